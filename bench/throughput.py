"""Throughput: our schedules against those of torch.distributed.pipelining, and against what no schedule can beat.

vs_torch_1f1b_p2_m4, vs_torch_1f1b_p2_m2: tokens/s of 2bw over those of Schedule1F1B, two stages, 4 and 2 microbatches.
vs_torch_best: the same over the best of torch's schedules that run on a CPU, at the m where that is least.
emulated_min: the least share of the bound 1 / (slowest stage) that 2bw reaches with stages that only take time.

Both sides compute the same blocks from the same weights on the same tokens, in two processes with one thread each, clip
by the norm of the whole model and step the same AdamW; their losses are compared. They run in turns. What differs is
what is measured: 2bw's gradients are one step old, so that its pipe never drains. Torch's goes over gloo without TLS,
ours over gRPC with TLS, which a job of this model gets unless it asks for something else; `2bw, collective` is what it
gets by `link = "collective"`, gloo as torch has it (`vs_torch_1f1b_p2_m4_collective`). Our processes keep freed memory
in large pages, as workers do; torch's are as Python begins them, unless `--keeps-memory both` or `none` says otherwise.

Beside them one process with the whole model, and two of them at once without a word between them: what the machine
itself gives a second process is the most that any pipeline of two can bring.

Emulated stages sleep, so that two cores carry 16 processes: 0.1 s a forward, 0.2 s a backward, 0.05 s an update, as a
GPU takes for a microbatch of a few thousand tokens through a billion parameters; `--microbatch-ms` has other times.
Executor, schedule, links, frames, clipping and optimizer are the real ones, on tensors of a few bytes.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rigs.emulated_stage import SleepTimes
from rigs.measure import Figure, progress, report
from rigs.pipeline_processes import ROUND_TRIP_S, KeepFreedMemory, Processes, StageRun, cut, seconds_per_batch
from rigs.torch_pipeline import SCHEDULES, TorchRun

from headway.optim.spec import GroupSpec, OptimSpec
from headway.stages.schedule.simulator import LinkTimes, StageTimes, simulate
from headway.stages.schedule.stage_schedule import StageSchedule
from headway.stages.spec import ModelSpec, ScheduleName, TrainSpec, layer_names
from headway.stages.stage.allocator import with_large_pages

ADAMW = GroupSpec(name="adamw", lr=1e-3)
OPTIM = OptimSpec(matrices=ADAMW, rest=ADAMW, error_feedback=0.0, lr_schedule="constant", warmup_batches=0)
ONE, TWO = "one process alone", "two processes alone"
"""The whole model without a pipeline, in one process and in two at once: what the machine gives a second process."""
OURS: tuple[ScheduleName, ...] = ("2bw", "1f1b", "gpipe")
COLLECTIVE = "2bw, collective"
"""2bw in a job that asks for collective links: gloo on both sides."""
REAL_BATCHES, REAL_SETTLING = 8, 2
LOSS_TOLERANCE = 2e-3
NEEDS_FOUR = "ScheduleDualPipeV"
"""It wants as many microbatches as there are stages, two a process."""
BARS = {"vs_torch_1f1b_p2_m4": 1.25, "vs_torch_1f1b_p2_m2": 1.4, "vs_torch_best": 1.0, "emulated_min": 0.97}


@dataclass(frozen=True, slots=True)
class Emulated:
    """One row of the emulated table."""

    num_stages: int
    num_microbatches: int
    schedule: ScheduleName
    microbatch_s: float
    """Forward and backward on every stage."""

    @property
    def sleeps(self) -> SleepTimes:
        """A backward takes twice a forward, an update half of one."""
        forward_s = self.microbatch_s / 3
        return SleepTimes(forward_s=forward_s, backward_s=2 * forward_s, update_s=forward_s / 2)

    @property
    def model(self) -> ModelSpec:
        """A layer a stage, of a few bytes."""
        return ModelSpec(
            num_hidden_layers=self.num_stages - 2,
            hidden_size=8,
            intermediate_size=8,
            num_attention_heads=1,
            num_key_value_heads=1,
            vocab_size=8,
        )

    @property
    def train(self) -> TrainSpec:
        """Return a training with enough batches for a steady middle: 2bw's pipe is full after p microbatches."""
        m = self.num_microbatches
        measured = max(2, 48 // m) if self.schedule == "2bw" else 1
        return TrainSpec(
            schedule=self.schedule,
            batches=self.num_settling + measured + 1,
            microbatches=m,
            microbatch_size=1,
            sequence_length=8,
        )

    @property
    def num_settling(self) -> int:
        """Batches that are not counted."""
        return 2 if self.num_microbatches == self.num_stages else 1

    @property
    def bound_s(self) -> float:
        """Return the bound: each stage's work on one batch."""
        return self.num_microbatches * self.microbatch_s + self.sleeps.update_s

    def run(self, job: str) -> StageRun:
        """Return a run of all stages."""
        cuts = [(name,) for name in layer_names(self.model)]
        return StageRun(job=job, model=self.model, train=self.train, optim=OPTIM, cuts=cuts, sleeps=self.sleeps)

    def measured(self, processes: Processes) -> float:
        """Share of the bound."""
        ends = processes.run(self.run(processes.new_name()), number=self.num_stages)[-1].batch_ends()
        return self.bound_s / seconds_per_batch(ends, num_settling=self.num_settling)

    def simulated(self) -> float:
        """The same, by the simulator that the planner asks, with half the planner's round trip each way."""
        train, p, run = self.train, self.num_stages, self.run("simulated")
        schedules = [StageSchedule.of(train, stage_index=s, num_stages=p, depth=run.depth(s)) for s in range(p)]
        sleeps = self.sleeps
        times = StageTimes(forward=sleeps.forward_s, backward=sleeps.backward_s, update=sleeps.update_s)
        simulation = simulate(schedules, [times] * p, links=[LinkTimes(latency=ROUND_TRIP_S / 2)] * (p - 1))
        ends = [0.0] * train.batches
        for done in simulation.timeline:
            if done.stage == p - 1 and str(done.op).startswith("B"):
                ends[done.op.batch] = done.ended
        return self.bound_s / seconds_per_batch(ends, num_settling=self.num_settling)


class TwoProcesses:
    """Real compute: the default model on two stages."""

    def __init__(
        self, ours: Processes, theirs: Processes, *, link: str, keeps_memory: str, optim: OptimSpec = OPTIM
    ) -> None:
        """keeps_memory: the processes that keep freed memory: `ours`, `both` or `none`."""
        for processes in {"ours": (ours,), "both": (ours, theirs), "none": ()}[keeps_memory]:
            processes.run(KeepFreedMemory(), number=2)
        self._processes = ours
        self._theirs = theirs
        self._link = link
        self._optim = optim
        self._model = ModelSpec()
        self.losses: dict[tuple[str, int], list[float]] = {}

    def tokens_per_s(self, side: str, num_microbatches: int) -> float:
        """Return the rate of one of our schedules, or of torch's. Raises RuntimeError when that does not run here."""
        if side in (ONE, TWO):
            return self._alone(1 if side == ONE else 2, num_microbatches)
        name = "2bw" if side == COLLECTIVE else side
        is_ours = name in OURS
        train = TrainSpec(
            schedule=name if is_ours else "1f1b",  # type: ignore[arg-type]
            batches=REAL_BATCHES,
            microbatches=num_microbatches,
        )
        if is_ours:
            run = StageRun(
                job=self._processes.new_name(),
                model=self._model,
                train=train,
                optim=self._optim,
                cuts=cut(layer_names(self._model), 2),
                link="collective" if side == COLLECTIVE else self._link,
            )
            reports = self._processes.run(run, number=2)
            ends, losses = reports[-1].batch_ends(), reports[-1].losses
        else:
            theirs = TorchRun(
                schedule=side,
                model=self._model,
                train=train,
                optim=self._optim,
                num_processes=2,
                rendezvous=str(self._theirs.folder / "rendezvous"),
            )
            reports = self._theirs.run(theirs, number=2)
            ends, losses = reports[-1].batch_ends, max(each.losses for each in reports)
        self.losses[side, num_microbatches] = losses
        return train.tokens_per_batch / seconds_per_batch(ends, num_settling=REAL_SETTLING)

    def _alone(self, number: int, num_microbatches: int) -> float:
        """Of all processes together."""
        train = TrainSpec(schedule="2bw", batches=REAL_BATCHES // 2 + 1, microbatches=num_microbatches)
        run = StageRun(
            job=self._processes.new_name(),
            model=self._model,
            train=train,
            optim=self._optim,
            cuts=[layer_names(self._model)],
            is_alone=True,
        )
        reports = self._processes.run(run, number=number)
        return sum(
            train.tokens_per_batch / seconds_per_batch(report.batch_ends(), num_settling=1) for report in reports
        )

    def check_losses(self, num_microbatches: int) -> None:
        """Check that all synchronous schedules have equal losses; raises RuntimeError otherwise."""
        expected = self.losses["1f1b", num_microbatches]
        for (side, m), losses in self.losses.items():
            if m == num_microbatches and side not in ("2bw", COLLECTIVE):
                worst = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
                if worst > LOSS_TOLERANCE:
                    raise RuntimeError(f"{side} does not train what our 1f1b trains: losses differ by {worst:g}")


def measure_real(
    sides: Sequence[str], all_m: Iterable[int], num_rounds: int, *, link: str, keeps_memory: str
) -> tuple[dict[str, Figure], dict[str, object]]:
    """All sides in turns, in either order."""
    figures: dict[str, Figure] = {}
    table: dict[str, object] = {}
    worst: Figure | None = None
    large = with_large_pages(os.environ)
    our_environment = large if keeps_memory in ("ours", "both") else {}
    their_environment = large if keeps_memory == "both" else {}
    with Processes(2, environment=our_environment) as ours, Processes(2, environment=their_environment) as theirs:
        pair = TwoProcesses(ours, theirs, link=link, keeps_memory=keeps_memory)
        for m in all_m:
            able = [side for side in (*sides, ONE, TWO) if m >= 4 or side != NEEDS_FOUR]
            speeds: dict[str, list[float]] = {side: [] for side in able}
            for number in range(num_rounds):
                for side in able if number % 2 == 0 else able[::-1]:
                    speeds[side].append(pair.tokens_per_s(side, m))
                    progress(f"m = {m}, round {number + 1}: {side} {speeds[side][-1]:.0f} tokens/s")
            pair.check_losses(m)
            medians = {side: statistics.median(values) for side, values in speeds.items()}
            ratios = {
                side: Figure.of([mine / other for mine, other in zip(speeds["2bw"], values, strict=True)])
                for side, values in speeds.items()
            }
            over_torch: dict[str, Figure] = {}
            if COLLECTIVE in able and "Schedule1F1B" in able:
                pairs = zip(speeds[COLLECTIVE], speeds["Schedule1F1B"], strict=True)
                over_torch[f"vs_torch_1f1b_p2_m{m}_collective"] = Figure.of([mine / other for mine, other in pairs])
            print(f"\np = 2, m = {m}: tokens/s, and 2bw over it")
            for side in able:
                print(f"  {side:32} {medians[side]:8.0f}   {ratios[side]}")
            for figure in over_torch.values():
                print(f"  {COLLECTIVE}, over Schedule1F1B: {figure}")
            table[f"tokens_per_s_m{m}"] = {side: round(value, 1) for side, value in medians.items()}
            if m in (2, 4):
                figures |= over_torch
                figures |= {f"vs_torch_1f1b_p2_m{m}": ratios[side] for side in able if side == "Schedule1F1B"}
            # Of those that were asked for.
            best = max((side for side in able if side in SCHEDULES), key=lambda side: medians[side])
            table[f"torch_best_m{m}"] = best
            gains = [two / one for one, two in zip(speeds[ONE], speeds[TWO], strict=True)]
            table[f"second_process_brings_m{m}"] = round(statistics.median(gains), 3)
            table[f"2bw_vs_two_alone_m{m}"] = round(ratios[TWO].median, 3)
            if worst is None or ratios[best].median < worst.median:
                worst = ratios[best]
    if worst is not None:
        figures["vs_torch_best"] = worst
    return figures, table


def measure_emulated(
    rows: Sequence[Emulated], num_rounds: int
) -> tuple[dict[str, Figure], dict[str, object], dict[Emulated, float]]:
    """Each row by itself; 2bw as often as there are rounds."""
    shares: dict[Emulated, list[float]] = {row: [] for row in rows}
    with Processes(max(row.num_stages for row in rows)) as processes:
        for number in range(num_rounds):
            for row in rows:
                if number == 0 or row.schedule == "2bw":
                    shares[row].append(row.measured(processes))
                    progress(f"p = {row.num_stages}, m = {row.num_microbatches}, {row.schedule}: {shares[row][-1]:.3f}")
    medians = {row: statistics.median(values) for row, values in shares.items()}
    by_place = {(row.num_stages, row.num_microbatches, row.schedule): row for row in rows}
    print(f"\nemulated stages: share of the bound, and simulated\n{'p':>4}{'m':>5}", *(f"{name:>15}" for name in OURS))
    for p, m in dict.fromkeys((row.num_stages, row.num_microbatches) for row in rows):
        found = [by_place.get((p, m, name)) for name in OURS]
        cells = [f"{medians[row]:.3f} ({row.simulated():.3f})" if row else "" for row in found]
        print(f"{p:4}{m:5}", *(f"{cell:>15}" for cell in cells))
    least = min((row for row in rows if row.schedule == "2bw"), key=lambda row: medians[row])
    table = {f"p{row.num_stages}_m{row.num_microbatches}_{row.schedule}": round(medians[row], 4) for row in rows}
    return {"emulated_min": Figure.of(shares[least])}, {"emulated": table}, medians


def plot(medians: dict[Emulated, float], file: Path) -> None:
    """The shares against the number of stages."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    factors = sorted({row.num_microbatches // row.num_stages for row in medians})
    sizes = sorted({row.num_stages for row in medians})
    figure, all_axes = pyplot.subplots(1, len(factors), figsize=(11, 3.6), sharey=True, squeeze=False)
    axes = all_axes[0]
    for axis, factor in zip(axes, factors, strict=True):
        for schedule, colour in zip(OURS, ("#1b6ca8", "#c8553d", "#6b8e23"), strict=True):
            of_axis = [row for row in medians if row.num_microbatches == factor * row.num_stages]
            rows = sorted((row for row in of_axis if row.schedule == schedule), key=lambda row: row.num_stages)
            stages = [row.num_stages for row in rows]
            axis.plot(stages, [medians[row] for row in rows], "o", color=colour, label=f"{schedule}, measured")
            axis.plot(stages, [row.simulated() for row in rows], "-", color=colour, label="simulated", alpha=0.5)
        axis.set(title=f"m = {factor if factor > 1 else ''}p", xlabel="stages p", xticks=sizes, ylim=(0, 1.05))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of the bound 1 / (slowest stage)")
    axes[0].legend(fontsize=7, loc="lower left")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def emulated_rows(
    sizes: Iterable[int], factors: Iterable[int], schedules: Iterable[ScheduleName], microbatch_s: float
) -> list[Emulated]:
    """All of them."""
    factors, schedules = tuple(factors), tuple(schedules)
    return [
        Emulated(p, factor * p, schedule, microbatch_s) for p in sizes for factor in factors for schedule in schedules
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="within a minute: one round, m = 2, four emulated stages")
    parser.add_argument("--part", choices=("real", "emulated"), help="only this half")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--beside", nargs="+", choices=("gpipe", *SCHEDULES), default=["gpipe", *SCHEDULES], help="beside 2bw and 1f1b"
    )
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8], help="of real compute")
    parser.add_argument("--link", choices=("grpc", "collective"), default="grpc", help="of ours, with real compute")
    parser.add_argument("--keeps-memory", choices=("ours", "both", "none"), default="ours", help="whose processes")
    parser.add_argument("--schedules", choices=OURS, nargs="+", default=OURS, help="of emulated stages")
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 8, 16], help="of emulated pipelines")
    parser.add_argument("--factors", type=int, nargs="+", default=[1, 2, 4], help="microbatches, in numbers of stages")
    parser.add_argument("--microbatch-ms", type=float, default=300, help="forward and backward on an emulated stage")
    parser.add_argument("--plot", type=Path, help="where to draw the emulated shares, as a PNG")
    options = parser.parse_args()
    if options.microbatch_ms <= 0:
        parser.error("--microbatch-ms: a stage takes time")
    figures: dict[str, Figure] = {}
    extra: dict[str, object] = {}
    parts: list[Callable[[], None]] = []

    def real() -> None:
        sides = ["2bw", "1f1b", "Schedule1F1B"] if options.quick else ["2bw", COLLECTIVE, "1f1b", *options.beside]
        all_m = [2] if options.quick else options.microbatches
        how = {"link": options.link, "keeps_memory": options.keeps_memory}
        found, table = measure_real(sides, all_m, 1 if options.quick else options.rounds, **how)
        figures.update(found)
        extra.update(table, **how)

    def emulated() -> None:
        microbatch_s = options.microbatch_ms / 1e3
        rows = (
            emulated_rows((4,), (1, 2), ("2bw",), microbatch_s)
            if options.quick
            else emulated_rows(options.stages, options.factors, options.schedules, microbatch_s)
        )
        found, table, medians = measure_emulated(rows, 1 if options.quick else options.rounds)
        figures.update(found)
        extra.update(table)
        if options.plot:
            plot(medians, options.plot)

    parts = {"real": [real], "emulated": [emulated]}.get(options.part, [real, emulated])
    for part in parts:
        part()
    bars = {} if options.quick else {name: bar for name, bar in BARS.items() if name in figures}
    return report("Throughput of two processes, and of emulated stages", figures, bars=bars, extra=extra)


if __name__ == "__main__":
    sys.exit(main())
