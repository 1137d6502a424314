"""The moments of a stage's run. One observer hears of all of them; it fans out where it is composed."""

from typing import Protocol

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
        """All losses of a batch are known. Only the worker that writes the journal hears of it."""
        ...
