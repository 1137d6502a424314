"""Forwards a run's moments to its observers: goodput, the last operations, the history, tests, the daemon."""

from collections.abc import Callable

from headway.stages.schedule.operations import Op, Update
from headway.stages.state.journal import JournalRow
from headway.stages.telemetry.goodput import Goodput
from headway.stages.telemetry.history import HistoryFile
from headway.stages.telemetry.recent_ops import RecentOps


class RunObserver:
    """A `StageObserver` of one generation. Other threads may read `running` and `recent`."""

    def __init__(
        self,
        goodput: Goodput,
        recent: RecentOps,
        *,
        history: HistoryFile | None,
        on_operation: Callable[[Op], None] | None,
        on_batch: Callable[[JournalRow], None],
    ) -> None:
        """on_operation: is called after each operation, for tests; None: no test observes."""
        self.recent = recent
        self.running: type[Op] | None = None
        """Kind of the operation that runs now."""
        self._goodput = goodput
        self._history = history
        self._on_operation = on_operation
        self._on_batch = on_batch

    @property
    def expected_s(self) -> float:
        """Return the expected seconds of the running operation; between operations, of an operation of any kind."""
        return self.recent.typical_s(self.running)

    def waits(self, what: str, now: float) -> None:
        """See `StageObserver`."""
        self._goodput.waits(what, now)

    def begins(self, op: Op, now: float) -> None:
        """See `StageObserver`."""
        self.running = type(op)
        self._goodput.operates(op.batch, now)

    def ended(self, op: Op, *, version: int, num_versions_live: int, started: float, ended: float) -> None:
        """See `StageObserver`."""
        self.running = None
        self.recent.record(op, version, started, ended)
        if type(op) is Update:
            self._goodput.updated(op.batch)
        if self._history is not None:
            self._history.record(op, version=version, num_versions_live=num_versions_live, started=started, ended=ended)
        if self._on_operation is not None:
            self._on_operation(op)

    def batch_done(self, row: JournalRow) -> None:
        """See `StageObserver`."""
        self._on_batch(row)
