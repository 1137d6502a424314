"""An observer sees that a long update progresses."""

from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headway.optim.layer_optimizer import optimizer_factory
from headway.optim.muon import NUM_STEPS, orthogonalize
from headway.optim.spec import OptimSpec
from headway.optim.step_count import STEPS


class StepsAtProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The count whenever a matrix product begins."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.counts.append(STEPS.num_done)
        return func(*args, **(kwargs or {}))


def test_a_matrix_counts_while_it_is_orthogonalised() -> None:
    """No more than one iteration, three products, goes by without a count."""
    with StepsAtProducts() as seen:
        orthogonalize(torch.eye(20, 30))
    assert len(seen.counts) == 3 * NUM_STEPS
    assert all(seen.counts.count(count) == 3 for count in set(seen.counts))


def test_every_parameter_of_an_update_counts() -> None:
    """Also those that are no matrices, whichever way the layers are stepped."""
    shapes = {"up.weight": (20, 30), "norm.weight": (20,), "bias.weight": (30,)}

    def fresh() -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield {name: torch.ones(shape) for name, shape in shapes.items()}

    tensors, before = fresh(), STEPS.num_done
    optimizer = optimizer_factory(OptimSpec(), num_batches=4, delay=1)("block.0", next(tensors))
    optimizer.step(0, current=next(tensors), target=next(tensors), gradients=next(tensors))
    assert STEPS.num_done == before + len(shapes) + NUM_STEPS
    maps = {kind: [next(tensors)] for kind in ("current", "target", "gradients")}
    type(optimizer).step_together([optimizer], 1, owners=(), shares=None, **maps)
    assert STEPS.num_done == before + 2 * (len(shapes) + NUM_STEPS)
