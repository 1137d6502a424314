"""What one step of delay costs in loss, and how much Error Feedback gives back, optimizer by optimizer.

A byte-level decoder of 4 layers × 128 learns the sources of the Python standard library in batches of 16 × 128 tokens,
by the single-process loop: the same recurrence as a pipeline's, without one. Each row trains three times on the same
data: synchronously, with a delay of one, and with a delay of one and Error Feedback. The loss is that of the final
weights on windows of the same text, drawn with another seed. A second table has the first row, delayed and with Error
Feedback, with momentum and last update in bfloat16; beside it stands what another seed of the job changes.
`--quick`: one row, a fifth of the updates, a small model. `--state`: the second table alone.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from rigs.measure import machine, progress, versions
from torch import Tensor
from torch.func import functional_call

from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.local.reference_loop import Weights, reference
from headway.optim.spec import GroupSpec, OptimSpec
from headway.stages.data.stdlib_corpus import builtin_corpus
from headway.stages.data.tokens import TokenShards
from headway.stages.model.decoder import build_layer, token_loss
from headway.stages.spec import ModelSpec, TrainSpec

NUM_HELD_OUT = 32  # microbatches
SETTINGS: tuple[tuple[Literal["gpipe", "2bw"], float], ...] = (("gpipe", 0.0), ("2bw", 0.0), ("2bw", 1.0))
"""Schedule and α: synchronous, delayed, delayed with Error Feedback."""
NUM_SEEDS = 3
STATES: dict[str, tuple[Literal["float32", "bfloat16"], Literal["float32", "bfloat16"]]] = {
    "float32": ("float32", "float32"),
    "momentum": ("bfloat16", "float32"),
    "last update": ("float32", "bfloat16"),
    "both": ("bfloat16", "bfloat16"),
}
"""Dtypes of the momentum and of Error Feedback's last update, by what is in bfloat16."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: an optimizer with its rate. `published` are the nats that the delay costs without and with
    Error Feedback in the probes that docs/numerics.md lists."""

    label: str
    optim: OptimSpec
    published: tuple[float, float]


def optim(name: Literal["muon", "adamw", "lion"], lr: float) -> OptimSpec:
    """One rate for both groups; beside Muon, AdamW takes the rest."""
    matrices = GroupSpec(name=name, lr=lr)
    return OptimSpec(matrices=matrices, rest=GroupSpec(name="adamw", lr=lr) if name == "muon" else matrices)


ROWS = (
    Row("Muon 3e-3 (rest AdamW)", optim("muon", 3e-3), (0.190, 0.076)),
    Row("Muon 1e-2 (rest AdamW)", optim("muon", 1e-2), (0.368, 0.141)),
    Row("AdamW 3e-3", optim("adamw", 3e-3), (0.310, 0.264)),
    Row("AdamW 1e-2", optim("adamw", 1e-2), (0.198, 0.126)),
    Row("Lion 1e-3", optim("lion", 1e-3), (0.089, 0.192)),
)
FULL = JobSpec(
    job=JobSection(name="delay"),
    model=ModelSpec(
        num_hidden_layers=4, hidden_size=128, intermediate_size=344, num_attention_heads=4, num_key_value_heads=4
    ),
    train=TrainSpec(batches=400, microbatches=1, microbatch_size=16, sequence_length=128),
)
QUICK = replace(
    FULL,
    model=replace(FULL.model, num_hidden_layers=2, hidden_size=64, intermediate_size=172),
    train=replace(FULL.train, batches=80, sequence_length=64),
)


def held_out_loss(job: JobSpec, weights: Weights, tokens: TokenShards) -> float:
    """Mean loss of the weights, nats per token, on windows drawn with another seed than training's."""
    layers = {name: build_layer(name, job.model) for name in job.layers}
    losses = []
    with torch.no_grad():
        for index in range(NUM_HELD_OUT):
            rows = tokens.microbatch(job.train, seed=job.job.seed + 1, batch=index, microbatch=0)
            hidden: Tensor = rows.inputs
            for name, layer in layers.items():
                hidden = functional_call(layer, weights[name], (hidden,))
            losses.append(token_loss(hidden, rows.targets).item())
    return statistics.fmean(losses)


def train(job: JobSpec, tokens: TokenShards, label: str) -> float:
    """Held-out loss after the last update."""
    weights = reference(job, tokens, on_batch=lambda _: None)
    loss = held_out_loss(job, weights, tokens)
    progress(f"{label}: {loss:.4f}")
    return loss


def measure(row: Row, base: JobSpec, tokens: TokenShards) -> dict[str, float]:
    """The three runs of a row."""
    losses = []
    for schedule, alpha in SETTINGS:
        job = replace(
            base,
            train=replace(base.train, schedule=schedule),
            optim=replace(row.optim, error_feedback=alpha),
        )
        losses.append(train(job, tokens, f"{row.label}, {schedule}, α = {alpha:g}"))
    synchronous, delayed, corrected = losses
    return {
        "sync": round(synchronous, 4),
        "delay": round(delayed - synchronous, 4),
        "delay_error_feedback": round(corrected - synchronous, 4),
        "recovered": round((delayed - corrected) / (delayed - synchronous), 3),
    }


def measure_state(row: Row, base: JobSpec, tokens: TokenShards) -> dict[str, float]:
    """What bfloat16 buffers of the optimizer cost, in nats over float32 ones; and the spread of three seeds."""
    losses = {}
    for label, (momentum, feedback) in STATES.items():
        matrices = replace(row.optim.matrices, momentum_dtype=momentum)
        rest = replace(row.optim.rest, momentum_dtype=momentum)
        optim = replace(row.optim, matrices=matrices, rest=rest, error_feedback_dtype=feedback)
        for seed in range(NUM_SEEDS):
            job = replace(base, job=replace(base.job, seed=seed), optim=optim)
            losses[label, seed] = train(job, tokens, f"{row.label}, {label}, seed {seed}")
    plain = [losses["float32", seed] for seed in range(NUM_SEEDS)]
    costs = {
        label: statistics.fmean(losses[label, seed] - plain[seed] for seed in range(NUM_SEEDS))
        for label in STATES
        if label != "float32"
    }
    return {"loss": statistics.fmean(plain), "seeds": max(plain) - min(plain)} | costs


def main() -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one optimizer, within a minute")
    parser.add_argument("--state", action="store_true", help="what bfloat16 buffers of the optimizer cost, alone")
    arguments = parser.parse_args()
    base, rows = (QUICK, ROWS[:1]) if arguments.quick else (FULL, ROWS)
    with tempfile.TemporaryDirectory() as cache:
        tokens = TokenShards.open(builtin_corpus(Path(cache)))
        results = {row.label: measure(row, base, tokens) for row in rows if not arguments.state}
        state = {label: round(nats, 4) for label, nats in measure_state(ROWS[0], base, tokens).items()}

    print(f"\nheld-out loss in nats of {ROWS[0].label} with Error Feedback, mean of {NUM_SEEDS} seeds")
    print(f"{state['loss']:.4f}; seeds lie {state['seeds']:.4f} apart. In bfloat16:")
    print(", ".join(f"{label} {state[label]:+.4f}" for label in STATES if label in state))
    if results:
        show(results, rows[: len(results)], base)
    print(
        json.dumps(
            {
                "rows": results,
                "narrow_state": state,
                "updates": base.train.batches,
                "machine": machine(),
                "versions": versions(),
            }
        )
    )


def show(results: dict[str, dict[str, float]], rows: Sequence[Row], base: JobSpec) -> None:
    """Print the table of delays."""
    print(f"\nheld-out loss in nats, {base.train.batches} updates, one seed")
    print(f"{'':24} {'sync':>7} {'delay 1':>9} {'with EF':>9} {'recovered':>10}   probe: delay 1, with EF")
    for row in rows:
        result = results[row.label]
        published = "" if base is QUICK else "{:+.3f} {:+.3f}".format(*row.published)
        print(
            f"{row.label:24} {result['sync']:7.3f} {result['delay']:+9.3f} {result['delay_error_feedback']:+9.3f} "
            f"{result['recovered']:10.0%}   {published}"
        )


if __name__ == "__main__":
    main()
