"""LionMuon: steps of Muon and of Lion in turn, from one momentum.

Source: Riabinin et al., "LionMuon: Alternating Spectral and Sign Descent for Efficient Training", 2026, arXiv
2605.19811, with a period of 2: Muon in even updates, as in the authors' code, which has the scale of Muon's step too.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from headway.optim.eager import EagerOptimizer, buffer, count_step, matrix_only
from headway.optim.muon import NUM_STEPS, iteration, orthogonalize, shape_scale
from headway.optim.spec import Coefficients


class LionMuon(EagerOptimizer):
    """Steps whole matrices [rows, cols] in place; state: `exp_avg` of each, and the count of steps.

        u = β₁·m + (1−β₁)·g
        even updates: W ← (1 − lr·weight_decay)·W − lr·0.2·√max(rows, cols)·orthogonalize(u)
        odd ones:     W ← (1 − s·weight_decay)·W − s·sign(u), s = sign_share·lr
        m ← β₂·m + (1−β₂)·g

    Raises ValueError when a gradient is not a matrix.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 3e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.1,
        sign_share: float = 0.01,
        newton_schulz_dtype: str = "float32",
        newton_schulz_steps: int = NUM_STEPS,
        newton_schulz_coefficients: Coefficients = "quintic",
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "weight_decay": weight_decay,
                "sign_share": sign_share,
                "newton_schulz_dtype": getattr(torch, newton_schulz_dtype),
                "newton_schulz_steps": newton_schulz_steps,
                "newton_schulz_coefficients": newton_schulz_coefficients,
            },
        )

    def _step_tensor(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        matrix_only(gradient, "LionMuon")
        state, (beta1, beta2), rate = self.state[weight], group["betas"], group["lr"]
        average = buffer(state, "exp_avg", gradient)
        direction, scale = average.lerp(gradient, 1 - beta1), 1.0
        if count_step(state) % 2 == 1:  # the first step is that of update 0
            direction = orthogonalize(direction, **iteration(group))
            scale = shape_scale(*weight.shape, adjust_lr="match_rms_adamw")
        else:
            direction.sign_()
            rate *= group["sign_share"]
        weight.mul_(1 - rate * group["weight_decay"])
        weight.add_(direction, alpha=-rate * scale)
        average.lerp_(gradient, 1 - beta2)
