"""Sums the norm of the whole model's gradient, in an order that no cut of the pipeline changes.

A layer's square is the left fold of its parameters' squares in name order. The total is the left fold of the layers'
squares from the last layer to the first. All sums are in float64.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from headway.stages.spec import ROUTER_BIAS, TIED, ModelSpec
from headway.stages.sums import fold

EPSILON = 1e-6


@torch.no_grad()
def parameter_squares(gradients: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of squares of each of a layer's gradients, float64 [parameters], in name order."""
    return torch.stack([gradients[name].to(torch.float64, copy=True).square_().sum() for name in sorted(gradients)])


def counted_once(layer: str, gradients: Mapping[str, Tensor], model: ModelSpec) -> Mapping[str, Tensor]:
    """Return the gradients of a layer that count: a tied matrix counts at the embedding, a router's bias has none."""
    if layer == "head" and model.trains_tie:
        return {name: gradient for name, gradient in gradients.items() if name != TIED["head"]}
    if model.router_bias:
        return {name: gradient for name, gradient in gradients.items() if not name.endswith(ROUTER_BIAS)}
    return gradients


def layer_squares(of_parameters: Sequence[float], num_parameters: Sequence[int]) -> list[float]:
    """Return the layers' squares from those of their parameters, one layer after the other."""
    numbers = iter(of_parameters)
    return [fold(list(islice(numbers, count))) if count else 0.0 for count in num_parameters]


def clip_coefficient(total_square: float, clip_norm: float) -> float:
    """Return the factor for every gradient: min(1, clip / (norm + 1e-6))."""
    return min(1.0, clip_norm / (math.sqrt(total_square) + EPSILON))


class SquaresRelay:
    """A stage's part in the sum: its own layers' squares follow those of the stages downstream."""

    def __init__(self, *, is_last: bool) -> None:
        self._is_last = is_last
        self._own: dict[int, list[float]] = {}
        self._downstream: dict[int, list[float]] = {}

    @property
    def is_empty(self) -> bool:
        """Return whether no batch is half known."""
        return not (self._own or self._downstream)

    def expects_downstream(self, batch: int) -> bool:
        """Return whether squares from downstream would be the first for their batch."""
        return not self._is_last and batch not in self._downstream

    def add_own(self, batch: int, squares: list[float]) -> list[float] | None:
        """Add this stage's squares, last layer first. Returns all squares so far, once downstream's are known too."""
        self._own[batch] = squares
        return self._joined(batch)

    def add_downstream(self, batch: int, squares: list[float]) -> list[float] | None:
        """Add the squares of all stages downstream, last layer first. Returns all squares so far, once the own are
        known too.
        """
        self._downstream[batch] = squares
        return self._joined(batch)

    def _joined(self, batch: int) -> list[float] | None:
        if batch not in self._own or (batch not in self._downstream and not self._is_last):
            return None
        return self._downstream.pop(batch, []) + self._own.pop(batch)
