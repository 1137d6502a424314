"""What a node's one port costs the frames of a link, beside a port of the worker's own, over the same emulated line.

A gRPC stream with TLS carries frames of 4 MiB, in the pieces of a link, to a server in another process, and short
messages whose answers are waited for. relative_one_port: MB/s through the shared port over MB/s of the direct
connection, of the worse line. The rows of this machine have no line: they say what the passage itself carries.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
from lines.wan_line import Line
from lines.wan_proxy import ProxyWan
from rigs.measure import Figure, alternate, report
from rigs.path_server import HOST, INCARNATION, METHOD, NODE

from headway.daemon.rpc.certificates import CertificateAuthority
from headway.stages.links.grpc.endpoint import TRANSPORT_OPTIONS
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
    identity: TlsIdentity

    def carried(self, line: Line | None, seconds: float, *, is_shared: bool) -> Carried:
        """Measure a connection over a line; None: without one."""
        port = self.shared_port if is_shared else self.own_port
        if line is None:
            return self._at(port, seconds, is_shared)
        with ProxyWan(port) as wan:
            wan.set(line)
            return self._at(wan.port, seconds, is_shared)

    def _at(self, port: int, seconds: float, is_shared: bool) -> Carried:
        address = f"{HOST}:{port}"
        address = shared_address(address, INCARNATION) if is_shared else address
        return asyncio.run(_measured(address, self.identity, seconds))


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
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            own, shared = map(int, process.stdout.readline().split())
            yield Far(own, shared, TlsIdentity.read(folder / NODE))
        finally:
            process.kill()


def main() -> int:
    """Measure each line in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="pairs of each line")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    options = parser.parse_args()
    figures: dict[str, Figure] = {}
    worst: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="headway-paths-") as folder, far(Path(folder)) as server:
        for name, line in LINES.items():
            rates: dict[bool, list[Carried]] = {True: [], False: []}

            def once(is_shared: bool, line: Line | None = line, rates: dict[bool, list[Carried]] = rates) -> float:
                rates[is_shared].append(server.carried(line, options.seconds, is_shared=is_shared))
                return rates[is_shared][-1].mb_per_s

            pairs = alternate(options.pairs, partial(once, True), partial(once, False))
            figures[f"{name}: direct, MB/s"] = Figure.of([direct for _, direct in pairs])
            figures[f"{name}: one port, MB/s"] = Figure.of([shared for shared, _ in pairs])
            ratio = Figure.of([shared / direct for shared, direct in pairs])
            figures[f"{name}: one port over direct"] = ratio
            trips = zip(rates[False], rates[True], strict=True)
            figures[f"{name}: round trip, direct over one port"] = Figure.of(
                [direct.round_trip_s / shared.round_trip_s for direct, shared in trips]
            )
            if line is not None:
                worst.append(ratio)
    figures["relative_one_port"] = min(worst, key=lambda figure: figure.median)
    return report("paths to a worker", figures, bars={"relative_one_port": BAR})


if __name__ == "__main__":
    raise SystemExit(main())
