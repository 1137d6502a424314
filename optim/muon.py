"""Muon: momentum, then orthogonalisation, for the matrices inside a block.

Source: Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/, with the decoupled weight decay of Liu et al.,
"Muon is Scalable for LLM Training", 2025, arXiv 2502.16982. Same rule as torch.optim.Muon with
`adjust_lr_fn="original"`; in bfloat16 the same operations, so the same bits.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from headway.optim.newton_schulz import NUM_STEPS, orthogonalize


class Muon(Optimizer):
    """Steps whole matrices [rows, cols] in place; state: `momentum_buffer` of each, in the gradient's dtype.

        m ← μ·m + (1−μ)·g
        u = (1−μ)·g + μ·m  (Nesterov) or m
        W ← (1 − lr·weight_decay)·W − lr·√max(1, rows/cols)·orthogonalize(u)

    Raises ValueError when a gradient is not a matrix.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 3e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        newton_schulz_dtype: torch.dtype = torch.float32,
        newton_schulz_steps: int = NUM_STEPS,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "newton_schulz_dtype": newton_schulz_dtype,
                "newton_schulz_steps": newton_schulz_steps,
            },
        )

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_matrix(parameter, parameter.grad, group)
        return loss

    def _step_matrix(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        # One matrix at a time. To batch equal shapes, gather the directions here and orthogonalise the stack:
        # within one layer only, or the bits would depend on where the model is cut.
        if gradient.ndim != 2:
            raise ValueError(f"Muon steps matrices, not a parameter of shape {list(gradient.shape)}")
        momentum: float = group["momentum"]
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.contiguous_format)
        buffer: Tensor = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        update = orthogonalize(direction, steps=group["newton_schulz_steps"], dtype=group["newton_schulz_dtype"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(update, alpha=-group["lr"] * shape_scale(*gradient.shape))


def shape_scale(rows: int, cols: int) -> float:
    """√max(1, rows/cols): what the rate of a tall matrix is multiplied by."""
    return math.sqrt(max(1, rows / cols))
