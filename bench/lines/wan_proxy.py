"""A line between two sites as a TCP proxy in a process of its own: what wan_line.py says, done to real connections.

Needs no rights. It ends TCP at both sides, so congestion control is wan_line's, and all else is real. One thread, no
copies but the kernel's: what it carries at most, and at which cost, wan.py measures in its own run.
"""

import heapq
import json
import os
import select
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Self

from lines.wan_line import FIRST_REDIAL_S, FIRST_RETRANSMISSION_S, QUEUE_S, Line, Stream, Way, after_cut
from lines.wan_process import TIMEOUT_S, LineProcess

HOST = "127.0.0.1"
MOST_UNWRITTEN = 8 << 20
"""Bytes that arrived and that the receiver does not take: then nothing more is taken from the sender."""


@dataclass(eq=False, slots=True)
class _Half:
    """Copies from one socket to the other."""

    source: socket.socket
    target: socket.socket
    way: int
    dialled_at: float
    stream: Stream = field(default_factory=Stream)
    under_way: deque[tuple[float, bytes]] = field(default_factory=deque)
    arrived: deque[memoryview] = field(default_factory=deque)
    num_arrived: int = 0
    has_ended: bool = False
    lost_at: float = 0.0
    """First loss of the present cut; 0: none."""
    first_wait_s: float = FIRST_RETRANSMISSION_S


class _Proxy:
    """Connections from `port` to `target_port`, over one line."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server((HOST, 0))
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._epoll.register(sys.stdin, select.EPOLLIN)
        self._by_source: dict[int, _Half] = {}
        self._by_target: dict[int, _Half] = {}
        self._interest: dict[int, int] = {}
        self._ways = [Way(Line(), seed) for seed in (1, 2)]
        self._timers: list[tuple[float, int, _Half]] = []
        self._number = count()
        self._cut_from = self._cut_until = 0.0
        self._waiting: set[_Half] = set()
        """Halves that wait for room in the router, or for the end of a cut."""

    def run(self) -> None:
        """Run until the standard input ends."""
        print(self.port, flush=True)
        while True:
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                self._deliver(heapq.heappop(self._timers)[2], now)
            for half in [half for half in self._waiting if self._may_take(half, now)]:
                self._waiting.discard(half)
                self._want(half.source, select.EPOLLIN, True)
            moments = [self._timers[0][0]] if self._timers else []
            if self._waiting:
                moments.append(max(now + 5e-4, min(self._room_at(half) for half in self._waiting)))
            timeout = max(0.0, min(moments) - now) if moments else 1.0
            for number, events in self._epoll.poll(timeout):
                if number == self._listener.fileno():
                    self._accept()
                elif number == sys.stdin.fileno():
                    if not self._command(sys.stdin.readline()):
                        return
                else:
                    self._moved(number, events)

    def _command(self, text: str) -> bool:
        if not text:
            return False
        told = json.loads(text)
        if "line" in told:
            for way in self._ways:
                way.line = Line(**told["line"])
        if "cut_s" in told:
            self._cut_from = time.monotonic()
            self._cut_until = self._cut_from + told["cut_s"]
            for half in self._by_source.values():
                half.lost_at, half.first_wait_s = 0.0, FIRST_RETRANSMISSION_S
                if half.under_way:
                    self._lose(half, self._cut_from)
        print(json.dumps({"cpu_s": time.process_time()}), flush=True)
        return True

    # --- Cuts ---------------------------------------------------------------------------------------------------------

    def _lose(self, half: _Half, now: float) -> None:
        """Drop the bytes on the line; they come again with the retransmission."""
        if half.lost_at:
            return
        half.lost_at = now
        later = after_cut(now, self._cut_until, half.first_wait_s) + self._ways[0].line.round_trip_ms / 1e3
        half.under_way = deque((max(at, later), data) for at, data in half.under_way)
        half.stream.last_arrival = max(half.stream.last_arrival, later)
        if half.under_way:
            heapq.heappush(self._timers, (half.under_way[0][0], next(self._number), half))

    # --- Connections --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection((HOST, self._target_port), timeout=TIMEOUT_S)
        except OSError:
            near.close()
            return
        now = time.monotonic()
        for way, (source, target) in enumerate(((near, far), (far, near))):
            source.setblocking(False)
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            half = _Half(source, target, way, dialled_at=now)
            # A handshake takes a round trip before anything else does.
            half.stream.last_arrival = now + 1.5 * self._ways[way].line.round_trip_ms / 1e3 if way == 0 else 0.0
            half.first_wait_s = FIRST_REDIAL_S if now < self._cut_until else FIRST_RETRANSMISSION_S
            self._by_source[source.fileno()] = half
            self._by_target[target.fileno()] = half
        for end in (near, far):
            self._interest[end.fileno()] = select.EPOLLIN
            self._epoll.register(end, select.EPOLLIN)

    def _moved(self, number: int, events: int) -> None:
        half = self._by_source.get(number)
        if half is None:
            return
        if events & select.EPOLLOUT:
            self._write(self._by_target[number])
        if number in self._by_source and events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            self._take(half)

    def _may_take(self, half: _Half, now: float) -> bool:
        return (
            self._ways[half.way].has_room(now) and half.num_arrived < MOST_UNWRITTEN and half.stream.free_at < now + 0.1
        )

    def _room_at(self, half: _Half) -> float:
        return max(self._ways[half.way].room_at(), half.stream.free_at - QUEUE_S)

    def _take(self, half: _Half) -> None:
        now, way = time.monotonic(), self._ways[half.way]
        if not self._may_take(half, now):
            self._waiting.add(half)
            self._want(half.source, select.EPOLLIN, False)
            return
        try:
            data = half.source.recv(way.line.piece_bytes)
        except BlockingIOError:
            return
        except OSError:
            self._close(half)
            return
        if now < self._cut_until:
            self._lose(half, max(now, half.dialled_at))
        arrives = way.put(len(data), now, half.stream)
        half.under_way.append((arrives, data))
        if len(half.under_way) == 1:
            heapq.heappush(self._timers, (arrives, next(self._number), half))
        if not data:
            self._want(half.source, select.EPOLLIN, False)

    def _deliver(self, half: _Half, now: float) -> None:
        while half.under_way and half.under_way[0][0] <= now:
            data = half.under_way.popleft()[1]
            if data:
                half.arrived.append(memoryview(data))
                half.num_arrived += len(data)
            else:
                half.has_ended = True
        if half.under_way:
            heapq.heappush(self._timers, (half.under_way[0][0], next(self._number), half))
        self._write(half)

    def _write(self, half: _Half) -> None:
        if half.target.fileno() < 0:
            return
        try:
            while half.arrived:
                sent = half.target.send(half.arrived[0])
                half.num_arrived -= sent
                if sent < len(half.arrived[0]):
                    half.arrived[0] = half.arrived[0][sent:]
                else:
                    half.arrived.popleft()
            if half.has_ended:
                half.target.shutdown(socket.SHUT_WR)
                half.has_ended = False
        except BlockingIOError:
            pass
        except OSError:
            self._close(half)
            return
        self._want(half.target, select.EPOLLOUT, bool(half.arrived))

    def _close(self, half: _Half) -> None:
        for end in (half.source, half.target):
            number = end.fileno()
            if number >= 0 and number in self._interest:
                self._epoll.unregister(number)
                del self._interest[number]
                self._waiting.discard(self._by_source.pop(number))
                del self._by_target[number]
                end.close()

    def _want(self, end: socket.socket, event: int, is_wanted: bool) -> None:
        number = end.fileno()
        before = self._interest.get(number)
        if before is None:
            return
        after = before | event if is_wanted else before & ~event
        if after != before:
            self._interest[number] = after
            self._epoll.modify(number, after)


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


if __name__ == "__main__":
    os.nice(-5) if os.geteuid() == 0 else None
    _Proxy(int(sys.argv[1])).run()
