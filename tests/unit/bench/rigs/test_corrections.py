"""Other forms of Error Feedback, on two updates whose results are written out."""

import pytest
import torch
from rigs.corrections import CORRECTIONS, Adaptive, FromZero, LookedBack, WithoutDecay
from torch import Tensor

from headway.optim.layer_optimizer import ErrorFeedback
from headway.optim.spec import GroupSpec, OptimSpec

OPTIM = OptimSpec(
    matrices=GroupSpec(name="muon", lr=0.5, weight_decay=0.1), rest=GroupSpec(name="adamw", lr=0.5, weight_decay=0.0)
)
STEPS = (torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 2.0]]))
"""δ_0 and δ_1."""


def ends(correction: ErrorFeedback, name: str = "mlp.up_proj.weight", steps: tuple[Tensor, ...] = STEPS) -> Tensor:
    """The weight after the updates, from 0."""
    weight = torch.zeros_like(steps[0])
    for index, delta in enumerate(steps):
        before, weight = weight, weight - delta
        correction.correct(name, weight, before=before, update_index=index)
    return weight


def corrected(alpha: float) -> Tensor:
    first, second = STEPS
    return -first - second - alpha * (second - first)


@pytest.mark.parametrize(
    ("name", "alpha"),
    [
        ("α 0.5", 0.5),
        ("α 1.5", 1.5),
        ("matrices only", 1.0),
        ("rest only", 0.0),
        ("matrices 1, rest 0.5", 1.0),
        ("off in the second half", 0.0),
        ("off in the last fifth", 0.0),
        ("α as the rate", 2 / 20),
    ],
)
def test_the_factor_is_as_named(name: str, alpha: float) -> None:
    """Of the second of two updates, in the warm-up of 20."""
    assert torch.equal(ends(CORRECTIONS[name]("block.0", OPTIM, 2)), corrected(alpha))


@pytest.mark.parametrize(("name", "alpha"), [("matrices only", 0.0), ("rest only", 1.0), ("matrices 1, rest 1.5", 1.5)])
def test_a_norm_is_of_the_rest(name: str, alpha: float) -> None:
    steps = tuple(step[0] for step in STEPS)
    assert torch.equal(ends(CORRECTIONS[name]("block.0", OPTIM, 2), "norm.weight", steps), corrected(alpha)[0])


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_factor_of_0_is_not_the_end(name: str) -> None:
    """A layer's optimizer asks before each correction, and one parameter's factor says nothing of the next one's."""
    correction = CORRECTIONS[name]("block.0", OPTIM, 2)
    for layer in ("mlp.up_proj.weight", "norm.weight"):
        ends(correction, layer, tuple(step if "mlp" in layer else step[0] for step in STEPS))
        assert correction.is_active


def test_by_correlation_the_factor_predicts_the_next_update_best() -> None:
    """⟨δ_1, δ_0⟩ / ⟨δ_0, δ_0⟩ = 5 / 10; opposed updates are not followed."""
    torch.testing.assert_close(ends(Adaptive()), corrected(0.5))
    opposed = (STEPS[0], -STEPS[0])
    assert torch.equal(ends(Adaptive(), steps=opposed), torch.zeros(1, 2))


def test_the_first_update_is_corrected_by_the_difference_from_none() -> None:
    assert torch.equal(ends(FromZero()), corrected(1.0) - STEPS[0])


def test_the_last_update_is_taken_back() -> None:
    assert torch.equal(ends(LookedBack(2)), corrected(1.0) + STEPS[1])
    assert torch.equal(ends(LookedBack(3)), corrected(1.0))


def test_decay_is_left_out_of_the_difference() -> None:
    """W_0 = 0 has no decay; W_1 = −δ_0 has one of 0.5 · 2/20 · 0.1 of itself in update 1."""
    decay = -STEPS[0] * 0.5 * (2 / 20) * 0.1
    torch.testing.assert_close(ends(WithoutDecay("block.0", OPTIM, 100)), corrected(1.0) + decay)
    assert torch.equal(ends(WithoutDecay("block.0", OPTIM, 100), "mlp.gate.weight"), corrected(1.0))
