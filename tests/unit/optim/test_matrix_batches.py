"""Batches of matrices against each matrix alone: which ones share a batch depends on the cut, so no bit may."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from headway.optim import muon as matrix_batches
from headway.optim.layer_optimizer import optimizer_factory
from headway.optim.muon import MOST_MATRICES, SHORTEST_SIDE, Muon, batch_limit, orthogonalize, orthogonalize_each
from headway.optim.spec import Coefficients, GroupSpec, OptimSpec
from tests.rigs.muon_reference import orthogonalize_reference

CPU = torch.device("cpu")
SHAPES = [(17, 17), (32, 32), (88, 32), (32, 88), (64, 172), (172, 64), (128, 128), (64, 128), (344, 128), (256, 256)]
"""Shapes of models from 32 to 256 wide, and the smallest that are batched."""
BLOCK = {"q": (24, 24), "k": (12, 24), "up": (64, 24), "down": (24, 64), "norm": (24,)}
NUM_UPDATES = 4
PUBLISHED: dict[str, Any] = {"adjust_lr": "match_rms_adamw", "newton_schulz_coefficients": "polar_express"}


@pytest.fixture
def is_batched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the matrices of each call of the iteration that had several."""
    sizes: list[int] = []

    def seen(matrices: Tensor, **iteration: Any) -> Tensor:
        if matrices.ndim == 3:
            sizes.append(len(matrices))
        return plain(matrices, **iteration)

    plain = orthogonalize
    monkeypatch.setattr(matrix_batches, "orthogonalize", seen)
    return sizes


@pytest.mark.parametrize("coefficients", ["quintic", "polar_express"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [*SHAPES[:-4], *(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES[-4:])]
)
def test_batches_of_every_size_have_the_bits_of_the_reference(
    shape: tuple[int, int], dtype: torch.dtype, coefficients: str
) -> None:
    """One to sixteen matrices, as many as may share a batch → each has every bit of the slow reference."""
    limit = batch_limit(*shape, dtype=dtype, device=CPU)
    for number in range(1, limit + 1):
        matrices = torch.randn(number, *shape, generator=torch.Generator().manual_seed(number)).unbind()
        results = orthogonalize_each(matrices, steps=5, dtype=dtype, coefficients=coefficients)
        for result, matrix in zip(results, matrices, strict=True):
            assert torch.equal(result, orthogonalize_reference(matrix, dtype=dtype, coefficients=coefficients))


def test_what_is_batched_is_small_and_not_too_small() -> None:
    """Sides of up to 16, large matrices, other dtypes, CUDA, several threads → one by one."""
    assert batch_limit(32, 32, dtype=torch.float32, device=CPU) == MOST_MATRICES
    assert batch_limit(128, 128, dtype=torch.float32, device=CPU) == 2
    assert batch_limit(128, 128, dtype=torch.bfloat16, device=CPU) == MOST_MATRICES
    alone = [
        batch_limit(SHORTEST_SIDE - 1, 400, dtype=torch.float32, device=CPU),
        batch_limit(400, SHORTEST_SIDE - 1, dtype=torch.bfloat16, device=CPU),
        batch_limit(1024, 1024, dtype=torch.bfloat16, device=CPU),
        batch_limit(32, 32, dtype=torch.float64, device=CPU),
        batch_limit(32, 32, dtype=torch.float32, device=torch.device("cuda")),
    ]
    assert alone == [1] * len(alone)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert batch_limit(32, 32, dtype=torch.float32, device=CPU) == 1
    finally:
        torch.set_num_threads(threads)


def test_a_batch_whose_bits_differ_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product whose batches round differently → one by one, with the bits of each alone."""
    plain = orthogonalize

    def off_by_a_bit(matrices: Tensor, **iteration: Any) -> Tensor:
        result = plain(matrices, **iteration)
        return result if matrices.ndim == 2 else torch.nextafter(result, torch.full_like(result, 9.0))

    monkeypatch.setattr(matrix_batches, "orthogonalize", off_by_a_bit)
    matrix_batches._has_same_bits.cache_clear()
    matrices = torch.randn(3, 20, 30).unbind()
    try:
        results = orthogonalize_each(matrices, steps=5, dtype=torch.float32)
    finally:
        matrix_batches._has_same_bits.cache_clear()
    for result, matrix in zip(results, matrices, strict=True):
        assert torch.equal(result, orthogonalize_reference(matrix))


def test_muons_step_together_as_alone(is_batched: list[int]) -> None:
    """Three optimizers with other rates and shapes, one gradient missing → batches, and each one's own bits."""
    shapes = [[(20, 20), (20, 30)], [(20, 20), (30, 20)], [(20, 20), (20, 30), (18, 18)]]
    start = [[torch.randn(shape) for shape in of_one] for of_one in shapes]
    sides = []
    for _ in range(2):
        weights = [[Parameter(tensor.clone()) for tensor in of_one] for of_one in start]
        sides.append((weights, [Muon(of_one, 0.01 * (k + 1)) for k, of_one in enumerate(weights)]))
    (together, muons), (alone, others) = sides
    for seed in range(3):
        for weights in (together, alone):
            torch.manual_seed(seed)
            for weight in [weight for of_one in weights for weight in of_one]:
                weight.grad = torch.randn(weight.shape)
            weights[2][2].grad = None
        for batch in Muon.batches(matrix for muon in muons for matrix in muon.matrices()):
            Muon.step_batch(batch)
        for muon in others:
            muon.step()
    assert {2, 3} <= set(is_batched)
    for ours, theirs in zip(together, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_other_coefficients_are_another_batch() -> None:
    """Two optimizers that iterate by other coefficients, and a third by the first's → its matrix and the first's share
    a batch.
    """
    of_each: list[Coefficients] = ["quintic", "polar_express", "quintic"]
    muons = [Muon([Parameter(torch.zeros(20, 20))], newton_schulz_coefficients=each) for each in of_each]
    batches = [[muon for muon, *_ in batch] for batch in Muon.batches(m for muon in muons for m in muon.matrices())]
    assert batches == [[muons[0], muons[2]], [muons[1]]]


def _weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in BLOCK.items()}


def _train(optim: OptimSpec, stages: Sequence[int], *, is_in_place: bool) -> list[Tensor]:
    """Some updates of all blocks, those of a stage together: all weights and the optimizers' state."""
    make = optimizer_factory(optim, num_batches=NUM_UPDATES, delay=1)
    blocks = range(sum(stages))
    sets = [[_weights(block) for block in blocks], [_weights(block) for block in blocks]]
    optimizers = [make(f"block.{block}", sets[0][block]) for block in blocks]
    for batch in range(NUM_UPDATES):
        first = 0
        for size in stages:
            part = slice(first, first + size)
            type(optimizers[0]).step_together(
                optimizers[part],
                batch,
                current=sets[0 if is_in_place else batch % 2][part],
                target=sets[0 if is_in_place else (batch + 1) % 2][part],
                gradients=[_weights(100 * batch + block) for block in blocks[part]],
            )
            first += size
    states = [optimizer.state() for optimizer in optimizers]
    return [of_block[name] for of_block in [*sets[0], *states] for name in sorted(of_block)]


@settings(max_examples=12, deadline=None)
@given(
    stages=st.lists(st.integers(1, 18), min_size=1, max_size=3),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    is_in_place=st.booleans(),
    name=st.sampled_from(["muon", "normuon"]),
    published=st.sampled_from([{}, PUBLISHED]),
)
def test_no_cut_changes_a_bit(
    stages: list[int], dtype: str, is_in_place: bool, name: str, published: dict[str, Any]
) -> None:
    """Blocks in any number of stages, more of them than share a batch → the bits of one block a stage."""
    matrices = GroupSpec(name=name, newton_schulz_dtype=dtype, **published)  # type: ignore[arg-type]
    optim = OptimSpec(matrices=matrices, warmup_batches=1)
    cut = _train(optim, stages, is_in_place=is_in_place)
    alone = _train(optim, [1] * sum(stages), is_in_place=is_in_place)
    assert all(torch.equal(a, b) for a, b in zip(cut, alone, strict=True))


def test_stages_of_blocks_are_batched(is_batched: list[int]) -> None:
    """Eighteen blocks in one stage → sixteen and two of every shape that is not too small."""
    _train(OptimSpec(), [18], is_in_place=False)
    assert {2, 16} <= set(is_batched)
