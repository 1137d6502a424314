"""What one step of delay costs when a trained model is tuned further: all of it or adapters, by AdamW or Muon.

AdamW pretrains a byte-level decoder on the sources of the Python standard library. Then the model learns Python's
English reference (`pydoc_data.topics`, no part of the pretraining), by the single-process loop: the recurrence of a
pipeline, without one. Each row first chooses its rate among RATES, synchronously with seed 0. Then each seed trains
synchronously, with a delay of one, and with a delay of one and Error Feedback. The seed orders the data, and draws the
adapters. The loss is that of the last weights on held-out text, and a gap is that of equal seeds, with the 90 %
interval of Student's t. Tokens/s are the loop's. Peak memory is that of a plan of one stage, storage by storage.
`--quick`: a tiny model, to see the bench run. `--only LoRA`: the rows with that in their names.

    PYTHONPATH=bench python bench/tuning/finetune.py
"""

import argparse
import gc
import json
import math
import pydoc_data.topics
import statistics
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from rigs.counted_pipeline import CountedPipeline, unlimited_node
from rigs.live_bytes import LiveBytes
from rigs.measure import machine, progress, versions
from torch import Tensor

from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.local.reference_loop import BatchResult, Weights, reference
from headway.daemon.plan.cluster_plan import ClusterPlan
from headway.daemon.plan.planner import make_plan
from headway.optim.spec import GroupSpec, OptimSpec
from headway.stages.data.shard_writer import DataForm, writing_shards
from headway.stages.data.stdlib_corpus import END_OF_FILE, stdlib_sources
from headway.stages.data.tokens import TokenShards
from headway.stages.model.adapters import merged
from headway.stages.model.decoder import build_layer, token_loss
from headway.stages.spec import AdapterSpec, ModelSpec, TrainSpec

NUM_HELD_OUT = 32  # microbatches
NUM_SEEDS = 3
STUDENT_T = 2.920
"""Of two degrees of freedom: the interval of three seeds that holds 90 %."""
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
Setting = tuple[str, Literal["gpipe", "2bw"], float]
SETTINGS: tuple[Setting, ...] = (("sync", "gpipe", 0.0), ("delay 1", "2bw", 0.0), ("delay 1 + EF", "2bw", 1.0))
"""Name, schedule and α."""
Optimizer = Literal["adamw", "muon"]

FULL = JobSpec(
    job=JobSection(name="finetune"),
    model=ModelSpec(
        num_hidden_layers=4, hidden_size=128, intermediate_size=344, num_attention_heads=4, num_key_value_heads=4
    ),
    train=TrainSpec(batches=150, microbatches=1, microbatch_size=16, sequence_length=128),
)
QUICK = replace(
    FULL,
    model=replace(FULL.model, num_hidden_layers=2, hidden_size=64, intermediate_size=172),
    train=replace(FULL.train, batches=20, sequence_length=64),
)
PRETRAINING = 4
"""Batches of pretraining for one of tuning."""


NO_ADAPTER = AdapterSpec()


@dataclass(frozen=True, slots=True)
class Row:
    """One way to tune."""

    label: str
    optimizer: Optimizer
    adapter: AdapterSpec = NO_ADAPTER

    def model(self, base: ModelSpec) -> ModelSpec:
        """Return the model, with the row's adapters."""
        return replace(base, adapter=self.adapter)


LORA = AdapterSpec(rank=8, alpha=16.0)
ROWS = (
    Row("full, AdamW", "adamw"),
    Row("full, Muon", "muon"),
    Row("LoRA, AdamW", "adamw", LORA),
    Row("LoRA, Muon", "muon", LORA),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What all rows share."""

    base: JobSpec
    tokens: TokenShards
    held_out: TokenShards
    pretrained: Weights


@dataclass(frozen=True, slots=True)
class Trained:
    """One run's result."""

    loss: float
    """Held out, nats per token."""
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Gap:
    """What a delay costs, in nats."""

    mean: float
    half: float
    """Half of the interval."""

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ± {self.half:.4f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One line of the table."""

    rate: float
    sync: float
    """Loss, nats per token, mean of the seeds."""
    delay: Gap
    delay_error_feedback: Gap
    tokens_per_s: int
    peak_bytes: int


def optim(name: Optimizer, lr: float) -> OptimSpec:
    """One rate for both groups; beside Muon, AdamW takes the rest."""
    return OptimSpec(matrices=GroupSpec(name=name, lr=lr), rest=GroupSpec(name="adamw", lr=lr), warmup_batches=10)


def write_code(folder: Path) -> Path:
    """Shards of the standard library's sources, without what is tuned on."""
    with writing_shards(folder, DataForm(vocab_size=256)) as writer:
        for file in stdlib_sources(Path(sysconfig.get_path("stdlib"))):
            if "pydoc_data" not in file.parts:
                writer.append(np.frombuffer(file.read_bytes() + bytes([END_OF_FILE]), dtype=np.uint8))
    return folder


def write_prose(folder: Path) -> Path:
    """Shards of Python's reference: each tenth topic is held out."""
    with writing_shards(folder, DataForm(vocab_size=256)) as writer:
        for index, topic in enumerate(sorted(pydoc_data.topics.topics)):
            text = pydoc_data.topics.topics[topic].encode() + bytes([END_OF_FILE])
            (writer.validation if index % 10 == 0 else writer).append(np.frombuffer(text, dtype=np.uint8))
    return folder


def pretrain(base: JobSpec, tokens: TokenShards) -> Weights:
    """The model that everybody starts from: AdamW, synchronous, its rate falls to zero."""
    train = replace(base.train, schedule="gpipe", batches=PRETRAINING * base.train.batches)
    job = replace(base, train=train, optim=optim("adamw", 3e-3))
    return reference(job, tokens, on_batch=Progress("pretraining", train.batches))


class Progress:
    """Says each hundredth batch's loss."""

    def __init__(self, label: str, num_batches: int) -> None:
        self._label, self._num_batches = label, num_batches

    def __call__(self, result: BatchResult) -> None:
        if (result.batch + 1) % 100 == 0:
            progress(f"{self._label}: batch {result.batch + 1} of {self._num_batches}, loss {result.loss:.3f}")


def held_out_loss(job: JobSpec, weights: Weights, tokens: TokenShards) -> float:
    """Mean loss of the weights on windows of the held-out text, nats per token."""
    layers = {}
    for name in job.layers:
        layers[name] = build_layer(name, job.model)
        layers[name].load_state_dict(weights[name], assign=True)
    losses = []
    with torch.no_grad():
        for index in range(NUM_HELD_OUT):
            rows = tokens.microbatch(job.train, seed=0, batch=index, microbatch=0)
            hidden: Tensor = rows.inputs
            for layer in layers.values():
                hidden = layer(hidden)
            losses.append(token_loss(hidden, rows.targets).item())
    return statistics.fmean(losses)


def tune(tuning: Tuning, row: Row, rate: float, setting: Setting, seed: int) -> Trained:
    """Train once from the pretrained weights."""
    name, schedule, alpha = setting
    base = tuning.base
    job = replace(
        base,
        model=row.model(base.model),
        job=replace(base.job, seed=seed),
        train=replace(base.train, schedule=schedule),
        optim=replace(optim(row.optimizer, rate), error_feedback=alpha),
    )
    seconds: list[float] = []
    weights = reference(
        job,
        tuning.tokens,
        on_batch=lambda result: seconds.append(result.seconds),
        initial=lambda layer: {name: tensor.clone() for name, tensor in tuning.pretrained[layer].items()},
    )
    if job.model.has_adapter:
        adapter = row.adapter
        weights = {name: merged(tuning.pretrained[name], weights[name], adapter) for name in tuning.pretrained}
    trained = Trained(
        held_out_loss(base, weights, tuning.held_out), job.train.tokens_per_batch / statistics.median(seconds)
    )
    progress(f"{row.label} {rate:g}, {name}, seed {seed}: {trained.loss:.4f}")
    return trained


def best_rate(tuning: Tuning, row: Row) -> float:
    """The rate of the least synchronous loss."""
    losses = {rate: tune(tuning, row, rate, SETTINGS[0], 0).loss for rate in RATES}
    found = min(losses, key=losses.__getitem__)
    if found in (RATES[0], RATES[-1]):
        progress(f"{row.label}: the best rate {found:g} is at the edge of those that were tried")
    return found


def measure(tuning: Tuning, row: Row, rate: float) -> Result:
    """All runs of a row. rate: 0: the best of RATES."""
    rate = rate or best_rate(tuning, row)
    sync, delayed, corrected = (
        [tune(tuning, row, rate, setting, seed) for seed in range(NUM_SEEDS)] for setting in SETTINGS
    )
    return Result(
        rate=rate,
        sync=round(statistics.fmean(run.loss for run in sync), 4),
        delay=gap(sync, delayed),
        delay_error_feedback=gap(sync, corrected),
        tokens_per_s=round(statistics.median(run.tokens_per_s for run in (*sync, *delayed, *corrected))),
        peak_bytes=peak_bytes(
            replace(tuning.base, model=row.model(tuning.base.model), optim=optim(row.optimizer, rate))
        ),
    )


def gap(sync: Sequence[Trained], other: Sequence[Trained]) -> Gap:
    """The mean difference of equal seeds, and the half of its interval."""
    differences = [late.loss - early.loss for early, late in zip(sync, other, strict=True)]
    half = STUDENT_T * statistics.stdev(differences) / math.sqrt(len(differences))
    return Gap(round(statistics.fmean(differences), 4), round(half, 4))


def peak_bytes(job: JobSpec) -> int:
    """The peak of a stage that has all layers, under 2BW with Error Feedback."""
    job = replace(job, train=replace(job.train, batches=3), fault=replace(job.fault, snapshot_every=0))
    plan = make_plan(job, [unlimited_node("n1")])
    if not isinstance(plan, ClusterPlan):
        raise RuntimeError(plan.reason)
    live = LiveBytes(1)
    with live:
        pipeline = CountedPipeline(job, plan, as_worker=live.of)
        gc.collect()
        live.begin()
        pipeline.run()
    return live.peaks[0]


def show(results: dict[str, Result], num_updates: int) -> None:
    """Print the table."""
    print(f"\nheld-out loss in nats after {num_updates} updates, {NUM_SEEDS} seeds, gaps with 90 % intervals")
    print(f"{'':14} {'rate':>7} {'sync':>7} {'delay 1':>17} {'delay 1 + EF':>17} {'tokens/s':>9} {'peak MiB':>9}")
    for label, result in results.items():
        print(
            f"{label:14} {result.rate:7g} {result.sync:7.3f} {result.delay!s:>17} {result.delay_error_feedback!s:>17} "
            f"{result.tokens_per_s:9} {result.peak_bytes / 2**20:9.1f}"
        )


def main() -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--only", default="", help="rows whose name has this part")
    parser.add_argument("--rate", type=float, default=0.0, help="a rate for all rows, instead of the best of RATES")
    parser.add_argument("--updates", type=int, default=0, help="another number of updates; pretraining stays as it is")
    options = parser.parse_args()
    base = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        code = TokenShards.open(write_code(Path(folder) / "code"))
        prose = write_prose(Path(folder) / "prose")
        held_out = TokenShards.open(prose, is_validation=True)
        tuning = Tuning(base=base, tokens=TokenShards.open(prose), held_out=held_out, pretrained=pretrain(base, code))
        before = held_out_loss(base, tuning.pretrained, held_out)
        if options.updates:
            base = replace(base, train=replace(base.train, batches=options.updates))
            tuning = replace(tuning, base=base)
        results = {row.label: measure(tuning, row, options.rate) for row in ROWS if options.only in row.label}
    show(results, base.train.batches)
    print(f"before tuning: {before:.3f}")
    body = {
        "rows": {label: asdict(result) for label, result in results.items()},
        "before": round(before, 4),
        "updates": base.train.batches,
    }
    print(json.dumps(body | {"machine": machine(), "versions": versions()}))


if __name__ == "__main__":
    main()
