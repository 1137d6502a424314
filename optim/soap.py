"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner.

Source: Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", 2024, arXiv 2409.11321, algorithm 3, with
what the authors' code adds: the first gradient only sets the bases, and the eigenvalues' order is kept falling.
"""

import math
from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor

from headway.optim.eager import EagerOptimizer, buffer, count_step, matrix_only
from headway.optim.spec import SIDES
from headway.optim.step_count import STEPS


class Soap(EagerOptimizer):
    """Steps whole matrices [rows, cols] in place. State of each: `exp_avg`, `exp_avg_sq`, the count of steps, and of
    each side that is no longer than `max_precondition_dim`, `gram_<side>` and `basis_<side>` [side, side].

        update 0:       L ← (1−β₂)·g·gᵀ;  R ← (1−β₂)·gᵀ·g;  P, Q ← their eigenvectors; W stays
        update t ≥ 1:   m ← β₁·m + (1−β₁)·g;  v ← β₂·v + (1−β₂)·(Pᵀ·g·Q)²
                        U = P·((Pᵀ·m·Q) / (√v + eps))·Qᵀ
                        W ← (1 − lr·weight_decay)·W − lr·√(1−β₂ᵗ)/(1−β₁ᵗ)·U
                        L ← β₂·L + (1−β₂)·g·gᵀ;  R ← β₂·R + (1−β₂)·gᵀ·g
        each t that `precondition_frequency` divides: the columns of P, and the rows of v, in the order of falling
                        diagonal of Pᵀ·L·P;  P ← the orthogonal factor of L·P; the same of Q, columns of v, and R

    A longer side is not rotated. Raises ValueError when a gradient is not a matrix.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 3e-3,
        *,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        precondition_frequency: int = 10,
        max_precondition_dim: int = 10_000,
    ) -> None:
        bases = {"precondition_frequency": precondition_frequency, "max_precondition_dim": max_precondition_dim}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **bases})

    def _step_tensor(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        matrix_only(gradient, "SOAP")
        state, (_, beta2) = self.state[weight], group["betas"]
        update_index = count_step(state) - 1
        average, second = buffer(state, "exp_avg", gradient), buffer(state, "exp_avg_sq", gradient)
        if update_index > 0:
            self._step_rotated(weight, gradient, average, second, update_index, group)
        for dim, side in enumerate(SIDES):
            if weight.size(dim) <= group["max_precondition_dim"]:
                gram = _summed(state, f"gram_{side}", gradient if dim == 0 else gradient.mT, beta2)
                if update_index == 0:
                    state[f"basis_{side}"] = _eigenvectors(gram)
                elif update_index % group["precondition_frequency"] == 0:
                    _turn(state[f"basis_{side}"], gram, second, dim)
                STEPS.num_done += 1

    def _step_rotated(
        self, weight: Tensor, gradient: Tensor, average: Tensor, second: Tensor, number: int, group: dict[str, Any]
    ) -> None:
        state, (beta1, beta2), rate = self.state[weight], group["betas"], group["lr"]
        rotated = _rotated(gradient, state)
        average.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
        update = _rotated_back(_rotated(average, state).div_(second.sqrt().add_(group["eps"])), state)
        weight.mul_(1 - rate * group["weight_decay"])
        weight.add_(update, alpha=-rate * math.sqrt(1 - beta2**number) / (1 - beta1**number))


def _summed(state: MutableMapping[str, Any], slot: str, gradient: Tensor, beta2: float) -> Tensor:
    """Add the products of a gradient's rows to their running mean, and return that."""
    product = gradient @ gradient.mT
    return buffer(state, slot, product).lerp_(product, 1 - beta2)


def _rotated(matrix: Tensor, state: MutableMapping[str, Any]) -> Tensor:
    """Return Pᵀ·X·Q in a new tensor."""
    found = state["basis_rows"].mT @ matrix if "basis_rows" in state else matrix.clone()
    return found @ state["basis_cols"] if "basis_cols" in state else found


def _rotated_back(matrix: Tensor, state: MutableMapping[str, Any]) -> Tensor:
    """Return P·X·Qᵀ."""
    found = state["basis_rows"] @ matrix if "basis_rows" in state else matrix
    return found @ state["basis_cols"].mT if "basis_cols" in state else found


def _eigenvectors(gram: Tensor) -> Tensor:
    """Return the eigenvectors as columns, in the order of falling eigenvalues."""
    if not gram.isfinite().all():  # eigh would raise; as under any optimizer, the loss will tell
        return torch.full_like(gram, torch.nan)
    found: Tensor = torch.linalg.eigh(gram).eigenvectors
    return found.flip(1).contiguous()


def _turn(basis: Tensor, gram: Tensor, second: Tensor, dim: int) -> None:
    """Do one step of power iteration in place, with the second moment's rows or columns in the basis' new order."""
    product = gram @ basis
    order = (basis * product).sum(0).argsort(descending=True, stable=True)
    second.copy_(second.index_select(dim, order))
    basis.copy_(torch.linalg.qr(product.index_select(1, order)).Q)
