"""Muon and Lion against torch's own Muon, the slow reference, and the formula in numpy."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from headway.optim.lion import Lion
from headway.optim.muon import Muon, shape_scale
from headway.optim.spec import AdjustLr, Coefficients
from tests.rigs.muon_reference import muon_reference

SHAPES = [(24, 24), (16, 48), (48, 16)]


@pytest.mark.parametrize(("adjust_lr", "coefficients"), [("original", "quintic"), ("match_rms_adamw", "polar_express")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_muon_has_the_bits_of_its_reference(
    shape: tuple[int, int], nesterov: bool, dtype: torch.dtype, adjust_lr: AdjustLr, coefficients: Coefficients
) -> None:
    """Six steps with a moving rate → weights and momentum equal the slow reference in every bit."""
    weight = Parameter(torch.randn(shape))
    muon = Muon(
        [weight],
        weight_decay=0.1,
        momentum=0.9,
        nesterov=nesterov,
        newton_schulz_dtype=dtype,
        newton_schulz_coefficients=coefficients,
        adjust_lr=adjust_lr,
    )
    expected, buffer = weight.detach().clone(), torch.zeros(shape)
    for step in range(6):
        weight.grad = torch.randn(shape)
        muon.param_groups[0]["lr"] = lr = 0.01 * (step + 1)
        muon.step()
        expected, buffer = muon_reference(
            expected,
            buffer,
            weight.grad,
            lr=lr,
            weight_decay=0.1,
            momentum=0.9,
            nesterov=nesterov,
            newton_schulz_dtype=dtype,
            newton_schulz_steps=5,
            newton_schulz_coefficients=coefficients,
            adjust_lr=adjust_lr,
        )
        assert torch.equal(weight, expected)
        assert torch.equal(muon.state[weight]["momentum_buffer"], buffer)


@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_muon_agrees_with_torch(shape: tuple[int, int], nesterov: bool, adjust_lr: AdjustLr) -> None:
    """torch.optim.Muon iterates in bfloat16 → ours in bfloat16 has its bits, ours in float32 is within its rounding."""
    start = torch.randn(shape)
    ours, exact, theirs = (Parameter(start.clone()) for _ in range(3))
    shared: dict[str, Any] = {"momentum": 0.95, "nesterov": nesterov}
    optimizers = [
        (ours, Muon([ours], 0.02, adjust_lr=adjust_lr, **shared)),
        (exact, Muon([exact], 0.02, adjust_lr=adjust_lr, newton_schulz_dtype=torch.bfloat16, **shared)),
        (theirs, torch.optim.Muon([theirs], 0.02, adjust_lr_fn=adjust_lr, **shared)),
    ]
    for _ in range(5):
        gradient = torch.randn(shape)
        for weight, optimizer in optimizers:
            weight.grad = gradient.clone()
            optimizer.step()
    assert torch.equal(exact, theirs)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02 * 5 * 0.05)
    assert not torch.equal(ours, start)


def test_only_tall_matrices_are_scaled() -> None:
    """rows > cols → √(rows/cols); otherwise 1."""
    assert shape_scale(64, 16) == 2.0
    assert shape_scale(16, 64) == shape_scale(16, 16) == 1.0


@pytest.mark.parametrize("shape", [(128, 128), (64, 256), (256, 64)])
def test_an_adjusted_rate_gives_the_size_of_adamw(shape: tuple[int, int]) -> None:
    """The first update at a rate of 1, by Polar Express → a root mean square of 0.2, of any shape."""
    weight = Parameter(torch.zeros(shape))
    weight.grad = torch.randn(shape)
    Muon([weight], 1.0, adjust_lr="match_rms_adamw", newton_schulz_coefficients="polar_express").step()
    assert weight.detach().square().mean().sqrt().item() == pytest.approx(0.2, rel=0.1)


def test_muon_refuses_what_is_no_matrix() -> None:
    """A bias that was routed to Muon by mistake → ValueError that names its shape."""
    bias = Parameter(torch.zeros(3))
    bias.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"\[3\]"):
        Muon([bias]).step()


def test_lion_follows_its_formula() -> None:
    """Five steps on a tensor of three dimensions → the paper's algorithm in float64, up to float32's rounding."""
    weight = Parameter(torch.randn(2, 3, 4))
    lion = Lion([weight], 0.01, betas=(0.9, 0.8), weight_decay=0.2)
    w, m = weight.detach().double().numpy(), np.zeros((2, 3, 4))
    for _ in range(5):
        weight.grad = torch.randn(2, 3, 4)
        g = weight.grad.double().numpy()
        w = (1 - 0.01 * 0.2) * w - 0.01 * np.sign(0.9 * m + 0.1 * g)
        m = 0.8 * m + 0.2 * g
        lion.step()
    np.testing.assert_allclose(weight.detach().numpy(), w, atol=1e-5)
    np.testing.assert_allclose(lion.state[weight]["exp_avg"].numpy(), m, atol=1e-6)


@pytest.mark.parametrize("kind", [Muon, Lion])
def test_a_parameter_without_gradient_is_left_alone(kind: type[Muon] | type[Lion]) -> None:
    """Of two parameters one has a gradient: only that one moves."""
    used, unused = Parameter(torch.randn(4, 4)), Parameter(torch.ones(4, 4))
    used.grad = torch.ones(4, 4)
    before = used.detach().clone()
    kind([used, unused]).step()
    assert not torch.equal(used, before)
    assert torch.equal(unused, torch.ones(4, 4))
