"""NorMuon: Muon, whose orthogonalised rows are brought to one size by a running mean of their squares.

Source: Li et al., "NorMuon: Making Muon more efficient and scalable", 2025, arXiv 2510.05491. The size of the whole
update is that of the authors' code: Muon's own, so a rate means what it means for Muon. Their algorithm 1 has an update
of 0.2 a root mean square instead.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from headway.optim.muon import Muon


class NorMuon(Muon):
    """Steps whole matrices [rows, cols] in place; state: Muon's, and `row_mean_sq` [rows, 1] of each.

        X = orthogonalize(u) as Muon has it, in float32
        v ← β₂·v + (1−β₂)·(mean of each row of X²)
        Y = X / (√v + eps)
        W ← (1 − lr·weight_decay)·W − lr·r·(‖X‖ / (‖Y‖ + eps))·Y, r as Muon has it

    Raises ValueError when a gradient is not a matrix.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float = 3e-3, *, beta2: float = 0.95, eps: float = 1e-8, **of_muon: Any
    ) -> None:
        super().__init__(params, lr, **of_muon)
        for group in self.param_groups:
            group.update(beta2=beta2, eps=eps)

    def _apply(self, weight: Tensor, update: Tensor, group: dict[str, Any]) -> None:
        state, eps = self.state[weight], group["eps"]
        update = update.to(weight.dtype)
        if "row_mean_sq" not in state:
            state["row_mean_sq"] = torch.zeros_like(weight[:, :1], memory_format=torch.contiguous_format)
        mean: Tensor = state["row_mean_sq"]
        mean.lerp_(update.square().mean(dim=1, keepdim=True), 1 - group["beta2"])
        scaled = update / (mean.sqrt() + eps)
        scaled.mul_(vector_norm(update) / (vector_norm(scaled) + eps))
        super()._apply(weight, scaled, group)
