"""The tokens of the first stage's microbatches, on their device when they are needed.

On a device that copies, a thread draws them ahead and begins their copies. A microbatch is a function of the job's
seed, its batch and its number, so that drawing ahead changes no token. A stop drops what was drawn beyond it.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from queue import Empty, Full, Queue
from typing import Final

import structlog
from torch import Tensor

from headway.stages.data.microbatch import Microbatch
from headway.stages.device.device import DeviceCopy, StageDevice
from headway.stages.errors import UnavailableError
from headway.stages.stage.content import MicrobatchSource
from headway.stages.stage.context import StageContext

log = structlog.get_logger()

MOST_AHEAD: Final = 4
"""Microbatches that are drawn before they are needed."""
CLOSING_S: Final = 10.0
STEP_S: Final = 0.5
"""Time after which a thread that cannot go on looks whether it is still wanted."""


@dataclass(frozen=True, slots=True)
class _OnTheWay:
    """Rows on their way to the device."""

    copy: DeviceCopy
    """Of what this stage reads."""
    passing: tuple[Tensor, ...]
    """Targets that only pass through this stage: they stay in host memory."""

    def taken(self) -> Microbatch:
        return Microbatch.of((*self.copy.take(), *self.passing))


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A microbatch, and the held-out one that is computed beside it."""

    rows: _OnTheWay
    held_out: _OnTheWay | None


class DrawnTokens:
    """Of one run. `take` belongs to the thread that computes."""

    def __init__(self, source: MicrobatchSource, context: StageContext, device: StageDevice) -> None:
        self._source = source
        self._context = context
        self._device = device
        self._microbatches = context.schedule.held_microbatches
        """Those of each batch that this worker computes, in its order."""
        self._ahead: Queue[tuple[int, int, _Drawn] | BaseException] = Queue(MOST_AHEAD)
        self._is_wanted = True
        self._thread: threading.Thread | None = None

    def take(self, batch: int, microbatch: int) -> tuple[Microbatch, Microbatch | None]:
        """Return a microbatch, the next one in order, and the held-out one of its number if the batch is evaluated.

        The targets are on the device if this stage reads them. Raises what the source raises.
        """
        drawn = self._next(batch, microbatch)
        return drawn.rows.taken(), None if drawn.held_out is None else drawn.held_out.taken()

    def take_held_out(self, microbatch: int) -> Microbatch:
        """Return a microbatch of an evaluation that is computed by itself: no other one is taken any more."""
        self.close()
        return self._on_the_way(self._source.held_out(self._context.train, microbatch)).taken()

    def _next(self, batch: int, microbatch: int) -> _Drawn:
        if self._device.is_immediate:
            return self._draw(batch, microbatch)
        if self._thread is None:
            self._thread = threading.Thread(target=self._draw_all, args=(batch,), name="headway-tokens", daemon=True)
            self._thread.start()
        try:
            drawn = self._ahead.get(timeout=self._context.patience_s)
        except Empty:
            raise UnavailableError("the data", f"no tokens came for {self._context.patience_s:g} s") from None
        if isinstance(drawn, BaseException):
            raise drawn
        assert drawn[:2] == (batch, microbatch), f"microbatch {drawn[:2]} was drawn, {(batch, microbatch)} is next"
        return drawn[2]

    def close(self) -> None:
        """End the thread; what was drawn ahead is dropped. Idempotent."""
        self._is_wanted = False
        thread, self._thread = self._thread, None
        if thread is not None:
            while not self._ahead.empty():
                self._ahead.get_nowait()
            thread.join(CLOSING_S)
            if thread.is_alive():
                log.warning("tokens.thread_left", waits_for="a read of the data", waited_s=CLOSING_S)

    def _draw(self, batch: int, microbatch: int) -> _Drawn:
        train, seed = self._context.train, self._context.seed
        rows = self._on_the_way(self._source.microbatch(train, seed=seed, batch=batch, microbatch=microbatch))
        if not train.evaluates(batch, microbatch):
            return _Drawn(rows, None)
        return _Drawn(rows, self._on_the_way(self._source.held_out(train, microbatch)))

    def _on_the_way(self, rows: Microbatch) -> _OnTheWay:
        if self._context.is_last:
            return _OnTheWay(self._device.copy_in(rows.tensors), ())
        return _OnTheWay(self._device.copy_in(rows.read_by_all), rows.read_by_last)

    def _draw_all(self, first_batch: int) -> None:
        """Draw until nobody wants more. An error is the last thing that is handed over."""
        try:
            for batch, microbatch in self._order(first_batch):
                if not self._hand_over((batch, microbatch, self._draw(batch, microbatch))):
                    return
        except BaseException as error:  # the thread that computes raises it
            self._hand_over(error)

    def _order(self, first_batch: int) -> Iterator[tuple[int, int]]:
        for batch in count(first_batch):
            if batch >= self._context.train.batches:
                return
            for microbatch in self._microbatches:
                yield batch, microbatch

    def _hand_over(self, drawn: tuple[int, int, _Drawn] | BaseException) -> bool:
        """Return whether more is wanted."""
        while self._is_wanted:
            try:
                self._ahead.put(drawn, timeout=STEP_S)
            except Full:
                continue
            return True
        return False
