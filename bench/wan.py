"""Two sites far apart: what distance costs a pipeline of two stages, beside the same job on one site.

The stages are real executors with real gRPC links and TLS in two processes; each operation takes a fixed time and
computes nothing. Between the sites is an emulated line (wan_line.py says what it does). m and depth are what the
planner advises for the line (`headway plan`), and the same m on one site is the other side of each ratio.

ratio_100ms_2bw, ratio_100ms_1f1b: tokens/s over a line of 100 ms round trip over tokens/s on one site. outage_cost_s:
what a cut of 10 seconds costs, with no batch computed again. ceiling_mbit_s: what the emulator itself carries.
reached_with_loss: at 0.1 % loss, what the link carries over the ceiling of one TCP connection, which the line has here.
"""

import argparse
import itertools
import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pipeline_processes
from emulated_stage import SleepTimes
from measure import Figure, progress, report
from pipeline_processes import Host, Processes, StageReport, StageRun, cut, seconds_per_batch
from wan_ceiling import Wan, ceiling, ceiling_of_namespaces, ceilings
from wan_line import Line
from wan_namespaces import ADDRESSES, LARGE_MTU, PLAIN_MTU, NamespacesWan, enter, is_possible
from wan_proxy import ProxyWan

from headway.daemon.planning.distance import microbatches_on_the_way
from headway.optim.spec import OptimSpec
from headway.stages.schedule import ScheduleName, schedule_depth
from headway.stages.spec import ModelSpec, TrainSpec, layer_names
from headway.stages.stage_context import StageContext

MODEL = ModelSpec(
    num_hidden_layers=2, hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=4
)
SLEEPS = SleepTimes(forward_s=13e-3, backward_s=27e-3, update_s=5e-3)
MICROBATCH_S = SLEEPS.forward_s + SLEEPS.backward_s
MICROBATCH_SIZE = 4
TOKENS = {100: 80, 400: 320}
"""A sequence's length by the line's Mbit/s: frames that need two thirds of the line."""
ROUND_TRIPS_MS = (0, 20, 50, 100, 200)
LEAST_MICROBATCHES = 4
NUM_SETTLING = 4
NUM_BATCHES = 10
CONGESTION = ("cubic", "bbr")
"""TCP's congestion controls, of the host; the first is the kernel's own choice."""
OUTAGE_S = 10.0
MOST_OUTAGE_COST_S = 11.5
SCHEDULES: tuple[ScheduleName, ...] = ("2bw", "1f1b", "gpipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A stage's report, and how often its process took up a broken link."""

    stage: StageReport
    num_resumed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WanRun(StageRun):
    """One stage of two, the first of which may dial the second over a line."""

    address: str = ""
    """Where the first stage dials; empty: the second one's own."""
    depths: tuple[int, int] = (2, 1)

    def run(self, host: Host) -> Resumed:  # type: ignore[override]
        """The stage of the host's rank."""
        direct = host.addresses
        before = host._grpc.num_resumed
        host.addresses = [direct[0], self.address or direct[1]]
        try:
            return Resumed(stage=StageRun.run(self, host), num_resumed=host._grpc.num_resumed - before)
        finally:
            host.addresses = direct

    def _context(self, stage: int) -> StageContext:
        return replace(StageRun._context(self, stage), depth=self.depths[stage])


class Ports:
    """A task: on which port a process listens."""

    def run(self, host: Host) -> int:
        """Of the host."""
        return int(host.address.rpartition(":")[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One row's job: the frames by the line, m and depth by the planner's advice for it."""

    schedule: ScheduleName
    line: Line
    sequence_length: int

    @property
    def frame_bytes(self) -> int:
        """Of an activation, float32."""
        return MICROBATCH_SIZE * self.sequence_length * MODEL.hidden_size * 4

    @property
    def needed_mbit_s(self) -> float:
        """Each way."""
        return self.frame_bytes * 8 / 1e6 / MICROBATCH_S

    @property
    def advised(self) -> int:
        """Microbatches in flight that hide the line, as the planner counts them."""
        line = self.line
        link_s = line.round_trip_ms / 1e3 + 2 * line.jitter_ms / 1e3 + 2 * self.frame_bytes / line.bytes_per_s
        return microbatches_on_the_way([MICROBATCH_S, MICROBATCH_S], [link_s], MICROBATCH_S)

    @property
    def microbatches(self) -> int:
        """m."""
        return max(LEAST_MICROBATCHES, self.advised)

    @property
    def depths(self) -> tuple[int, int]:
        """Of both stages."""
        if self.schedule == "2bw":
            return self.advised, 1
        first, second = (schedule_depth(self.schedule, self.microbatches, 2, stage) for stage in range(2))
        return first, second


class Apart(Processes):
    """Two processes, each in a network namespace of its own."""

    def __init__(self, namespaces: Sequence[str]) -> None:
        super().__init__(2)
        self._namespaces = namespaces

    def target(self, rank: int) -> Callable[[Connection, int, Path], None]:
        return partial(_serve_in, self._namespaces[rank], ADDRESSES[rank])


def _serve_in(namespace: str, address: str, connection: Connection, rank: int, certificates: Path) -> None:
    enter(namespace)
    pipeline_processes.HOST = address
    pipeline_processes.serve(connection, rank, certificates)


@dataclass(frozen=True, slots=True)
class Sites:
    """Two sites, and the line between them."""

    processes: Processes
    wan: Wan
    address: str
    """Where the first stage dials; empty: the second one's own."""


@contextmanager
def sites(kind: str, near: Processes, *, has_loss: bool = False) -> Iterator[Sites]:
    """Two sites by a kind of emulator; near: two processes on one site, which the proxy puts a line between."""
    if kind == "proxy":
        with ProxyWan(near.run(Ports(), number=2)[1]) as wan:
            yield Sites(near, wan, f"{pipeline_processes.HOST}:{wan.port}")
        return
    with NamespacesWan(mtu=PLAIN_MTU if has_loss else LARGE_MTU) as line, Apart(line.namespaces) as processes:
        yield Sites(processes, line, "")


@dataclass
class Bench:
    """The same job on one site and on two."""

    near: Processes
    far: Sites
    num_batches: int
    _near: dict[tuple[object, ...], float] = field(default_factory=dict)

    def seconds(self, job: Job, *, is_far: bool) -> float:
        """Of a batch, over the line or on one site."""
        reports = self.run(job, num_batches=self.num_batches, is_far=is_far)
        return seconds_per_batch(reports[0].stage.batch_ends(), num_settling=NUM_SETTLING)

    def near_seconds(self, job: Job) -> float:
        """On one site; measured once for each form of job."""
        key = (job.schedule, job.microbatches, job.sequence_length, job.depths)
        if key not in self._near:
            self._near[key] = self.seconds(job, is_far=False)
        return self._near[key]

    def ratio(self, job: Job, *, is_fresh: bool = False) -> float:
        """Tokens/s over the line over tokens/s on one site."""
        near = self.seconds(job, is_far=False) if is_fresh else self.near_seconds(job)
        return near / self.seconds(job, is_far=True)

    def run(self, job: Job, *, num_batches: int, is_far: bool) -> list[Resumed]:
        """Both stages' reports."""
        train = TrainSpec(
            schedule=job.schedule,
            batches=num_batches,
            microbatches=job.microbatches,
            microbatch_size=MICROBATCH_SIZE,
            sequence_length=job.sequence_length,
            clip_norm=1.0,
        )
        task = WanRun(
            job=self.near.new_name(),
            model=MODEL,
            train=train,
            optim=OptimSpec(),
            cuts=cut(layer_names(MODEL), 2),
            sleeps=SLEEPS,
            address=self.far.address if is_far else "",
            depths=job.depths,
        )
        if is_far:
            self.far.wan.set(job.line)
        return (self.far.processes if is_far else self.near).run(task, number=2)

    def outage_cost_s(self) -> tuple[float, int]:
        """Seconds that a cut costs a run, and how many connections took up the link again."""
        job = Job(schedule="2bw", line=Line(round_trip_ms=50, mbit_s=100), sequence_length=TOKENS[100])
        batch_s = job.microbatches * MICROBATCH_S + SLEEPS.update_s
        timer = threading.Timer(8 * batch_s, partial(self.far.wan.cut, OUTAGE_S))
        timer.start()
        reports = self.run(job, num_batches=24, is_far=True)
        timer.join()
        ends = reports[0].stage.batch_ends()
        steps = [after - before for before, after in itertools.pairwise(ends)]
        assert len(ends) == 24, "a batch was computed twice, or never"
        cost = ends[-2] - ends[NUM_SETTLING - 1] - statistics.median(steps) * (len(ends) - 1 - NUM_SETTLING)
        return cost, reports[1].num_resumed


def main() -> int:
    """Measure the grid, the cut and the emulator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="100 ms at 100 Mbit/s and the cut alone, within a minute")
    parser.add_argument("--emulator", choices=("auto", "proxy", "namespaces"), default="auto", help="auto: what may be")
    options = parser.parse_args()
    quick, kind = options.quick, options.emulator
    if kind == "auto":
        kind = "namespaces" if is_possible() else "proxy"
    limit = ceiling if kind == "proxy" else ceiling_of_namespaces
    most, _ = limit(Line(), 2.0)
    at_400, cpu_share = limit(Line(mbit_s=400, round_trip_ms=20), 4.0)
    progress(f"{kind}: {most:.0f} Mbit/s at most; {at_400:.0f} of 400 Mbit/s one way at {cpu_share:.0%} of a core")
    rows: list[str] = []
    with Processes(2) as near:
        with sites(kind, near) as far:
            bench = Bench(near, far, num_batches=NUM_BATCHES)
            figures = _headline(bench, num_pairs=2 if quick else 3)
            if not quick:
                _grid(bench, rows)
            cost, num_resumed = bench.outage_cost_s()
            progress(f"a cut of {OUTAGE_S:g} s costs {cost:.2f} s; resumed {num_resumed} times")
        if not quick:
            with sites(kind, near, has_loss=True) as far:
                figures["reached_with_loss"] = _with_loss(Bench(near, far, num_batches=NUM_BATCHES), rows)
    print("\n".join(rows))
    figures["outage_cost_s"] = Figure.of([cost])
    status = report(
        f"Two sites over an emulated line ({kind})",
        figures,
        bars={"ratio_100ms_2bw": 0.95} | ({} if quick else {"reached_with_loss": 0.8}),
        extra={
            "emulator": kind,
            "num_resumed": num_resumed,
            "ceiling_mbit_s": round(most),
            "emulator_cores_at_400_mbit_s": round(cpu_share, 3),
            "rows": rows,
        },
    )
    return status or int(cost > MOST_OUTAGE_COST_S or num_resumed < 1)


def _headline(bench: Bench, *, num_pairs: int) -> dict[str, Figure]:
    """The ratios at 100 ms and 100 Mbit/s, pairs in turns."""
    line = Line(round_trip_ms=100, mbit_s=100)
    for is_far in (False, True):  # the first run of a process is slower
        bench.seconds(Job(schedule="2bw", line=line, sequence_length=TOKENS[100]), is_far=is_far)
    figures = {}
    for schedule in SCHEDULES:
        job = Job(schedule=schedule, line=line, sequence_length=TOKENS[100])
        number = num_pairs if schedule == "2bw" else 1
        ratios = [bench.ratio(job, is_fresh=True) for _ in range(number)]
        figures[f"ratio_100ms_{schedule}"] = Figure.of(ratios)
        progress(f"{schedule}, 100 ms, 100 Mbit/s, m = {job.microbatches}, depth {job.depths}: {ratios}")
    return figures


def _grid(bench: Bench, rows: list[str]) -> None:
    rows.append(f"{'line':32} {'needs':>11} {'m':>3} {'depth':>6} {'2bw':>7} {'1f1b':>7} {'gpipe':>7}")
    lines = [Line(round_trip_ms=ms, mbit_s=mbit_s) for mbit_s in TOKENS for ms in ROUND_TRIPS_MS]
    lines += [Line(round_trip_ms=100, mbit_s=mbit_s, jitter_ms=20) for mbit_s in TOKENS]
    for line in lines:
        schedules = SCHEDULES if line.mbit_s == min(TOKENS) else SCHEDULES[:1]
        jobs = [Job(schedule=schedule, line=line, sequence_length=TOKENS[int(line.mbit_s)]) for schedule in schedules]
        ratios = [bench.ratio(job) for job in jobs]
        name = f"{line.round_trip_ms:g} ms, {line.mbit_s:g} Mbit/s"
        name += f", jitter {line.jitter_ms:g} ms" if line.jitter_ms else ""
        rows.append(
            f"{name:32} {jobs[0].needed_mbit_s:4.0f} Mbit/s {jobs[0].microbatches:3} {jobs[0].depths[0]:6} "
            + " ".join(f"{ratio:7.3f}" for ratio in ratios)
        )
        progress(rows[-1])


def _with_loss(bench: Bench, rows: list[str]) -> Figure:
    """What the job carries of what it could: its own need, the line, or what one TCP connection manages with loss."""
    line = Line(round_trip_ms=20, mbit_s=100, loss=1e-3)
    job = Job(schedule="2bw", line=line, sequence_length=TOKENS[100])
    reached = []
    for congestion in CONGESTION if isinstance(bench.far.wan, NamespacesWan) else ("reno",):
        one, four = ceilings(bench.far.wan, line, congestion)
        carried = job.microbatches * job.frame_bytes * 8 / 1e6 / bench.seconds(job, is_far=True)
        busy = MICROBATCH_S / (MICROBATCH_S + SLEEPS.update_s / job.microbatches)
        most = min(line.mbit_s, one, job.needed_mbit_s * busy)
        reached.append(carried / most)
        rows.append(
            f"{line.round_trip_ms:g} ms, {line.mbit_s:g} Mbit/s, loss {line.loss:.1%}, {congestion}: one connection "
            f"{one:.1f} Mbit/s, four {four:.1f}; the job {carried:.1f} of {most:.1f} that it needs or can have"
        )
        progress(rows[-1])
    return Figure.of(reached[:1])


if __name__ == "__main__":
    sys.exit(main())
