"""How close the links come to what they are made of: MB/s, processor time, round trips; two processes on one machine.

Frames of one size go one way, as fast as the receiver takes them; the clock stops at the answer to the last one. Sides:

    tcp          one socket, sendall and recv_into one buffer
    gloo         torch.distributed send and recv, one buffer
    collective   the collective link
    grpc_bare    a gRPC stream of ready bytes, no protobuf around them, the links' certificates and options
    grpc_cut     the same in pieces of 1 MiB
    grpc         the gRPC link

All sides of a size take turns, in rotating order. The links deliver every frame in a tensor of its own.

grpc_vs_bare_SIZE: MB/s of the gRPC link over those of the faster of the two bare streams in the same round.
collective_vs_gloo_SIZE: the same of the collective link over bare gloo. collective_speedup_SIZE: over the gRPC link.
grpc_vs_bare, collective_vs_gloo: the size where it is least. grpc_mb_s: the size where it is most.
SIDE_cpu_s_per_gb_SIZE: user and system time of both processes. SIDE_round_trip_us: 1 KiB there, a few bytes back.
"""

import argparse
import asyncio
import json
import os
import queue
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import grpc
import torch
import torch.distributed as dist
from measure import Figure, progress, report
from torch._C._distributed_c10d import TCPStore

from headway.daemon.certificates import CertificateAuthority
from headway.stages.allocator import keep_freed_memory
from headway.stages.collective_endpoint import METHOD, CollectiveEndpoint, CollectiveTerms
from headway.stages.frame_codec import CHUNK_BYTES
from headway.stages.frame_contract import DOWNSTREAM_KINDS, UPSTREAM_KINDS, FrameContract, TensorForm
from headway.stages.ids import Batch, Generation, Microbatch, StageIndex
from headway.stages.link import Frame, FrameKind, Link, LinkLost
from headway.stages.link_endpoint import TRANSPORT_OPTIONS, LinkEndpoint
from headway.stages.loop_thread import LoopThread
from headway.stages.tls_identity import CHANNEL_OPTIONS, TlsIdentity

SIZES = {"256KiB": 1 << 18, "1MiB": 1 << 20, "4MiB": 1 << 22, "16MiB": 1 << 24}
SMALL_BYTES = 1 << 10
CUT_BYTES = CHUNK_BYTES
SIDES = ("tcp", "gloo", "collective", "grpc_bare", "grpc_cut", "grpc")
NUM_ROUND_TRIPS = 200
HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=60)
GENERATION = Generation(1)
MAX_FRAMES = 1 << 12
UNLIMITED = {"grpc.max_receive_message_length": -1, "grpc.max_send_message_length": -1}
BARE_OPTIONS = tuple({**dict(TRANSPORT_OPTIONS), **UNLIMITED}.items())


class Side(Protocol):
    """One end of a way for frames of one size. Rank 0 sends, rank 1 takes and answers."""

    def send(self, num_frames: int) -> None:
        """Returns with the answer to the last frame."""
        ...

    def take(self, num_frames: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """One pass: seconds at the sender, and processor seconds of both processes."""

    num_bytes: int
    seconds: float
    cpu_s: float

    @property
    def mb_s(self) -> float:
        return self.num_bytes / self.seconds / 1e6

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.num_bytes / 1e9)


class TcpSide:
    """One socket."""

    def __init__(self, connection: socket.socket, num_bytes: int) -> None:
        self._connection = connection
        self._buffer = bytearray(num_bytes)

    def send(self, num_frames: int) -> None:
        for _ in range(num_frames):
            self._connection.sendall(self._buffer)
        self._connection.recv(1)

    def take(self, num_frames: int) -> None:
        view = memoryview(self._buffer)
        for _ in range(num_frames):
            filled = 0
            while filled < len(view):
                filled += self._connection.recv_into(view[filled:])
        self._connection.sendall(b"x")


class GlooSide:
    """torch.distributed's own calls."""

    def __init__(self, num_bytes: int) -> None:
        self._values = torch.ones(num_bytes // 4)
        self._answer = torch.ones(1)

    def send(self, num_frames: int) -> None:
        for _ in range(num_frames):
            dist.send(self._values, 1)
        dist.recv(self._answer, 1)

    def take(self, num_frames: int) -> None:
        for _ in range(num_frames):
            dist.recv(self._values, 0)
        dist.send(self._answer, 0)


class BareSide:
    """A gRPC stream; `read` and `write` are those of the call or the context."""

    def __init__(self, loop: LoopThread, stream: Any, num_bytes: int, message_bytes: int) -> None:
        self._loop = loop
        self._stream = stream
        self._messages = [bytes(min(message_bytes, num_bytes)) for _ in range(-(-num_bytes // message_bytes))]

    def send(self, num_frames: int) -> None:
        self._loop.run(self._send(num_frames), timeout=TIMEOUT, what="a bare stream")

    def take(self, num_frames: int) -> None:
        self._loop.run(self._take(num_frames), timeout=TIMEOUT, what="a bare stream")

    async def _send(self, num_frames: int) -> None:
        for _ in range(num_frames):
            for message in self._messages:
                await self._stream.write(message)
        await self._stream.read()

    async def _take(self, num_frames: int) -> None:
        for _ in range(num_frames * len(self._messages)):
            await self._stream.read()
        await self._stream.write(b"x")


class LinkSide:
    """A link; the answer is a total of the norm, or its squares."""

    def __init__(
        self,
        rank: int,
        open_link: Callable[["queue.SimpleQueue[Frame | LinkLost]", FrameContract], Link],
        num_bytes: int,
    ) -> None:
        forms = {
            FrameKind.ACTIVATION: (TensorForm(torch.float32, (num_bytes // 4,)),),
            FrameKind.NORM_SQUARES: (TensorForm(torch.float64, (1,)),),
        }
        self._inbox: queue.SimpleQueue[Frame | LinkLost] = queue.SimpleQueue()
        self._link = open_link(self._inbox, FrameContract(forms, MAX_FRAMES))
        shape, dtype = ((1,), torch.float64) if rank else ((num_bytes // 4,), torch.float32)
        kind = FrameKind.NORM_SQUARES if rank else FrameKind.ACTIVATION
        self._frame = Frame(kind, GENERATION, Batch(0), Microbatch(0), (torch.ones(shape, dtype=dtype),))

    def send(self, num_frames: int) -> None:
        for _ in range(num_frames):
            self._link.send(self._frame)
        self._take_one()

    def take(self, num_frames: int) -> None:
        for _ in range(num_frames):
            self._take_one()
        self._link.send(self._frame)

    def _take_one(self) -> None:
        item = self._inbox.get(timeout=TIMEOUT.total_seconds())
        if isinstance(item, LinkLost):
            raise RuntimeError(f"{item.peer}: {item.reason}")


class Process:
    """One of the two; rank 0 dials."""

    def __init__(self, rank: int, certificates: Path) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()  # as every worker does
        self._rank = rank
        self._identity = TlsIdentity.read(certificates)
        self._loop = LoopThread()
        self._loop.start()
        incarnation = "ab"[rank]
        self._grpc = LinkEndpoint(
            loop=self._loop, identity=self._identity, host=HOST, incarnation=incarnation, protocol=1
        )
        self._collective = CollectiveEndpoint(
            loop=self._loop, identity=self._identity, host=HOST, incarnation=incarnation, protocol=1, on_stuck=print
        )
        self._grpc.add_method(METHOD, self._collective.answer)
        self._grpc.start()
        self._streams: asyncio.Queue[Any] = asyncio.Queue()
        self._listener = socket.create_server((HOST, 0))
        bare_port = self._loop.run(self._serve_bare(), timeout=TIMEOUT, what="a bare server")
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self.ports: list[int] = [self._grpc.port, bare_port, self._listener.getsockname()[1], self._store.port]
        self._peer_ports: list[int] = []
        self._channel: grpc.aio.Channel | None = None
        self._sides: dict[tuple[str, int], Side] = {}

    def connect(self, peer_ports: list[int]) -> None:
        """Once both listen. gloo's group is made here."""
        self._peer_ports = peer_ports
        store = self._store if self._rank else TCPStore(HOST, peer_ports[3], is_master=False)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=2, timeout=TIMEOUT)

    def run(self, side: str, num_bytes: int, num_frames: int) -> tuple[float, float]:
        """Seconds and processor seconds of this process. The first pass of a side and size makes its connection."""
        if (side, num_bytes) not in self._sides:
            self._sides[side, num_bytes] = self._open(side, num_bytes)
        way = self._sides[side, num_bytes]
        began, cpu_began = time.perf_counter(), _cpu_seconds()
        (way.take if self._rank else way.send)(num_frames)
        return time.perf_counter() - began, _cpu_seconds() - cpu_began

    def round_trips(self, side: str) -> float:
        """Seconds, the median."""
        return statistics.median(self.run(side, SMALL_BYTES, 1)[0] for _ in range(NUM_ROUND_TRIPS))

    def _open(self, side: str, num_bytes: int) -> Side:
        if side == "tcp":
            connection = (
                self._listener.accept()[0] if self._rank else socket.create_connection((HOST, self._peer_ports[2]))
            )
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return TcpSide(connection, num_bytes)
        if side == "gloo":
            return GlooSide(num_bytes)
        if side in ("grpc", "collective"):
            open_link = self._open_grpc if side == "grpc" else self._open_collective
            return LinkSide(
                self._rank, lambda inbox, contract: open_link(f"{side}-{num_bytes}", inbox, contract), num_bytes
            )
        stream = self._loop.run(self._bare_stream(), timeout=TIMEOUT, what="a bare stream")
        return BareSide(self._loop, stream, num_bytes, CUT_BYTES if side == "grpc_cut" else num_bytes)

    async def _serve_bare(self) -> int:
        async def serve(_: Any, context: Any) -> None:
            assert await context.read() == b"hello"
            self._streams.put_nowait(context)
            await asyncio.Event().wait()

        self._bare = grpc.aio.server(options=BARE_OPTIONS)
        handler: Any = grpc.stream_stream_rpc_method_handler(serve)
        self._bare.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", {"Stream": handler}),))
        identity = self._identity
        credentials = grpc.ssl_server_credentials(
            [(identity.key, identity.certificate)], root_certificates=identity.ca, require_client_auth=True
        )
        port = self._bare.add_secure_port(f"{HOST}:0", credentials)
        await self._bare.start()
        return port

    async def _bare_stream(self) -> Any:
        if self._rank:
            return await self._streams.get()
        identity = self._identity
        credentials = grpc.ssl_channel_credentials(identity.ca, identity.key, identity.certificate)
        options = (*BARE_OPTIONS, *CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        channel = grpc.aio.secure_channel(f"{HOST}:{self._peer_ports[1]}", credentials, options=options)
        call: Any = channel.stream_stream("/bare/Stream")()
        await call.write(b"hello")
        call.channel = channel  # lives as long
        return call

    def _open_grpc(self, job: str, inbox: "queue.SimpleQueue[Frame | LinkLost]", contract: FrameContract) -> Link:
        if self._rank:
            return self._grpc.accept(
                job,
                GENERATION,
                stage=StageIndex(1),
                peer_incarnation="a",
                inbox=inbox,
                contract=contract,
                first_contact=TIMEOUT,
                resume_timeout=TIMEOUT,
            )
        return self._grpc.dial(
            f"{HOST}:{self._peer_ports[0]}",
            job,
            GENERATION,
            stage=StageIndex(0),
            peer_incarnation="b",
            inbox=inbox,
            contract=contract,
            first_contact=TIMEOUT,
            resume_timeout=TIMEOUT,
        )

    def _open_collective(self, job: str, inbox: "queue.SimpleQueue[Frame | LinkLost]", contract: FrameContract) -> Link:
        peer = 1 - self._rank
        terms = CollectiveTerms(
            job=job,
            generation=GENERATION,
            stage=StageIndex(self._rank),
            worker=self._rank,
            peer_stage=StageIndex(peer),
            peer_worker=peer,
            peer_incarnation="ab"[peer],
            peer_name=f"stage {peer}",
            peer_address=f"{HOST}:{self._peer_ports[0]}",
            inbox=inbox,
            contract=contract,
            receives=DOWNSTREAM_KINDS if self._rank else UPSTREAM_KINDS,
            device=torch.device("cpu"),
            first_contact=TIMEOUT,
            silence=TIMEOUT,
        )
        return self._collective.accept(terms) if self._rank else self._collective.dial(terms)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Pair:
    """Both processes, seen from the one that sends."""

    def __init__(self, certificates: Path, other: "subprocess.Popen[str]") -> None:
        self._own = Process(0, certificates)
        self._other = other
        ports = json.loads(self._hear())
        self._say(self._own.ports)
        self._own.connect(ports)

    def sample(self, side: str, num_bytes: int, num_frames: int) -> Sample:
        """One pass in both."""
        self._say([side, num_bytes, num_frames])
        seconds, cpu_s = self._own.run(side, num_bytes, num_frames)
        return Sample(num_bytes * num_frames, seconds, cpu_s + float(self._hear()))

    def round_trip_s(self, side: str) -> float:
        """The median of many."""
        self._say([side, 0, 0])
        seconds = self._own.round_trips(side)
        self._hear()
        return seconds

    def _say(self, what: object) -> None:
        assert self._other.stdin is not None
        self._other.stdin.write(json.dumps(what) + "\n")
        self._other.stdin.flush()

    def _hear(self) -> str:
        assert self._other.stdout is not None
        return self._other.stdout.readline()


def serve(certificates: Path) -> None:
    """The other process: a line of standard input for each pass."""
    process = Process(1, certificates)
    print(json.dumps(process.ports), flush=True)
    process.connect(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        side, num_bytes, num_frames = json.loads(line)
        cpu_s = process.run(side, num_bytes, num_frames)[1] if num_frames else process.round_trips(side)
        print(cpu_s, flush=True)
    os._exit(0)


def measure(pair: Pair, num_rounds: int, pass_bytes: int, sides: list[str]) -> dict[tuple[str, str], list[Sample]]:
    """By side and size: one sample a round."""
    samples: dict[tuple[str, str], list[Sample]] = {(side, size): [] for side in sides for size in SIZES}
    for size, num_bytes in SIZES.items():
        for side in sides:
            pair.sample(side, num_bytes, 3)
        for number in range(num_rounds):
            turn = number % len(sides)
            for side in (*sides[turn:], *sides[:turn]):
                samples[side, size].append(pair.sample(side, num_bytes, max(4, pass_bytes // num_bytes)))
            progress(f"{size} round {number}: " + ", ".join(f"{s} {samples[s, size][-1].mb_s:.0f}" for s in sides))
    return samples


def table(samples: dict[tuple[str, str], list[Sample]], round_trips: dict[str, float]) -> None:
    """Medians, for people."""
    print(f"\n{'MB/s (cpu s/GB)':16}" + "".join(f"{size:>16}" for size in SIZES) + f"{'round trip µs':>16}")
    for side, seconds in round_trips.items():
        cells = [
            f"{statistics.median(s.mb_s for s in samples[side, size]):.0f} "
            f"({statistics.median(s.cpu_s_per_gb for s in samples[side, size]):.2f})"
            for size in SIZES
        ]
        print(f"{side:16}" + "".join(f"{cell:>16}" for cell in cells) + f"{seconds * 1e6:16.0f}")


def ratios(samples: dict[tuple[str, str], list[Sample]]) -> dict[str, Figure]:
    """Of the sides that were measured, round by round."""
    figures: dict[str, Figure] = {}
    for name, ours, *theirs in (
        ("grpc_vs_bare", "grpc", "grpc_bare", "grpc_cut"),
        ("collective_vs_gloo", "collective", "gloo"),
        ("collective_speedup", "collective", "grpc"),
    ):
        if not all((side, "1MiB") in samples for side in (ours, *theirs)):
            continue
        for size in SIZES:
            rounds = zip(samples[ours, size], *(samples[side, size] for side in theirs), strict=True)
            figures[f"{name}_{size}"] = Figure.of(
                [mine.mb_s / max(other.mb_s for other in others) for mine, *others in rounds]
            )
        least = min((figures[f"{name}_{size}"] for size in SIZES), key=lambda figure: figure.median)
        if name != "collective_speedup":
            figures[name] = least
    return figures


def main() -> int:
    """Measure every size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="three rounds of less")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--serve", type=Path)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
    num_rounds, pass_bytes = (3, 1 << 26) if options.quick else (options.rounds, 1 << 27)
    with tempfile.TemporaryDirectory() as folder:
        certificates = CertificateAuthority.create(Path(folder) / "authority").issue("node")
        command = [sys.executable, __file__, "--serve", str(certificates)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            try:
                pair = Pair(certificates, other)
                round_trips = {side: pair.round_trip_s(side) for side in options.sides}
                samples = measure(pair, num_rounds, pass_bytes, options.sides)
            finally:
                other.kill()
    table(samples, round_trips)
    extra: dict[str, object] = {f"{side}_round_trip_us": round(s * 1e6, 1) for side, s in round_trips.items()}
    for (side, size), of_side in samples.items():
        extra[f"{side}_mb_s_{size}"] = round(statistics.median(sample.mb_s for sample in of_side), 1)
        extra[f"{side}_cpu_s_per_gb_{size}"] = round(statistics.median(s.cpu_s_per_gb for s in of_side), 3)
    if "grpc" in options.sides:
        extra["grpc_mb_s"] = max(float(str(extra[f"grpc_mb_s_{size}"])) for size in SIZES)
    bars = {"grpc_vs_bare": 0.9, "collective_vs_gloo": 0.9}
    figures = ratios(samples)
    return report(
        "Wire: the links beside what they are made of",
        figures,
        bars={name: bar for name, bar in bars.items() if name in figures},
        extra=extra,
    )


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
