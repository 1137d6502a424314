"""Lion: the sign of an interpolated momentum.

Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, arXiv 2302.06675, algorithm 2.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from headway.optim.eager import EagerOptimizer, buffer


class Lion(EagerOptimizer):
    """Steps tensors of any shape in place; state: `exp_avg` of each.

    u = β₁·m + (1−β₁)·g
    W ← (1 − lr·weight_decay)·W − lr·sign(u)
    m ← β₂·m + (1−β₂)·g
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _step_tensor(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        average = buffer(self.state[weight], "exp_avg", gradient)
        direction = average.lerp(gradient, 1 - beta1).sign_()
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(direction, alpha=-group["lr"])
        average.lerp_(gradient, 1 - beta2)
