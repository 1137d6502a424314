"""The correction by the difference of two updates (docs/numerics.md, section 6)."""

import torch
from torch import Tensor


class ErrorFeedback:
    """The last update of one parameter."""

    def __init__(self, alpha: float, delay: int, k: int, dtype: str) -> None:
        self.gain = alpha * delay
        self.k = k
        self.dtype = getattr(torch, dtype)
        self.last: Tensor | None = None

    def corrected(self, b: int, before: Tensor, after: Tensor) -> Tensor:
        """W_{b+1}, from W_b and from what the inner optimizer made of it. Three rounded operations in float32."""
        update = before - after
        last, self.last = self.last, update.to(self.dtype).float()
        if self.gain == 0 or b <= self.k or last is None:
            return after
        return after - torch.tensor(self.gain, dtype=torch.float32) * (update - last)
