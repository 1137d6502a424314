"""A stage whose layers take a minimum time that a test sets, by a fault point at each layer's forward and backward."""

from collections.abc import Callable
from functools import partial
from time import perf_counter, sleep
from typing import Any

from torch import Tensor, nn

from headway.daemon.fault_points import PACE, register_action
from headway.stages.data.microbatch import Microbatch
from headway.stages.stage.graph import StageGraph


class PacedGraph(StageGraph):
    """Computes the same bits as a StageGraph.

    The minimum time starts when the operation is called, and each layer adds its seconds. So other processes of this
    machine delay an operation only if they cost it more time than it would rest.

    """

    def __init__(self, *arguments: Any, on_layer: Callable[[str, str], None], **more: Any) -> None:
        """on_layer: receives `forward` or `backward` and the layer's name. The other arguments are StageGraph's."""
        super().__init__(*arguments, **more)
        self._due = 0.0
        register_action(PACE, self._rest)
        for modules in self._modules:
            for layer, module in zip(self._layers, modules, strict=True):
                module.register_forward_hook(partial(_computed, on_layer, str(layer.name)))

    def forward(self, key: tuple[int, int], rows: Microbatch, *, version: int) -> Tensor:
        """Compute the stage's forward, not faster than its layers' minimum times."""
        self._due = perf_counter()
        return super().forward(key, rows, version=version)

    def backward(self, key: tuple[int, int], gradient: Tensor | None) -> tuple[list[Tensor], Tensor | None]:
        """Compute the stage's backward, not faster than its layers' minimum times."""
        self._due = perf_counter()
        return super().backward(key, gradient)

    def _rest(self, seconds: float) -> None:
        self._due += seconds
        if (left := self._due - perf_counter()) > 0:
            sleep(left)


def _computed(
    on_layer: Callable[[str, str], None], layer: str, _module: nn.Module, _inputs: object, output: Tensor
) -> Tensor:
    """A forward hook. The view runs it after the hooks on the layer's output, because the layer above ends first."""
    on_layer("forward", layer)
    if output.requires_grad:
        output.register_hook(lambda _gradient: on_layer("backward", layer))  # type: ignore[no-untyped-call]
    return output.view_as(output)
