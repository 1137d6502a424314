"""A stage that computes what it should and takes a fixed time for it: the cores of this machine do not set the pace."""

from collections.abc import Sequence
from time import perf_counter, sleep
from typing import Any

from torch import Tensor

from headway.stages.data.microbatch import Microbatch
from headway.stages.schedule.operations import Backward, Forward, Op, Update
from headway.stages.stage.graph import StageGraph
from rigs.emulated_stage import SleepTimes


class PacedGraph(StageGraph):
    """Every operation ends when its time is over, or later if computing took longer. Its results are the true ones."""

    def __init__(self, paces: SleepTimes, stage: int, *arguments: Any, **more: Any) -> None:
        """paces, stage: how long each operation takes. The rest is StageGraph's."""
        super().__init__(*arguments, **more)
        self._paces = paces
        self._stage = stage

    def forward(self, key: tuple[int, int], rows: Microbatch, *, version: int) -> Tensor:
        """As the stage's own."""
        began = perf_counter()
        output = super().forward(key, rows, version=version)
        self._rest(Forward(*key), began)
        return output

    def backward(self, key: tuple[int, int], gradient: Tensor | None) -> tuple[list[Tensor], Tensor | None]:
        """As the stage's own."""
        began = perf_counter()
        gradients = super().backward(key, gradient)
        self._rest(Backward(*key), began)
        return gradients

    def update(self, batch: int, gradients: Sequence[Tensor]) -> None:
        """As the stage's own."""
        began = perf_counter()
        super().update(batch, gradients)
        self._rest(Update(batch), began)

    def _rest(self, op: Op, began: float) -> None:
        if (left := began + self._paces.seconds(self._stage, op) - perf_counter()) > 0:
            sleep(left)
