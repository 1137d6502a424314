"""Finds the best pipeline along a given order of devices: exact dynamic programming over cuts and replicas. Pure.

A pipeline is a sequence of stages, each with adjacent devices of the order and adjacent layers. Every device of the
order works. The recurrence goes from the last stage to the first, because a stage's microbatches in flight depend on
the stages after it. With s stages from layer a on, the first of them on devices i … j−1,

    F(s, i, j, a) = min over e, k of max(seconds of layers a … e−1 on i … j−1, link(i, j, k), F(s−1, j, k, e))
"""

from collections.abc import Callable, Iterator
from itertools import accumulate, combinations, pairwise
from math import inf
from typing import Any, Final

import numpy as np

from headway.daemon.plan.devices import DeviceSlot
from headway.daemon.plan.predicted_time import Cut, fill_factor
from headway.daemon.plan.replica_shares import Floats
from headway.daemon.plan.stage_costs import StageCosts

TOLERANCE: Final = 1e-9
"""Relative difference below which two times count as equal."""
NUM_DIGITS: Final = 9
"""Digits to which sums of squares are compared, in units of the slowest stage's."""
ROUND_TRIP_WEIGHT: Final = 1e7
"""Weight of round trips, where a batch waits for them: they come before the balance of the stages."""


_Combine = Callable[[Any, Any], Any]


class PipelineCut:
    """The search along one order of devices."""

    def __init__(self, costs: StageCosts, order: tuple[DeviceSlot, ...], *, shape: tuple[int, ...] = ()) -> None:
        """shape: number of workers of each stage; empty: free."""
        self._costs = costs
        self._order = order
        size, most = len(order), costs.num_groups
        if shape:
            starts = dict(pairwise(accumulate(shape, initial=0)))
            self._ends = [[starts[first]] if first in starts else [] for first in range(size)]
        else:
            self._ends = [list(range(first + 1, min(size, first + most) + 1)) for first in range(size)]
        self._ends = [
            [end for end in ends if costs.can_share(order[first:end])] for first, ends in enumerate(self._ends)
        ]
        self._links: dict[tuple[int, int, int], float] = {}
        self._trips: dict[tuple[int, int, int], float] = {}
        for first in range(size):
            for end in self._ends[first]:
                for last in self._ends[end] if end < size else ():
                    runs = order[first:end], order[end:last]
                    if not costs.links.all_talk(*runs):
                        continue
                    self._links[first, end, last] = costs.cuts.boundary_seconds(*runs)
                    self._trips[first, end, last] = costs.links.longest_round_trip_s(*runs)

    def best(self, at_most: float = inf) -> tuple[float, Cut] | None:
        """Return the least seconds of a batch, and the most balanced of the pipelines that reach it; None: nothing
        fits.

        The most balanced has the least sum of squared stage times. at_most: slower pipelines are of no use.
        """
        found: tuple[float, float, Cut] | None = None
        for seconds, balance, cut in self._by_stages(at_most, is_best_alone=True):
            is_better = found is None or seconds < found[0] * (1 - TOLERANCE)
            if is_better or (
                found is not None and seconds <= found[0] * (1 + TOLERANCE) and balance < found[1] * (1 - TOLERANCE)
            ):
                found = seconds, balance, cut
        return None if found is None else (found[0], found[2])

    def of_each_length(self, at_most: float) -> list[tuple[float, Cut]]:
        """Return the best pipelines of each number of stages whose batches take at most this long."""
        return [(seconds, cut) for seconds, _, cut in self._by_stages(at_most, is_best_alone=False)]

    def _by_stages(self, at_most: float, *, is_best_alone: bool) -> Iterator[tuple[float, float, Cut]]:
        """Yield (seconds, sum of squares, cut) by number of stages. is_best_alone: leave out those slower
        than others.
        """
        slowest = _Recurrence(self, combine=np.maximum, of_stage=lambda times: times, of_link=self._links)
        for num_stages in range(1, self._most_stages() + 1):
            limit = slowest.least(num_stages)
            if limit == inf:
                continue
            factor = fill_factor(num_stages, self._costs.num_microbatches, self._costs.spec.train.delay)
            if factor * limit > at_most * (1 + TOLERANCE):
                continue
            for found in self._within(num_stages, limit, factor, slowest):
                at_most = min(at_most, found[0]) if is_best_alone else at_most
                yield found

    def _most_stages(self) -> int:
        return min(len(self._order), self._costs.num_layers, self._costs.num_microbatches)

    def _within(
        self, num_stages: int, least: float, factor: float, slowest: "_Recurrence"
    ) -> list[tuple[float, float, Cut]]:
        """Return (seconds, sum of squares, cut) of the best pipelines of a number of stages."""
        balanced = self._balanced(least, num_stages)
        if self._costs.spec.train.delay or num_stages == 1:
            return [(least, balanced[1], balanced[2])]
        # The batch waits for round trips: a slower stage may save some. Try every promising stage time as a limit.
        shortest = self._balanced(inf, num_stages)[0]
        best = factor * least + balanced[0]
        found = [(best, balanced[1], balanced[2])]
        if balanced[0] > shortest * (1 + TOLERANCE):
            for limit in slowest.times_between(least, (best - shortest) / factor):
                trips, squares, cut = self._balanced(limit, num_stages)
                if factor * limit + trips < best:
                    best = factor * limit + trips
                    found.append((best, squares, cut))
        return found

    def _balanced(self, limit: float, num_stages: int) -> tuple[float, float, Cut]:
        """Return (round trips, sum of squares, cut) with no stage and no link slower than a limit."""
        limit *= 1 + TOLERANCE
        unit = limit if limit < inf else 1.0
        waits = not self._costs.spec.train.delay
        links = {
            place: (ROUND_TRIP_WEIGHT * self._trips[place] if waits else 0.0) if seconds <= limit else inf
            for place, seconds in self._links.items()
        }

        def squares(times: Floats) -> Floats:
            if limit == inf:
                return np.where(times < inf, 0.0, inf)
            return np.where(times <= limit, (times / unit) ** 2, inf)

        sums = _Recurrence(self, combine=np.add, of_stage=squares, of_link=links)
        cut, places = sums.trace(num_stages)
        trips = sum(self._trips[place] for place in places) if waits else 0.0
        return trips, sums.least(num_stages) - ROUND_TRIP_WEIGHT * trips, cut


_Place = tuple[int, int, int]
"""(stages from here on, first device, end of the first stage's devices)"""


class _Recurrence:
    """One evaluation of the recurrence: the weights of a stage's time and of a link, and their combination."""

    def __init__(
        self,
        search: PipelineCut,
        *,
        combine: _Combine,
        of_stage: Callable[[Floats], Floats],
        of_link: dict[tuple[int, int, int], float],
    ) -> None:
        self._costs = search._costs
        self._order = search._order
        self._ends = search._ends
        self._combine = combine
        self._of_stage = of_stage
        self._of_link = of_link
        self._tables: dict[tuple[int, int, int], Floats] = {}
        self._behind: dict[tuple[int, int, int], Floats] = {}
        """(stages, first, end) → costs of the stages behind, by their first layer."""
        self._found: dict[tuple[int, int, int], Floats] = {}
        """(stages, first device, end of its stage) → F, by first layer."""
        self._solve(search._most_stages())

    def least(self, num_stages: int) -> float:
        """Return F for all layers on all devices in a number of stages."""
        return min((float(self._found[place][0]) for place in self._starts(num_stages)), default=inf)

    def times_between(self, least: float, most: float) -> list[float]:
        """Return all stage and link times in an interval, rising."""
        times = {float(time) for table in self._tables.values() for time in table[(table > least) & (table < most)]}
        return sorted(times | {time for time in self._of_link.values() if least < time < most})

    def trace(self, num_stages: int) -> tuple[Cut, list[tuple[int, int, int]]]:
        """Return a pipeline that reaches `least`, with earlier stages as short as possible, and its boundaries."""
        place = min(
            self._starts(num_stages), key=lambda place: (round(float(self._found[place][0]), NUM_DIGITS), place)
        )
        runs: list[tuple[DeviceSlot, ...]] = []
        spans: list[tuple[int, int]] = []
        boundaries: list[tuple[int, int, int]] = []
        first = 0
        while True:
            stages, start, end = place
            runs.append(self._order[start:end])
            if stages == 1:
                spans.append((first, self._costs.num_layers))
                return Cut(runs=tuple(runs), spans=tuple(spans)), boundaries
            totals = self._combine(self._tables[place][first], self._behind[place])
            layer = int(np.argmin(np.round(totals, NUM_DIGITS)))
            followers = [
                (round(float(self._combine(link, self._found[after][layer])), NUM_DIGITS), after)
                for after, link in self._followers(place)
            ]
            following = min(followers)[1]
            spans.append((first, layer))
            boundaries.append((start, end, following[2]))
            place, first = following, layer

    def _solve(self, most_stages: int) -> None:
        size = len(self._order)
        for stages in range(1, most_stages + 1):
            for start in range(size - stages, -1, -1):
                for end in self._ends[start]:
                    self._add(stages, start, end)

    def _add(self, stages: int, start: int, end: int) -> None:
        place = (stages, start, end)
        if stages == 1:
            if end == len(self._order):
                table = self._tables[place] = self._of_stage(self._seconds(start, end, 1))
                self._found[place] = table[:, -1]
            return
        followers = self._followers(place)
        if not followers:
            return
        behind = np.min([self._combine(link, self._found[after]) for after, link in followers], axis=0)
        table = self._tables[place] = self._of_stage(self._seconds(start, end, stages))
        self._behind[place] = behind
        self._found[place] = np.min(self._combine(table, behind[np.newaxis, :]), axis=1)

    def _seconds(self, start: int, end: int, num_stages: int) -> Floats:
        """A batch's, by (first layer, end)."""
        size = self._costs.num_layers + 1
        found = np.full((size, size), inf)
        for span in combinations(range(size), 2):
            choice = self._costs.stage(self._order[start:end], span, num_stages)
            found[span] = inf if choice is None else choice.seconds
        return found

    def _followers(self, place: tuple[int, int, int]) -> list[tuple[tuple[int, int, int], float]]:
        """Return the stages that may come next, and the cost of the link to each."""
        stages, start, end = place
        if end == len(self._order):
            return []
        after = [(stages - 1, end, last) for last in self._ends[end]]
        return [
            (each, self._of_link[start, end, each[2]])
            for each in after
            if each in self._found and (start, end, each[2]) in self._of_link
        ]

    def _starts(self, num_stages: int) -> list[tuple[int, int, int]]:
        return [place for end in self._ends[0] if (place := (num_stages, 0, end)) in self._found]
