"""Error Feedback: the formula in numpy's single precision, and what it telescopes to."""

import numpy as np
import pytest
import torch

from headway.optim.layer_optimizer import ErrorFeedback


@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_bits_are_those_of_three_rounded_operations(alpha: float) -> None:
    """Six updates of random inner steps → W' − c·(δ_b − δ_{b−1}), rounded after each operation."""
    feedback = ErrorFeedback(alpha, delay=1)
    weight = torch.randn(5, 7)
    w, previous = weight.numpy().copy(), np.zeros((5, 7), np.float32)
    for b in range(6):
        before = weight.clone()
        weight.mul_(0.99).sub_(0.1 * torch.randn(5, 7))
        inner = weight.numpy().copy()
        feedback.correct("w", weight, before=before, update_index=b)
        delta = w - inner
        w = inner if b == 0 else inner - np.float32(alpha) * (delta - previous)
        previous = delta
        np.testing.assert_array_equal(weight.numpy(), w)
        np.testing.assert_array_equal(feedback.deltas["w"].numpy(), delta)


def test_alpha_one_is_prediction_with_the_last_update() -> None:
    """Telescoped in float64: with Y_{b+1} = Y_b − δ_b, W_{b+1} = Y_{b+1} − δ_b + δ_0."""
    feedback = ErrorFeedback(1.0, delay=1, dtype=torch.float64)
    weight = torch.randn(20, dtype=torch.float64)
    y, first = weight.clone(), torch.zeros(20, dtype=torch.float64)
    for b in range(10):
        before, delta = weight.clone(), torch.randn(20, dtype=torch.float64)
        weight -= delta
        feedback.correct("w", weight, before=before, update_index=b)
        first = delta if b == 0 else first
        y -= delta
        torch.testing.assert_close(weight, y if b == 0 else y - delta + first, rtol=0, atol=1e-12)


def test_update_zero_only_remembers() -> None:
    """b = 0 → W' stays, δ_0 is stored, even over what another timeline left."""
    feedback = ErrorFeedback(1.0, delay=1)
    feedback.deltas["w"] = torch.full((2,), 9.0)
    weight = torch.tensor([1.0, 2.0])
    feedback.correct("w", weight, before=torch.tensor([3.0, 3.0]), update_index=0)
    assert weight.tolist() == [1.0, 2.0]
    assert feedback.deltas["w"].tolist() == [2.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_by_fresh_gradients_are_remembered_and_not_corrected(dtype: torch.dtype) -> None:
    """Three batches without delay → δ_0 to δ_3 are only stored, and update 4 is the first one with a correction."""
    feedback = ErrorFeedback(1.0, delay=1, sync_batches=3, dtype=dtype)
    weight = torch.zeros(3)
    for b, step in enumerate((1.0, 4.0, 2.0, 8.0, 16.0)):
        before = weight.clone()
        weight -= step
        feedback.correct("w", weight, before=before, update_index=b)
        assert (before - weight).tolist() == [step if b < 4 else 16.0 + (16.0 - 8.0)] * 3
        assert feedback.deltas["w"].tolist() == [step] * 3
        assert feedback.deltas["w"].dtype == dtype


def test_a_lost_buffer_is_an_error() -> None:
    """δ_{b−1} was not brought along → KeyError with the parameter's name, not a silent restart."""
    with pytest.raises(KeyError, match="w"):
        ErrorFeedback(1.0, delay=1).correct("w", torch.ones(2), before=torch.ones(2), update_index=4)


@pytest.mark.parametrize(("alpha", "delay", "is_active"), [(1.0, 1, True), (1.0, 0, False), (0.0, 1, False)])
def test_only_a_delay_makes_it_active(alpha: float, delay: int, is_active: bool) -> None:
    """c = α·d is zero without delay or without α."""
    assert ErrorFeedback(alpha, delay=delay).is_active is is_active
