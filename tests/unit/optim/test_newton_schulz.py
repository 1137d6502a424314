"""Orthogonalisation against its slow oracles, and the coefficients of Polar Express against a minimax computation."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from headway.optim import muon
from headway.optim.muon import SMALLEST_HALVED, orthogonalize, step_coefficients
from headway.optim.spec import Coefficients
from tests.rigs.muon_reference import orthogonalize_by_singular_values, orthogonalize_reference
from tests.rigs.update_memory import NewMemory

SHAPES = [(32, 32), (24, 96), (96, 24), (1, 7), (64, 65)]
COEFFICIENTS: list[Coefficients] = ["quintic", "polar_express"]
LEAST, CUSHION = 1e-3, 0.02407327424182761
"""The paper's least singular value, and the share of the largest one below which a step is not made for it."""


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_those_of_the_plain_iteration(
    shape: tuple[int, int], dtype: torch.dtype, coefficients: Coefficients
) -> None:
    """Wide, tall and square matrices, at several step counts → every bit of the reference."""
    matrix = torch.randn(shape)
    for steps in (1, 5, 9):
        result = orthogonalize(matrix, steps=steps, dtype=dtype, coefficients=coefficients)
        assert result.shape == matrix.shape
        assert result.dtype == dtype
        expected = orthogonalize_reference(matrix, steps=steps, dtype=dtype, coefficients=coefficients)
        assert torch.equal(result, expected)


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_iteration_applies_its_polynomials_to_the_singular_values(
    shape: tuple[int, int], coefficients: Coefficients
) -> None:
    """The same polynomials applied to an SVD in float64 → the same matrix up to rounding."""
    matrix = torch.randn(shape, dtype=torch.float64)
    expected = orthogonalize_by_singular_values(matrix, coefficients=coefficients)
    exact = orthogonalize(matrix, dtype=torch.float64, coefficients=coefficients)
    torch.testing.assert_close(exact, expected, rtol=1e-10, atol=1e-11)
    found = orthogonalize(matrix, coefficients=coefficients)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def nearest_to_one(low: float, high: float) -> tuple[float, float, float]:
    """a, b and c of the a·x + b·x³ + c·x⁵ that is nearest to 1 between two values, by Remez: its distance is the same,
    with signs in turn, at both ends and at both extremes between them.
    """
    extremes = np.array([3 * low + high, low + 3 * high]) / 4
    for _ in range(60):
        points = np.array([low, *extremes, high])
        a, b, c, distance = np.linalg.solve(np.stack([points, points**3, points**5, [1, -1, 1, -1]], 1), np.ones(4))
        extremes = np.sort(np.sqrt(np.roots([5 * c, 3 * b, a]).real))
    between = np.linspace(low, high, 10_001)
    assert np.abs(a * between + b * between**3 + c * between**5 - 1).max() <= abs(distance) * (1 + 1e-9) + 1e-12
    return float(a), float(b), float(c)


def test_coefficients_of_polar_express_are_minimax() -> None:
    """The best polynomial for what the steps before leave, put around 1, with 1 % for rounding → each step's; the last
    is the limit, flat at 1 up to its second derivative.
    """
    *early, last = step_coefficients("polar_express", 8)
    low, high = LEAST, 1.0
    for number, of_step in enumerate(early):
        a, b, c = nearest_to_one(max(low, CUSHION * high), high)
        ends = [a * x + b * x**3 + c * x**5 for x in (low, high)]
        scale = 2 / sum(ends)
        published = [of_step[0] * 1.01, of_step[1] * 1.01**3, of_step[2] * 1.01**5]
        np.testing.assert_allclose(published, [scale * a, scale * b, scale * c], rtol=1e-12 if number < 6 else 1e-8)
        low, high = scale * ends[0], 2 - scale * ends[0]
    assert high - low < 1e-8
    a, b, c = last
    assert (a + b + c, a + 3 * b + 5 * c, 6 * b + 20 * c) == (1, 0, 0)
    assert step_coefficients("polar_express", 10) == [*early, last, last, last]
    assert step_coefficients("polar_express", 2) == early[:2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 64), (64, 160), (160, 64)])
def test_polar_express_ends_nearer_to_one(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Singular values over two decades, five steps each → smaller distances from 1 than the quintic's, the largest and
    the mean, and within the page's bounds; nearly none after two steps more.
    """
    short = min(shape)
    left, right = (torch.linalg.qr(torch.randn(side, short))[0] for side in shape)
    matrix = left * torch.logspace(0, -2, short) @ right.mT

    def distances(coefficients: Coefficients, steps: int) -> Tensor:
        found = orthogonalize(matrix, steps=steps, dtype=dtype, coefficients=coefficients)
        values: Tensor = torch.linalg.svdvals(found.double())
        return (values - 1).abs()

    ours, quintic, further = distances("polar_express", 5), distances("quintic", 5), distances("polar_express", 7)
    assert ours.max() < quintic.max()
    assert ours.mean() < quintic.mean()
    assert ours.max() < 0.16
    assert further.max() < (1e-5 if dtype == torch.float32 else 0.01)


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


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(640, 640), (641, 700), (700, 641), (1024, 768)])
def test_bits_of_large_matrices_are_those_of_the_plain_iteration(
    shape: tuple[int, int], dtype: torch.dtype, coefficients: Coefficients
) -> None:
    """Panels that end where the matrix does, and not; wide, tall and square → every bit of the reference."""
    matrix = torch.randn(shape) * torch.logspace(0, -2, shape[0]).unsqueeze(1)
    expected = orthogonalize_reference(matrix, steps=2, dtype=dtype, coefficients=coefficients)
    assert torch.equal(orthogonalize(matrix, steps=2, dtype=dtype, coefficients=coefficients), expected)


@pytest.mark.parametrize("side", [muon.PANEL, 2 * muon.PANEL + 1, 3 * muon.PANEL - 1])
def test_halved_products_are_the_products(side: int) -> None:
    """Whole numbers, whose sums are exact in any order → equal Gram matrices; polynomials up to rounding."""
    matrix = torch.randint(-3, 4, (side, 40)).double()
    gram = matrix @ matrix.mT
    assert torch.equal(muon._half_gram(matrix), gram)
    for _, b, c in (*step_coefficients("polar_express", 3), *step_coefficients("quintic", 1)):
        torch.testing.assert_close(muon._half_polynomial(gram, b, c), torch.addmm(gram, gram, gram, beta=b, alpha=c))


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

    def off_by_a_bit(x: Tensor, *_: float) -> Tensor:
        return torch.nextafter(x @ x.mT, torch.tensor(9.0))

    monkeypatch.setattr(muon, "_half_gram", off_by_a_bit)
    monkeypatch.setattr(muon, "_half_polynomial", off_by_a_bit)
    matrix = torch.randn(SMALLEST_HALVED, SMALLEST_HALVED)
    assert torch.equal(orthogonalize(matrix, steps=1), orthogonalize_reference(matrix, steps=1))


@pytest.mark.usefixtures("halves_anew")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_halves_are_compared_with_the_coefficients_of_each_step(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that rounds otherwise in a panel, with the third step's coefficients alone → whole products."""
    right = muon._half_polynomial
    triples = step_coefficients("polar_express", 3)

    def off_by_a_bit(gram: Tensor, b: float, c: float) -> Tensor:
        found = right(gram, b, c)
        return found if (b, c) != triples[2][1:] else torch.nextafter(found, torch.full_like(found, 9.0))

    monkeypatch.setattr(muon, "_half_polynomial", off_by_a_bit)
    matrix = torch.randn(SMALLEST_HALVED, SMALLEST_HALVED)
    for steps in (2, 3):
        found = orthogonalize(matrix, steps=steps, dtype=dtype, coefficients="polar_express")
        expected = orthogonalize_reference(matrix, steps=steps, dtype=dtype, coefficients="polar_express")
        assert torch.equal(found, expected)


def test_only_large_products_of_one_thread_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, a batch, two threads → whole; many rows on one thread → what the comparison says."""
    triples = step_coefficients("quintic", 5)
    monkeypatch.setattr(muon, "_halves_have_same_bits", lambda *_: (True, False))
    assert muon._halved(torch.empty(SMALLEST_HALVED, 600), triples) == (True, False)
    assert muon._halved(torch.empty(SMALLEST_HALVED - 1, 600), triples) == (False, False)
    assert muon._halved(torch.empty(2, SMALLEST_HALVED, 600), triples) == (False, False)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert muon._halved(torch.empty(SMALLEST_HALVED, 600), triples) == (False, False)
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
