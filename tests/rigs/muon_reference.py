"""The slow oracle of muon.py: one matrix, a new tensor for every line, nothing in place."""

import math

import torch
from torch import Tensor


def orthogonalize_reference(matrix: Tensor, *, steps: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    """Orthogonalise one matrix [rows, cols], in the operations that define the bits of `orthogonalize`. Result in
    `dtype`.
    """
    rows, cols = matrix.shape
    x = matrix.to(dtype)
    if rows > cols:
        x = x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, polynomial, x, beta=3.4445)
    return x.T if rows > cols else x


def orthogonalize_by_singular_values(matrix: Tensor, *, steps: int = 5) -> Tensor:
    """Orthogonalise in float64 without a matrix iteration: the polynomial is applied to each singular value.

    An odd polynomial of X acts on the singular values alone and leaves both bases unchanged. Result in float64.
    """
    u, singular_values, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = singular_values / singular_values.square().sum().sqrt().clamp(min=1e-7)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    orthogonalized: Tensor = u * s @ vh
    return orthogonalized


def muon_reference(
    weight: Tensor,
    momentum_buffer: Tensor,
    gradient: Tensor,
    *,
    lr: float,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    newton_schulz_dtype: torch.dtype,
    newton_schulz_steps: int,
) -> tuple[Tensor, Tensor]:
    """Turn W and m [rows, cols] before a step into (W, m) after it. Bit for bit the result of `Muon.step`."""
    rows, cols = weight.shape
    new_buffer = torch.lerp(momentum_buffer, gradient, 1 - momentum)
    direction = torch.lerp(gradient, new_buffer, momentum) if nesterov else new_buffer
    update = orthogonalize_reference(direction, steps=newton_schulz_steps, dtype=newton_schulz_dtype)
    decayed = weight * (1 - lr * weight_decay)
    new_weight = torch.add(decayed, update, alpha=-lr * math.sqrt(max(1, rows / cols)))
    return new_weight, new_buffer
