"""The slow oracle of muon.py: one matrix, a new tensor for every line, nothing in place."""

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

Triples = Sequence[tuple[float, float, float]]
QUINTIC: Final = (3.4445, -4.7750, 2.0315)
POLAR_EXPRESS: Final[Triples] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
"""As published, without the margin of 1 % that each of these has for rounding."""


def triples_of(coefficients: str, steps: int) -> Triples:
    """a, b and c of each step."""
    if coefficients == "quintic":
        return [QUINTIC] * steps
    safe = [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in POLAR_EXPRESS]
    return [safe[step] if step < len(safe) else (1.875, -1.25, 0.375) for step in range(steps)]


def orthogonalize_reference(
    matrix: Tensor, *, steps: int = 5, dtype: torch.dtype = torch.float32, coefficients: str = "quintic"
) -> Tensor:
    """Orthogonalise one matrix [rows, cols], in the operations that define the bits of `orthogonalize`. Result in
    `dtype`.
    """
    rows, cols = matrix.shape
    x = matrix.to(dtype)
    if rows > cols:
        x = x.T
    norm = x.norm() * 1.01 if coefficients == "polar_express" else x.norm()
    x = x / norm.clamp(min=1e-7)
    for a, b, c in triples_of(coefficients, steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if rows > cols else x


def orthogonalize_by_singular_values(matrix: Tensor, *, steps: int = 5, coefficients: str = "quintic") -> Tensor:
    """Orthogonalise in float64 without a matrix iteration: the polynomial is applied to each singular value.

    An odd polynomial of X acts on the singular values alone and leaves both bases unchanged. Result in float64.
    """
    u, singular_values, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = singular_values / singular_values.square().sum().sqrt().clamp(min=1e-7)
    s = s / 1.01 if coefficients == "polar_express" else s
    for a, b, c in triples_of(coefficients, steps):
        s = a * s + b * s**3 + c * s**5
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
    newton_schulz_coefficients: str,
    adjust_lr: str,
) -> tuple[Tensor, Tensor]:
    """Turn W and m [rows, cols] before a step into (W, m) after it. Bit for bit the result of `Muon.step`."""
    rows, cols = weight.shape
    new_buffer = torch.lerp(momentum_buffer, gradient, 1 - momentum)
    direction = torch.lerp(gradient, new_buffer, momentum) if nesterov else new_buffer
    update = orthogonalize_reference(
        direction, steps=newton_schulz_steps, dtype=newton_schulz_dtype, coefficients=newton_schulz_coefficients
    )
    decayed = weight * (1 - lr * weight_decay)
    factors = {"original": math.sqrt(max(1, rows / cols)), "match_rms_adamw": 0.2 * math.sqrt(max(rows, cols))}
    new_weight = torch.add(decayed, update, alpha=-lr * factors[adjust_lr])
    return new_weight, new_buffer
