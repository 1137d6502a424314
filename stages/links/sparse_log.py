"""Says when an event that may come a thousand times a second is worth a line of the log. Pure."""

from dataclasses import dataclass
from typing import Final

PAUSE_S: Final = 10.0
"""Shortest time between two lines about the same kind of event."""


@dataclass(slots=True)
class SparseLog:
    """Events of one kind."""

    _num_untold: int = 0
    _told_at: float | None = None

    def due(self, now: float) -> int:
        """Count an event. Return how many the next line is about; 0: no line now."""
        self._num_untold += 1
        if self._told_at is not None and now < self._told_at + PAUSE_S:
            return 0
        num, self._num_untold, self._told_at = self._num_untold, 0, now
        return num
