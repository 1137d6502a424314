"""Every named optimizer on a card: state that moves changes no bit there either."""

import pytest
import torch
from torch import Tensor

from headway.optim.layer_optimizer import TorchLayerOptimizer, optimizer_factory
from headway.optim.spec import OPTIMIZERS, GroupSpec, OptimSpec

pytestmark = pytest.mark.gpu
NUM_UPDATES = 12


def trained(optimizer: TorchLayerOptimizer, weight: Tensor, updates: range) -> Tensor:
    """The weight after these updates, in place."""
    for update in updates:
        generator = torch.Generator().manual_seed(update)
        gradient = torch.randn(weight.shape, generator=generator).to(weight.device)
        maps = {"current": {"up.weight": weight}, "target": {"up.weight": weight}, "gradients": {"up.weight": gradient}}
        optimizer.step(update, **maps)
    return weight


@pytest.mark.parametrize("shape", [(200, 300), (300, 200)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_bits_are_the_states(card: torch.device, name: str, shape: tuple[int, int]) -> None:
    """Deterministic algorithms; twice the same updates, once with the state carried over → equal bits, and finite."""
    torch.use_deterministic_algorithms(True)
    spec = OptimSpec(matrices=GroupSpec(name=name, precondition_frequency=3), warmup_batches=3)
    start = torch.randn(shape, generator=torch.Generator().manual_seed(99)).to(card)
    make = optimizer_factory(spec, num_batches=NUM_UPDATES, delay=1)
    first, second, whole = (make("block.0", {"up.weight": start}) for _ in range(3))
    weight = trained(first, start.clone(), range(7))
    second.load_state(first.state())
    moved = trained(second, weight, range(7, NUM_UPDATES))
    assert torch.equal(moved, trained(whole, start.clone(), range(NUM_UPDATES)))
    assert moved.isfinite().all()
