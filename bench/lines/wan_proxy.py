"""A line as a TCP proxy in a process of its own: bytes pass at its rate, and late by half its round trip.

Needs no rights, and ends TCP at both sides: nothing else of a line is emulated. Two threads a direction of a
connection: one takes bytes when the line has room, one gives them when they are due.
"""

import json
import os
import queue
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Self

from lines.wan_line import QUEUE_S, Line
from lines.wan_process import TIMEOUT_S, LineProcess

HOST = "127.0.0.1"
PIECE_BYTES = 64 << 10
MOST_PIECES = 128
"""That have arrived and that the receiver does not take: then nothing more is taken from the sender."""


class _Way:
    """One direction of the line, for all its connections."""

    def __init__(self) -> None:
        self.line = Line()
        self._free_at = 0.0
        self._turn = threading.Lock()

    @property
    def piece_bytes(self) -> int:
        """Return the bytes taken from a sender at once: a millisecond's worth."""
        return int(min(PIECE_BYTES, max(4 << 10, self.line.bytes_per_s / 1e3)))

    def put(self, num_bytes: int) -> float:
        """Wait until the router takes a piece; return when it arrives at the other end."""
        with self._turn:
            now = time.monotonic()
            begins = max(now, self._free_at)
            self._free_at = begins + num_bytes / self.line.bytes_per_s
            arrives = self._free_at + self.line.round_trip_ms / 2e3
        if begins - now > QUEUE_S:
            time.sleep(begins - now - QUEUE_S)
        return arrives


def _carry(source: socket.socket, target: socket.socket, way: _Way, not_before: float) -> None:
    """Take bytes from one end and give them to the other, until either has ended."""
    under_way: queue.Queue[tuple[float, bytes]] = queue.Queue(MOST_PIECES)

    def give() -> None:
        try:
            while (piece := under_way.get())[1]:
                time.sleep(max(0.0, max(piece[0], not_before) - time.monotonic()))
                target.sendall(piece[1])
            target.shutdown(socket.SHUT_WR)
        except OSError:  # the sender hears it with its next bytes
            with suppress(OSError):
                source.shutdown(socket.SHUT_RD)
            while under_way.get()[1]:
                pass

    threading.Thread(target=give, daemon=True).start()
    data = b"first"
    while data:
        try:
            data = source.recv(way.piece_bytes)
        except OSError:
            data = b""
        under_way.put((way.put(len(data)), data))


def _serve(listener: socket.socket, target_port: int, ways: tuple[_Way, _Way]) -> None:
    while True:
        near, _ = listener.accept()
        try:
            far = socket.create_connection((HOST, target_port), timeout=TIMEOUT_S)
        except OSError:
            near.close()
            continue
        far.settimeout(None)
        # A handshake takes a round trip before anything else does.
        greeted_at = time.monotonic() + 1.5 * ways[0].line.round_trip_ms / 1e3
        for arguments in ((near, far, ways[0], greeted_at), (far, near, ways[1], 0.0)):
            arguments[0].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_carry, args=arguments, daemon=True).start()


class ProxyWan(LineProcess):
    """The proxy in its process. A context manager."""

    def __init__(self, target_port: int) -> None:
        super().__init__(__file__, str(target_port))
        self.port = int(self.told)
        """Port to dial."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def main() -> None:
    """Run until the standard input ends."""
    ways = (_Way(), _Way())
    listener = socket.create_server((HOST, 0))
    threading.Thread(target=_serve, args=(listener, int(sys.argv[1]), ways), daemon=True).start()
    print(listener.getsockname()[1], flush=True)
    for text in sys.stdin:
        if line := json.loads(text).get("line"):
            for way in ways:
                way.line = Line(**line)
        print(json.dumps({"cpu_s": time.process_time()}), flush=True)


if __name__ == "__main__":
    os.nice(-5) if os.geteuid() == 0 else None
    main()
