"""The movement of the learning rate: a float64 factor for each update, indexed by b and by nothing else."""

import math
from collections.abc import Callable
from typing import Literal

DECAY_SHARE = 5
"""Warm-up–stable–decay falls over the last ⌈B / DECAY_SHARE⌉ updates."""

Kind = Literal["constant", "cosine", "wsd"]
AfterEnd = Literal["", "floor", "warm_up_again"]

LrSchedule = Callable[[int], float]
"""Map from the update's index b to the factor of every group's rate."""


def lr_schedule(
    kind: Kind,
    *,
    num_batches: int,
    warmup_batches: int,
    floor: float = 0.0,
    schedule_batches: int = 0,
    after_end: AfterEnd = "",
) -> LrSchedule:
    """Return the factor of update b = 0 … num_batches − 1: that of one schedule, or of one and what follows its end.

    schedule_batches: length S of the schedule; 0: the whole job. after_end: from update S on, the floor, or a second
    schedule over the other updates, which begins with the warm-up. An index outside the job raises ValueError.
    """
    end = schedule_batches or num_batches
    first = _one_schedule(kind, end, warmup_batches, floor)
    again = _one_schedule(kind, num_batches - end, warmup_batches, floor)

    def factor(update_index: int) -> float:
        if not 0 <= update_index < num_batches:
            raise ValueError(f"update {update_index} is not one of a job with {num_batches} batches")
        if update_index < end:
            return first(update_index)
        return floor if after_end == "floor" else again(update_index - end)

    return factor


def _one_schedule(kind: Kind, num_batches: int, warmup_batches: int, floor: float) -> LrSchedule:
    """Return the factor of update b = 0 … B−1, B being `num_batches`.

    (b+1)/w in the first w updates; then 1 (constant), ½(1 + cos(π(b−w)/(B−w))) (cosine), or 1 and over the last
    n = ⌈B/5⌉ updates (B−b)/n (wsd). A fall f ends at the floor φ: φ + (1 − φ)·f. Warm-up has precedence.
    """
    num_decay = -(-num_batches // DECAY_SHARE)

    def factor(update_index: int) -> float:
        if update_index < warmup_batches:
            return (update_index + 1) / warmup_batches
        if kind == "cosine":
            progress = (update_index - warmup_batches) / (num_batches - warmup_batches)
            return floor + (1.0 - floor) * (0.5 * (1.0 + math.cos(math.pi * progress)))
        if kind == "wsd" and update_index >= num_batches - num_decay:
            return floor + (1.0 - floor) * ((num_batches - update_index) / num_decay)
        return 1.0

    return factor
