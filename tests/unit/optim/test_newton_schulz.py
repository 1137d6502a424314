"""Orthogonalisation against its slow oracles."""

import pytest
import torch

from headway.optim.muon import orthogonalize
from tests.rigs.muon_reference import orthogonalize_by_singular_values, orthogonalize_reference

SHAPES = [(32, 32), (24, 96), (96, 24), (1, 7), (64, 65)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_those_of_the_plain_iteration(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Wide, tall and square matrices, at several step counts → every bit of the reference."""
    matrix = torch.randn(shape)
    for steps in (1, 5):
        result = orthogonalize(matrix, steps=steps, dtype=dtype)
        assert result.shape == matrix.shape
        assert result.dtype == dtype
        assert torch.equal(result, orthogonalize_reference(matrix, steps=steps, dtype=dtype))


@pytest.mark.parametrize("shape", SHAPES)
def test_iteration_applies_the_quintic_to_the_singular_values(shape: tuple[int, int]) -> None:
    """The same polynomial applied to an SVD in float64 → the same matrix up to rounding."""
    matrix = torch.randn(shape, dtype=torch.float64)
    expected = orthogonalize_by_singular_values(matrix)
    torch.testing.assert_close(orthogonalize(matrix, dtype=torch.float64), expected, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(orthogonalize(matrix).double(), expected, rtol=1e-4, atol=1e-5)


def test_singular_values_end_near_one() -> None:
    """Well-conditioned matrices of any scale → all singular values between 0.6 and 1.3."""
    for scale in (1e-4, 1.0, 1e4):
        values = torch.linalg.svdvals(orthogonalize(scale * (torch.eye(16, 40) + 0.1 * torch.randn(16, 40))))
        assert values.min() > 0.6
        assert values.max() < 1.3


def test_a_zero_matrix_stays_zero() -> None:
    """A gradient that vanished → zeros, not NaN."""
    assert torch.equal(orthogonalize(torch.zeros(4, 6)), torch.zeros(4, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(48, 48), (32, 88), (88, 32)])
@pytest.mark.parametrize("num_matrices", range(1, 9))
def test_a_batch_has_the_bits_of_its_matrices(num_matrices: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """One to eight equal shapes on one CPU thread → each as if it were alone, also with two leading dimensions."""
    stack = torch.randn(num_matrices, *shape)
    expected = torch.stack([orthogonalize(matrix, dtype=dtype) for matrix in stack])
    assert torch.equal(orthogonalize(stack, dtype=dtype), expected)
    assert torch.equal(orthogonalize(stack.unsqueeze(0), dtype=dtype), expected.unsqueeze(0))


def test_strides_do_not_change_bits() -> None:
    """A matrix that lies transposed in memory → the bits of its contiguous copy; the input is left as it was."""
    matrix = torch.randn(40, 24).T
    before = matrix.clone()
    assert torch.equal(orthogonalize(matrix), orthogonalize(matrix.contiguous()))
    assert torch.equal(matrix, before)


def test_a_vector_is_refused() -> None:
    """One dimension → ValueError that names the shape."""
    with pytest.raises(ValueError, match=r"\[5\]"):
        orthogonalize(torch.ones(5))
