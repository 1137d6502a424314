"""Compares what planned changes promised a running job with their results. Pure.

A plan is predicted by measured times, and noisy times make every other cut look better for a while. So the job's pace
under a new plan is compared with its pace before. The shortfall is doubt, which the next change must overcome in
addition to the usual threshold. Doubts add up, and fade with time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

MEMORY_S: Final = 1800.0
"""Time in which a broken promise is forgotten, evenly."""
NUM_PACES: Final = 16
"""Number of progress records in the median of a pace: about one comes every second."""
LEAST_PACES: Final = 4
"""Minimum number of records that give a pace: a pipe fills first."""
MAX_PROMISES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """One planned change."""

    generation: int
    at: float
    factor: float
    """Factor by which the new plan was predicted to be faster."""
    before: float
    """Tokens a second before the change."""
    after: float = 0.0
    """Tokens a second under the new plan; 0: not known yet."""

    @property
    def shortfall(self) -> float:
        """Return by how much the factor was missed; 0: it was reached, or is unknown."""
        return max(0.0, self.factor - max(self.after / self.before, 1.0)) if self.after else 0.0


@dataclass(frozen=True, slots=True)
class Promises:
    """The promises of one job, as far as its plans were seen to change."""

    generation: int = 0
    """Generation of the plan in force."""
    paces: tuple[float, ...] = ()
    """Tokens a second under it, from its newest progress records."""
    made: tuple[Promise, ...] = ()

    def plan_changed(self, generation: int, *, factor: float, now: float) -> "Promises":
        """Note a new plan in force. factor: its promise; 0: none, because the change was forced."""
        made = self.made
        if factor > 0 and len(self.paces) >= LEAST_PACES:
            promise = Promise(generation=generation, at=now, factor=factor, before=median(self.paces))
            made = (*made, promise)[-MAX_PROMISES:]
        return Promises(generation, (), made)

    def progressed(self, generation: int, tokens_per_second: float) -> "Promises":
        """Note a progress record."""
        if generation != self.generation or tokens_per_second <= 0:
            return self
        paces = (*self.paces, tokens_per_second)[-NUM_PACES:]
        made = self.made
        if made and made[-1].generation == generation and len(paces) >= LEAST_PACES:
            made = (*made[:-1], replace(made[-1], after=median(paces)))
        return Promises(generation, paces, made)

    def doubt(self, now: float) -> float:
        """Return the gain that the next change must promise in addition to the usual threshold."""
        return doubt([(now - promise.at, promise.shortfall) for promise in self.made])


def doubt(shortfalls: Sequence[tuple[float, float]]) -> float:
    """Return the doubt of (seconds since a change, by how much it missed its factor)."""
    return sum(missed * max(0.0, 1 - since / MEMORY_S) for since, missed in shortfalls)
