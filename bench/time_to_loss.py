"""Seconds to the same loss: 2bw with Muon and Error Feedback against 1f1b with Muon, on one site and on two.

A byte-level decoder of four blocks learns the sources of the Python standard library in two stages: real executors,
links with TLS and processes, and between two sites an emulated line. Every operation computes what it
should and then rests until its fixed time is over, so that all runs have the same seconds a microbatch, whatever the
cores of this machine do. m is what the planner advises for 2bw over the line, depths are its own, both schedules have
the same data, rates (constant after a warm-up) and clipping.

Smoothed loss: the mean over the last 20 batches' training losses. The target is what 1f1b has when it ends; earlier
ones are what it has after a part of its batches. One seed is trained in all four runs, and its losses must be the same
bits on one site and on two. Of the other seeds the plain loop gives the losses, and the four runs the seconds in which
so many batches were done: when a batch is done does not depend on the seed.

speedup_two_sites, speedup_one_site: seconds of 1f1b over seconds of 2bw until the target. more_batches: batches of 2bw
over batches of 1f1b. distance_2bw, distance_1f1b: seconds on two sites over seconds on one.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from lines.wan_line import Line
from lines.wan_plan import advice
from lines.wan_sites import Resumed, Sites, WanRun, sites
from rigs.emulated_stage import SleepTimes
from rigs.measure import Figure, progress, report
from rigs.paced_stage import PacedGraph
from rigs.pipeline_processes import Processes, cut

from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.local.reference_loop import BatchResult, reference
from headway.optim.spec import GroupSpec, OptimSpec
from headway.stages.data.stdlib_corpus import builtin_corpus
from headway.stages.data.tokens import TokenShards
from headway.stages.schedule.operations import Update
from headway.stages.spec import ModelSpec, TrainSpec, layer_names
from headway.stages.stage.content import MicrobatchSource
from headway.stages.stage.graph import StageGraph

Schedule = Literal["2bw", "1f1b"]
SCHEDULES: tuple[Schedule, ...] = ("2bw", "1f1b")
MODEL = ModelSpec(
    num_hidden_layers=4, hidden_size=64, intermediate_size=172, num_attention_heads=4, num_key_value_heads=2
)
TIMES = SleepTimes(forward_s=13e-3, backward_s=27e-3, update_s=5e-3)
LINE = Line(round_trip_ms=100, mbit_s=100)
MICROBATCH_SIZE, SEQUENCE_LENGTH = 4, 128
OPTIM = OptimSpec(
    matrices=GroupSpec(name="muon", lr=1e-2),
    rest=GroupSpec(name="adamw", lr=3e-3),
    lr_schedule="constant",
    warmup_batches=10,
)
"""The rates of docs/jobs/demo.toml."""
WINDOW = 20
"""Batches of which the smoothed loss is the mean."""
NUM_BATCHES, QUICK_BATCHES = 150, 30
"""Number of batches of 1f1b: about six minutes, and less than one."""
MORE = 1.5
"""Times as many for 2bw, which may need more until the same loss."""
PARTS = (0.25, 0.5, 1.0)
"""Shares of 1f1b's batches whose smoothed losses are the targets."""
LATE = 1.1
"""An operation that takes so many times its time is late."""
PLACES = ("one site", "two sites")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun(WanRun):
    """One stage that trains on the corpus, at a pace."""

    data: str
    times: SleepTimes

    def tokens(self) -> MicrobatchSource:
        return TokenShards.open(Path(self.data))

    def graph_maker(self, stage: int) -> Callable[..., StageGraph]:
        return partial(PacedGraph, self.times, stage)


@dataclass(frozen=True, slots=True)
class Trained:
    """A run of a pipeline."""

    seconds: list[float]
    """Times at which each batch was done, since the first operation."""
    losses: list[float]
    late: float
    """Part of the forwards and backwards that took longer than they should, as computing did."""

    @property
    def batch_s(self) -> float:
        """Median between two batches' ends."""
        return statistics.median(after - before for before, after in zip(self.seconds, self.seconds[1:], strict=False))


@dataclass(frozen=True, slots=True)
class Bench:
    """One job in two schedules."""

    num_batches: int
    seed: int
    data: str

    def train_spec(self, schedule: Schedule) -> TrainSpec:
        """Return the training, with the m that the planner advises for 2bw over the line."""
        few = TrainSpec(
            microbatches=2, microbatch_size=MICROBATCH_SIZE, sequence_length=SEQUENCE_LENGTH, batches=self.num_batches
        )
        return replace(
            few,
            schedule=schedule,
            microbatches=advice(MODEL, few, TIMES, LINE).least_microbatches,
            batches=self.num_batches if schedule == "1f1b" else round(MORE * self.num_batches),
        )

    def trained(self, schedule: Schedule, place: str, near: Processes, far: Sites) -> Trained:
        """A real run."""
        is_far, train = place == PLACES[1], self.train_spec(schedule)
        far.wan.set(LINE)
        task = TrainingRun(
            job=near.new_name(),
            model=MODEL,
            train=train,
            optim=optim(schedule),
            cuts=cut(layer_names(MODEL), 2),
            depths=advice(MODEL, train, TIMES, LINE if is_far else None).depths,
            seed=self.seed,
            data=self.data,
            times=TIMES,
        )
        reports: list[Resumed] = (far.processes if is_far else near).run(task, number=2)
        began = reports[0].stage.operations[0][1]
        is_late = [
            ended - began > LATE * TIMES.seconds(0, op)
            for each in reports
            for op, began, ended in each.stage.operations
            if not isinstance(op, Update)
        ]
        return Trained(
            seconds=[ended - began for ended in reports[1].stage.batch_ends()],
            losses=reports[1].stage.losses,
            late=sum(is_late) / len(is_late),
        )


def optim(schedule: Schedule) -> OptimSpec:
    """Error Feedback where there is a delay."""
    return replace(OPTIM, error_feedback=1.0 if schedule == "2bw" else 0.0)


class Kept:
    """Runs that are done, in a file if there is one, so that a bench that was cut off goes on with the next."""

    def __init__(self, file: Path | None, of: object) -> None:
        """of: inputs of the runs; stored runs of other inputs are ignored."""
        self._file, self._of = file, repr(of)
        has_some = file is not None and file.exists()
        told = json.loads(file.read_text()) if file is not None and has_some else {}
        self._runs: dict[str, Trained] = (
            {name: Trained(**run) for name, run in told["runs"].items()} if told.get("of") == self._of else {}
        )

    def run(self, name: str, make: Callable[[], Trained]) -> Trained:
        """The one of that name."""
        if name not in self._runs:
            self._runs[name] = make()
            if self._file is not None:
                runs = {name: asdict(run) for name, run in self._runs.items()}
                self._file.write_text(json.dumps({"of": self._of, "runs": runs}))
        return self._runs[name]


def losses_of_plain_loop(bench: Bench, schedule: Schedule) -> list[float]:
    """Return the loss of each batch, by the single-process loop."""
    results: list[BatchResult] = []
    job = JobSpec(
        job=JobSection(name="time-to-loss", seed=bench.seed),
        model=MODEL,
        train=bench.train_spec(schedule),
        optim=optim(schedule),
    )
    reference(job, TokenShards.open(Path(bench.data)), on_batch=results.append)
    return [result.loss for result in results]


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return, for each batch, the mean over it and up to WINDOW − 1 earlier ones."""
    return [statistics.fmean(losses[max(0, end - WINDOW) : end]) for end in range(1, len(losses) + 1)]


def batches_until(losses: Sequence[float], target: float) -> int:
    """Return the number of batches until the smoothed loss reaches the target. Raises ValueError when it never does."""
    for batch, loss in enumerate(smoothed(losses)):
        if loss <= target and batch + 1 >= WINDOW:
            return batch + 1
    raise ValueError(f"a smoothed loss of {target:.4f} is not reached in {len(losses)} batches")


@dataclass(frozen=True, slots=True)
class Crossing:
    """The times at which a seed's runs reach one target."""

    target: float
    batches: dict[Schedule, int]
    seconds: dict[tuple[str, Schedule], float]

    @classmethod
    def of(
        cls, losses: dict[Schedule, list[float]], runs: dict[tuple[str, Schedule], Trained], part: float
    ) -> "Crossing":
        """The target is what 1f1b has after a part of its batches."""
        target = smoothed(losses["1f1b"])[max(WINDOW, round(part * len(losses["1f1b"]))) - 1]
        batches = {schedule: batches_until(losses[schedule], target) for schedule in SCHEDULES}
        return cls(target, batches, {key: run.seconds[batches[key[1]] - 1] for key, run in runs.items()})

    def speedup(self, place: str) -> float:
        """Seconds of 1f1b over seconds of 2bw."""
        return self.seconds[place, "1f1b"] / self.seconds[place, "2bw"]

    def distance(self, schedule: Schedule) -> float:
        """Seconds on two sites over seconds on one."""
        return self.seconds[PLACES[1], schedule] / self.seconds[PLACES[0], schedule]


def plot(
    runs: dict[tuple[str, Schedule], Trained], losses: Sequence[dict[Schedule, list[float]]], file: Path, m: int
) -> None:
    """Smoothed loss against seconds of the four runs, and against batches of all seeds."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (by_time, by_batch) = pyplot.subplots(1, 2, figsize=(11, 3.8), sharey=True)
    colours = {"2bw": "#1b6ca8", "1f1b": "#c8553d"}
    names = {"2bw": "2bw, Muon + Error Feedback", "1f1b": "1f1b, Muon"}
    for (place, schedule), run in runs.items():
        style = "-" if place == PLACES[1] else ":"
        curve = smoothed(run.losses)[WINDOW - 1 :]
        by_time.plot(
            run.seconds[WINDOW - 1 :], curve, style, color=colours[schedule], label=f"{names[schedule]}, {place}"
        )
    for index, seed in enumerate(losses):
        for schedule, of_batches in seed.items():
            curve = smoothed(of_batches)[WINDOW - 1 :]
            label = names[schedule] if index == 0 else None
            by_batch.plot(
                range(WINDOW, len(of_batches) + 1), curve, color=colours[schedule], lw=1, alpha=0.7, label=label
            )
    by_time.set(
        title=f"two sites: {LINE.round_trip_ms:g} ms, {LINE.mbit_s:g} Mbit/s, m = {m}",
        xlabel="seconds",
        ylabel=f"training loss, mean of {WINDOW} batches (nats)",
    )
    by_batch.set(title=f"{len(losses)} seeds", xlabel="batches")
    for axis in (by_time, by_batch):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> int:
    """Train, and print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="within a minute: one seed, few batches")
    parser.add_argument("--batches", type=int, default=NUM_BATCHES, help="of 1f1b; more take longer and go further")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--keep", type=Path, help="a file for the runs that are done, to go on with if cut off")
    parser.add_argument("--plot", type=Path, help="where to draw the curves, as a PNG")
    options = parser.parse_args()
    num_batches, num_seeds = (QUICK_BATCHES, 1) if options.quick else (options.batches, options.seeds)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(num_batches, 1, str(builtin_corpus(Path(folder))))
        kept = Kept(options.keep, (bench.train_spec("2bw"), MODEL, TIMES, OPTIM, LINE))
        runs: dict[tuple[str, Schedule], Trained] = {}
        with Processes(2) as near, sites() as far:
            for place in PLACES:
                for schedule in SCHEDULES:
                    run = runs[place, schedule] = kept.run(
                        f"{schedule}, {place}", partial(bench.trained, schedule, place, near, far)
                    )
                    progress(
                        f"{schedule}, {place}: {len(run.seconds)} batches in {run.seconds[-1]:.1f} s, "
                        f"{run.batch_s:.3f} s each, {run.late:.1%} of the operations late; "
                        f"smoothed loss {smoothed(run.losses)[-1]:.4f}"
                    )
        same_bits = all(runs[PLACES[0], each].losses == runs[PLACES[1], each].losses for each in SCHEDULES)
        losses: list[dict[Schedule, list[float]]] = [{each: runs[PLACES[0], each].losses for each in SCHEDULES}]
        others = [replace(bench, seed=seed) for seed in range(2, num_seeds + 1)]
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
            of_schedule = [pool.map(losses_of_plain_loop, others, [each] * len(others)) for each in SCHEDULES]
            for row in zip(*of_schedule, strict=True):
                losses.append(dict(zip(SCHEDULES, row, strict=True)))
    return _tell(runs, losses, same_bits=same_bits, m=bench.train_spec("2bw").microbatches, picture=options.plot)


def _tell(
    runs: dict[tuple[str, Schedule], Trained],
    losses: Sequence[dict[Schedule, list[float]]],
    *,
    same_bits: bool,
    m: int,
    picture: Path | None,
) -> int:
    crossings = {part: [Crossing.of(seed, runs, part) for seed in losses] for part in PARTS}
    print(f"\nseconds to a smoothed loss, median of {len(losses)} seeds; m = {m}")
    print(f"{'target':>8} {'batches: 2bw':>13} {'1f1b':>6}" + "".join(f"{p + ', ' + s:>18}" for p, s in runs))
    table = []
    for part, seeds in crossings.items():
        middle = {key: statistics.median(each.seconds[key] for each in seeds) for key in runs}
        batches = {each: statistics.median(seed.batches[each] for seed in seeds) for each in SCHEDULES}
        target = statistics.median(each.target for each in seeds)
        print(
            f"{target:8.3f} {batches['2bw']:13g} {batches['1f1b']:6g}" + "".join(f"{middle[k]:16.1f} s" for k in runs)
        )
        table.append(
            {
                "part": part,
                "target": round(target, 4),
                "batches": batches,
                "seconds": {f"{place}, {schedule}": round(s, 2) for (place, schedule), s in middle.items()},
            }
        )
    if picture:
        plot(runs, losses, picture, m)
    last = crossings[PARTS[-1]]
    figures = {
        "speedup_two_sites": Figure.of([each.speedup(PLACES[1]) for each in last]),
        "speedup_one_site": Figure.of([each.speedup(PLACES[0]) for each in last]),
        "more_batches": Figure.of([each.batches["2bw"] / each.batches["1f1b"] for each in last]),
        "distance_2bw": Figure.of([each.distance("2bw") for each in last]),
        "distance_1f1b": Figure.of([each.distance("1f1b") for each in last]),
    }
    extra: dict[str, object] = {
        "targets": table,
        "microbatches": m,
        "seeds": len(losses),
        "same_bits_on_one_site_and_two": same_bits,
        "batch_s": {f"{place}, {schedule}": round(run.batch_s, 4) for (place, schedule), run in runs.items()},
        "late": {f"{place}, {schedule}": round(run.late, 4) for (place, schedule), run in runs.items()},
    }
    status = report("Seconds to the same loss", figures, bars={"speedup_two_sites": 1.0}, extra=extra)
    return status or int(not same_bits)


if __name__ == "__main__":
    sys.exit(main())
