"""What each way to a worker costs the frames of a link, beside a port of the worker's own, over the same emulated line.

A gRPC stream with TLS carries frames of 4 MiB, in the pieces of a link, to a server in another process, and short
messages whose answers are waited for. MB/s of a way over MB/s of the direct connection, of the worse line:
relative_one_port, through the node's shared port; relative_reverse, the node only dials out, and stands by over the
line at the port of whoever sends; relative_relay, it stands by in the middle of the line, each half with half of the
round trip. The rows of this machine have no line: they say what the passage itself carries.
"""

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import IO

import grpc
from lines.wan_line import Line
from lines.wan_proxy import ProxyWan
from rigs.measure import Figure, report
from rigs.path_server import HOST, INCARNATION, METHOD, NODE

from headway.daemon.net.certificates import CertificateAuthority
from headway.daemon.net.port import TAKEN, VIA
from headway.stages.links.endpoint import TRANSPORT_OPTIONS
from headway.stages.sockets.shared_port import open_channel, shared_address
from headway.stages.sockets.tls_identity import TlsIdentity

PIECE_BYTES = 1 << 20
NUM_UNDER_WAY = 16
"""Pieces that are not answered: four frames of 4 MiB."""
NUM_ROUND_TRIPS = 30
LINES = {
    "this machine": None,
    "100 Mbit/s, 40 ms": Line(mbit_s=100, round_trip_ms=40),
    "1 Gbit/s, 10 ms": Line(mbit_s=1000, round_trip_ms=10),
}
BAR = 0.95
STANDS_BY_S = 10.0


class Way(StrEnum):
    """The ways to the server."""

    DIRECT = "direct"
    ONE_PORT = "one port"
    REVERSE = "reverse"
    RELAY = "relay"


@dataclass(frozen=True, slots=True)
class Carried:
    """What one connection has carried."""

    mb_per_s: float
    round_trip_s: float


@dataclass(frozen=True, slots=True)
class Far:
    """The server's process."""

    own_port: int
    shared_port: int
    relay_port: int
    orders: IO[str]
    identity: TlsIdentity

    def carried(self, line: Line | None, seconds: float, way: Way) -> Carried:
        """Measure a connection over a line; None: without one."""
        with ExitStack() as stack:

            def over(port: int, part: float = 1.0) -> int:
                if line is None:
                    return port
                wan = stack.enter_context(ProxyWan(port))
                wan.set(replace(line, round_trip_ms=line.round_trip_ms * part))
                return wan.port

            if way is Way.DIRECT:
                return self._at(f"{HOST}:{over(self.own_port)}", seconds)
            if way is Way.ONE_PORT:
                return self._at(shared_address(f"{HOST}:{over(self.shared_port)}", INCARNATION), seconds)
            part = 0.5 if way is Way.RELAY else 1.0
            self._stands_by_at(over(self.relay_port, part))
            port = over(self.relay_port, part) if way is Way.RELAY else self.relay_port
            return self._at(shared_address(f"{HOST}:{port}/{NODE}{VIA}", INCARNATION), seconds)

    def _at(self, address: str, seconds: float) -> Carried:
        return asyncio.run(_measured(address, self.identity, seconds))

    def _stands_by_at(self, port: int) -> None:
        self.orders.write(f"{port}\n")
        self.orders.flush()
        until = time.monotonic() + STANDS_BY_S
        while True:
            with socket.create_connection((HOST, self.relay_port), timeout=STANDS_BY_S) as asking:
                asking.sendall(f"CONNECT {NODE}{VIA}{INCARNATION}:443 HTTP/1.1\r\n\r\n".encode())
                if asking.recv(100).startswith(TAKEN):
                    return
            if time.monotonic() > until:
                raise TimeoutError(f"{NODE} does not stand by at port {port}")
            time.sleep(0.1)


async def _measured(address: str, identity: TlsIdentity, seconds: float) -> Carried:
    credentials = grpc.ssl_channel_credentials(identity.ca, identity.key, identity.certificate)
    options = (*TRANSPORT_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
    async with open_channel(address, credentials, node=NODE, options=options) as channel:
        call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(METHOD)()
        round_trips = []
        for _ in range(NUM_ROUND_TRIPS):
            began = time.perf_counter()
            await call.write(b"x")
            await call.read()
            round_trips.append(time.perf_counter() - began)
        frame, room, num_counted = os.urandom(PIECE_BYTES), asyncio.Semaphore(NUM_UNDER_WAY), 0
        settled_at, settled = time.perf_counter() + seconds / 3, 0
        until = time.perf_counter() + seconds

        async def write() -> None:
            while time.perf_counter() < until:
                await room.acquire()
                await call.write(frame)
            await call.done_writing()

        writing = asyncio.create_task(write())
        began = time.perf_counter()
        while (answer := await call.read()) is not grpc.aio.EOF:
            room.release()
            assert isinstance(answer, bytes)
            assert int.from_bytes(answer, "little") == PIECE_BYTES
            now = time.perf_counter()
            if now < settled_at:
                began = now
            else:
                settled += 1
            num_counted += 1
        await writing
        rate = settled * PIECE_BYTES / 1e6 / (time.perf_counter() - began)
    return Carried(rate, statistics.median(round_trips))


@contextmanager
def far(folder: Path) -> Iterator[Far]:
    """Start the server's process."""
    authority = CertificateAuthority.create(folder / "ca")
    (folder / NODE).symlink_to(authority.issue(NODE))
    command = [sys.executable, "-m", "rigs.path_server", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            own, shared, relay = map(int, process.stdout.readline().split())
            yield Far(own, shared, relay, process.stdin, TlsIdentity.read(folder / NODE))
        finally:
            process.kill()


def main() -> int:
    """Measure each line in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each line, with all ways")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    options = parser.parse_args()
    figures: dict[str, Figure] = {}
    ratios: dict[Way, list[Figure]] = {way: [] for way in Way if way is not Way.DIRECT}
    with tempfile.TemporaryDirectory(prefix="headway-paths-") as folder, far(Path(folder)) as server:
        for name, line in LINES.items():
            found: dict[Way, list[Carried]] = {way: [] for way in Way}
            for number in range(options.rounds):
                for way in list(Way)[:: 1 if number % 2 else -1]:
                    found[way].append(server.carried(line, options.seconds, way))
            figures[f"{name}: direct, MB/s"] = Figure.of([each.mb_per_s for each in found[Way.DIRECT]])
            for way, told in ratios.items():
                pairs = list(zip(found[way], found[Way.DIRECT], strict=True))
                figures[f"{name}: {way}, MB/s"] = Figure.of([each.mb_per_s for each in found[way]])
                ratio = Figure.of([each.mb_per_s / direct.mb_per_s for each, direct in pairs])
                figures[f"{name}: {way} over direct"] = ratio
                figures[f"{name}: round trip, direct over {way}"] = Figure.of(
                    [direct.round_trip_s / each.round_trip_s for each, direct in pairs]
                )
                if line is not None:
                    told.append(ratio)
    names = {way: f"relative_{way.replace(' ', '_')}" for way in ratios}
    figures |= {names[way]: min(told, key=lambda figure: figure.median) for way, told in ratios.items()}
    return report("paths to a worker", figures, bars=dict.fromkeys(names.values(), BAR))


if __name__ == "__main__":
    raise SystemExit(main())
