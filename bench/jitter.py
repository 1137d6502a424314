"""Jitter: work that runs when it is ready, against the same schedule in a fixed order, with stage times that vary.

ready_vs_fixed_20, ready_vs_fixed_50: tokens/s of 2bw by readiness over 2bw by a table; every operation's time is
multiplied by a log-normal factor of mean 1 and a standard deviation of 20 and of 50 %.

The table of a stage is the order in which it runs its operations when nothing varies, by the simulator; its executor
then waits for the table's next operation, as executors of static schedules do. Both sides have the same depth, links,
frames and, operation by operation, the same times; what differs is what a stage does while it could do something else.
Three rows: 2bw at the depth that a planner gives it, 2bw without its slack (`…_without_slack`), and 1f1b.
Stragglers: one operation in fifty takes eight times as long. Stages are emulated: 20 ms a forward, 40 ms a backward.
The bubble is the share of the time in which the stage with the most to do has nothing to do.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rigs.emulated_stage import SleepTimes
from rigs.measure import Figure, progress, report
from rigs.pipeline_processes import ROUND_TRIP_S, Processes, StageReport, StageRun

from headway.optim.spec import GroupSpec, OptimSpec
from headway.stages.schedule.operations import Op
from headway.stages.schedule.simulator import LinkTimes, StageTimes, simulate
from headway.stages.schedule.stage_schedule import StageSchedule
from headway.stages.spec import ModelSpec, ScheduleName, TrainSpec, layer_names

NUM_STAGES, NUM_MICROBATCHES = 8, 16
SETTLING, MEASURED = 1, 5
"""Batches. The last one of a run is left out: the pipe drains."""
ROWS: dict[str, tuple[ScheduleName, bool, str]] = {
    "2bw": ("2bw", True, ""),
    "2bw without slack": ("2bw", False, "_without_slack"),
    "1f1b": ("1f1b", True, "_1f1b"),
}
"""Schedule, whether it has its slack, and what the figure's name ends with."""
CASES = {
    "20": {"jitter": 0.2},
    "50": {"jitter": 0.5},
    "stragglers": {"jitter": 0.05, "straggling": 0.02},
}
MODEL = ModelSpec(
    num_hidden_layers=NUM_STAGES - 2,
    hidden_size=8,
    intermediate_size=8,
    num_attention_heads=1,
    num_key_value_heads=1,
    vocab_size=8,
)
SGD = GroupSpec(name="sgd", lr=1e-3)
OPTIM = OptimSpec(matrices=SGD, rest=SGD, error_feedback=0.0, lr_schedule="constant", warmup_batches=0)
SLEEPS = SleepTimes(forward_s=0.020, backward_s=0.040, update_s=0.010)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run."""

    batch_s: float
    bubble: float


@dataclass(frozen=True, slots=True)
class Bench:
    """The runs of a schedule."""

    processes: Processes
    schedule: ScheduleName
    has_slack: bool

    @property
    def train(self) -> TrainSpec:
        """Small."""
        return TrainSpec(
            schedule=self.schedule,
            batches=SETTLING + MEASURED + 1,
            microbatches=NUM_MICROBATCHES,
            microbatch_size=1,
            sequence_length=8,
        )

    def table(self, run: StageRun) -> list[list[Op]]:
        """Return each stage's operations in the order that constant times give."""
        schedules = [
            StageSchedule.of(run.train, stage_index=s, num_stages=NUM_STAGES, depth=run.depth(s))
            for s in range(NUM_STAGES)
        ]
        times = StageTimes(forward=SLEEPS.forward_s, backward=SLEEPS.backward_s, update=SLEEPS.update_s)
        links = [LinkTimes(latency=ROUND_TRIP_S / 2)] * (NUM_STAGES - 1)
        simulation = simulate(schedules, [times] * NUM_STAGES, links=links)
        assert not simulation.is_stuck
        return [[done.op for done in simulation.timeline if done.stage == s] for s in range(NUM_STAGES)]

    def outcome(self, sleeps: SleepTimes, *, is_fixed: bool) -> Outcome:
        """Return the figures of one run."""
        run = StageRun(
            job=self.processes.new_name(),
            model=MODEL,
            train=self.train,
            optim=OPTIM,
            cuts=[(name,) for name in layer_names(MODEL)],
            sleeps=sleeps,
            has_slack=self.has_slack,
        )
        if is_fixed:
            run = replace(run, orders=self.table(run))
        return outcome(self.processes.run(run, number=NUM_STAGES))


def outcome(reports: Sequence[StageReport]) -> Outcome:
    """Return the seconds of the measured batches, by the last stage's clock."""
    ends = reports[-1].batch_ends()
    begin, end = ends[SETTLING - 1], ends[SETTLING + MEASURED - 1]
    busiest_s = max(
        sum(max(0.0, min(end, ended) - max(begin, started)) for _, started, ended in each.operations)
        for each in reports
    )
    return Outcome((end - begin) / MEASURED, 1 - busiest_s / (end - begin))


def bound_s(sleeps: SleepTimes) -> float:
    """Return, per batch, the work of the busiest stage in the measured batches."""
    batches = range(SETTLING, SETTLING + MEASURED)
    return sleeps.busiest_s(NUM_STAGES, batches, NUM_MICROBATCHES) / MEASURED


def measure(
    bench: Bench, cases: Sequence[str], num_seeds: int
) -> tuple[dict[str, Figure], dict[str, dict[str, float]], dict[str, list[tuple[float, float]]]]:
    """Per case the ratio, the medians of what else was seen, and each seed's shares of its bound: ready, fixed."""
    ratios: dict[str, Figure] = {}
    table: dict[str, dict[str, float]] = {}
    shares: dict[str, list[tuple[float, float]]] = {}
    for case in cases:
        pairs = []
        for seed in range(num_seeds):
            sleeps = replace(SLEEPS, **CASES[case], seed=seed)
            sides = {}
            for is_fixed in (False, True) if seed % 2 == 0 else (True, False):
                sides[is_fixed] = bench.outcome(sleeps, is_fixed=is_fixed)
            pairs.append((sides[False], sides[True]))
            shares.setdefault(case, []).append(
                (bound_s(sleeps) / sides[False].batch_s, bound_s(sleeps) / sides[True].batch_s)
            )
            both = f"{sides[False].batch_s:.3f} s ready, {sides[True].batch_s:.3f} s fixed"
            name = bench.schedule if bench.has_slack else f"{bench.schedule} without slack"
            progress(f"{name}, {case}, seed {seed}: {both}")
        ratios[case] = Figure.of([fixed.batch_s / ready.batch_s for ready, fixed in pairs])
        table[case] = {
            "ready_bubble": statistics.median(ready.bubble for ready, _ in pairs),
            "fixed_bubble": statistics.median(fixed.bubble for _, fixed in pairs),
            "ready_share": statistics.median(ready for ready, _ in shares[case]),
            "fixed_share": statistics.median(fixed for _, fixed in shares[case]),
        }
    return ratios, table, shares


def plot(shares: dict[str, dict[str, list[tuple[float, float]]]], file: Path) -> None:
    """Every seed's two shares of the bound, joined by a line."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(shares), figsize=(4.2 * len(shares), 3.6), sharey=True, squeeze=False)
    for axis, (schedule, by_case) in zip(axes[0], shares.items(), strict=True):
        for position, pairs in enumerate(by_case.values()):
            for ready, fixed in pairs:
                axis.plot([position - 0.15, position + 0.15], [fixed, ready], "-", color="#999999", linewidth=0.8)
            spots = [position - 0.15] * len(pairs), [position + 0.15] * len(pairs)
            axis.plot(
                spots[0],
                [fixed for _, fixed in pairs],
                "o",
                color="#c8553d",
                label="fixed order" if not position else None,
            )
            axis.plot(
                spots[1],
                [ready for ready, _ in pairs],
                "o",
                color="#1b6ca8",
                label="by readiness" if not position else None,
            )
        axis.set(title=schedule, xticks=range(len(by_case)), ylim=(0, 1.05))
        axis.set_xticklabels([case if case.isalpha() else f"jitter {case} %" for case in by_case])
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("share of the busiest stage's bound")
    axes[0][0].legend(fontsize=8, loc="lower left")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="within a minute: 2bw, one seed")
    parser.add_argument("--seeds", type=int, default=4, help="of 2bw; 1f1b has half as many")
    parser.add_argument("--rows", choices=tuple(ROWS), nargs="+", default=list(ROWS))
    parser.add_argument("--cases", choices=tuple(CASES), nargs="+", default=list(CASES))
    parser.add_argument("--plot", type=Path, help="where to draw all runs, as a PNG")
    options = parser.parse_args()
    figures: dict[str, Figure] = {}
    extra: dict[str, object] = {"stages": NUM_STAGES, "microbatches": NUM_MICROBATCHES}
    shares: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with Processes(NUM_STAGES) as processes:
        for name in list(ROWS)[:2] if options.quick else options.rows:
            schedule, has_slack, suffix = ROWS[name]
            num_seeds = 1 if options.quick else options.seeds if schedule == "2bw" else max(1, options.seeds // 2)
            cases = list(CASES)[:2] if options.quick else options.cases
            bench = Bench(processes, schedule, has_slack)
            ratios, table, shares[name] = measure(bench, cases, num_seeds)
            print(f"\n{name}: share of the bound and bubble, ready and fixed; tokens/s of ready over fixed")
            for case, row in table.items():
                figures[f"ready_vs_fixed_{case}{suffix}"] = ratios[case]
                print(
                    f"  {case:12} {row['ready_share']:6.1%} {row['fixed_share']:6.1%}   "
                    f"{row['ready_bubble']:6.1%} {row['fixed_bubble']:6.1%}   {ratios[case]}"
                )
            extra[name] = {case: {what: round(value, 4) for what, value in row.items()} for case, row in table.items()}
    if options.plot:
        plot(shares, options.plot)
    return report("Stage times that vary: readiness over a fixed order", figures, extra=extra)


if __name__ == "__main__":
    sys.exit(main())
