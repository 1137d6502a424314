"""Losses that whole trainings end at, and the batches and seconds until then."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from headway.daemon.study.study_results import estimate
from headway.stages.spec import ScheduleName
from rigs.measure import Figure

Ends = Mapping[int, float]
"""Of one schedule and seed: what trainings of so many batches end at, each with a whole schedule of the rate."""
Runs = Mapping[ScheduleName, "Paced"]
SYNC_SHARE = 0.1
"""Of the batches of 2bw, the first ones, which have no delay and take the seconds of 1f1b."""


@dataclass(frozen=True, slots=True)
class Paced:
    """A schedule's seconds in a cell."""

    ends: list[float]
    """Seconds from the first operation until the end of each of the first batches."""
    batch_s: float
    """Of each batch after them."""
    late: float = 0.0
    """Part of the forwards and backwards that took longer than they should, as computing did."""

    def until(self, num_batches: int) -> float:
        """Seconds for so many batches."""
        known = len(self.ends)
        return ([0.0, *self.ends])[min(num_batches, known)] + max(0, num_batches - known) * self.batch_s


def batches_until(ends: Ends, loss: float) -> float:
    """Return the batches of a training that ends at a loss, between those that were made: a line in the logarithm of
    the batches. Infinite: none of them ends so low; the shortest one's: all do.
    """
    made = sorted(ends.items())
    if made[0][1] <= loss:
        return made[0][0]
    for (fewer, high), (more, low) in pairwise(made):
        if low <= loss:
            share = (high - loss) / (high - low)
            return math.exp(math.log(fewer) + share * (math.log(more) - math.log(fewer)))
    return math.inf


@dataclass(frozen=True, slots=True)
class Target:
    """A loss that 1f1b ends at after so many batches; each seed has its own."""

    batches: int
    losses: list[float]
    delayed: list[float]
    """Batches of 2bw until then, by seed."""

    @classmethod
    def of(cls, batches: int, synced: Sequence[Ends], delayed: Sequence[Ends]) -> "Target | None":
        """The target; None: 2bw does not end there for some seed."""
        losses = [ends[batches] for ends in synced]
        found = [batches_until(ends, loss) for ends, loss in zip(delayed, losses, strict=True)]
        return cls(batches, losses, found) if all(map(math.isfinite, found)) else None

    def seconds(self, runs: Runs) -> dict[ScheduleName, list[float]]:
        """Return the seconds of each seed by schedule. gpipe has the losses of 1f1b."""
        of_2bw = []
        for batches in self.delayed:
            fresh = round(SYNC_SHARE * batches)
            of_2bw.append(runs["1f1b"].until(fresh) + runs["2bw"].until(round(batches) - fresh))
        synced = {name: [run.until(self.batches)] * len(of_2bw) for name, run in runs.items()}
        return synced | {"2bw": of_2bw}

    def ratios(self, runs: Runs) -> dict[str, Figure]:
        """Return the seconds of each other schedule over those of 2bw."""
        seconds = self.seconds(runs)
        return {f"{name} over 2bw": _over(each, seconds["2bw"]) for name, each in seconds.items() if name != "2bw"}

    def more_batches(self) -> Figure:
        """Return the batches of 2bw over those of 1f1b."""
        return over_seeds([each / self.batches for each in self.delayed])


def _over(ones: Sequence[float], others: Sequence[float]) -> Figure:
    return over_seeds([one / other for one, other in zip(ones, others, strict=True)])


def over_seeds(values: Sequence[float]) -> Figure:
    """Return the mean of a few seeds with its 90 % interval, Student's t; one seed has none."""
    of = estimate(values)
    half = 0.0 if math.isnan(of.half) else of.half
    return Figure(of.mean, of.mean - half, of.mean + half, len(values))
