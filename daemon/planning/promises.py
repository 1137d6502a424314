"""What planned changes promised a running job, and what came of them. Pure.

A plan is predicted by measured times, and where those are noisy every other cut looks better for a while. So each
change is held to its word: the job's pace under the new plan is compared with its pace before. What is missing is
doubt, which the next change must overcome beside the usual bar. Doubts add up, and are forgotten little by little.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

MEMORY_S: Final = 1800.0
"""A promise that was not kept is forgotten within so long, evenly."""
NUM_PACES: Final = 16
"""Progress records that a pace is the median of: about one comes every second."""
LEAST_PACES: Final = 4
"""Fewer say nothing: a pipe fills first."""
MAX_PROMISES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """One planned change."""

    generation: int
    at: float
    factor: float
    """How many times faster the new plan was predicted to be."""
    before: float
    """Tokens a second."""
    after: float = 0.0
    """The same under the new plan; 0: not known yet."""

    @property
    def shortfall(self) -> float:
        """By how much the factor was missed; 0: it was reached, or it is not known."""
        return max(0.0, self.factor - max(self.after / self.before, 1.0)) if self.after else 0.0


@dataclass(frozen=True, slots=True)
class Promises:
    """Those of one job, as far as its plans were seen to change."""

    generation: int = 0
    """Of the plan in force."""
    paces: tuple[float, ...] = ()
    """Tokens a second under it, as its newest progress records have them."""
    made: tuple[Promise, ...] = ()

    def plan_changed(self, generation: int, *, factor: float, now: float) -> "Promises":
        """Another plan is in force. factor: what it promises; 0: nothing, it had to be."""
        made = self.made
        if factor > 0 and len(self.paces) >= LEAST_PACES:
            promise = Promise(generation=generation, at=now, factor=factor, before=median(self.paces))
            made = (*made, promise)[-MAX_PROMISES:]
        return Promises(generation, (), made)

    def progressed(self, generation: int, tokens_per_second: float) -> "Promises":
        """A progress record came."""
        if generation != self.generation or tokens_per_second <= 0:
            return self
        paces = (*self.paces, tokens_per_second)[-NUM_PACES:]
        made = self.made
        if made and made[-1].generation == generation and len(paces) >= LEAST_PACES:
            made = (*made[:-1], replace(made[-1], after=median(paces)))
        return Promises(generation, paces, made)

    def doubt(self, now: float) -> float:
        """What the next change must promise beside the usual bar."""
        return doubt([(now - promise.at, promise.shortfall) for promise in self.made])


def doubt(shortfalls: Sequence[tuple[float, float]]) -> float:
    """Of (seconds since a change, by how much it missed its factor)."""
    return sum(missed * max(0.0, 1 - since / MEMORY_S) for since, missed in shortfalls)
