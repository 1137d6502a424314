"""Divides the reduction groups of a stage among its replicas: the slowest of them needs the least possible time. Pure.

Microbatch i of m belongs to group i mod G, so the first m mod G groups have one microbatch more. The groups are counted
from the first replica to the last, each at least one; shares need not be even. `interleaved` then chooses which groups
each replica gets, and deals them out in turn.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import floor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

HALVINGS = 48
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


def least_seconds(
    per_microbatch: Sequence[Floats], per_update: Sequence[Floats], most_groups: Sequence[Counts], ends: Counts
) -> Floats:
    """Return the time of a batch on the slowest replica under the best shares, for many slices of layers at once.

    Per replica: seconds of a microbatch, of the update that each does in full, and how many groups its memory has room
    for, each [num slices]. ends: see `group_ends`. Returns [num slices]; inf where the groups do not fit.
    """
    total = int(ends[-1])
    above = np.max([total * each + update for each, update in zip(per_microbatch, per_update, strict=True)], axis=0)
    below = np.zeros_like(above)
    fits, _ = _assign(above, per_microbatch, per_update, most_groups, ends)
    for _ in range(HALVINGS):
        middle = 0.5 * (below + above)
        enough, _ = _assign(middle, per_microbatch, per_update, most_groups, ends)
        above = np.where(enough, middle, above)
        below = np.where(enough, below, middle)
    _, seconds = _assign(above, per_microbatch, per_update, most_groups, ends)
    return np.where(fits, seconds, np.inf)


def best_shares(
    per_microbatch: Sequence[float], per_update: Sequence[float], most_groups: Sequence[int], ends: Counts
) -> tuple[int, ...]:
    """Return how many groups each replica holds under the best shares of one slice. Raises ValueError if they do not
    fit.
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
        raise ValueError("the groups do not fit")
    for _ in range(HALVINGS):
        middle = 0.5 * (below + above)
        fitting = filled(middle)
        if fitting is None:
            below = middle
        else:
            above, shares = middle, fitting
    return shares


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


def _assign(
    limit: Floats,
    per_microbatch: Sequence[Floats],
    per_update: Sequence[Floats],
    most_groups: Sequence[Counts],
    ends: Counts,
) -> tuple[NDArray[np.bool_], Floats]:
    """Fill each replica in turn with as many groups as the limit allows: (whether all are taken, slowest time)."""
    position = np.zeros(limit.shape, dtype=np.int64)
    fits = np.ones(limit.shape, dtype=np.bool_)
    slowest = np.zeros_like(limit)
    for index, (each, update, most) in enumerate(zip(per_microbatch, per_update, most_groups, strict=True)):
        following = _reach(limit, position, len(per_microbatch) - 1 - index, each, update, most, ends)
        fits &= following > position
        following = np.maximum(following, position)
        slowest = np.maximum(slowest, (ends[following] - ends[position]) * each + update)
        position = following
    return fits & (position == len(ends) - 1), slowest


def _reach(
    limit: Floats, position: Counts, left: int, each: Floats, update: Floats, most: Counts, ends: Counts
) -> Counts:
    """Return the group at which a replica that begins at one must stop. left: later replicas, which need a
    group each.
    """
    room = np.floor((limit - update) / each * (1 + 1e-12) + SLACK)
    microbatches = np.clip(room, 0, ends[-1]).astype(np.int64)
    following = np.searchsorted(ends, ends[position] + microbatches, side="right") - 1
    reached: Counts = np.minimum(following, np.minimum(position + most, len(ends) - 1 - left))
    return reached
