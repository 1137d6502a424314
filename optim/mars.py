"""MARS: AdamW of a gradient that the one before corrects, so that it varies less.

Source: Yuan et al., "MARS: Unleashing the Power of Variance Reduction for Training Large Models", 2024, arXiv
2411.10438: MARS-AdamW in the approximate form, whose gradient before is the last batch's own. Each parameter is clipped
alone, as in the authors' code. All parameters have this rule, where their code has AdamW for vectors unless told.
"""

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.linalg import vector_norm

from headway.optim.eager import EagerOptimizer, buffer, count_step


class Mars(EagerOptimizer):
    """Steps tensors of any shape in place; state: three tensors of each, and the count t of steps, from 1 on.

    c = g + γ·β₁/(1−β₁)·(g − the gradient before; before the first: 0)
    c ← c / max(‖c‖, 1)
    m ← β₁·m + (1−β₁)·c;  v ← β₂·v + (1−β₂)·c²
    W ← (1 − lr·weight_decay)·W − lr·m / (1−β₁ᵗ) / (√v / √(1−β₂ᵗ) + eps)
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 3e-3,
        *,
        betas: tuple[float, float] = (0.95, 0.99),
        gamma: float = 0.025,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "gamma": gamma, "eps": eps, "weight_decay": weight_decay})

    def _step_tensor(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2), rate = self.state[weight], group["betas"], group["lr"]
        number = count_step(state)
        average, second, before = (buffer(state, slot, gradient) for slot in ("exp_avg", "exp_avg_sq", "last_gradient"))
        corrected = (gradient - before).mul_(group["gamma"] * beta1 / (1 - beta1)).add_(gradient)
        corrected.div_(vector_norm(corrected).clamp_(min=1.0))
        before.copy_(gradient)
        average.lerp_(corrected, 1 - beta1)
        second.mul_(beta2).addcmul_(corrected, corrected, value=1 - beta2)
        divisor = (second.sqrt() / math.sqrt(1 - beta2**number)).add_(group["eps"])
        weight.mul_(1 - rate * group["weight_decay"])
        weight.addcdiv_(average, divisor, value=-rate / (1 - beta1**number))
