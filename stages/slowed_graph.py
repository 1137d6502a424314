"""A stage that is slower than its device: the knob with which tests make a straggler."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter, sleep
from typing import Any, Final

import torch
from torch import Tensor

from headway.stages.stage_graph import StageGraph

NUM_RECENT: Final = 16


class Pace:
    """How long a device rests after one kind of operation, to be so many times slower.

    It is slowed by what the operation usually takes here, the lower quartile of the newest: what another process of
    this machine takes from one operation, no other device would take from it, and it is not multiplied.
    """

    def __init__(self, slowdown: float) -> None:
        """slowdown: at least 1."""
        self._slowdown = slowdown
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)

    def rest_s(self, taken_s: float) -> float:
        """After an operation that took so long."""
        self._recent.append(taken_s)
        usual_s = sorted(self._recent)[len(self._recent) // 4]
        return max(0.0, self._slowdown * usual_s - taken_s)


def graph_maker(slowdown: float, device: torch.device) -> Callable[..., StageGraph]:
    """What makes the graph of a stage that is so many times slower than its device; 1: as fast as that."""
    return StageGraph if slowdown == 1.0 else partial(SlowedGraph, slowdown=slowdown, device=device)


class SlowedGraph(StageGraph):
    """Every operation takes so many times as long; what it computes is the same. Neighbours hear of it afterwards."""

    def __init__(self, *arguments: Any, slowdown: float, device: torch.device, **more: Any) -> None:
        """slowdown: at least 1. The rest is StageGraph's."""
        super().__init__(*arguments, **more)
        self._paces: defaultdict[str, Pace] = defaultdict(lambda: Pace(slowdown))
        self._device = device

    def forward(self, key: tuple[int, int], inputs: Tensor, targets: Tensor, *, version: int) -> Tensor:
        """As the stage's own, later."""
        began = perf_counter()
        output = super().forward(key, inputs, targets, version=version)
        self._drag("forward", began)
        return output

    def backward(self, key: tuple[int, int], gradient: Tensor | None) -> tuple[list[Tensor], Tensor | None]:
        """As the stage's own, later."""
        began = perf_counter()
        gradients = super().backward(key, gradient)
        self._drag("backward", began)
        return gradients

    def update(self, batch: int, gradients: Sequence[Tensor]) -> None:
        """As the stage's own, later."""
        began = perf_counter()
        super().update(batch, gradients)
        self._drag("update", began)

    def _drag(self, kind: str, began: float) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        sleep(self._paces[kind].rest_s(perf_counter() - began))
