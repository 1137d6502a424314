"""The plain loop with layers that take a set time, as `daemon/worker/stage_records.py` has them in a worker."""

from time import perf_counter, sleep
from typing import Any
from unittest import mock

from torch import Tensor, nn

from headway.stages.model.decoder import build_layer

FIRST_LAYER = "embed"


class Pace:
    """One clock for all layers: an operation that is late makes the next one no later."""

    def __init__(self, layer_s: float) -> None:
        self._layer_s = layer_s
        self._due = 0.0

    def build(self, name: str, *arguments: Any, **more: Any) -> nn.Module:
        """Build a layer whose forward takes `layer_s`, and whose backward takes twice as long."""
        layer = build_layer(name, *arguments, **more)
        if name == FIRST_LAYER:
            layer.register_forward_pre_hook(lambda *_: self._begin())
        layer.register_forward_hook(self._computed)
        return layer

    def _begin(self) -> None:
        self._due = perf_counter()

    def _computed(self, _module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        self._rest(self._layer_s)
        if output.requires_grad:
            output.register_hook(lambda _gradient: self._rest(2 * self._layer_s))  # type: ignore[no-untyped-call]
        return output.view_as(output)

    def _rest(self, seconds: float) -> None:
        self._due += seconds
        if (left := self._due - perf_counter()) > 0:
            sleep(left)


def pace_loop(layer_s: float) -> None:
    """Let `reference` take a set time in this process from now on."""
    mock.patch("headway.daemon.local.reference_loop.build_layer", Pace(layer_s).build).start()
