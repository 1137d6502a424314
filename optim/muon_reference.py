"""The slow oracle of muon.py: one matrix, a new tensor for every line, nothing in place."""

import math

import torch
from torch import Tensor

from headway.optim.newton_schulz_reference import orthogonalize_reference


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
