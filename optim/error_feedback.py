"""Error Feedback for a gradient that is one version old, at the level of the update.

Source: Zmushko et al., "One-Step Gradient Delay is Not a Barrier for Large-Scale Asynchronous Pipeline Parallel LLM
Pretraining", ICML 2026, arXiv 2606.30634. The rule and its derivation are in docs/numerics.md.
"""

import torch
from torch import Tensor

SLOT = "error_feedback"


class ErrorFeedback:
    """Adds the difference of two consecutive updates. State: δ_{b−1} by parameter name, in `deltas`.

    The inner optimizer went from W_b to W'. With δ_b = W_b − W' and c = α·delay:

        W_{b+1} = W' − c·(δ_b − δ_{b−1})        b ≥ 1
        W_{b+1} = W'                            b = 0

    At c = 0 it is inactive: not to be called, and it holds no state. `dtype` is that of the state alone: δ_{b−1} is
    rounded to it once, when it is stored.
    """

    def __init__(self, alpha: float, *, delay: int, dtype: torch.dtype = torch.float32) -> None:
        self.gain = alpha * delay
        self.dtype = dtype
        self.deltas: dict[str, Tensor] = {}

    @property
    def is_active(self) -> bool:
        """Return whether it changes anything."""
        return self.gain != 0.0

    @torch.no_grad()
    def correct(self, name: str, weight: Tensor, *, before: Tensor, update_index: int) -> None:
        """Turn `weight` from W' into W_{b+1} in place; `before` is W_b. Both are fp32, of the parameter's shape.

        Raises KeyError when δ_{b−1} is missing after update 0.
        """
        delta = before - weight
        if update_index == 0:
            self.deltas[name] = delta.to(self.dtype)
            return
        # One subtraction, one multiplication, one subtraction, each rounded: `sub(alpha=)` could become a fused
        # multiply-add on one machine and not on another. The buffer of δ_{b−1} holds each result in turn,
        # widened first if its dtype is narrow.
        last = self.deltas[name]
        correction = last.to(delta.dtype)
        torch.sub(delta, correction, out=correction)
        correction.mul_(self.gain)
        weight.sub_(correction)
        last.copy_(delta)
