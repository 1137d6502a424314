"""Seconds to the same loss: 1f1b with Muon over 2bw with Muon and Error Feedback, for 2, 4 and 8 stages, m = p and 4p
microbatches, on one site and on two.

A byte-level decoder of eight blocks learns the sources of the Python standard library. The losses of a batch depend
neither on the number of stages nor on the sites nor on time, so the plain loop gives them, once for each schedule and
seed. The seconds of a batch come from a run of a few batches in each cell: real executors, links with TLS and
processes, and between two sites an emulated line. Every operation there computes what it should and then rests until
its fixed time is over. A batch has the same work in every cell, and the same rows. What binds both: the losses of every
cell's batches are the bits of the plain loop with that m. Between two m only rounding differs.

All have the same data, clipping and rates, which are constant after a warm-up. Then a run's curve does not depend on
where it ends, and "until this loss" has a meaning for each loss. Under a cosine a loss in the middle is measured at a
rate that the end decides, and the last one is reached when the schedule ends or never.

"2bw, sync start" has no delay while the rate rises: its first batches take the seconds of 1f1b.

No row of the data is seen twice, so each batch's loss is of unseen text, before its update (under 2bw one update
older). Smoothed loss: the mean of the last 20 batches. The targets are what 1f1b has after parts of its batches; 2bw
may take 1.75 times as many.

p8_m32_two: 1f1b over 2bw: seconds of both until the last target that all seeds reach, at 8 stages, m = 32, on two
sites. There gpipe is timed too: it has the losses of 1f1b and hides a line better. more batches: those of 2bw over
those of 1f1b until that target. final difference: smoothed loss minus that of 1f1b after equally many batches, nats.
Intervals are over seeds; the seconds of a batch are one run's.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product, repeat
from pathlib import Path

from lines.wan_line import Line
from lines.wan_plan import advice
from lines.wan_sites import Resumed, WanRun, sites
from rigs.emulated_stage import SleepTimes
from rigs.loss_targets import CURVES, DELAYED, SYNC_START, Curves, Paced, Runs, Target, smoothed
from rigs.measure import Figure, progress, report
from rigs.paced_stage import PacedGraph
from rigs.pipeline_processes import Processes, cut, seconds_per_batch

from headway.daemon.jobs.data_choices import BESIDE_MUON
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.local.reference_loop import BatchResult, reference
from headway.optim.spec import GroupSpec, OptimSpec
from headway.stages.data.stdlib_corpus import builtin_corpus
from headway.stages.data.tokens import TokenShards
from headway.stages.schedule.operations import Update
from headway.stages.spec import ModelSpec, ScheduleName, TrainSpec, layer_names
from headway.stages.stage.content import MicrobatchSource
from headway.stages.stage.graph import StageGraph

MODEL = ModelSpec(
    num_hidden_layers=8, hidden_size=32, intermediate_size=88, num_attention_heads=2, num_key_value_heads=2
)
LINE = Line(round_trip_ms=100, mbit_s=100)
SEQUENCES, SEQUENCE_LENGTH = 32, 64
"""Of a batch."""
OPTIM = OptimSpec(
    matrices=GroupSpec(name="muon", lr=3e-2),
    rest=GroupSpec(name="adamw", lr=9e-3, betas=BESIDE_MUON),
    lr_schedule="constant",
)
"""Of a third of the rates of docs/jobs/demo.toml, themselves, and 3 and 10 times as high ones, the best for 1f1b after
200 and more batches; those of the first three that are best for 2bw after 300."""
WARMUP = 0.1
"""Of 1f1b's batches. A sync start is as long."""
BATCH_S, QUICK_BATCH_S = 6.4, 1.0
"""Forwards and backwards of a batch, all stages together: 25 ms of each of 8 stages for one of 32 microbatches."""
FORWARD_SHARE, UPDATE_SHARE = 1 / 3, 0.04
"""Of that time: the forwards', and what the updates take in addition."""
NUM_BATCHES, QUICK_BATCHES = 300, 60
"""Of 1f1b."""
MORE = 1.75
"""Times as many for 2bw, which may need more until the same loss."""
NUM_PACED, NUM_SETTLING = 10, 4
"""Batches of a cell's run, and those before it is steady."""
PLAIN_M = 2
"""m of the trainings that give the losses."""
ROUNDING = 1e-3
"""Nats by which rounding may part two m in the batches of a cell."""
PARTS = (0.25, 0.5, 0.75, 1.0)
"""Shares of 1f1b's batches whose smoothed losses are the targets."""
LATE, MOST_LATE = 1.1, 0.05
"""An operation that takes so many times its time is late; a run with a larger share of such is made again, once."""


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
class Cell:
    """Where a job runs."""

    num_stages: int
    microbatches: int
    place: str

    @property
    def name(self) -> str:
        """Return the name of its figures."""
        return f"p{self.num_stages}_m{self.microbatches}_{self.place}"

    @property
    def schedules(self) -> tuple[ScheduleName, ...]:
        """Return what is timed here: on one site gpipe takes the time of 1f1b."""
        return ("1f1b", "2bw") if self.place == "one" else ("1f1b", "2bw", "gpipe")

    def times(self, batch_s: float) -> SleepTimes:
        """Return the seconds of its operations, for a batch of so many together."""
        each = batch_s / self.num_stages / self.microbatches
        return SleepTimes(
            forward_s=FORWARD_SHARE * each,
            backward_s=(1 - FORWARD_SHARE) * each,
            update_s=UPDATE_SHARE * batch_s / self.num_stages,
        )


def cells_of(*, is_quick: bool) -> list[Cell]:
    """Return the cells of a bench."""
    stages, mores, places = ((2, 4), (1,), ("one",)) if is_quick else ((2, 4, 8), (1, 4), ("one", "two"))
    return [Cell(num_stages, more * num_stages, place) for num_stages, more, place in product(stages, mores, places)]


def job(name: str, m: int, *, total: int, batches: int, seed: int = 1) -> JobSpec:
    """Return the training of a curve. total: batches of 1f1b, of which the warm-up is a share; batches: of this run."""
    warmup = round(WARMUP * total)
    return JobSpec(
        job=JobSection(name="time-to-loss", seed=seed),
        model=MODEL,
        train=TrainSpec(
            schedule="2bw" if name in DELAYED else "1f1b",
            batches=batches,
            microbatches=m,
            microbatch_size=SEQUENCES // m,
            sequence_length=SEQUENCE_LENGTH,
            sync_batches=warmup if name == SYNC_START else 0,
            data_order="epochs",  # a batch has the same rows with any m
        ),
        optim=replace(OPTIM, warmup_batches=warmup, error_feedback=float(name in DELAYED)),
    )


def plain_losses(spec: JobSpec, data: str) -> list[float]:
    """Return the loss of each batch, by the single-process loop."""
    results: list[BatchResult] = []
    reference(spec, TokenShards.open(Path(data)), on_batch=results.append)
    return [result.loss for result in results]


@contextmanager
def processes_of(cell: Cell) -> Iterator[Processes]:
    """The processes of a cell's stages."""
    if cell.place == "one":
        with Processes(cell.num_stages) as processes:
            yield processes
    else:
        with sites(number=cell.num_stages) as far:
            far.wan.set(LINE)
            yield far.processes


@dataclass(frozen=True, slots=True)
class Bench:
    """The paced runs."""

    total: int
    batch_s: float
    data: str
    plain: Mapping[tuple[str, int], list[float]]
    """Losses of the plain loop in the first batches, of 1f1b and 2bw by m."""

    def paced(self, cell: Cell, schedule: ScheduleName, processes: Processes) -> Paced:
        """Return a real run, the better one of two if the first has late operations."""
        run = self._run(cell, schedule, processes)
        if run.late > MOST_LATE:
            run = min(run, self._run(cell, schedule, processes), key=lambda each: each.late)
        at_work = (1 + UPDATE_SHARE) * self.batch_s / cell.num_stages / run.batch_s
        flag = f"  MORE THAN {MOST_LATE:.0%} LATE" if run.late > MOST_LATE else ""
        progress(
            f"{cell.name}, {schedule}: {run.batch_s:.3f} s a batch, stages at work for {at_work:.0%}, "
            f"{run.late:.1%} of the operations late{flag}"
        )
        return run

    def _run(self, cell: Cell, schedule: ScheduleName, processes: Processes) -> Paced:
        """Raises RuntimeError: the losses are not those of the plain loop."""
        same_as, m, times = "2bw" if schedule == "2bw" else "1f1b", cell.microbatches, cell.times(self.batch_s)
        spec = job(same_as, m, total=self.total, batches=NUM_PACED)
        train, line = replace(spec.train, schedule=schedule), LINE if cell.place == "two" else None
        task = TrainingRun(
            job=processes.new_name(),
            model=MODEL,
            train=train,
            optim=spec.optim,
            cuts=cut(layer_names(MODEL), cell.num_stages),
            depths=advice(MODEL, train, times, line, cell.num_stages).depths,
            seed=spec.job.seed,
            data=self.data,
            times=times,
        )
        reports: list[Resumed] = processes.run(task, number=cell.num_stages)
        if reports[-1].stage.losses != self.plain[same_as, m]:
            raise RuntimeError(f"{cell.name}, {schedule}: the losses are not those of the plain loop")
        began = reports[0].stage.operations[0][1]
        is_late = [
            after - before > LATE * times.seconds(0, op)
            for each in reports
            for op, before, after in each.stage.operations
            if not isinstance(op, Update)
        ]
        ends = [end - began for end in reports[0].stage.batch_ends()]
        steady_s = seconds_per_batch(ends, num_settling=NUM_SETTLING)
        return Paced(ends[:-1], steady_s, sum(is_late) / len(is_late))  # the last batch is not followed by another


def trained(
    total: int, seeds: Sequence[int], ms: Sequence[int], data: str
) -> tuple[list[Curves], dict[tuple[str, int], list[float]]]:
    """Return the curves, by seed, and `Bench.plain`.

    Raises RuntimeError: with some m the first losses are farther from the curve's than rounding explains.
    """
    more = round(MORE * total)
    long = {
        (name, seed): job(name, PLAIN_M, total=total, batches=more if name in DELAYED else total, seed=seed)
        for seed, name in product(seeds, CURVES)
    }
    short = {(name, m): job(name, m, total=total, batches=NUM_PACED) for name, m in product(("1f1b", "2bw"), ms)}
    progress(f"{len(long) + len(short)} trainings by the plain loop")
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        whole, first = (
            dict(zip(jobs, pool.map(plain_losses, jobs.values(), repeat(data)), strict=True)) for jobs in (long, short)
        )
    for (name, m), losses in first.items():
        apart = max(abs(one - other) for one, other in zip(losses, whole[name, seeds[0]], strict=False))
        if apart > ROUNDING:
            raise RuntimeError(f"{name}: m = {m} and m = {PLAIN_M} are {apart:.2g} nats apart; this is not rounding")
    return [{name: whole[name, seed] for name in CURVES} for seed in seeds], first


def told_cell(cell: Cell, runs: Runs, targets: Mapping[float, Target]) -> dict[str, object]:
    """Print a cell's table; return it for the JSON line."""
    print(f"\n{cell.name}: seconds a batch: " + ", ".join(f"{name} {run.batch_s:.3f}" for name, run in runs.items()))
    rows = []
    for part, target in targets.items():
        middle = {name: round(statistics.median(target.seconds(name, run)), 1) for name, run in runs.items()}
        ratios = target.ratios(runs)
        print(
            f"  loss {statistics.median(target.losses):.3f}:",
            "; ".join(f"{name} {seconds} s" for name, seconds in middle.items()),
            *(f"\n    {pair} {ratio}" + ("   SLOWER" if ratio.median < 1 else "") for pair, ratio in ratios.items()),
        )
        told = {pair: [round(value, 3) for value in (r.median, r.low, r.high)] for pair, r in ratios.items()}
        rows.append({"part": part, "seconds": middle, "ratios": told})
    batch_s, late = ({each: round(getattr(run, name), 4) for each, run in runs.items()} for name in ("batch_s", "late"))
    return {"batch_s": batch_s, "late": late, "targets": rows}


def tell(curves: Sequence[Curves], runs: Mapping[Cell, Runs]) -> int:
    """Print the tables and the JSON line; return the exit status."""
    targets = {part: target for part in PARTS if (target := Target.of(curves, part))}
    for part in sorted(set(PARTS) - set(targets)):
        print(f"not all reach the loss of 1f1b after {part:.0%} of its batches in {MORE:g} times as many")
    table = {cell.name: told_cell(cell, of_cell, targets) for cell, of_cell in runs.items()}
    figures: dict[str, Figure] = {}
    if targets:
        last = targets[max(targets)]
        for cell, of_cell in runs.items():
            figures |= {f"{cell.name}: {pair}": ratio for pair, ratio in last.ratios(of_cell).items()}
        figures |= {f"more batches: {name}": figure for name, figure in last.more_batches().items()}
    ends = [{name: smoothed(losses)[len(seed["1f1b"]) - 1] for name, losses in seed.items()} for seed in curves]
    for name in DELAYED:
        figures[f"final difference: {name}"] = Figure.of([end[name] - end["1f1b"] for end in ends])
    told = {part: {"loss": each.losses, "batches": each.batches} for part, each in targets.items()}
    extra = {"cells": table, "targets": told, "final": ends}
    return report("Seconds to the same loss: the last target", figures, extra=extra)


def main() -> int:
    """Train, time, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="within a minute: p = 2 and 4, m = p, one site, one seed")
    parser.add_argument("--batches", type=int, default=NUM_BATCHES, help="of 1f1b; more take longer and go further")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    options = parser.parse_args()
    total, seeds = (QUICK_BATCHES, 1) if options.quick else (options.batches, options.seeds)
    cells = cells_of(is_quick=options.quick)
    runs: dict[Cell, Runs] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = str(builtin_corpus(Path(folder)))
        ms = sorted({cell.microbatches for cell in cells})
        curves, plain = trained(total, range(1, seeds + 1), ms, data)
        if sys.platform == "linux" and os.geteuid() == 0:
            # What else this machine does is to set no pace. The stages' processes inherit it.
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        bench = Bench(total, QUICK_BATCH_S if options.quick else BATCH_S, data, plain)
        for cell in cells:
            with processes_of(cell) as processes:
                timed: dict[str, Paced] = {each: bench.paced(cell, each, processes) for each in cell.schedules}
            start = timed["2bw"].after(timed["1f1b"], round(WARMUP * total))
            runs[cell] = {**timed, SYNC_START: start}
    return tell(curves, runs)


if __name__ == "__main__":
    sys.exit(main())
