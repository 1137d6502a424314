"""An observer of a stage that does nothing, and the base of those that want a few of the moments."""

from headway.stages.schedule.operations import Op
from headway.stages.state.journal import JournalRow


class Unobserved:
    """A `StageObserver`."""

    def waits(self, what: str, now: float) -> None: ...

    def begins(self, op: Op, now: float) -> None: ...

    def ended(self, op: Op, *, version: int, num_versions_live: int, started: float, ended: float) -> None: ...

    def batch_done(self, row: JournalRow) -> None: ...
