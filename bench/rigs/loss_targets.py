"""Losses that several trainings reach, and the seconds and batches until then."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rigs.measure import Figure

WINDOW = 20
"""Batches of which the smoothed loss is the mean."""
SYNC_START = "2bw, sync start"
"""2bw whose first batches have no delay."""
DELAYED = ("2bw", SYNC_START)
CURVES = ("1f1b", *DELAYED)
"""What has losses of its own."""

Curves = Mapping[str, list[float]]
"""Of one seed, the losses of each of CURVES."""
Runs = Mapping[str, "Paced"]


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
        """Seconds for so many batches, one or more."""
        known = len(self.ends)
        return self.ends[min(num_batches, known) - 1] + max(0, num_batches - known) * self.batch_s

    def after(self, first: "Paced", num_batches: int) -> "Paced":
        """Return these batches behind so many of another schedule, which ends with an empty pipeline."""
        ends = [first.until(number) for number in range(1, num_batches + 1)]
        return Paced([*ends, *(ends[-1] + end for end in self.ends)], self.batch_s, max(first.late, self.late))


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return, for each batch, the mean over it and up to WINDOW − 1 earlier ones."""
    return [statistics.fmean(losses[max(0, end - WINDOW) : end]) for end in range(1, len(losses) + 1)]


def batches_until(losses: Sequence[float], target: float) -> int | None:
    """Return the number of batches until the smoothed loss reaches the target; None: it never does."""
    reached = (n for n, loss in enumerate(smoothed(losses), 1) if loss <= target and n >= WINDOW)
    return next(reached, None)


@dataclass(frozen=True, slots=True)
class Target:
    """A loss that all seeds reach; each has its own, as 1f1b has it after the same part of its batches."""

    losses: list[float]
    batches: dict[str, list[int]]
    """Of each curve, by seed."""

    @classmethod
    def of(cls, curves: Sequence[Curves], part: float) -> "Target | None":
        """The target at a part of 1f1b's batches; None: some curve does not reach it. curves: by seed."""
        losses = [smoothed(seed["1f1b"])[max(WINDOW, round(part * len(seed["1f1b"]))) - 1] for seed in curves]
        batches: dict[str, list[int]] = {}
        for name in curves[0]:
            found = [batches_until(seed[name], loss) for seed, loss in zip(curves, losses, strict=True)]
            batches[name] = [number for number in found if number is not None]
        return cls(losses, batches) if all(len(each) == len(curves) for each in batches.values()) else None

    def seconds(self, name: str, run: Paced) -> list[float]:
        """Return the seconds of each seed. gpipe has the losses of 1f1b."""
        return [run.until(number) for number in self.batches["1f1b" if name == "gpipe" else name]]

    def ratios(self, runs: Runs) -> dict[str, Figure]:
        """Return the seconds of each schedule without delay over those of each with one."""
        seconds = {name: self.seconds(name, run) for name, run in runs.items()}
        pairs = [(slow, fast) for fast in runs for slow in runs if fast in DELAYED and slow not in DELAYED]
        return {f"{slow} over {fast}": _over(seconds[slow], seconds[fast]) for slow, fast in pairs}

    def more_batches(self) -> dict[str, Figure]:
        """Return the batches of each schedule with a delay over those of 1f1b."""
        return {name: _over(self.batches[name], self.batches["1f1b"]) for name in self.batches if name in DELAYED}


def _over(ones: Sequence[float], others: Sequence[float]) -> Figure:
    return Figure.of([one / other for one, other in zip(ones, others, strict=True)])
