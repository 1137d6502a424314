"""A job that learns preferences: every cut, schedule and replica gives the bits of the plain loop."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from headway.daemon.local.reference_loop import reference
from headway.stages.data.microbatch import Microbatch
from headway.stages.model.adapters import without_adapters
from headway.stages.model.decoder import build_layer
from headway.stages.model.objective import beside_frozen, preference_loss
from headway.stages.spec import AdapterSpec, TrainSpec
from tests.rigs.pipeline import (
    ADAMW,
    MODEL,
    CountingTokens,
    make_job,
    oracle,
    with_train,
)

ADAPTED = replace(MODEL, adapter=AdapterSpec(rank=2, alpha=4.0))
PAIRS = with_train(objective="dpo", loss_mask="data", documents="separate", dpo_beta=0.5)


def test_training_begins_where_nothing_is_preferred() -> None:
    """Adapters of zero are the frozen model → the first loss is ln 2; a batch without pairs has loss 0."""
    losses, _ = oracle(
        make_job(replace(PAIRS, schedule="1f1b", loss_chunk=5, recompute="attention"), ADAMW, model=ADAPTED)
    )
    assert losses[0] == pytest.approx(0.6931472, rel=1e-6)
    assert losses[1] == 0.0


def test_a_preferred_answer_gains_until_the_loss_is_small() -> None:
    """The same pairs again and again → the loss falls below half of ln 2."""

    class OneBatch(CountingTokens):
        def microbatch(self, train: TrainSpec, *, seed: int, batch: int, microbatch: int) -> Microbatch:
            return super().microbatch(train, seed=seed, batch=0 * batch, microbatch=microbatch)

    found: list[float] = []
    job = make_job(replace(PAIRS, batches=40, dpo_beta=2.0), replace(ADAMW, lr_schedule="constant"), model=ADAPTED)
    job = replace(job, optim=replace(job.optim, matrices=replace(job.optim.matrices, lr=1e-2)))
    reference(job, OneBatch(), on_batch=lambda row: found.append(row.loss))  # type: ignore[arg-type]
    assert found[-1] < 0.35


class Scores(nn.Module):
    """A head that returns its input."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


@pytest.mark.parametrize("chunk", [0, 4])
def test_the_loss_is_that_of_the_paper(chunk: int) -> None:
    """Two pairs and a document alone, pairs found by hand → the formula by sums of log-probabilities in float64."""
    torch.manual_seed(1)
    hidden = torch.randn(2, 10, 6)  # one row, and the frozen model's below it
    targets = torch.tensor([[1, 2, -100, 4, 5, -100, 3, -100, 2, 5]])
    positions = torch.tensor([[0, 1, 0, 1, 2, 0, 1, 0, 1, 0]], dtype=torch.int32)
    spans = [((0, 2), (2, 5)), ((5, 7), (7, 9))]
    loss = preference_loss(Scores(), hidden, targets, positions, beta=0.3, chunk=chunk, mean_pairs=torch.tensor(2.0))
    likely = hidden.double().log_softmax(-1)

    def gain(span: tuple[int, int]) -> float:
        chosen = [(t, int(targets[0, t])) for t in range(*span) if targets[0, t] >= 0]
        return sum(float(likely[0, t, token] - likely[1, t, token]) for t, token in chosen)

    expected = sum(-torch.tensor(0.3 * (gain(a) - gain(b))).sigmoid().log() for a, b in spans) / 2
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


def test_the_frozen_half_is_the_layer_without_adapters() -> None:
    """A block with adapters, its input twice → its own output above, the frozen block's below, no gradient there."""
    block = build_layer("block.0", ADAPTED).to_empty(device="cpu")
    torch.manual_seed(2)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    hidden = torch.randn(3, 8, MODEL.hidden_size)
    doubled = torch.cat((hidden, hidden)).requires_grad_()
    output = beside_frozen(block, doubled)
    with without_adapters(block):
        assert torch.equal(output[3:], block(hidden))
    assert torch.equal(output[:3], block(hidden))
    assert not torch.equal(output[:3], output[3:])
    (gradient,) = torch.autograd.grad(output.sum(), doubled)
    assert gradient[3:].count_nonzero() == 0
    assert gradient[:3].count_nonzero() > 0
