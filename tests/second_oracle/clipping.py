"""The global gradient norm and what it does to a gradient (docs/numerics.md, section 3)."""

from math import sqrt

import torch

from tests.second_oracle.initial_weights import Weights


def clipped(gradient: Weights, *, clip_norm: float, is_tied: bool) -> Weights:
    """The gradient, scaled down to a norm of at most clip_norm; 0 leaves it alone. is_tied: two copies count once."""
    if clip_norm <= 0:
        return gradient
    coefficient = torch.tensor(min(1.0, clip_norm / (norm(gradient, is_tied=is_tied) + 1e-6)), dtype=torch.float32)
    return {
        layer: {name: tensor * coefficient for name, tensor in parameters.items()}
        for layer, parameters in gradient.items()
    }


def norm(gradient: Weights, *, is_tied: bool) -> float:
    """Layers from the last to the first, each the fold of its parameters by name. Plain `+`: `sum` compensates."""
    total = None
    for layer in reversed(list(gradient)):
        square = None
        for name in sorted(gradient[layer]):
            if (is_tied and name == "lm_head.weight") or name == "mlp.gate.e_score_correction_bias":
                continue
            pieces = torch.split(gradient[layer][name].flatten(), 2**20)
            term = pieces[0].double().square().sum().item()
            for piece in pieces[1:]:
                term = term + piece.double().square().sum().item()
            square = term if square is None else square + term
        square = 0.0 if square is None else square
        total = square if total is None else total + square
    assert total is not None
    return sqrt(total)
