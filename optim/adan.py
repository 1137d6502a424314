"""Adan: a running mean of the gradients, and another of how they change.

Source: Xie et al., "Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep Models", 2022, arXiv
2208.06677, in the notation of the authors' code, where each β is what is kept. Weight decay is decoupled as everywhere
here: their `no_prox`.
"""

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from headway.optim.eager import EagerOptimizer, buffer, count_step


class Adan(EagerOptimizer):
    """Steps tensors of any shape in place; state: four tensors of each, and the count t of steps, from 1 on.

    d = g − (the gradient before; of the first step: g)
    m ← β₁·m + (1−β₁)·g;  v ← β₂·v + (1−β₂)·d;  n ← β₃·n + (1−β₃)·(g + β₂·d)²
    D = √n / √(1−β₃ᵗ) + eps
    W ← (1 − lr·weight_decay)·W − lr·m / (1−β₁ᵗ) / D − lr·β₂·v / (1−β₂ᵗ) / D
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.98, 0.92),
        beta3: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "beta3": beta3, "eps": eps, "weight_decay": weight_decay})

    def _step_tensor(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2), beta3, rate = self.state[weight], group["betas"], group["beta3"], group["lr"]
        number = count_step(state)
        average, change, second = (buffer(state, slot, gradient) for slot in ("exp_avg", "exp_avg_diff", "exp_avg_sq"))
        before = buffer(state, "last_gradient", gradient)
        if number == 1:
            before.copy_(gradient)
        difference = gradient - before
        before.copy_(gradient)
        average.lerp_(gradient, 1 - beta1)
        change.lerp_(difference, 1 - beta2)
        looked_ahead = difference.mul_(beta2).add_(gradient)
        second.mul_(beta3).addcmul_(looked_ahead, looked_ahead, value=1 - beta3)
        divisor = (second.sqrt() / math.sqrt(1 - beta3**number)).add_(group["eps"])
        weight.mul_(1 - rate * group["weight_decay"])
        weight.addcdiv_(average, divisor, value=-rate / (1 - beta1**number))
        weight.addcdiv_(change, divisor, value=-rate * beta2 / (1 - beta2**number))
