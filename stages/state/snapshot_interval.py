"""Decides which boundaries a stage writes while it runs. Pure."""

LATE_S = 0.1
LATE_SHARE = 0.05
"""A snapshot is late when an update waited for it longer than LATE_S and this share of the time since the last one: so
doubling the interval helps, and ends.
"""


class SnapshotInterval:
    """Every n-th boundary, with n the job's number times a factor: 1, 2, 4 …, so that the stages' boundaries meet.

    Boundaries of checkpoints stay as in the job, unless they would come more often than those of snapshots.
    """

    def __init__(self, snapshot_every: int, checkpoint_every: int) -> None:
        """Intervals are in batches; 0: never."""
        self._snapshot_every, self._checkpoint_every = snapshot_every, checkpoint_every
        self._was_late = False
        self.factor = 1

    def is_due(self, boundary: int) -> bool:
        """Return whether the boundary is due."""
        numbers = (self._snapshot_every * self.factor, self._checkpoint_every * self._checkpoint_factor)
        return boundary > 0 and any(number > 0 and boundary % number == 0 for number in numbers)

    @property
    def _checkpoint_factor(self) -> int:
        if not self._snapshot_every or not self._checkpoint_every:
            return self.factor
        factor = 1
        while factor < self.factor and self._checkpoint_every * factor < self._snapshot_every * self.factor:
            factor *= 2
        return factor

    def space(self, factor: int) -> None:
        """Take only every factor-th from now on. Raises ValueError unless it is a power of two."""
        if factor < 1 or factor & (factor - 1):
            raise ValueError(f"snapshots cannot be spaced by a factor of {factor}: it is no power of two")
        self.factor = factor

    def ended(self, *, waited_s: float, since_last_s: float) -> bool:
        """Note a finished snapshot, with an update's wait for it. Returns whether the interval has doubled."""
        is_late = waited_s > max(LATE_S, LATE_SHARE * since_last_s)
        has_doubled = is_late and self._was_late
        self._was_late = is_late and not has_doubled
        if has_doubled:
            self.factor *= 2
        return has_doubled
