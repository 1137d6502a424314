"""The oracle itself, held against recorded versions and arithmetic written out a second time."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.local.reference_loop import BatchResult, Weights, reference
from headway.optim.spec import GroupSpec, OptimSpec
from headway.stages.data.shard_writer import DataForm, writing_shards
from headway.stages.data.tokens import TokenShards
from headway.stages.model.decoder import build_layer, token_loss
from headway.stages.model.initial_weights import initial_parameters
from headway.stages.spec import ModelSpec, TrainSpec
from headway.stages.state.optimizer import LayerOptimizer

MODEL = ModelSpec(
    num_hidden_layers=2,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
    initializer_range=0.1,
)
TRAIN = TrainSpec(batches=5, microbatches=5, microbatch_size=2, sequence_length=12, clip_norm=0.0)
ADAMW = GroupSpec(name="adamw", lr=1e-2)
NO_FEEDBACK = OptimSpec(matrices=ADAMW, rest=ADAMW, error_feedback=0.0, warmup_batches=0, lr_schedule="constant")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    folder = tmp_path_factory.mktemp("tokens") / "data"
    with writing_shards(folder, DataForm(vocab_size=MODEL.vocab_size)) as writer:
        writer.append(np.random.default_rng(0).integers(0, 16, 4000) * np.tile([1, 3], 2000))
    return TokenShards.open(folder)


def make_job(optim: OptimSpec = NO_FEEDBACK, **train: Any) -> JobSpec:
    return JobSpec(job=JobSection(name="test", seed=9), model=MODEL, train=replace(TRAIN, **train), optim=optim)


class RecordingOptimizer(LayerOptimizer):
    """Plain gradient descent that remembers, for each update of its layer, what it was given and what it made."""

    def __init__(self) -> None:
        self.updates: list[int] = []
        self.currents: list[dict[str, Tensor]] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.targets: list[dict[str, Tensor]] = []

    def step(
        self,
        update_index: int,
        *,
        current: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
    ) -> None:
        self.updates.append(update_index)
        self.currents.append(copied(current))
        self.gradients.append(copied(gradients))
        for name, tensor in target.items():
            tensor.copy_(current[name] - 0.3 * gradients[name])
        self.targets.append(copied(target))

    def state(self) -> dict[str, Tensor]:
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        assert not state


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def record(job: JobSpec, tokens: TokenShards) -> tuple[dict[str, RecordingOptimizer], list[BatchResult], Weights]:
    optimizers: dict[str, RecordingOptimizer] = {}
    results: list[BatchResult] = []
    final = reference(
        job,
        tokens,
        on_batch=results.append,
        optimizers_from=lambda name, _: optimizers.setdefault(name, RecordingOptimizer()),
    )
    return optimizers, results, final


def microbatch_gradient(job: JobSpec, tokens: TokenShards, weights: Weights, b: int, i: int) -> tuple[float, Weights]:
    """One microbatch by `backward()`, on copies of weights in the job's dtype; the gradients are fp32."""
    dtype = getattr(torch, job.train.dtype)
    leaves = {
        layer: {name: tensor.to(dtype, copy=True).requires_grad_() for name, tensor in parameters.items()}
        for layer, parameters in weights.items()
    }
    rows = tokens.microbatch(job.train, seed=9, batch=b, microbatch=i)
    hidden = rows.inputs
    for layer in job.layers:
        hidden = functional_call(build_layer(layer, MODEL), leaves[layer], (hidden,))
    loss = token_loss(hidden, rows.targets)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients: Weights = {}
    for layer, parameters in leaves.items():
        gradients[layer] = {}
        for name, leaf in parameters.items():
            assert leaf.grad is not None
            gradients[layer][name] = leaf.grad.float()
    return loss.item(), gradients


def expected_version(schedule: str, b: int) -> int:
    """Written out: the batches of a 2bw job are computed on W_0, W_0, W_1, W_2, W_3; of one whose first two have no
    delay on W_0, W_1, W_2, W_2, W_3."""
    return {"2bw": [0, 0, 1, 2, 3], "2bw after 2": [0, 1, 2, 2, 3]}.get(schedule, [0, 1, 2, 3, 4])[b]


@pytest.mark.parametrize(
    ("schedule", "dtype", "num_groups"),
    [
        *product(["2bw", "1f1b"], ["float32", "bfloat16"], [1, 3]),
        ("gpipe", "float32", 2),
        ("2bw after 2", "float32", 1),
        ("2bw after 2", "bfloat16", 2),
    ],
)
def test_every_gradient_is_that_of_its_version(tokens: TokenShards, schedule: str, dtype: str, num_groups: int) -> None:
    """Each update gets (1/m)·Σ_k Σ_i of gradients taken on W_0, W_0, W_1 … (2bw) or W_0, W_1 … : the same bits."""
    name, *without = schedule.split(" after ")
    job = make_job(schedule=name, sync_batches=int(*without or "0"), dtype=dtype, reduction_groups=num_groups)
    optimizers, results, _ = record(job, tokens)
    for b in range(job.train.batches):
        version = {layer: optimizers[layer].currents[expected_version(schedule, b)] for layer in job.layers}
        alone = [microbatch_gradient(job, tokens, version, b, i) for i in range(5)]
        loss = 0.0
        for value, _ in alone:
            loss += value
        assert results[b].loss == loss / 5
        members = {1: [[0, 1, 2, 3, 4]], 2: [[0, 2, 4], [1, 3]], 3: [[0, 3], [1, 4], [2]]}[num_groups]
        for layer, optimizer in optimizers.items():
            for name, found in optimizer.gradients[b].items():
                sums = []
                for group in members:
                    total = alone[group[0]][1][layer][name]
                    for i in group[1:]:
                        total = total + alone[i][1][layer][name]
                    sums.append(total)
                expected = sums[0]
                for total in sums[1:]:
                    expected = expected + total
                assert found.dtype == torch.float32
                assert torch.equal(found, expected * torch.tensor(1 / 5, dtype=torch.float32)), f"{b} {layer} {name}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "2bw"])
def test_each_update_starts_where_the_last_one_ended(tokens: TokenShards, schedule: str, dtype: str) -> None:
    """W_0 is the initial weights in fp32, each W_{b+1} goes into update b+1, W_B comes back; updates count 0 to B-1."""
    job = make_job(schedule=schedule, dtype=dtype)
    optimizers, results, final = record(job, tokens)
    for layer, optimizer in optimizers.items():
        assert optimizer.updates == [0, 1, 2, 3, 4]
        chain = [initial_parameters(layer, MODEL, seed=9), *optimizer.targets]
        for before, after in zip(chain, [*optimizer.currents, final[layer]], strict=True):
            assert all(torch.equal(before[name], after[name]) for name in before)
        assert all(tensor.dtype == torch.float32 and not tensor.requires_grad for tensor in final[layer].values())
    assert [result.batch for result in results] == [0, 1, 2, 3, 4]
    assert {result.tokens for result in results} == {5 * 2 * 12}


def test_schedules_of_one_delay_are_one_recurrence(tokens: TokenShards) -> None:
    """gpipe and 1f1b give the same bits; 2bw does not, from the batch on that would have used W_1."""
    losses = {name: [result.loss for result in record(make_job(schedule=name), tokens)[1]] for name in SCHEDULES}
    assert losses["gpipe"] == losses["1f1b"]
    assert losses["2bw"][0] == losses["1f1b"][0]
    assert losses["2bw"][1] != losses["1f1b"][1]


def test_a_job_all_of_whose_batches_have_no_delay_is_one_of_1f1b(tokens: TokenShards) -> None:
    """2bw with Error Feedback: without delay to the end, or to the last but one, which is the same → the bits of 1f1b;
    one fewer → others."""

    def weights(**train: Any) -> Weights:
        return reference(make_job(OptimSpec(warmup_batches=0), **train), tokens, on_batch=lambda _: None)

    plain = weights(schedule="1f1b")
    for k, is_same in ((5, True), (4, True), (3, False)):
        found = weights(sync_batches=k)
        assert all(torch.equal(found[layer][n], plain[layer][n]) for layer in plain for n in plain[layer]) is is_same


SCHEDULES = ("gpipe", "1f1b", "2bw")


def test_clipping_scales_the_whole_gradient_in_the_named_order(tokens: TokenShards) -> None:
    """Against a fold written out: parameters by name, layers from last to first, float64, one fp32 coefficient."""
    clip = 0.05
    free, _, _ = record(make_job(batches=1), tokens)
    clipped, _, _ = record(make_job(batches=1, clip_norm=clip), tokens)
    total = 0.0
    for layer in ("head", "block.1", "block.0", "embed"):
        of_layer = 0.0
        for name in sorted(free[layer].gradients[0]):
            of_layer += free[layer].gradients[0][name].double().square().sum().item()
        total += of_layer
    coefficient = min(1.0, clip / (sqrt(total) + 1e-6))
    assert coefficient < 0.5
    for layer, optimizer in clipped.items():
        for name, gradient in optimizer.gradients[0].items():
            expected = free[layer].gradients[0][name] * torch.tensor(coefficient, dtype=torch.float32)
            assert torch.equal(gradient, expected)


def test_a_small_gradient_is_not_scaled(tokens: TokenShards) -> None:
    """A norm far below clip_norm: the coefficient is one, and no bit changes."""
    free, _, _ = record(make_job(batches=1), tokens)
    clipped, _, _ = record(make_job(batches=1, clip_norm=1e9), tokens)
    for layer, optimizer in clipped.items():
        for name, gradient in optimizer.gradients[0].items():
            assert torch.equal(gradient, free[layer].gradients[0][name])


MUON = OptimSpec(matrices=GroupSpec(name="muon", lr=1e-2), rest=ADAMW, warmup_batches=2)
OPTIMIZERS = {
    "muon, adamw, ef": MUON,
    "muon, lion, ef, wsd": OptimSpec(
        matrices=GroupSpec(name="muon", lr=1e-2),
        rest=GroupSpec(name="lion", lr=1e-3),
        lr_schedule="wsd",
        warmup_batches=2,
    ),
    "soap, mars, ef": OptimSpec(
        matrices=GroupSpec(name="soap", lr=1e-2, precondition_frequency=2),
        rest=GroupSpec(name="mars", lr=1e-2),
        warmup_batches=2,
    ),
    "normuon, adan, ef": OptimSpec(
        matrices=GroupSpec(name="normuon", lr=1e-2), rest=GroupSpec(name="adan", lr=1e-2), warmup_batches=2
    ),
    "lionmuon, adamw, ef": replace(MUON, matrices=GroupSpec(name="lionmuon", lr=1e-2)),
    "adamw": NO_FEEDBACK,
    "sgd": replace(NO_FEEDBACK, matrices=GroupSpec(name="sgd", lr=0.1), rest=GroupSpec(name="sgd", lr=0.1)),
}


@pytest.mark.parametrize(
    ("schedule", "optim", "dtype"),
    [
        *product(SCHEDULES, ["muon, adamw, ef", "muon, lion, ef, wsd", "adamw", "sgd"], ["float32"]),
        *product(["2bw"], ["soap, mars, ef", "normuon, adan, ef", "lionmuon, adamw, ef"], ["float32"]),
        ("2bw", "muon, adamw, ef", "bfloat16"),
        ("1f1b", "adamw", "bfloat16"),
    ],
)
def test_training_repeats_itself_and_learns(tokens: TokenShards, schedule: str, optim: str, dtype: str) -> None:
    """Fourteen batches with the job's own optimizers, twice: equal bits, and a loss that falls."""
    job = make_job(OPTIMIZERS[optim], schedule=schedule, dtype=dtype, batches=14, clip_norm=1.0, reduction_groups=2)
    runs = []
    for _ in range(2):
        results: list[BatchResult] = []
        final = reference(job, tokens, on_batch=results.append)
        runs.append(([result.loss for result in results], final))
        torch.randn(3)
    (losses, final), (again, final_again) = runs
    assert losses == again
    assert losses[-1] < losses[0] - 0.2
    for layer, parameters in final.items():
        assert all(torch.equal(tensor, final_again[layer][name]) for name, tensor in parameters.items())


def test_without_delay_it_is_ordinary_training(tokens: TokenShards) -> None:
    """gpipe with AdamW against torch.optim.AdamW on one module list: the same weights to rounding."""
    job = make_job(schedule="gpipe", clip_norm=0.5)
    final = reference(job, tokens, on_batch=lambda _: None)

    leaves = {
        layer: {name: tensor.requires_grad_() for name, tensor in initial_parameters(layer, MODEL, seed=9).items()}
        for layer in job.layers
    }
    everything = [leaf for parameters in leaves.values() for leaf in parameters.values()]
    optimizer = torch.optim.AdamW(everything, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for b in range(job.train.batches):
        optimizer.zero_grad()
        losses = []
        for i in range(5):
            rows = tokens.microbatch(job.train, seed=9, batch=b, microbatch=i)
            hidden = rows.inputs
            for layer in job.layers:
                hidden = functional_call(build_layer(layer, MODEL), leaves[layer], (hidden,))
            losses.append(token_loss(hidden, rows.targets))
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(everything, 0.5)
        optimizer.step()
    for layer, parameters in leaves.items():
        for name, leaf in parameters.items():
            torch.testing.assert_close(final[layer][name], leaf.detach(), rtol=1e-3, atol=2e-4)


def test_the_oracle_shares_no_machinery_with_the_pipeline() -> None:
    """A fresh interpreter that imports the reference has loaded model, data, optimizers and codecs of Headway, which
    tests of their own compare with formulas written out, and nothing else."""
    program = (
        "import sys, headway.daemon.local.reference_loop; print(*(m for m in sys.modules if m.startswith('headway.')))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60, cwd=Path("/")
    ).stdout.split()
    stages = {"errors", "ids", "spec", "links", "links.codec", "links.compression", "data", "data.tokens"}
    stages |= {"early_stop", "plugin_names"}
    stages |= {f"data.{name}" for name in ("microbatch", "shard_index")}
    stages |= {"state", "state.optimizer", "model"}
    allowed = {
        "headway.daemon",
        "headway.daemon.local",
        "headway.daemon.local.reference_loop",
        "headway.stages",
        *(f"headway.stages.{s}" for s in stages),
    }
    others = {name for name in loaded if not name.startswith(("headway.optim", "headway.stages.model."))} - allowed
    assert others == set()
    assert "headway.optim.layer_optimizer" in loaded
