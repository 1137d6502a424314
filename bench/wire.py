"""How close the links come to what they are made of: MB/s, processor time, round trips; two processes on one machine.

Frames of one size go one way, as fast as the receiver takes them; the clock stops at the answer to the last one. Sides:

    tcp          one socket, sendall and recv_into one buffer
    gloo         torch.distributed send and recv, one buffer
    gloo_new     the same, each frame into a tensor of its own
    plain        the link over plain TCP, which CPU workers of a private site have
    grpc_bare    a gRPC stream of ready bytes, no protobuf around them, the links' certificates and options
    grpc_cut     the same in pieces of 1 MiB
    grpc_tensors the same, and each piece is copied out of a tensor and into one, as gRPC's calls demand
    grpc         the gRPC link, over TCP with TLS
    grpc_bare_unix, grpc_cut_unix    the bare streams over a unix socket without TLS
    grpc_local   the gRPC link between two workers of one node

All sides of a size take turns, in rotating order. The links deliver every frame in a tensor of its own.
With --both-ways frames go over the links both ways at once, as activations and gradients do; MB/s are of each way.

grpc_vs_bare_SIZE: MB/s of the gRPC link over those of the faster of the two bare streams in the same round.
grpc_local_vs_bare_unix_SIZE: the same inside one node, over a unix socket. grpc_local_speedup_SIZE: over the gRPC link.
grpc_vs_tensors_SIZE: over the stream that carries tensors.
plain_vs_gloo_SIZE: the same of the plain link over bare gloo. plain_speedup_SIZE: over the gRPC link.
grpc_vs_bare, grpc_local_vs_bare_unix, plain_vs_gloo: the size where it is least.
grpc_mb_s: the size where it is most.
SIDE_cpu_s_per_gb_SIZE: user and system time of both processes. SIDE_round_trip_us: 1 KiB there, a few bytes back.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rigs.measure import Figure, progress, report
from rigs.wire_process import Process
from rigs.wire_sides import LINKS, WINDOW

from headway.daemon.net.certificates import CertificateAuthority
from headway.stages.sockets.core_threads import with_encryption_aside
from headway.stages.stage.allocator import with_large_pages

SIZES = {"256KiB": 1 << 18, "1MiB": 1 << 20, "4MiB": 1 << 22, "16MiB": 1 << 24}
BOTH_WAYS_SIZES = {"16KiB": 1 << 14, **SIZES}
SIDES = (
    *("tcp", "gloo", "gloo_new", "plain", "grpc_bare", "grpc_cut", "grpc_tensors", "grpc"),
    *("grpc_bare_unix", "grpc_cut_unix", "grpc_local"),
)
FEWEST_FRAMES, MOST_FRAMES = 4, 512
"""Number of frames of a pass."""
BARS = {"grpc_vs_bare": 0.9, "grpc_local_vs_bare_unix": 0.9, "plain_vs_gloo": 0.9}


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


Samples = dict[tuple[str, str], list[Sample]]
"""Samples by side and size."""


class Pair:
    """Both processes, seen from the one that sends."""

    def __init__(self, certificates: Path, other: "subprocess.Popen[str]") -> None:
        self._own = Process(0, certificates)
        self._other = other
        ports = json.loads(self._hear())
        self._say(self._own.ports)
        self._own.connect(ports)

    def sample(self, side: str, num_bytes: int, num_frames: int, *, is_both_ways: bool = False) -> Sample:
        """One pass in both."""
        self._say([side, num_bytes, num_frames, is_both_ways])
        seconds, cpu_s = self._own.run(side, num_bytes, num_frames, is_both_ways=is_both_ways)
        return Sample(num_bytes * num_frames, seconds, cpu_s + float(self._hear()))

    def round_trip_s(self, side: str) -> float:
        """The median of many."""
        self._say([side, 0, 0, False])
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
        side, num_bytes, num_frames, is_both_ways = json.loads(line)
        if num_frames:
            print(process.run(side, num_bytes, num_frames, is_both_ways=is_both_ways)[1], flush=True)
        else:
            print(process.round_trips(side), flush=True)
    os._exit(0)


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measured cases, and their amount."""

    sides: Sequence[str]
    sizes: Mapping[str, int]
    is_both_ways: bool
    num_rounds: int
    pass_bytes: int

    def samples(self, pair: Pair) -> Samples:
        """Return the samples by side and size: one a round."""
        samples: Samples = {(side, size): [] for side in self.sides for size in self.sizes}
        for size, num_bytes in self.sizes.items():
            for side in self.sides:
                self._sample(pair, side, num_bytes)  # its memory and buffers grow to what they will be
            for number in range(self.num_rounds):
                turn = number % len(self.sides)
                for side in (*self.sides[turn:], *self.sides[:turn]):
                    samples[side, size].append(self._sample(pair, side, num_bytes))
                last = ", ".join(f"{side} {samples[side, size][-1].mb_s:.0f}" for side in self.sides)
                progress(f"{size} round {number}: {last}")
        return samples

    def _sample(self, pair: Pair, side: str, num_bytes: int) -> Sample:
        fewest = WINDOW if self.is_both_ways else FEWEST_FRAMES
        num_frames = min(max(fewest, self.pass_bytes // num_bytes), MOST_FRAMES)
        return pair.sample(side, num_bytes, num_frames, is_both_ways=self.is_both_ways)


def table(samples: Samples, round_trips: Mapping[str, float]) -> None:
    """Medians, for people."""
    sizes = list(dict.fromkeys(size for _, size in samples))
    print(f"\n{'MB/s (cpu s/GB)':16}" + "".join(f"{size:>16}" for size in sizes) + f"{'round trip µs':>16}")
    for side, seconds in round_trips.items():
        cells = [
            f"{statistics.median(s.mb_s for s in samples[side, size]):.0f} "
            f"({statistics.median(s.cpu_s_per_gb for s in samples[side, size]):.2f})"
            for size in sizes
        ]
        print(f"{side:16}" + "".join(f"{cell:>16}" for cell in cells) + f"{seconds * 1e6:16.0f}")


def ratios(samples: Samples) -> dict[str, Figure]:
    """Return the ratios of the measured sides, round by round."""
    sizes = list(dict.fromkeys(size for _, size in samples))
    sides = {side for side, _ in samples}
    figures: dict[str, Figure] = {}
    for name, ours, *theirs in (
        ("grpc_vs_bare", "grpc", "grpc_bare", "grpc_cut"),
        ("grpc_vs_tensors", "grpc", "grpc_tensors"),
        ("grpc_local_vs_bare_unix", "grpc_local", "grpc_bare_unix", "grpc_cut_unix"),
        ("grpc_local_speedup", "grpc_local", "grpc"),
        ("plain_vs_gloo", "plain", "gloo"),
        ("plain_vs_gloo_new", "plain", "gloo_new"),
        ("plain_speedup", "plain", "grpc"),
    ):
        if not sides.issuperset((ours, *theirs)):
            continue
        of_size = {}
        for size in sizes:
            rounds = zip(samples[ours, size], *(samples[side, size] for side in theirs), strict=True)
            of_size[size] = Figure.of([mine.mb_s / max(other.mb_s for other in others) for mine, *others in rounds])
        figures.update({f"{name}_{size}": figure for size, figure in of_size.items()})
        if name in BARS:
            figures[name] = min(of_size.values(), key=lambda figure: figure.median)
    return figures


def main() -> int:
    """Measure every size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="three rounds of less")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--both-ways", action="store_true", help="over the links alone")
    parser.add_argument("--serve", type=Path)
    options = parser.parse_args()
    if more := with_large_pages(os.environ) | with_encryption_aside(
        os.environ
    ):  # as workers have them: both processes are started so
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **more})
    if options.serve:
        serve(options.serve)
    num_rounds, pass_bytes = (3, 1 << 26) if options.quick else (options.rounds, 1 << 27)
    measurement = Measurement(
        sides=[side for side in options.sides if side in LINKS or not options.both_ways],
        sizes=BOTH_WAYS_SIZES if options.both_ways else SIZES,
        is_both_ways=options.both_ways,
        num_rounds=num_rounds,
        pass_bytes=pass_bytes,
    )
    with tempfile.TemporaryDirectory() as folder:
        certificates = CertificateAuthority.create(Path(folder) / "authority").issue("node")
        command = [sys.executable, __file__, "--serve", str(certificates)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            try:
                pair = Pair(certificates, other)
                round_trips = {side: pair.round_trip_s(side) for side in measurement.sides}
                samples = measurement.samples(pair)
            finally:
                other.kill()
    table(samples, round_trips)
    extra: dict[str, object] = {f"{side}_round_trip_us": round(s * 1e6, 1) for side, s in round_trips.items()}
    for (side, size), of_side in samples.items():
        extra[f"{side}_mb_s_{size}"] = round(statistics.median(sample.mb_s for sample in of_side), 1)
        extra[f"{side}_cpu_s_per_gb_{size}"] = round(statistics.median(s.cpu_s_per_gb for s in of_side), 3)
    if "grpc" in measurement.sides:
        extra["grpc_mb_s"] = max(float(str(extra[f"grpc_mb_s_{size}"])) for size in measurement.sizes)
    figures = ratios(samples)
    return report(
        "Wire: the links beside what they are made of",
        figures,
        bars={name: bar for name, bar in BARS.items() if name in figures},
        extra=extra,
    )


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
