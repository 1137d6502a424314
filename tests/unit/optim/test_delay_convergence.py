"""The cost of a delay of one, and Error Feedback's gain, on a problem that is small enough to be exact."""

import pytest
import torch
from torch import Tensor

from headway.optim.layer_optimizer import optimizer_factory
from headway.optim.spec import GroupSpec, OptimSpec

NUM_BATCHES = 60


def final_loss(group: GroupSpec, *, delay: int, alpha: float) -> float:
    """Fit W to a linear map by full-batch gradients of W_{max(0, b−d)}: the mean square error of W_B."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 16, generator=generator)
    y = x @ torch.randn(16, 16, generator=generator)
    spec = OptimSpec(matrices=group, error_feedback=alpha, lr_schedule="cosine", warmup_batches=0)
    sets = [{"weight": torch.zeros(16, 16, requires_grad=True)} for _ in range(2)]
    optimizer = optimizer_factory(spec, num_batches=NUM_BATCHES, delay=delay)("block.0", sets[0])

    def loss_of(weight: Tensor) -> Tensor:
        return (x @ weight.T - y).square().mean()

    for b in range(NUM_BATCHES):
        stale = sets[max(0, b - delay) % 2]["weight"]
        (gradient,) = torch.autograd.grad(loss_of(stale), stale)
        optimizer.step(b, current=sets[b % 2], target=sets[(b + 1) % 2], gradients={"weight": gradient})
    return loss_of(sets[NUM_BATCHES % 2]["weight"]).item()


@pytest.mark.parametrize(
    "group",
    [
        GroupSpec(name="muon", lr=0.3, momentum=0.9, weight_decay=0.0),
        GroupSpec(name="adamw", lr=0.3, weight_decay=0.0),
    ],
    ids=lambda group: group.name,
)
def test_error_feedback_recovers_what_a_delay_costs(group: GroupSpec) -> None:
    """60 updates at a brisk rate → delayed is worse than synchronous, and Error Feedback takes most of it back."""
    synchronous = final_loss(group, delay=0, alpha=0.0)
    delayed = final_loss(group, delay=1, alpha=0.0)
    corrected = final_loss(group, delay=1, alpha=1.0)
    assert delayed > 1.5 * synchronous
    assert delayed - corrected > 0.5 * (delayed - synchronous)
