"""Other forms of Error Feedback than a job has, each in place of `ErrorFeedback` in the simulated loop.

All of them correct by the difference of two consecutive updates, and differ in the factor, or in what an update is.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from headway.optim.layer_optimizer import ErrorFeedback
from headway.optim.routing import Group, route
from headway.optim.spec import OptimSpec

Make = Callable[[str, OptimSpec, int], ErrorFeedback]
"""Returns the correction of a layer, by its name, for a delay of one and so many updates."""


class Correction(ErrorFeedback):
    """Error Feedback of a delay of one, at α = 1. It goes on where the factor is 0 for once."""

    def __init__(self) -> None:
        super().__init__(1.0, delay=1)

    @property
    def is_active(self) -> bool:
        return True


class Weighted(Correction):
    """The factor is a function of the update and of the parameter."""

    def __init__(self, layer: str, optim: OptimSpec, num_batches: int, alpha: "Alpha") -> None:
        super().__init__()
        self._layer, self._alpha = layer, alpha
        self._factor, self._num_batches = optim.rate_factors(num_batches), num_batches

    @torch.no_grad()
    def correct(self, name: str, weight: Tensor, *, before: Tensor, update_index: int) -> None:
        group = route(self._layer, name, weight)
        self.gain = self._alpha(group, self._factor(update_index), (update_index + 1) / self._num_batches)
        super().correct(name, weight, before=before, update_index=update_index)


Alpha = Callable[[Group, float, float], float]
"""α by the parameter's group, the schedule's factor of the rate, and the share of the updates that are done."""


@dataclass
class Running:
    """Running means over the updates of one parameter: of ⟨δ_b, δ_{b−1}⟩ and of ⟨δ_{b−1}, δ_{b−1}⟩."""

    both: float = 0.0
    last: float = 0.0


@dataclass
class Correlation:
    """The factor with which the last update predicts the next one best, least squares over the latest ones."""

    of: dict[str, Running] = field(default_factory=dict)

    def alpha(self, name: str, delta: Tensor, last: Tensor) -> float:
        """Return the factor after one more pair of updates."""
        known = self.of.setdefault(name, Running())
        known.both = MEMORY * known.both + torch.sum(delta * last).item()
        known.last = MEMORY * known.last + torch.sum(last * last).item()
        return min(1.0, max(0.0, known.both / known.last)) if known.last else 0.0


MEMORY: Final = 0.95


class Adaptive(Correction):
    """The factor follows the correlation of consecutive updates, parameter by parameter."""

    def __init__(self) -> None:
        super().__init__()
        self._correlation = Correlation()

    @torch.no_grad()
    def correct(self, name: str, weight: Tensor, *, before: Tensor, update_index: int) -> None:
        if update_index:
            self.gain = self._correlation.alpha(name, before - weight, self.deltas[name])
        super().correct(name, weight, before=before, update_index=update_index)


class FromZero(Correction):
    """The first update is corrected too, by the difference from none: u_{−1} = 0, as in the paper."""

    @torch.no_grad()
    def correct(self, name: str, weight: Tensor, *, before: Tensor, update_index: int) -> None:
        self.deltas.setdefault(name, torch.zeros_like(weight))
        super().correct(name, weight, before=before, update_index=update_index + 1)


class WithoutDecay(Correction):
    """Weight decay is no part of an update: it reads the weights themselves, which are never late."""

    def __init__(self, layer: str, optim: OptimSpec, num_batches: int) -> None:
        super().__init__()
        self._layer, self._optim, self._factor = layer, optim, optim.rate_factors(num_batches)

    @torch.no_grad()
    def correct(self, name: str, weight: Tensor, *, before: Tensor, update_index: int) -> None:
        group = self._optim.matrices if route(self._layer, name, weight) is Group.MATRICES else self._optim.rest
        decay = before * (group.lr * self._factor(update_index) * group.weight_decay)
        weight.add_(decay)
        super().correct(name, weight, before=before, update_index=update_index)
        weight.sub_(decay)


class LookedBack(Correction):
    """The last update ends at the point that gradients are taken near, and not one update ahead of it."""

    def __init__(self, num_batches: int) -> None:
        super().__init__()
        self._last_update = num_batches - 1

    @torch.no_grad()
    def correct(self, name: str, weight: Tensor, *, before: Tensor, update_index: int) -> None:
        super().correct(name, weight, before=before, update_index=update_index)
        if update_index == self._last_update:
            weight.add_(self.deltas[name])


def _weighted(alpha: Alpha) -> Make:
    return lambda layer, optim, num_batches: Weighted(layer, optim, num_batches, alpha)


CORRECTIONS: Final[dict[str, Make]] = {
    "α 0.5": _weighted(lambda _group, _factor, _done: 0.5),
    "α 0.75": _weighted(lambda _group, _factor, _done: 0.75),
    "α 1.5": _weighted(lambda _group, _factor, _done: 1.5),
    "matrices only": _weighted(lambda group, _factor, _done: float(group is Group.MATRICES)),
    "rest only": _weighted(lambda group, _factor, _done: float(group is Group.REST)),
    "matrices 1, rest 0.5": _weighted(lambda group, _factor, _done: 1.0 if group is Group.MATRICES else 0.5),
    "matrices 1, rest 1.5": _weighted(lambda group, _factor, _done: 1.0 if group is Group.MATRICES else 1.5),
    "α as the rate": _weighted(lambda _group, factor, _done: factor),
    "off in the second half": _weighted(lambda _group, _factor, done: float(done <= 0.5)),
    "off in the last fifth": _weighted(lambda _group, _factor, done: float(done <= 0.8)),
    "α by correlation": lambda _layer, _optim, _num_batches: Adaptive(),
    "first update corrected": lambda _layer, _optim, _num_batches: FromZero(),
    "decay left out": WithoutDecay,
    "ends before the look-ahead": lambda _layer, _optim, num_batches: LookedBack(num_batches),
}
