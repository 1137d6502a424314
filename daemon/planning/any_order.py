"""Finds an order of devices in which a pipeline fits, if any order has one: all orders at once. Pure.

Good orders of devices may have no room for a job that another order has room for. Here the order is not given. From
the last stage on, each stage takes any devices that are left. What matters behind a stage is only which kinds of
devices are used up, how many stages there are, and how many layers they cover. To cover more layers is never worse. So
for each set of used devices, the search keeps the pipeline's end that reaches furthest.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import comb, prod
from typing import Final

import numpy as np

from headway.daemon.costs.devices import DeviceSlot, Kinds
from headway.daemon.costs.stage_costs import StageCosts

MOST_SETS: Final = 4096
"""Maximum number of sets of used devices. With more, nothing is searched."""
MOST_RUNS: Final = 128
"""Maximum number of different stages' devices. With more, replicas are of one kind."""
QUICK: Final = 8192
"""Maximum product of both for which a faster order than the first one is searched."""
PRECISION: Final = 1.01
"""Factor between two times that ends the search for a faster order."""
LONGEST: Final = 1e300
"""A time to which each stage keeps that fits."""

_Counts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    """The devices of one stage, as kinds."""

    counts: _Counts
    slots: tuple[DeviceSlot, ...]
    """Any devices of these kinds."""


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a pipeline: the layers from `first` on."""

    first: int
    run: int = -1
    """Number of its first stage's run; -1: it has no stage."""
    behind: "_End | None" = None


class AnyOrder:
    """The search over all orders of a set of seats."""

    def __init__(
        self,
        costs: StageCosts,
        slots: Sequence[DeviceSlot],
        kinds: Kinds,
        is_wanted: Callable[[tuple[DeviceSlot, ...]], bool] = lambda _: True,
    ) -> None:
        """is_wanted: whether a pipeline may use these devices, and no more of them."""
        self._costs = costs
        self._is_wanted = is_wanted
        of_kind: dict[object, list[DeviceSlot]] = {}
        for slot in slots:
            of_kind.setdefault(kinds.of(slot), []).append(slot)
        self._seats = list(of_kind.values())
        self._most_stages = min(costs.num_layers, costs.num_microbatches, len(slots))
        self._shape = costs.spec.placement.replicas
        num_sets = prod(len(seats) + 1 for seats in self._seats)
        self._runs = list(self._stages()) if num_sets <= MOST_SETS else []
        self._is_quick = num_sets * len(self._runs) <= QUICK
        self._firsts: dict[tuple[int, int, float], list[int]] = {}

    def best(self) -> tuple[DeviceSlot, ...] | None:
        """Return an order in which a pipeline fits, with the least time of the slowest stage; None: none was found.

        The time of links is not searched for.
        """
        found = self._within(LONGEST)
        if found is None or not self._is_quick:
            return found and found[1]
        above, order = found
        whole = self._costs.slices.slice_of[0, self._costs.num_layers]
        timed = [(len(seats), *self._costs.seconds(seats[0])) for seats in self._seats]
        below = 1.0 / sum(n / (self._costs.num_microbatches * each[whole] + up[whole]) for n, each, up in timed)
        while above > below * PRECISION:
            middle = (below * above) ** 0.5
            found = self._within(middle)
            if found is None:
                below = middle
            else:
                above, order = found
        return order

    def _within(self, limit: float) -> tuple[float, tuple[DeviceSlot, ...]] | None:
        """Return the time of the slowest stage, and the order, of a pipeline whose stages take at most a time."""
        for num_stages in self._lengths():
            found = self._walk(limit, num_stages)
            if found is not None:
                return found
        return None

    def _lengths(self) -> Sequence[int]:
        """Return the numbers of stages to search for; 0: as few as suffice.

        Where more devices may be needed than memory asks for, each number has its own search.
        """
        if self._shape:
            return (len(self._shape),)
        is_free = self._costs.spec.placement.min_nodes <= 1 and not self._costs.links.has_blocked
        return (0,) if is_free else range(1, self._most_stages + 1)

    def _stages(self) -> Iterator[_Run]:
        """Yield the devices that a stage may have."""
        num_kinds = len(self._seats)
        most = min(self._costs.num_groups, sum(map(len, self._seats)))
        sizes = sorted(set(self._shape)) or range(1, most + 1)
        num_unlike = sum(comb(num_kinds + size - 1, size) for size in sizes)
        for size in sizes:
            each = combinations_with_replacement(range(num_kinds), size)
            for chosen in each if num_unlike <= MOST_RUNS else ((kind,) * size for kind in range(num_kinds)):
                used = Counter(chosen)
                if any(number > len(self._seats[kind]) for kind, number in used.items()):
                    continue
                run = tuple(slot for kind, number in sorted(used.items()) for slot in self._seats[kind][:number])
                if self._costs.can_share(run):
                    yield _Run(tuple(used[kind] for kind in range(num_kinds)), run)

    def _walk(self, limit: float, num_stages: int) -> tuple[float, tuple[DeviceSlot, ...]] | None:
        """Return a pipeline of a number of stages; 0: of the least number that suffices."""
        has_blocked = self._costs.links.has_blocked
        ends: dict[tuple[_Counts, int], _End] = {((0,) * len(self._seats), -1): _End(self._costs.num_layers)}
        for number in range(1, (num_stages or self._most_stages) + 1):
            # Every stage in front needs a layer.
            least = max(0, num_stages - number)
            size = self._shape[-number] if self._shape else 0
            firsts = [self._reach(index, number, limit) for index in range(len(self._runs))]
            following: dict[tuple[_Counts, int], _End] = {}
            for (used, _), end in ends.items():
                for index, run in enumerate(self._runs):
                    first = max(firsts[index][end.first], least)
                    if first >= end.first or (size and len(run.slots) != size):
                        continue
                    counts = tuple(map(int.__add__, used, run.counts))
                    if any(count > len(seats) for count, seats in zip(counts, self._seats, strict=True)):
                        continue
                    if has_blocked and not self._can_follow(run, end):
                        continue
                    found = _End(first, index, end)
                    if first == 0 and number >= num_stages and self._is_wanted(order := self._order(found)):
                        return self._slowest(found), order
                    key = (counts, index if has_blocked else -1)
                    if key not in following or first < following[key].first:
                        following[key] = found
            ends = following
        return None

    def _reach(self, index: int, number: int, limit: float) -> list[int]:
        """Return the first layer that a run can hold as the stage `number` from the end, by the stage's last layer."""
        key = (index, number, limit)
        if key not in self._firsts:
            fits = self._costs.run_seconds(self._runs[index].slots, number) <= limit
            firsts = np.where(fits.any(axis=0), fits.argmax(axis=0), fits.shape[0])
            self._firsts[key] = [int(first) for first in firsts]
        return self._firsts[key]

    def _can_follow(self, run: _Run, end: _End) -> bool:
        """Return whether every device of a run can talk to every one of the stage behind it."""
        return end.run < 0 or self._costs.links.all_talk(*self._seated([run, self._runs[end.run]]))

    def _order(self, end: _End) -> tuple[DeviceSlot, ...]:
        runs = [self._runs[index] for index in _run_numbers(end)]
        return tuple(slot for run in self._seated(runs) for slot in run)

    def _seated(self, runs: Sequence[_Run]) -> list[list[DeviceSlot]]:
        """Return different devices for each run."""
        taken = [0] * len(self._seats)
        found: list[list[DeviceSlot]] = []
        for run in runs:
            found.append([])
            for kind, number in enumerate(run.counts):
                found[-1] += self._seats[kind][taken[kind] : taken[kind] + number]
                taken[kind] += number
        return found

    def _slowest(self, end: _End) -> float:
        """Return the time of the slowest stage."""
        slowest, number = 0.0, len(_run_numbers(end))
        while end.behind is not None:
            times = self._costs.run_seconds(self._runs[end.run].slots, number)
            slowest = max(slowest, float(times[end.first, end.behind.first]))
            end, number = end.behind, number - 1
        return slowest


def _run_numbers(end: _End) -> list[int]:
    """Return the runs of a pipeline, from its first stage on."""
    found = []
    here: _End | None = end
    while here is not None and here.run >= 0:
        found.append(here.run)
        here = here.behind
    return found
