"""Seconds to the same loss: 1f1b with Muon over 2bw with Muon and a job's defaults, for 2, 4 and 8 stages, m = p and 4p
microbatches, on one site and on two.

A byte-level decoder of eight blocks learns the sources of the Python standard library. The losses of a batch depend
neither on the number of stages nor on the sites nor on time, so the plain loop gives them, once for each schedule and
seed. The seconds of a batch come from a run of a few batches in each cell: real executors, links with TLS and
processes, and between two sites an emulated line. Every operation there computes what it should and then rests until
its fixed time is over. A batch has the same work in every cell, and the same rows. What binds both: the losses of every
cell's batches are the bits of the plain loop with that m. Between two m only rounding differs.

A loss is what a whole training ends at: warm-up over a tenth of its batches, then a cosine to a tenth of the rate; of
W_B, on rows that no training has drawn. Somebody who trains for so many batches has it then. 1f1b has trainings of
several lengths, whose losses are the targets, and 2bw has some that are as long and longer; between two of them the
loss falls in a line with the logarithm of the batches. Each schedule has the best of three rates, by the first seed and
the middle length; it is told if that is the highest or the lowest one.

`--out DIR` keeps trainings and seconds in DIR, and an interrupted run goes on there.

2bw has Error Feedback and, as is a job's default, no delay in a tenth of its batches, which take the seconds of 1f1b.

p8_m32_two: 1f1b over 2bw: seconds of both until the last target, at 8 stages, m = 32, on two sites. There gpipe is
timed too: it has the losses of 1f1b and hides a line better. more batches: those of 2bw over those of 1f1b until a
target. auto: what `schedule = "auto"` chooses for a job of as many batches and the seconds of the cell.
Intervals are over seeds, Student's t; the seconds of a batch are one run's.
"""

import argparse
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product, repeat
from pathlib import Path

from lines.wan_line import Line
from lines.wan_plan import advice
from lines.wan_sites import Resumed, WanRun, sites
from rigs.emulated_stage import SleepTimes
from rigs.held_out import held_out_loss
from rigs.kept import Kept
from rigs.loss_targets import SYNC_SHARE, Ends, Paced, Runs, Target, over_seeds
from rigs.measure import Figure, progress, report
from rigs.paced_stage import PacedGraph
from rigs.pipeline_processes import Processes, cut, seconds_per_batch

from headway.daemon.jobs.data_choices import BESIDE_MUON
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.local.reference_loop import BatchResult, reference
from headway.daemon.plan.schedule_choice import seconds_until
from headway.optim.spec import GroupSpec, OptimSpec
from headway.stages.data.stdlib_corpus import builtin_corpus
from headway.stages.data.tokens import TokenShards
from headway.stages.errors import NonFiniteLossError
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
    matrices=GroupSpec(name="muon", lr=1e-2), rest=GroupSpec(name="adamw", lr=3e-3, betas=BESIDE_MUON), lr_floor=0.1
)
FACTORS = (2.0, 4.0, 8.0)
"""Of these rates, tried with both schedules."""
WARMUP = 0.1
"""Of a training's batches."""
BATCH_S, QUICK_BATCH_S = 6.4, 1.0
"""Forwards and backwards of a batch, all stages together: 25 ms of each of 8 stages for one of 32 microbatches."""
FORWARD_SHARE, UPDATE_SHARE = 1 / 3, 0.04
"""Of that time: the forwards', and what the updates take in addition."""
TARGETS, QUICK_TARGETS = (200, 400, 800), (40,)
"""Batches of the trainings of 1f1b."""
LONGER = (1.0, 1.2, 1.6)
"""Times as many of 2bw."""
NUM_PACED, NUM_SETTLING = 10, 4
"""Batches of a cell's run, and those before it is steady."""
PLAIN_M = 2
"""m of the trainings that give the losses."""
ROUNDING = 1e-3
"""Nats by which rounding may part two m in the batches of a cell."""
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


def job(schedule: ScheduleName, m: int, *, batches: int, seed: int = 1, factor: float = 1.0) -> JobSpec:
    """Return a whole training. factor: of the rates."""
    matrices, rest = (replace(group, lr=factor * group.lr) for group in (OPTIM.matrices, OPTIM.rest))
    is_late = schedule == "2bw"
    return JobSpec(
        job=JobSection(name="time-to-loss", seed=seed),
        model=MODEL,
        train=TrainSpec(
            schedule=schedule,
            batches=batches,
            microbatches=m,
            microbatch_size=SEQUENCES // m,
            sequence_length=SEQUENCE_LENGTH,
            sync_batches=round(SYNC_SHARE * batches) if is_late else 0,
            data_order="epochs",  # a batch has the same rows with any m
        ),
        optim=replace(
            OPTIM, matrices=matrices, rest=rest, warmup_batches=round(WARMUP * batches), error_feedback=float(is_late)
        ),
    )


def paced_job(schedule: ScheduleName, m: int) -> JobSpec:
    """Return the job of a cell's run, whose batches are all alike."""
    spec = job(schedule, m, batches=NUM_PACED)
    return replace(spec, train=replace(spec.train, sync_batches=0))


def plain_losses(spec: JobSpec, data: str) -> list[float]:
    """Return the loss of each batch, by the single-process loop."""
    results: list[BatchResult] = []
    reference(spec, TokenShards.open(Path(data)), on_batch=results.append)
    return [result.loss for result in results]


def end(spec: JobSpec, data: str) -> float:
    """Return the held-out loss of a training, by the single-process loop."""
    tokens = TokenShards.open(Path(data))
    try:
        weights = reference(spec, tokens, on_batch=lambda _: None)
    except NonFiniteLossError:
        return math.inf
    loss = held_out_loss(spec, weights, tokens, beyond=round(max(TARGETS) * max(LONGER)))
    progress(f"{spec.train.schedule}, {spec.train.batches} batches, rate {spec.optim.matrices.lr:g}, {loss:.4f}")
    return loss


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

    batch_s: float
    data: str
    plain: Mapping[tuple[ScheduleName, int], list[float]]
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
        m, times = cell.microbatches, cell.times(self.batch_s)
        same_as: ScheduleName = "2bw" if schedule == "2bw" else "1f1b"
        spec = paced_job(same_as, m)
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


@dataclass(frozen=True, slots=True)
class Trained:
    """What trainings end at."""

    synced: Sequence[Ends]
    """Of 1f1b, by seed."""
    delayed: Sequence[Ends]
    """Of 2bw."""
    factors: Mapping[ScheduleName, float]
    """Of the rates, that are best for each schedule."""
    plain: Mapping[tuple[ScheduleName, int], list[float]]
    """`Bench.plain`."""

    def targets(self) -> dict[int, Target]:
        """Return the losses that all seeds reach, by the batches of 1f1b."""
        found = {each: Target.of(each, self.synced, self.delayed) for each in self.synced[0]}
        return {batches: target for batches, target in found.items() if target}


Key = tuple[ScheduleName, float, int, int]
"""A training: schedule, factor of the rates, seed, batches."""


def ends_of(keys: Sequence[Key], pool: ProcessPoolExecutor, data: str, kept: Kept) -> dict[Key, float]:
    """Return what trainings end at."""
    names = {key: f"{key[0]}, rates × {key[1]:g}, seed {key[2]}, {key[3]} batches" for key in keys}
    missing = [key for key in keys if names[key] not in kept.found]
    jobs = [job(key[0], PLAIN_M, factor=key[1], seed=key[2], batches=key[3]) for key in missing]
    for key, loss in zip(missing, pool.map(end, jobs, repeat(data)), strict=True):
        kept.keep(names[key], loss)
    return {key: kept.found[name] for key, name in names.items()}


def trained(targets: Sequence[int], seeds: Sequence[int], ms: Sequence[int], data: str, kept: Kept) -> Trained:
    """Train. Raises RuntimeError: with some m the first losses are farther from those of PLAIN_M than rounding."""
    schedules: tuple[ScheduleName, ...] = ("1f1b", "2bw")
    lengths: dict[ScheduleName, list[int]] = {
        "1f1b": [*targets],
        "2bw": sorted({round(longer * each) for each in targets for longer in LONGER}),
    }
    middle = targets[len(targets) // 2]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        tuning = ends_of([(each, f, seeds[0], middle) for each, f in product(schedules, FACTORS)], pool, data, kept)
        factors = {each: min((tuning[each, f, seeds[0], middle], f) for f in FACTORS)[1] for each in schedules}
        keys = [(each, factors[each], seed, n) for each, seed in product(schedules, seeds) for n in lengths[each]]
        whole = ends_of(keys, pool, data, kept)
        jobs = {(each, m): paced_job(each, m) for each, m in product(schedules, {PLAIN_M, *ms})}
        plain = dict(zip(jobs, pool.map(plain_losses, jobs.values(), repeat(data)), strict=True))
    for schedule, factor in factors.items():
        if factor in (FACTORS[0], FACTORS[-1]):
            progress(
                f"{schedule}: the best rate is the {'lowest' if factor == FACTORS[0] else 'highest'} that was tried"
            )
    for (schedule, m), losses in plain.items():
        apart = max(abs(one - other) for one, other in zip(losses, plain[schedule, PLAIN_M], strict=True))
        if apart > ROUNDING:
            raise RuntimeError(
                f"{schedule}: m = {m} and m = {PLAIN_M} are {apart:.2g} nats apart; this is not rounding"
            )
    synced, delayed = (
        [{n: whole[each, factors[each], seed, n] for n in lengths[each]} for seed in seeds] for each in schedules
    )
    return Trained(synced, delayed, factors, plain)


def told_cell(cell: Cell, runs: Runs, targets: Mapping[int, Target]) -> dict[str, object]:
    """Print a cell's table; return it for the JSON line."""
    seconds = {name: run.batch_s for name, run in runs.items()}
    print(f"\n{cell.name}: seconds a batch: {', '.join(f'{name} {each:.3f}' for name, each in seconds.items())}")
    rows = []
    for batches, target in targets.items():
        until = seconds_until(job("2bw", cell.microbatches, batches=batches), seconds)
        chosen = min(until, key=until.__getitem__)
        ratios = target.ratios(runs)
        print(
            f"  loss of 1f1b after {batches}, {statistics.median(target.losses):.3f}; auto: {chosen}",
            *(f"\n    {pair} {ratio}" + ("   SLOWER" if ratio.median < 1 else "") for pair, ratio in ratios.items()),
        )
        told = {pair: [round(value, 3) for value in (r.median, r.low, r.high)] for pair, r in ratios.items()}
        rows.append({"batches": batches, "auto": chosen, "ratios": told})
    batch_s, late = ({each: round(getattr(run, name), 4) for each, run in runs.items()} for name in ("batch_s", "late"))
    return {"batch_s": batch_s, "late": late, "targets": rows}


def tell(found: Trained, runs: Mapping[Cell, Runs]) -> int:
    """Print the tables and the JSON line; return the exit status."""
    targets = found.targets()
    for batches in sorted(set(found.synced[0]) - set(targets)):
        print(f"not all reach the loss of 1f1b after {batches} batches in {LONGER[-1]:g} times as many")
    table = {cell.name: told_cell(cell, of_cell, targets) for cell, of_cell in runs.items()}
    figures: dict[str, Figure] = {}
    if targets:
        last = targets[max(targets)]
        for cell, of_cell in runs.items():
            figures |= {f"{cell.name}: {pair}": ratio for pair, ratio in last.ratios(of_cell).items()}
    figures |= {f"more batches: {batches}": target.more_batches() for batches, target in targets.items()}
    for batches in found.synced[0]:
        pairs = zip(found.delayed, found.synced, strict=True)
        figures[f"nats over 1f1b: {batches}"] = over_seeds([late[batches] - fresh[batches] for late, fresh in pairs])
    extra: dict[str, object] = {
        "cells": table,
        "factors": found.factors,
        "ends": {"1f1b": found.synced, "2bw": found.delayed},
    }
    return report("Seconds to the same loss: the last target", figures, extra=extra)


def main() -> int:
    """Train, time, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="within a minute: p = 2 and 4, m = p, one site, one seed")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also keep what was measured here, and go on with it")
    options = parser.parse_args()
    targets, seeds = (QUICK_TARGETS, 1) if options.quick else (TARGETS, options.seeds)
    cells = cells_of(is_quick=options.quick)
    runs: dict[Cell, Runs] = {}
    trainings, paces = (Kept(options.out and options.out / name) for name in ("trainings.jsonl", "paces.jsonl"))
    with tempfile.TemporaryDirectory() as folder:
        data = str(builtin_corpus(Path(folder)))
        found = trained(targets, range(1, seeds + 1), sorted({cell.microbatches for cell in cells}), data, trainings)
        if sys.platform == "linux" and os.geteuid() == 0:
            # What else this machine does is to set no pace. The stages' processes inherit it.
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        bench = Bench(QUICK_BATCH_S if options.quick else BATCH_S, data, found.plain)
        for cell in cells:
            missing = [each for each in cell.schedules if f"{cell.name}, {each}" not in paces.found]
            if missing:
                with processes_of(cell) as processes:
                    for each in missing:
                        paces.keep(f"{cell.name}, {each}", asdict(bench.paced(cell, each, processes)))
            runs[cell] = {each: Paced(**paces.found[f"{cell.name}, {each}"]) for each in cell.schedules}
    return tell(found, runs)


if __name__ == "__main__":
    sys.exit(main())
