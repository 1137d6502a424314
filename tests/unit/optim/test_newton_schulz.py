"""Orthogonalisation against its slow oracles."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from headway.optim import muon
from headway.optim.muon import SMALLEST_HALVED, orthogonalize
from tests.rigs.muon_reference import orthogonalize_by_singular_values, orthogonalize_reference
from tests.rigs.update_memory import NewMemory

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


@pytest.fixture
def halves_anew() -> Iterator[None]:
    """What this process has found out about halved products is forgotten before and after."""
    muon._halves_have_same_bits.cache_clear()
    yield
    muon._halves_have_same_bits.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(640, 640), (641, 700), (700, 641), (1024, 768)])
def test_bits_of_large_matrices_are_those_of_the_plain_iteration(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Panels that end where the matrix does, and not; wide, tall and square → every bit of the reference."""
    matrix = torch.randn(shape) * torch.logspace(0, -2, shape[0]).unsqueeze(1)
    expected = orthogonalize_reference(matrix, steps=2, dtype=dtype)
    assert torch.equal(orthogonalize(matrix, steps=2, dtype=dtype), expected)


@pytest.mark.parametrize("side", [muon.PANEL, 2 * muon.PANEL + 1, 3 * muon.PANEL - 1])
def test_halved_products_are_the_products(side: int) -> None:
    """Whole numbers, whose sums are exact in any order → equal Gram matrices; polynomials up to rounding."""
    matrix = torch.randint(-3, 4, (side, 40)).double()
    gram = matrix @ matrix.mT
    assert torch.equal(muon._half_gram(matrix), gram)
    torch.testing.assert_close(muon._half_polynomial(gram), torch.addmm(gram, gram, gram, beta=muon.B, alpha=muon.C))


@pytest.mark.usefixtures("halves_anew")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(SMALLEST_HALVED, SMALLEST_HALVED), (SMALLEST_HALVED, 1280)])
def test_the_comparison_takes_the_memory_of_an_iteration(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """First and second use of a shape → no byte more for the first."""
    matrix = torch.randn(shape)
    peaks = []
    for _ in range(2):
        with NewMemory([matrix]) as memory:
            orthogonalize(matrix, steps=2, dtype=dtype)
        peaks.append(memory.peak)
    assert peaks[0] <= peaks[1]


@pytest.mark.usefixtures("halves_anew")
def test_halves_whose_bits_differ_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that round otherwise in a panel → whole products, with the bits of the reference."""

    def off_by_a_bit(x: Tensor) -> Tensor:
        return torch.nextafter(x @ x.mT, torch.tensor(9.0))

    monkeypatch.setattr(muon, "_half_gram", off_by_a_bit)
    monkeypatch.setattr(muon, "_half_polynomial", off_by_a_bit)
    matrix = torch.randn(SMALLEST_HALVED, SMALLEST_HALVED)
    assert torch.equal(orthogonalize(matrix, steps=1), orthogonalize_reference(matrix, steps=1))


def test_only_large_products_of_one_thread_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, a batch, two threads → whole; many rows on one thread → what the comparison says."""
    monkeypatch.setattr(muon, "_halves_have_same_bits", lambda *_: (True, False))
    assert muon._halved(torch.empty(SMALLEST_HALVED, 600)) == (True, False)
    assert muon._halved(torch.empty(SMALLEST_HALVED - 1, 600)) == (False, False)
    assert muon._halved(torch.empty(2, SMALLEST_HALVED, 600)) == (False, False)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert muon._halved(torch.empty(SMALLEST_HALVED, 600)) == (False, False)
    finally:
        torch.set_num_threads(threads)


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
