"""Replicas of a stage that orthogonalise a share each: the owners, and the bits of an update that nobody shares."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.optim.layer_optimizer import TorchLayerOptimizer, UpdateOrderError, optimizer_factory
from headway.optim.muon import orthogonalize
from headway.optim.spec import GroupSpec, OptimSpec
from headway.optim.update_shares import iteration_cost, joined, matrix_owners, parted

SHAPES = {"q.weight": (20, 20), "up.weight": (40, 20), "down.weight": (20, 40), "tiny.weight": (12, 8), "norm": (20,)}
NUM_UPDATES = 3
PUBLISHED: dict[str, Any] = {"adjust_lr": "match_rms_adamw", "newton_schulz_coefficients": "polar_express"}
LAYERS = ("embedding", "block.0", "block.1", "block.2")
Maps = list[dict[str, Tensor]]


class Replica:
    """One worker's copy of a stage's weights and optimizers."""

    def __init__(self, spec: OptimSpec, *, delay: int, is_in_place: bool) -> None:
        make = optimizer_factory(spec, num_batches=NUM_UPDATES, delay=delay)
        self.sets = [draw(0), draw(0)]
        if is_in_place:
            self.sets[1] = self.sets[0]
        self.optimizers = [make(name, weights) for name, weights in zip(LAYERS, self.sets[0], strict=True)]

    def share(self, batch: int, matrices: Sequence[int]) -> Tensor:
        """The results of some matrices."""
        gradients = draw(1 + batch)
        return TorchLayerOptimizer.orthogonalize_share(self.optimizers, batch, gradients=gradients, matrices=matrices)

    def update(self, batch: int, owners: Sequence[int] = (), shares: Mapping[int, Tensor] | None = None) -> None:
        """The whole update, or the rest of it."""
        current, target = self.sets[batch % 2], self.sets[(batch + 1) % 2]
        TorchLayerOptimizer.step_together(
            self.optimizers,
            batch,
            current=current,
            target=target,
            gradients=draw(1 + batch),
            owners=owners,
            shares=shares,
        )

    def content(self) -> Maps:
        """Copies of weights and state."""
        states = [optimizer.state() for optimizer in self.optimizers]
        return [
            {name: tensor.clone() for name, tensor in of_one.items()}
            for of_one in [*self.sets[0], *self.sets[1], *states]
        ]


def draw(seed: int) -> Maps:
    """A tensor for each parameter of each layer."""
    generator = torch.Generator().manual_seed(seed)
    return [{name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()} for _ in LAYERS]


def assert_same(ours: Maps, theirs: Maps) -> None:
    """Every bit."""
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def update_by_shares(replicas: Sequence[Replica], batch: int) -> None:
    """Each replica sends its share as one tensor; all apply all of them."""
    shapes = TorchLayerOptimizer.matrix_shapes(replicas[0].optimizers)
    owners = matrix_owners(shapes, len(replicas))
    shares = {
        position: replica.share(batch, [index for index, owner in enumerate(owners) if owner == position])
        for position, replica in enumerate(replicas)
    }
    for replica in replicas:
        replica.update(batch, owners, shares)


@pytest.mark.parametrize(("name", "published"), [("muon", {}), ("normuon", {}), ("muon", PUBLISHED)])
@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("momentum_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("alpha", "delay", "nesterov", "is_in_place"), [(1.0, 1, True, False), (0.0, 0, False, True)])
def test_shares_give_the_bits_of_a_whole_update(
    alpha: float,
    delay: int,
    nesterov: bool,
    is_in_place: bool,
    dtype: str,
    momentum_dtype: str,
    num_replicas: int,
    name: str,
    published: dict[str, Any],
) -> None:
    """Two or three replicas, batched and single matrices, tall and wide → weights and state of an unshared update."""
    matrices = GroupSpec(
        name=name,
        nesterov=nesterov,
        newton_schulz_dtype=dtype,  # type: ignore[arg-type]
        momentum_dtype=momentum_dtype,  # type: ignore[arg-type]
        **published,
    )
    spec = OptimSpec(matrices=matrices, error_feedback=alpha, warmup_batches=1)
    alone = Replica(spec, delay=delay, is_in_place=is_in_place)
    replicas = [Replica(spec, delay=delay, is_in_place=is_in_place) for _ in range(num_replicas)]
    for batch in range(NUM_UPDATES):
        alone.update(batch)
        update_by_shares(replicas, batch)
        for replica in replicas:
            assert_same(replica.content(), alone.content())


def test_a_share_changes_nothing_and_comes_in_order() -> None:
    """Weights and state stay as they are before and after update 0; a share of another update is refused."""
    replica = Replica(OptimSpec(warmup_batches=1), delay=1, is_in_place=False)
    for batch in range(2):
        before = replica.content()
        replica.share(batch, [0, 3])
        assert_same(replica.content(), before)
        replica.update(batch)
    with pytest.raises(UpdateOrderError, match="update 1 cannot be applied, update 2 is next"):
        replica.share(1, [0])


def test_without_muon_there_is_nothing_to_share() -> None:
    """AdamW on all parameters → no matrices, and no owners."""
    adamw = GroupSpec(name="adamw")
    replica = Replica(OptimSpec(matrices=adamw, rest=adamw), delay=1, is_in_place=False)
    assert TorchLayerOptimizer.matrix_shapes(replica.optimizers) == []
    assert matrix_owners([], 2) == ()


@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (20, 20)])
def test_a_sent_result_keeps_its_strides(shape: tuple[int, int]) -> None:
    """A tall matrix's result is a view of its transpose → it arrives as one, beside others."""
    result = orthogonalize(torch.randn(shape))
    _, arrived = parted(joined([torch.ones(3, 2), result]), [(3, 2), shape])
    assert torch.equal(arrived, result)
    assert arrived.stride() == result.stride()


def test_a_share_of_another_length_is_refused() -> None:
    """One element more or less than the shapes have → one clear line."""
    for num_elements in (5, 7):
        with pytest.raises(ValueError, match=rf"a share of 6 elements, not of \[{num_elements}\]"):
            parted(torch.zeros(num_elements), [(2, 3)])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400)), max_size=30), st.integers(1, 5))
def test_owners_are_even_within_one_matrix(shapes: list[tuple[int, int]], num_replicas: int) -> None:
    """Any shapes → the most loaded replica has at most one matrix more than the least loaded one."""
    owners = matrix_owners(shapes, num_replicas)
    costs = [iteration_cost(*shape) for shape in shapes]
    loads = [sum(c for c, owner in zip(costs, owners, strict=True) if owner == k) for k in range(num_replicas)]
    assert len(owners) == len(shapes)
    assert max(loads) - min(loads) <= max(costs, default=0)


def test_ties_go_to_the_first() -> None:
    """Equal matrices alternate; a costly one counts first wherever it stands."""
    assert matrix_owners([(8, 8)] * 4, 2) == (0, 1, 0, 1)
    assert matrix_owners([(8, 8), (8, 8), (32, 32)], 2) == (1, 1, 0)
