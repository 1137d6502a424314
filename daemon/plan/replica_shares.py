"""Divides the reduction groups of a stage among its replicas: the slowest of them needs the least possible time. Pure.

Microbatch i of m belongs to group i mod G, so the first m mod G groups have one microbatch more. The groups are counted
from the first replica to the last, each at least one; shares need not be even. `interleaved` then chooses which groups
each replica gets, and deals them out in turn.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import floor, inf
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

HALVINGS = 40
"""Halvings of the interval of the least time: far below rounding."""
SLACK = 1e-9
"""Part of a microbatch that rounding may take."""

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Bools = NDArray[np.bool_]
Share = TypeVar("Share", float, Floats)


def group_ends(num_microbatches: int, num_groups: int) -> Counts:
    """Return the microbatches of the first 0, 1, … G groups. [G + 1]"""
    quotient, rest = divmod(num_microbatches, num_groups)
    groups = np.arange(num_groups + 1, dtype=np.int64)
    return groups * quotient + np.minimum(groups, rest)


def best_shares(
    per_microbatch: Sequence[float], per_update: Sequence[float], most_groups: Sequence[int], ends: Counts
) -> tuple[tuple[int, ...], float]:
    """Return how many groups each replica holds under the best shares, and a batch's seconds on the slowest.

    Per replica: seconds of a microbatch, of its update, and how many groups its memory has room for. ends: see
    `group_ends`. No shares: the groups do not fit.
    """
    bounds = [int(end) for end in ends]
    replicas = list(zip(per_microbatch, per_update, most_groups, strict=True))

    def filled(limit: float) -> tuple[int, ...] | None:
        """Fill each replica in turn with as many groups as the limit allows; None: some groups are left."""
        position, counts = 0, []
        for index, (each, update, most) in enumerate(replicas):
            microbatches = max(0, floor((limit - update) / each * (1 + 1e-12) + SLACK))
            following = bisect_right(bounds, bounds[position] + microbatches) - 1
            following = min(following, position + most, len(bounds) - len(replicas) + index)
            if following <= position:
                return None
            counts.append(following - position)
            position = following
        return tuple(counts) if position == len(bounds) - 1 else None

    below, above = 0.0, max(bounds[-1] * each + update for each, update, _ in replicas)
    shares = filled(above)
    if shares is None:
        return (), inf
    for _ in range(HALVINGS):
        middle = 0.5 * (below + above)
        fitting = filled(middle)
        if fitting is None:
            below = middle
        else:
            above, shares = middle, fitting
    firsts = list(accumulate(shares, initial=0))
    held = [bounds[end] - bounds[first] for first, end in pairwise(firsts)]
    return shares, max(number * each + update for number, (each, update, _) in zip(held, replicas, strict=True))


def largest_share(largest_part: Share, num_replicas: int) -> Share:
    """Return the most of a work that a replica gets, if each item goes to the one with the least so far.

    largest_part: the part of the work that its largest item takes. No share is above the mean and (R - 1)/R of that
    (Graham, Bounds on multiprocessing timing anomalies, 1969).
    """
    return (1.0 + (num_replicas - 1) * largest_part) / num_replicas


def interleaved(shares: Sequence[int], num_microbatches: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups of each replica, by how many it holds: dealt out evenly, sorted by their first group.

    Microbatches come in order, and so to the replicas in turn. No replica waits while the others' microbatches pass,
    which would need a whole round of groups in flight. Of groups with one microbatch more, each replica has as many as
    if its groups were adjacent.
    """
    num_groups = sum(shares)
    held: list[list[int]] = [[] for _ in shares]
    bounds = list(pairwise(accumulate(shares, initial=0)))
    num_longer = num_microbatches % num_groups
    for first, end in ((0, num_longer), (num_longer, num_groups)):
        counts = [max(0, min(last, end) - max(begin, first)) for begin, last in bounds]
        turns = sorted(
            (replica + turn * (end - first) / count, replica)
            for replica, count in enumerate(counts)
            for turn in range(count)
        )
        for group, (_, replica) in zip(range(first, end), turns, strict=True):
            held[replica].append(group)
    return tuple(map(tuple, held))
