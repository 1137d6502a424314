"""Both sides of the bench of Muon's update: which matrices it takes, and what their updates are compared with."""

import pytest
import torch
from rigs.muon_sides import (
    MODELS,
    Ours,
    Theirs,
    block_matrices,
    cosine,
    distance,
    gradient,
    gram_form,
    of_block,
    polar_factor,
)

from headway.optim.muon import orthogonalize

CPU = torch.device("cpu")
SHAPES = [(24, 40), (40, 24), (24, 24)]


def test_blocks_have_the_matrices_of_their_models() -> None:
    """Queries and outputs, keys and values, the three of the feed-forward."""
    assert dict(block_matrices(MODELS["360m"])) == {(960, 960): 2, (320, 960): 2, (2560, 960): 3}
    assert dict(block_matrices(MODELS["1b"])) == {(2048, 2048): 2, (512, 2048): 2, (8192, 2048): 3}


def test_a_block_takes_the_time_of_its_matrices() -> None:
    """Two shapes, two rounds, three sides."""
    seconds = {(1, 2): [(1.0, 2.0, 3.0), (4.0, 5.0, 6.0)], (3, 4): [(10.0, 20.0, 30.0), (40.0, 50.0, 60.0)]}
    assert of_block({(3, 4): 2, (1, 2): 3}, seconds) == [[23, 46, 69], [92, 115, 138]]


@pytest.mark.parametrize("shape", SHAPES)
def test_in_bfloat16_both_sides_do_the_same(shape: tuple[int, int]) -> None:
    """First updates → equal bits; the second is not, by Error Feedback."""
    of = gradient(shape, CPU)
    ours = Ours(of, "bfloat16", num_updates=2)
    theirs = Theirs(of, ours.optim.matrices)
    assert torch.equal(ours.step(), theirs.step())
    assert not torch.equal(ours.step(), theirs.step())


@pytest.mark.parametrize("shape", SHAPES)
def test_the_gram_form_is_the_iteration(shape: tuple[int, int]) -> None:
    """In float64, up to rounding."""
    of = gradient(shape, CPU)
    torch.testing.assert_close(gram_form(of, torch.float64), orthogonalize(of, dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_polar_factor_is_that_of_singular_values(shape: tuple[int, int]) -> None:
    """U·Vᵀ of torch's own decomposition."""
    of = gradient(shape, CPU)
    u, _, vh = torch.linalg.svd(of.double(), full_matrices=False)
    torch.testing.assert_close(polar_factor(of), u @ vh, rtol=0, atol=1e-7)


def test_cosine_and_distance() -> None:
    """A right angle, a longer one of the same direction."""
    one, other = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]])
    assert cosine(one, other) == 0
    assert cosine(one, 2 * one) == pytest.approx(1)
    assert distance(2 * one, one.double()) == pytest.approx(1)
    assert distance(other, one.double()) == pytest.approx(5 / 3)
