"""A stage that takes time and computes nothing: sleep in place of forward, backward and update, all else is real."""

import ctypes
import math
import random
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor

from headway.stages.data.microbatch import Microbatch
from headway.stages.schedule.next_op import WAIT, Wait
from headway.stages.schedule.operations import Backward, Forward, Op, Orthogonalize, Update
from headway.stages.schedule.schedule_state import ScheduleState
from headway.stages.spec import ModelSpec, TrainSpec
from headway.stages.stage.graph import StageGraph
from headway.stages.state.layer_state import LayerState


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepTimes:
    """Seconds of the operations of every stage."""

    forward_s: float
    backward_s: float
    update_s: float = 0.0
    jitter: float = 0.0
    """Standard deviation over mean of a log-normal factor; each operation has its own, by the seed."""
    straggling: float = 0.0
    """The probability with which an operation takes STRAGGLE times as long."""
    seed: int = 0

    def seconds(self, stage: int, op: Op) -> float:
        """Return the seconds of one operation: equal at any time, and in any order."""
        match op:
            case Forward():
                mean = self.forward_s
            case Backward():
                mean = self.backward_s
            case Update():
                mean = self.update_s
        if not self.jitter and not self.straggling:
            return mean
        draw = random.Random(f"{self.seed}/{stage}/{op}")
        variance = math.log1p(self.jitter**2)
        factor = draw.lognormvariate(-variance / 2, math.sqrt(variance))
        return mean * factor * (STRAGGLE if draw.random() < self.straggling else 1.0)

    def busiest_s(self, num_stages: int, batches: Iterable[int], num_microbatches: int) -> float:
        """Return the work of the busiest stage on these batches: the lower bound of every schedule."""
        batches = list(batches)
        return max(
            sum(
                sum(
                    self.seconds(stage, kind(batch, microbatch))
                    for microbatch in range(num_microbatches)
                    for kind in (Forward, Backward)
                )
                + self.seconds(stage, Update(batch))
                for batch in batches
            )
            for stage in range(num_stages)
        )


STRAGGLE = 8.0


class ZeroGraph(StageGraph):
    """Zeros of the right shapes, which nothing computes; updates are real, of tiny weights. `takes` is told of each."""

    def __init__(
        self,
        layers: Sequence[LayerState],
        model: ModelSpec,
        train: TrainSpec,
        *,
        is_first: bool,
        is_last: bool,
        **_: object,  # nothing is computed that could be timed, or drawn by a seed
    ) -> None:
        super().__init__(layers, model, train, is_first=is_first, is_last=is_last)
        self._versions: dict[tuple[int, int], int] = {}
        hidden = (train.microbatch_size, train.sequence_length, model.hidden_size)
        self._has_input_gradient = not is_first
        self._output = torch.zeros(()) if is_last else torch.zeros(hidden)
        self._input_gradient = torch.zeros(hidden)
        self._shapes = [tensor.shape for layer in layers for tensor in layer.versions.sets[0].values()]

    def takes(self, op: Op, began: float) -> None:
        """Let an operation that began then take its time."""
        raise NotImplementedError

    @property
    def is_empty(self) -> bool:
        return not self._versions

    def forward(self, key: tuple[int, int], rows: Microbatch, *, version: int) -> Tensor:  # noqa: ARG002
        self.takes(Forward(*key), perf_counter())
        self._versions[key] = version
        return self._output

    def evaluate(self, rows: Microbatch, *, version: int) -> Tensor:  # noqa: ARG002
        self.takes(Forward(0, 0), perf_counter())
        return self._output

    def backward(self, key: tuple[int, int], gradient: Tensor | None) -> tuple[list[Tensor], Tensor | None]:  # noqa: ARG002
        began = perf_counter()
        del self._versions[key]
        gradients = [torch.zeros(shape) for shape in self._shapes]
        self.takes(Backward(*key), began)
        return gradients, self._input_gradient if self._has_input_gradient else None

    def version_of(self, key: tuple[int, int]) -> int:
        return self._versions[key]

    def update(self, batch: int, gradients: Sequence[Tensor]) -> None:
        began = perf_counter()
        super().update(batch, gradients)
        self.takes(Update(batch), began)


class SleepingGraph(ZeroGraph):
    """Sleeps until the time of an operation is over."""

    def __init__(self, sleeps: SleepTimes, stage: int, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._sleeps = sleeps
        self._stage = stage

    def takes(self, op: Op, began: float) -> None:
        """Sleep for what is left of it."""
        if (left := began + self._sleeps.seconds(self._stage, op) - perf_counter()) > 0:
            sleep(left)


PR_SET_TIMERSLACK = 29
"""Of prctl(2)."""


def sleep_precisely() -> None:
    """Turn off timer slack in this thread: otherwise the kernel ends each sleep some 0.06 ms too late."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)


def sleeping_graph(sleeps: SleepTimes, stage: int, *arguments: Any, **more: Any) -> SleepingGraph:
    """Make the graph as the executor does, with the coming times."""
    sleep_precisely()
    return SleepingGraph(sleeps, stage, *arguments, **more)


class FixedOrder:
    """Chooses the operation of a fixed table; the executor waits for the table's next operation."""

    def __init__(self, table: Iterable[Op]) -> None:
        self._table = deque(table)

    def __call__(self, state: ScheduleState) -> Op | Wait:
        if not self._table or not _can_run(state, self._table[0]):
            return WAIT
        return self._table.popleft()


def _can_run(state: ScheduleState, op: Op) -> bool:
    schedule = state.schedule
    match op:
        case Forward(batch, microbatch):
            has_input = schedule.is_first or (batch, microbatch) in state.inputs
            return has_input and batch - schedule.delay <= state.version
        case Backward(batch, microbatch):
            return (batch, microbatch) in state.gradients
        case Orthogonalize():
            return state.is_share_ready
        case Update():
            return state.is_update_ready
