"""A stage that is slower than its device: the knob with which tests make a straggler."""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor

from headway.stages.stage_graph import StageGraph


def graph_maker(slowdown: float, device: torch.device) -> Callable[..., StageGraph]:
    """What makes the graph of a stage that is so many times slower than its device; 1: as fast as that."""
    return StageGraph if slowdown == 1.0 else partial(SlowedGraph, slowdown=slowdown, device=device)


class SlowedGraph(StageGraph):
    """Every operation takes so many times as long; what it computes is the same. Neighbours hear of it afterwards."""

    def __init__(self, *arguments: Any, slowdown: float, device: torch.device, **more: Any) -> None:
        """slowdown: at least 1. The rest is StageGraph's."""
        super().__init__(*arguments, **more)
        self._further = slowdown - 1.0
        self._device = device

    def forward(self, key: tuple[int, int], inputs: Tensor, targets: Tensor, *, version: int) -> Tensor:
        """As the stage's own, later."""
        began = perf_counter()
        output = super().forward(key, inputs, targets, version=version)
        self._drag(began)
        return output

    def backward(self, key: tuple[int, int], gradient: Tensor | None) -> tuple[list[Tensor], Tensor | None]:
        """As the stage's own, later."""
        began = perf_counter()
        gradients = super().backward(key, gradient)
        self._drag(began)
        return gradients

    def update(self, batch: int, gradients: Sequence[Tensor]) -> None:
        """As the stage's own, later."""
        began = perf_counter()
        super().update(batch, gradients)
        self._drag(began)

    def _drag(self, began: float) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        sleep(self._further * (perf_counter() - began))
