"""The operations that a stage has launched and its device has not done yet, and who hears of what the device does.

The host may be MOST_AHEAD operations ahead: enough that the device never waits for a launch, and few enough that what
the stage says of itself is true.
"""

from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import Final, Protocol

from headway.stages.device.device import Mark, StageDevice
from headway.stages.device.run_events import RunEvents
from headway.stages.schedule.operations import Op
from headway.stages.state.journal import JournalRow


class StageObserver(Protocol):
    """Runs in the stage's thread, on the way of every microbatch. Times are `perf_counter`'s."""

    def waits(self, what: str, now: float) -> None:
        """No operation can run. what: the class of the wait, by `stages/telemetry/goodput.py`."""
        ...

    def begins(self, op: Op, now: float) -> None:
        """An operation begins."""
        ...

    def ended(self, op: Op, *, version: int, num_versions_live: int, started: float, ended: float) -> None:
        """An operation has ended, and its frames are with the links. version: the weight version that it read."""
        ...

    def batch_done(self, row: JournalRow) -> None:
        """A batch's row is whole. Only the worker that writes the journal hears of it."""
        ...


MOST_AHEAD: Final = 2


@dataclass(slots=True)
class _Launched:
    """One operation."""

    op: Op
    version: int
    num_versions_live: int
    begin: Mark
    end: Mark
    launched: float
    ended: float = 0.0


class LaunchedOps:
    """Of one run, in its thread. On an immediate device an operation is done when it was launched."""

    def __init__(self, device: StageDevice, events: RunEvents, observer: StageObserver) -> None:
        self._device = device
        self._events = events
        self._observer = observer
        self._ops: deque[_Launched] = deque()
        self._began = 0.0
        self._begin: Mark | None = None
        self._last_ended = 0.0

    @property
    def is_full(self) -> bool:
        """Return whether the next operation must not be launched yet."""
        return len(self._ops) >= MOST_AHEAD

    def begins(self, op: Op) -> None:
        """Note that an operation is launched from now on."""
        self._began = perf_counter()
        if not self._device.is_immediate:
            self._begin = self._ops[-1].end if self._ops else self._device.mark()
        if not self._ops:
            self._observer.begins(op, self._began)

    def launched(self, op: Op, *, version: int, num_versions_live: int) -> None:
        """Note that all of the operation is launched."""
        if self._device.is_immediate:
            self._observer.ended(
                op,
                version=version,
                num_versions_live=num_versions_live,
                started=self._began,
                ended=perf_counter(),
            )
            return
        assert self._begin is not None
        entry = _Launched(op, version, num_versions_live, self._begin, self._device.mark(), self._began)
        self._ops.append(entry)

        def note_the_time() -> None:
            entry.ended = perf_counter()

        self._events.when_marked(entry.end, note_the_time, self._ended)

    def _ended(self) -> None:
        """The device has done the oldest operation, and begins the next."""
        entry = self._ops.popleft()
        started = entry.ended - entry.end.seconds_since(entry.begin)
        self._observer.ended(
            entry.op,
            version=entry.version,
            num_versions_live=entry.num_versions_live,
            started=max(started, entry.launched, self._last_ended),
            ended=entry.ended,
        )
        self._last_ended = entry.ended
        if self._ops:
            self._observer.begins(self._ops[0].op, entry.ended)
