"""What other delays would cost in loss: longer ones, those of other pipelines without a flush, those of a part of the
model; and other corrections.

A byte-level decoder of 16 blocks × 32 learns the sources of the Python standard library for 300 updates of 16 × 64
tokens, in one process; rigs/delayed_loop.py has each pipeline's rule and its source. Warm-up is a tenth of the updates,
then a cosine falls to a tenth of the rate. Muon 1e-2 has AdamW 3e-3 for the rest; AdamW alone has 1e-3. A gap is the
held-out loss of the final weights over that of delay 0 and the same seed, in nats. PACI takes a batch in 16 parts.
"norms late": a delay of one for them alone. rigs/corrections.py has the other forms of Error Feedback.
2BW is delay 1 at any depth, to the bit: tests/unit/bench/rigs/test_delayed_loop.py cuts it into up to 16 stages.

`--quick`: four rows of 60 updates, with a smaller model. `--seeds N`: means of so many, with 90 % intervals.
`--out DIR`: also the table, the JSON and a picture. What was trained is kept in DIR/trainings.jsonl, and an interrupted
run goes on there.
"""

import argparse
import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rigs.corrections import CORRECTIONS
from rigs.delayed_loop import PARTS, Delays, part, pipedream, train, uniform, unstashed
from rigs.held_out import held_out_loss
from rigs.measure import machine, progress, versions

from headway.daemon.jobs.data_choices import BESIDE_MUON
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.study.study_results import Estimate, estimate
from headway.optim.layer_optimizer import ErrorFeedback
from headway.optim.spec import GroupSpec, OptimSpec
from headway.stages.data.stdlib_corpus import builtin_corpus
from headway.stages.data.tokens import TokenShards
from headway.stages.spec import ModelSpec, TrainSpec

DEPTHS, FAR = (2, 4, 8, 16), (2, 4, 8)
OPTIMIZERS = {
    "Muon": OptimSpec(
        matrices=GroupSpec(name="muon", lr=1e-2), rest=GroupSpec(name="adamw", lr=3e-3, betas=BESIDE_MUON), lr_floor=0.1
    ),
    "AdamW": OptimSpec(matrices=GroupSpec(name="adamw", lr=1e-3), rest=GroupSpec(name="adamw", lr=1e-3), lr_floor=0.1),
}
FULL = JobSpec(
    job=JobSection(name="delays"),
    model=ModelSpec(
        num_hidden_layers=16, hidden_size=32, intermediate_size=88, num_attention_heads=2, num_key_value_heads=2
    ),
    train=TrainSpec(batches=300, microbatches=1, microbatch_size=16, sequence_length=64),
)
QUICK = replace(
    FULL, model=replace(FULL.model, num_hidden_layers=4), train=replace(FULL.train, batches=60, sequence_length=32)
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    delays: Delays
    alpha: float = 0.0
    has_adamw: bool = True
    """Whether AdamW trains it too."""
    correction: str = ""
    """One of CORRECTIONS, in place of the job's Error Feedback."""


ROWS = {
    "delay 0": Row(uniform(0)),
    "delay 1": Row(uniform(1)),
    "delay 1 + EF": Row(uniform(1), alpha=1.0),
    **{f"{name} late": Row(part(name)) for name in PARTS},
    **{f"{name} late + EF": Row(part(name), alpha=1.0) for name in PARTS},
    **{f"EF, {name}": Row(uniform(1), correction=name, has_adamw=False) for name in CORRECTIONS},
    **{f"PipeDream, {p} stages": Row(pipedream(p)) for p in DEPTHS},
    **{f"delay {d}": Row(uniform(d), has_adamw=d < 8) for d in FAR},
    **{f"delay {d} + EF": Row(uniform(d), alpha=1.0, has_adamw=False) for d in FAR},
    **{f"no stashing, {p} stages": Row(unstashed(p), has_adamw=False) for p in DEPTHS},
    **{f"PACI, {p} stages": Row(unstashed(p, 16), has_adamw=False) for p in (4, 16)},
}
QUICK_ROWS = ("delay 0", "delay 1", "delay 1 + EF", "PipeDream, 4 stages")
Cell = tuple[str, str, int]
"""Optimizer, row, seed."""
Found = Mapping[Cell, float]
"""Held-out losses, nats per token."""


def wanted(labels: Iterable[str], num_seeds: int) -> list[Cell]:
    """Return all that is to be trained, the first seed first."""
    pairs = [(o, label) for o in OPTIMIZERS for label in labels if o == "Muon" or ROWS[label].has_adamw]
    return [(optimizer, label, seed) for seed in range(num_seeds) for optimizer, label in pairs]


def trained(base: JobSpec, cell: Cell, tokens: TokenShards) -> float:
    """Return the held-out loss of a cell."""
    optimizer, label, seed = cell
    row = ROWS[label]
    optim = replace(OPTIMIZERS[optimizer], error_feedback=row.alpha, warmup_batches=base.train.batches // 10)
    job = replace(base, job=replace(base.job, seed=seed), optim=optim)
    losses: list[float] = []
    correction = partial(_corrected, row.correction, job) if row.correction else None
    weights = train(job, tokens, row.delays, on_batch=losses.append, correction=correction)
    held_out = held_out_loss(job, weights, tokens)
    progress(f"{optimizer}, {label}, seed {seed}: {held_out:.4f}; training {fmean(losses[-20:]):.4f}")
    return held_out


def _corrected(name: str, job: JobSpec, layer: str) -> ErrorFeedback:
    return CORRECTIONS[name](layer, job.optim, job.train.batches)


def measured(base: JobSpec, cells: list[Cell], kept: Path | None) -> dict[Cell, float]:
    """Return the losses of all cells. kept: lines of those that were trained before, with as many updates."""
    found: dict[Cell, float] = {}
    for line in kept.read_text().splitlines() if kept and kept.exists() else []:
        *cell, updates, loss = json.loads(line)
        found |= {tuple(cell): loss} if updates == base.train.batches else {}
    with tempfile.TemporaryDirectory() as cache:
        tokens = TokenShards.open(builtin_corpus(Path(cache)))
        for cell in [each for each in cells if each not in found]:
            found[cell] = trained(base, cell, tokens)
            if kept:
                with kept.open("a") as lines:
                    lines.write(json.dumps([*cell, base.train.batches, found[cell]]) + "\n")
    return {cell: found[cell] for cell in cells}


def gaps(found: Found) -> dict[str, dict[str, Estimate]]:
    """Return the gap of each row over delay 0, of equal seeds: optimizer to row to mean and interval."""
    of: dict[str, dict[str, list[float]]] = {}
    for (optimizer, label, seed), loss in found.items():
        of.setdefault(optimizer, {}).setdefault(label, []).append(loss - found[optimizer, "delay 0", seed])
    return {optimizer: {label: estimate(each) for label, each in rows.items()} for optimizer, rows in of.items()}


def table(found: Found) -> list[str]:
    """Return the lines of a table for people and for pages."""
    of, optimizers = gaps(found), list(OPTIMIZERS)
    lines = [f"| nats over delay 0, and its loss | {' | '.join(optimizers)} |", f"|---|{'---|' * len(optimizers)}"]
    for label in dict.fromkeys(label for _, label, _ in found):
        cells = [shown(of[each].get(label)) for each in optimizers]
        if label == "delay 0":
            ends = [fmean(loss for (o, row, _), loss in found.items() if (o, row) == (each, label)) for each in of]
            cells = [f"{end:.3f}" for end in ends]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def shown(gap: Estimate | None) -> str:
    """Return a cell of the table."""
    if gap is None:
        return ""
    return f"{gap.mean:+.3f}" + (f" ± {gap.half:.3f}" if gap.half == gap.half else "")


def draw(of: Mapping[str, Mapping[str, Estimate]], path: Path) -> None:
    """Draw the gaps against the depth of the pipeline, and against a uniform delay."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    *by_depth, by_delay = figure.subplots(1, 3)

    def line(axes: Any, points: Mapping[int, Estimate | None], colour: str, label: str) -> None:
        known = {x: gap for x, gap in points.items() if gap}
        halves = [gap.half if gap.half == gap.half else 0.0 for gap in known.values()]
        means = [gap.mean for gap in known.values()]
        if known:
            axes.errorbar([*known], means, yerr=halves, fmt="o-", color=colour, label=label, capsize=3, markersize=4)

    for axes, (optimizer, rows) in zip(by_depth, of.items(), strict=True):
        for name, colour in (("no stashing", "#cc79a7"), ("PipeDream", "#d55e00"), ("PACI", "#009e73")):
            line(axes, {p: rows.get(f"{name}, {p} stages") for p in DEPTHS}, colour, name)
        line(axes, dict.fromkeys(DEPTHS, rows.get("delay 1")), "#0072b2", "2BW")
        line(axes, dict.fromkeys(DEPTHS, rows.get("delay 1 + EF")), "#56b4e9", "2BW + EF")
        axes.set(title=optimizer, xlabel="stages", xscale="log", xticks=DEPTHS, xticklabels=DEPTHS, xlim=(1.8, 18))
    for (optimizer, rows), colours in zip(of.items(), (("#0072b2", "#56b4e9"), ("#000000", "#999999")), strict=True):
        for suffix, colour in zip(("", " + EF"), colours, strict=True):
            ends = {d: rows.get(f"delay {d}{suffix}") for d in (1, *FAR)}
            line(by_delay, {0: rows.get("delay 0"), **ends}, colour, f"{optimizer}{suffix}")
    by_delay.set(title="the same delay on all stages", xlabel="delay, updates")
    for axes in (*by_depth, by_delay):
        axes.axhline(0, color="grey", linewidth=0.8)
        axes.set(ylabel="held-out loss over delay 0, nats")
        axes.legend(frameon=False, fontsize=8)
        axes.minorticks_off()
    figure.savefig(path, dpi=110)


def publish(found: Found, base: JobSpec, out: Path | None) -> None:
    """Print the table and the JSON line, and write both and the picture."""
    of, lines = gaps(found), table(found)
    rows = {
        optimizer: {label: [round(x, 4) for x in (gap.mean, gap.half) if x == x] for label, gap in labelled.items()}
        for optimizer, labelled in of.items()
    }
    result = json.dumps({"gaps": rows, "updates": base.train.batches, "machine": machine(), "versions": versions()})
    if out:
        (out / "table.md").write_text("\n".join(lines) + "\n")
        (out / "results.json").write_text(result + "\n")
        draw(of, out / "delays.png")
    print("\n".join(lines))
    print(result)


def main() -> None:
    """Train and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="half a minute")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each row (1)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write here, and go on with what is there")
    options = parser.parse_args()
    base, labels = (QUICK, QUICK_ROWS) if options.quick else (FULL, (*ROWS,))
    kept = None
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        kept = options.out / "trainings.jsonl"
    publish(measured(base, wanted(labels, options.seeds), kept), base, options.out)


if __name__ == "__main__":
    main()
