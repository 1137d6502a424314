"""Two sites far apart: what distance costs a pipeline of two stages, beside the same job on one site.

The stages are real executors with real gRPC links and TLS in two processes; each operation takes a fixed time and
computes nothing. Between the sites is an emulated line, which needs root and /dev/net/tun (wan_namespaces.py). m and
depth are what the planner advises for the line (`headway plan`); the other side of each ratio is the same m on one
site, in turns.

ratio_100ms_2bw, ratio_100ms_1f1b: tokens/s over a line of 100 ms round trip over tokens/s on one site; the other rows
are named by their line. outage_cost_s: what a cut of 10 seconds costs, with no batch computed again. ceiling_mbit_s:
what the emulator itself carries. loss_…: at 0.1 % loss, what the link carries over the most that it could: what the
job needs, the line, or what one TCP connection, which the link is, reaches there by itself. m and depth are the
planner's, by what a daemon's probe finds out about that very line; blind: as if it had found no loss.

Each part can run alone (`--rows`), and prints its rows as they are done.
"""

import argparse
import itertools
import math
import statistics
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from lines.wan_ceiling import ceiling, ceilings
from lines.wan_line import Line
from lines.wan_plan import Advice, advice
from lines.wan_probe import BeProbed, Probe
from lines.wan_sites import Resumed, Sites, WanRun, sites
from rigs.emulated_stage import SleepTimes
from rigs.measure import Figure, alternate, report
from rigs.pipeline_processes import Processes, cut, seconds_per_batch

from headway.daemon.cluster.measurements import LinkProbe
from headway.optim.spec import OptimSpec
from headway.stages.spec import ModelSpec, ScheduleName, TrainSpec, layer_names

MODEL = ModelSpec(
    num_hidden_layers=2, hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=4
)
SLEEPS = SleepTimes(forward_s=13e-3, backward_s=27e-3, update_s=5e-3)
MICROBATCH_S = SLEEPS.forward_s + SLEEPS.backward_s
MICROBATCH_SIZE = 4
TOKENS = {100: 80, 400: 320}
"""A sequence's length by the line's Mbit/s: frames that need two thirds of the line."""
ROUND_TRIPS_MS = (0, 20, 50, 100, 200)
HEADLINE = Line(round_trip_ms=100, mbit_s=100)
JITTER_MS = 20
LOSS = 1e-3
LOSSY_ROUND_TRIPS_MS = (20, 100)
LEAST_MICROBATCHES = 4
NUM_SETTLING = 4
NUM_BATCHES = 10
LOSSY_SETTLING_S, LOSSY_S = 4.0, 6.0
"""Seconds before the window: bbr first fills the router's queue, and recovers the loss for two seconds."""
NUM_CONNECTIONS = (1, 4)
CONGESTION = ("cubic", "bbr")
"""TCP's congestion controls: what most hosts have, and one that takes no loss for a full line."""
OUTAGE_S = 10.0
NUM_CUT_BATCHES = 24
NUM_AFTER_CUT = 6
"""Batches until all is as before; what they take longer belongs to the cut."""
MOST_OUTAGE_COST_S = 11.5
BAR_2BW, BAR_LOSS = 0.95, 0.8
SCHEDULES: tuple[ScheduleName, ...] = ("2bw", "1f1b", "gpipe")
PARTS = ("emulator", "headline", "100", "400", "jitter", "cut", "loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One row's job: the frames by the line, m and depth by the planner's advice for it."""

    schedule: ScheduleName
    line: Line
    sequence_length: int

    @classmethod
    def over(cls, line: Line, schedule: ScheduleName = "2bw") -> "Job":
        """Return the job with the frames that belong to the line."""
        return cls(schedule=schedule, line=line, sequence_length=TOKENS[int(line.mbit_s)])

    @property
    def frame_bytes(self) -> int:
        """Return the bytes of an activation, float32."""
        return MICROBATCH_SIZE * self.sequence_length * MODEL.hidden_size * 4

    @property
    def needed_mbit_s(self) -> float:
        """Each way."""
        return self.frame_bytes * 8 / 1e6 / MICROBATCH_S

    @property
    def batch_mbit(self) -> float:
        """Return the megabits of a batch, each way."""
        return self.microbatches * self.frame_bytes * 8 / 1e6

    @property
    def microbatches(self) -> int:
        """Return the m that the planner advises for 2bw, for any schedule."""
        few = self._train("2bw", LEAST_MICROBATCHES, NUM_BATCHES)
        return max(LEAST_MICROBATCHES, advice(MODEL, few, SLEEPS, self.line).least_microbatches)

    def train(self, num_batches: int) -> TrainSpec:
        """Its recurrence."""
        return self._train(self.schedule, self.microbatches, num_batches)

    def advice(self, *, is_far: bool) -> Advice:
        """Return the planner's advice, over the line or on one site."""
        return advice(MODEL, self.train(NUM_BATCHES), SLEEPS, self.line if is_far else None)

    def _train(self, schedule: ScheduleName, microbatches: int, num_batches: int) -> TrainSpec:
        return TrainSpec(
            schedule=schedule,
            batches=num_batches,
            microbatches=microbatches,
            microbatch_size=MICROBATCH_SIZE,
            sequence_length=self.sequence_length,
            clip_norm=1.0,
        )


@dataclass
class Bench:
    """Runs one job on one site and on two."""

    near: Processes
    far: Sites

    def warm_up(self) -> None:
        """The first run of a process is slower."""
        for is_far in (False, True):
            self.seconds(Job.over(HEADLINE), is_far=is_far)

    def seconds(self, job: Job, *, is_far: bool, num_batches: int = NUM_BATCHES) -> float:
        """Return the seconds of a batch, over the line or on one site."""
        reports = self.run(job, num_batches=num_batches, is_far=is_far)
        return seconds_per_batch(reports[0].stage.batch_ends(), num_settling=NUM_SETTLING)

    def ratios(self, job: Job, *, num_pairs: int) -> list[float]:
        """Tokens/s over the line over tokens/s on one site, pairs in turns."""
        far, near = (partial(self.seconds, job, is_far=is_far) for is_far in (True, False))
        return [there / over_the_line for over_the_line, there in alternate(num_pairs, far, near)]

    def run(self, job: Job, *, num_batches: int, is_far: bool, line: Line | None = None) -> list[Resumed]:
        """Both stages' reports. line: where it is another than the planner knows."""
        task = WanRun(
            job=self.near.new_name(),
            model=MODEL,
            train=job.train(num_batches),
            optim=OptimSpec(),
            cuts=cut(layer_names(MODEL), 2),
            sleeps=SLEEPS,
            depths=job.advice(is_far=is_far).depths,
        )
        if is_far:
            self.far.wan.set(line or job.line)
        return (self.far.processes if is_far else self.near).run(task, number=2)

    def probed(self, line: Line) -> Line:
        """Return the line as a daemon's probe would measure it."""
        self.far.wan.set(line)
        far = self.far.processes
        address = far.run(BeProbed(far.certificates), number=2)[1]
        probe: LinkProbe = far.run(Probe(far.certificates, address), number=2)[0]
        return Line(round_trip_ms=probe.round_trip_s * 1e3, mbit_s=probe.bytes_per_s * 8 / 1e6, loss=probe.loss)

    def outage_cost_s(self) -> tuple[float, int]:
        """Seconds that a cut costs a run, and how many connections took up the link again."""
        job = Job.over(Line(round_trip_ms=50, mbit_s=100))
        batch_s = job.microbatches * MICROBATCH_S + SLEEPS.update_s
        timer = threading.Timer(8 * batch_s, partial(self.far.wan.cut, OUTAGE_S))
        timer.start()
        reports = self.run(job, num_batches=NUM_CUT_BATCHES, is_far=True)
        timer.join()
        ends = reports[0].stage.batch_ends()
        assert len(ends) == NUM_CUT_BATCHES, "a batch was computed twice, or never"
        steps = [after - before for before, after in itertools.pairwise(ends)]
        longest = steps.index(max(steps))
        around = steps[longest - 1 : longest + NUM_AFTER_CUT]
        return sum(around) - statistics.median(steps[NUM_SETTLING:]) * len(around), reports[1].num_resumed


@dataclass
class Results:
    """The figures so far."""

    rows: list[str] = field(default_factory=list)
    figures: dict[str, Figure] = field(default_factory=dict)
    bars: dict[str, float] = field(default_factory=dict)
    extra: dict[str, object] = field(default_factory=dict)
    has_failed: bool = False

    def row(self, text: str) -> None:
        """One line of the table, at once."""
        self.rows.append(text)
        print(text, flush=True)

    def figure(self, name: str, samples: Sequence[float], *, bar: float | None = None) -> Figure:
        """Add a row to the table at the end and to the JSON line."""
        self.figures[name] = Figure.of(samples)
        if bar is not None:
            self.bars[name] = bar
        return self.figures[name]


def measure_emulator(results: Results) -> None:
    """Measure the emulator's maximum, and its cost."""
    most, _ = ceiling(Line(), 2.0)
    at_400, cores = ceiling(Line(mbit_s=400, round_trip_ms=20), 4.0)
    results.row(f"emulator: {most:.0f} Mbit/s at most; {at_400:.0f} of 400 Mbit/s one way with {cores:.2f} of a core")
    results.extra |= {"ceiling_mbit_s": round(most), "emulator_cores_at_400_mbit_s": round(cores, 3)}


def measure_line(bench: Bench, line: Line, results: Results, *, pairs: dict[ScheduleName, int], name: str = "") -> None:
    """A row: each schedule over a line. pairs: how many of each; name: of its figures."""
    jobs = [Job.over(line, schedule) for schedule in pairs]
    name = name or f"{line.round_trip_ms:g}ms_{line.mbit_s:g}mbit" + ("_jitter" if line.jitter_ms else "")
    told = []
    for job in jobs:
        has_bar = job.schedule == "2bw" and line.round_trip_ms == HEADLINE.round_trip_ms
        figure = results.figure(
            f"ratio_{name}_{job.schedule}",
            bench.ratios(job, num_pairs=pairs[job.schedule]),
            bar=BAR_2BW if has_bar else None,
        )
        told.append(f"{job.schedule} {figure.median:.3f} [{figure.low:.3f}, {figure.high:.3f}]")
    advised = jobs[0].advice(is_far=True)
    jitter = f", jitter {line.jitter_ms:g} ms" if line.jitter_ms else ""
    results.row(
        f"{line.round_trip_ms:3g} ms, {line.mbit_s:g} Mbit/s{jitter}: needs {jobs[0].needed_mbit_s:.0f} Mbit/s, "
        f"m = {jobs[0].microbatches}, depth {advised.depths[0]}: {', '.join(told)}"
    )


def measure_cut(bench: Bench, results: Results) -> None:
    """Measure the cost of a cut."""
    cost, num_resumed = bench.outage_cost_s()
    results.figure("outage_cost_s", [cost])
    results.extra["num_resumed"] = num_resumed
    results.has_failed |= cost > MOST_OUTAGE_COST_S or num_resumed < 1
    results.row(f"a cut of {OUTAGE_S:g} s costs {cost:.2f} s, no batch computed again; resumed {num_resumed} times")


def measure_loss(bench: Bench, line: Line, results: Results, congestions: Sequence[str] = CONGESTION) -> None:
    """Measure the job's share of the possible rate: its own need, the line, or one TCP connection's rate with loss."""
    for congestion in congestions:
        found = ceilings(bench.far.wan, line, congestion, NUM_CONNECTIONS)
        known = bench.probed(line)
        jobs = {"": replace(Job.over(line), line=known)}
        if known.loss and congestion == "bbr":
            jobs["_blind"] = replace(jobs[""], line=replace(known, loss=0.0))
        told = []
        for name, job in jobs.items():
            busy = MICROBATCH_S / (MICROBATCH_S + SLEEPS.update_s / job.microbatches)
            most = min(line.mbit_s, found[1], job.needed_mbit_s * busy)
            expected_s = job.batch_mbit / most
            num_settling = max(NUM_SETTLING, math.ceil(LOSSY_SETTLING_S / expected_s))
            num_batches = num_settling + max(NUM_SETTLING, math.ceil(LOSSY_S / expected_s))
            reports = bench.run(job, num_batches=num_batches, is_far=True, line=line)
            batch_s = seconds_per_batch(reports[0].stage.batch_ends(), num_settling=num_settling)
            carried = job.batch_mbit / batch_s
            bar = None if name else BAR_LOSS
            figure = results.figure(f"loss_{line.round_trip_ms:g}ms_{congestion}{name}", [carried / most], bar=bar)
            depth = job.advice(is_far=True).depths[0]
            told.append(
                f"m = {job.microbatches}, depth {depth}: {carried:.1f} of {most:.1f} ({figure.median:.2f})"
                f"{', blind' if name else ''}"
            )
        ceilings_told = ", ".join(f"{number}: {mbit_s:.1f}" for number, mbit_s in found.items())
        results.row(
            f"{line.round_trip_ms:3g} ms, {line.mbit_s:g} Mbit/s, loss {line.loss:.1%}, {congestion}: TCP connections "
            f"carry {ceilings_told} Mbit/s; a probe says {known.round_trip_ms:.3g} ms, {known.mbit_s:.3g} Mbit/s, loss "
            f"{known.loss:.2%}; the job, of what it needs or its one connection can: {'; '.join(told)}"
        )


def main() -> int:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="100 ms at 100 Mbit/s and the cut alone, within a minute")
    parser.add_argument("--rows", nargs="+", choices=PARTS, default=PARTS, help="these parts alone")
    parser.add_argument("--lossy-ms", nargs="+", type=int, default=LOSSY_ROUND_TRIPS_MS, help="of the rows with loss")
    parser.add_argument("--congestion", nargs="+", choices=CONGESTION, default=CONGESTION, help="TCP's, with loss")
    options = parser.parse_args()
    parts = ("headline", "cut") if options.quick else options.rows
    results = Results(extra={"parts": list(parts)})
    if "emulator" in parts:
        measure_emulator(results)
    with Processes(2) as near:
        if set(parts) - {"emulator", "loss"}:
            with sites() as far:
                _without_loss(Bench(near, far), parts, results, is_quick=options.quick)
        if "loss" in parts:
            with sites(has_loss=True) as far:
                for round_trip_ms in options.lossy_ms:
                    line = Line(round_trip_ms=round_trip_ms, mbit_s=100, loss=LOSS)
                    measure_loss(Bench(near, far), line, results, options.congestion)
    title = "Two sites over an emulated line"
    status = report(title, results.figures, bars=results.bars, extra={**results.extra, "rows": results.rows})
    return status or int(results.has_failed)


def _without_loss(bench: Bench, parts: Sequence[str], results: Results, *, is_quick: bool) -> None:
    bench.warm_up()
    if "headline" in parts:
        pairs: dict[ScheduleName, int] = {"2bw": 2, "1f1b": 1} if is_quick else {"2bw": 7, "1f1b": 3, "gpipe": 2}
        measure_line(bench, HEADLINE, results, pairs=pairs, name="100ms")
    if "cut" in parts:
        measure_cut(bench, results)
    for mbit_s in TOKENS:
        if str(mbit_s) in parts:
            for round_trip_ms in ROUND_TRIPS_MS:
                line = Line(round_trip_ms=round_trip_ms, mbit_s=mbit_s)
                if line != HEADLINE or "headline" not in parts:
                    measure_line(bench, line, results, pairs={"2bw": 2, "1f1b": 1} if mbit_s == 100 else {"2bw": 2})
    if "jitter" in parts:
        for mbit_s in TOKENS:
            line = replace(HEADLINE, mbit_s=mbit_s, jitter_ms=JITTER_MS)
            measure_line(bench, line, results, pairs={"2bw": 2})


if __name__ == "__main__":
    sys.exit(main())
