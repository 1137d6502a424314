"""The best cut of a list of layers into stages, for a given order of devices: exact dynamic programming. Pure."""

from collections.abc import Callable, Sequence
from math import inf

TOLERANCE = 1e-9
"""Relative: two stage times closer than this are equal."""

StageSeconds = Callable[[int, int, int], float]
"""(stage, first layer, end) → seconds of layers first … end-1 on that stage; inf where they do not fit."""


def best_cut(num_layers: int, num_stages: int, seconds: StageSeconds) -> tuple[int, ...] | None:
    """Where each stage ends, the last end being `num_layers`; None if no cut fits. Every stage has a layer.

    Of all cuts it is one with the least slowest stage; of those, one with the least sum of squared stage times, which
    is the most balanced; of those, the one whose earliest stages are shortest. Two passes of the same recurrence over
    (stages left, first layer), each O(num_stages · num_layers²).
    """
    if not 1 <= num_stages <= num_layers:
        return None
    table = [
        [[seconds(stage, first, end) for end in range(num_layers + 1)] for first in range(num_layers)]
        for stage in range(num_stages)
    ]
    slowest, _ = _solve(table, num_layers, combine=max, cost=lambda time: time)
    if slowest == inf:
        return None
    limit = slowest * (1 + TOLERANCE)
    _, ends = _solve(
        table,
        num_layers,
        combine=lambda one, rest: one + rest,
        cost=lambda time: time * time if time <= limit else inf,
    )
    return ends


def _solve(
    table: Sequence[Sequence[Sequence[float]]],
    num_layers: int,
    *,
    combine: Callable[[float, float], float],
    cost: Callable[[float], float],
) -> tuple[float, tuple[int, ...]]:
    """The least combined cost over all cuts, and the ends that reach it."""
    num_stages = len(table)
    # best[first]: least cost of layers first … on the stages from `stage` on; behind the last stage, nothing is left.
    best = [inf] * num_layers + [0.0]
    choices: list[list[int]] = []
    for stage in reversed(range(num_stages)):
        before, best = best, [inf] * (num_layers + 1)
        choice = [0] * num_layers
        for first in range(stage, num_layers - (num_stages - 1 - stage)):
            for end in range(first + 1, num_layers - (num_stages - 1 - stage) + 1):
                total = combine(cost(table[stage][first][end]), before[end])
                if total < best[first] * (1 - TOLERANCE):
                    best[first], choice[first] = total, end
        choices.append(choice)
    ends, first = [], 0
    if best[0] < inf:
        for choice in reversed(choices):
            first = choice[first]
            ends.append(first)
    return best[0], tuple(ends)
