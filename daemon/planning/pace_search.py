"""Finds a pipeline for many devices: halves the interval of the slowest stage's time, and tries each along an order.
Pure.

For a given time T one walk along the order decides. From the last layer on, each stage takes the next one or several
devices, and as many layers as they manage within T. A walk that has covered more layers is never worse, so for each
place in the order only the furthest walks are kept. A device may stay unused. Where a walk neglects a cost (a few
links, uneven groups), it assumes the worse case; the plan's figures are computed from the resulting pipeline.
"""

from dataclasses import dataclass
from math import ceil, inf
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headway.daemon.costs.devices import DeviceSlot
from headway.daemon.costs.replica_shares import Counts, Floats
from headway.daemon.costs.stage_costs import StageCosts
from headway.daemon.planning.pipeline_cut import Cut

MORE_REPLICAS: Final = 6
"""Maximum number of replicas of a stage, beyond twice the number of devices per layer."""
PRECISION: Final = 1e-3
"""Relative precision of the time with which the search ends."""
NUM_WALKS: Final = 4096
"""Maximum number of walks kept at once, over all places of the order."""
WALKS_AROUND_BLOCKED: Final = 16
"""Minimum number of walks kept for each place where some devices cannot talk."""
WIDER: Final = 1.25
"""Factor by which the time grows until a first pipeline is found; its square follows."""
MOST_WIDENINGS: Final = 8
ANY_TIME: Final = 1e15
"""Multiple of the least time that stands for no limit."""


_Rooms = tuple[Counts, NDArray[np.bool_], Counts]
"""See `PaceSearch._rooms_at`."""


@dataclass(frozen=True, slots=True)
class _Walk:
    """The end of a pipeline: the layers from `first` on, in a number of stages."""

    first: int
    num_stages: int
    run: tuple[int, int] = (0, 0)
    """(first device, end) of its first stage."""
    behind: "_Walk | None" = None


class PaceSearch:
    """The search along one order of devices."""

    def __init__(self, costs: StageCosts, order: tuple[DeviceSlot, ...], *, most_stages: int = 0) -> None:
        """most_stages: 0: as many as the job allows."""
        self._costs = costs
        self._order = order
        timed = [costs.seconds(slot) for slot in order]
        self._each = np.array([each for each, _ in timed])
        self._update = np.array([update for _, update in timed])
        """Seconds of a microbatch and of an update. [num seats, num slices]"""
        self._group = ceil(costs.num_microbatches / costs.num_groups)
        self._most_stages = min(costs.num_layers, costs.num_microbatches, most_stages or len(order))
        self._num_kept = max(1, NUM_WALKS // len(order)) if self._counts_stages() else 1
        self._is_whole = self._num_kept >= self._most_stages
        """True while no walk that could be worth continuing is left out."""
        self._limits = list(dict.fromkeys(map(_limits, order)))
        self._limits_at = np.array([self._limits.index(_limits(slot)) for slot in order])
        """Memory limits of each place."""
        self._rooms: dict[int, _Rooms] = {}
        self._reach = self._class_reach()
        self._slowest_sibling = self._sibling_bandwidths()
        self._widest = costs.cuts.widest_boundary_s(order)
        self._has_limits = any(slot.limit_bytes or slot.host_memory_bytes for slot in order)
        per_layer = self._each[:, costs.slices.slice_of.diagonal(1)]
        self._layer_speed = 1.0 / np.maximum(np.median(per_layer, axis=1), 1e-30)
        whole = costs.slices.slice_of[0, costs.num_layers]
        work = costs.num_microbatches * self._each[:, whole] + self._update[:, whole]
        self._least = float(1.0 / np.sum(1.0 / work))

    def best(self, at_most: float = inf) -> tuple[float, Cut] | None:
        """Return a time near the least, and a pipeline whose stages and links keep to it; None: none within at_most."""
        above, found, wider = min(at_most, self._least * WIDER), None, WIDER
        for _ in range(MOST_WIDENINGS):
            found = self._walk(above)
            if found is not None or above >= at_most or (wider == WIDER and self._never_fits(at_most)):
                break
            wider *= wider
            above = min(at_most, above * wider)
        if found is None:
            return None
        below = self._least
        while above > below * (1 + PRECISION):
            middle = 0.5 * (below + above)
            walked = self._walk(middle)
            if walked is None:
                below = middle
            else:
                above, found = middle, walked
        return above, self._cut(found)

    def _never_fits(self, at_most: float) -> bool:
        """Return whether memory is too small for any batch time, so that a longer time is of no use."""
        return self._is_whole and self._walk(min(at_most, self._least * ANY_TIME)) is None

    def _counts_stages(self) -> bool:
        """Return whether the number of a walk's stages matters."""
        return self._costs.memory.is_limited or min(len(self._order), self._costs.num_layers) > self._most_stages

    def _class_reach(self) -> list[int]:
        """Return how many devices before a place, at most, can be replicas of one stage. Index: the place
        behind them.
        """
        enough = 2 * ceil(len(self._order) / self._costs.num_layers) + MORE_REPLICAS
        most, reach = min(self._costs.num_groups, enough), [0]
        for index, slot in enumerate(self._order):
            alike = index and self._order[index - 1].arithmetic_class == slot.arithmetic_class
            number = reach[-1] + 1 if alike else 1
            while number > 1 and not self._costs.links.siblings_talk(self._order[index + 1 - number : index + 1]):
                number -= 1
            reach.append(number)
        return [min(each, most) for each in reach]

    def _sibling_bandwidths(self) -> list[Floats]:
        """Return the slowest link between the 1, 2, … devices before a place; inf for one."""
        links, order = self._costs.links, self._order
        found = []
        for place, reach in enumerate(self._reach):
            slowest = [inf]
            for number in range(2, reach + 1):
                new, others = order[place - number], order[place - number + 1 : place]
                if links.differ_inside_sites:
                    nearest = min(links.bytes_per_s(new, other) for other in others)
                else:
                    nearest = links.bytes_per_s(new, others[-1])
                slowest.append(min(slowest[-1], nearest))
            found.append(np.array(slowest[:reach]))
        return found

    def _walk(self, limit: float) -> _Walk | None:
        """Return a walk that is a pipeline of all layers within a time, with the last devices of the order."""
        costs, size = self._costs, len(self._order)
        kept: list[list[_Walk]] = [[] for _ in range(size + 1)]
        kept[size].append(_Walk(costs.num_layers, 0, (size, size)))
        for place in range(size, 0, -1):
            walks = self._furthest(kept[place])
            for walk in walks:
                for first, number in self._stages(walk, place, limit):
                    following = _Walk(first, walk.num_stages + 1, (place - number, place), walk)
                    if first == 0:
                        return following
                    kept[place - number].append(following)
            kept[place - 1].extend(walks)
        return None

    def _furthest(self, walks: list[_Walk]) -> list[_Walk]:
        """Return the walks worth continuing: the furthest and, if the number of stages counts, those with fewer."""
        if self._costs.links.has_blocked:
            return self._furthest_by_run(walks)
        found: list[_Walk] = []
        for walk in sorted(walks, key=lambda walk: (walk.first, walk.num_stages, walk.run)):
            if not found or walk.num_stages < found[-1].num_stages:
                found.append(walk)
        if len(found) <= self._num_kept:
            return found
        if self._num_kept == 1:
            return found[:1]
        step = (len(found) - 1) / (self._num_kept - 1)
        return [found[round(index * step)] for index in range(self._num_kept)]

    def _furthest_by_run(self, walks: list[_Walk]) -> list[_Walk]:
        """Return the furthest walk for each first stage: where some devices cannot talk, the next stage may
        avoid one.
        """
        best: dict[tuple[int, int], _Walk] = {}
        for walk in sorted(walks, key=lambda walk: (walk.first, walk.num_stages, walk.run)):
            best.setdefault(walk.run, walk)
        return list(best.values())[: max(self._num_kept, WALKS_AROUND_BLOCKED)]

    def _stages(self, walk: _Walk, place: int, limit: float) -> list[tuple[int, int]]:
        """Return (first layer, number of devices) for stages that could be before a walk, ending before a place."""
        costs, end, reach = self._costs, walk.first, self._reach[place]
        if walk.num_stages >= self._most_stages:
            return []
        slots = slice(place - reach, place)
        most_layers = int(limit / costs.num_microbatches * self._layer_speed[slots].sum() * 1.2) + 3
        low = max(0, end - most_layers)
        rooms = self._rooms_at(costs.memory.least_depth(walk.num_stages + 1)) if self._has_limits else None
        if rooms is not None:
            low = max(low, int(rooms[2][self._limits_at[place - 1], end]))
            if low >= end:
                return []
        candidates = costs.slices.slice_of[low:end, end]
        enough = self._enough(place, candidates, limit, rooms)
        for choice in range(1, len(costs.slices.recomputes) if rooms is not None else 1):
            # Less memory for more time: some candidates keep to both limits only so.
            enough |= self._enough(place, candidates + choice * costs.slices.num_slices, limit, rooms)
        found, best = [], end
        firsts = (low + enough.argmax(axis=1)).tolist()
        for index in np.flatnonzero(enough.any(axis=1)).tolist():
            first = firsts[index]
            if first < best and self._link_keeps(walk, place, index + 1, limit):
                found.append((first, index + 1))
                best = first
        return found

    def _enough(self, place: int, slices: Counts, limit: float, rooms: _Rooms | None) -> NDArray[np.bool_]:
        """Return whether the 1, 2, … devices before a place manage slices within a time. [reach, num candidates]"""
        costs, reach = self._costs, self._reach[place]
        slots = slice(place - reach, place)
        # Nearest device first. [reach, num candidates]
        each, update = self._each[slots, slices][::-1], self._update[slots, slices][::-1]
        alone = costs.num_microbatches * each[0] + update[0] <= limit
        shared_limit = np.full(len(slices), limit)
        if not costs.spec.train.delay:
            most_bytes = costs.sums_bytes[slices] * (costs.num_groups / 4 + 1)
            shared_limit = limit - most_bytes / self._slowest_sibling[place][-1]
        room = np.floor((shared_limit - update) / each * (1 + 1e-12) + 1e-9) // self._group
        fits_alone: NDArray[np.bool_] | bool = True
        if rooms is None:
            room = np.minimum(room, costs.num_groups)
        else:
            limits = self._limits_at[slots][::-1]
            room = np.minimum(room, rooms[0][limits[:, np.newaxis], slices])
            fits_alone = rooms[1][limits[0], slices]
        enough = np.logical_and.accumulate(room >= 1, axis=0) & (np.cumsum(room, axis=0) >= costs.num_groups)
        enough[0] = alone & fits_alone
        if costs.spec.train.delay and reach > 1:
            number = np.arange(1, reach + 1)
            share = (costs.num_groups / number + 1) * (number - 1) / number / self._slowest_sibling[place]
            enough &= share[:, np.newaxis] * costs.sums_bytes[slices][np.newaxis, :] <= limit
        return enough

    def _rooms_at(self, depth: int) -> _Rooms:
        """Return the room on devices, by their memory.

        These are: groups that a device has room for as one of several replicas, [memory, slice]; whether it has room
        for a stage alone, [memory, slice]; and the first layer from which on either is possible, by the stage's end.
        """
        found = self._rooms.get(depth)
        if found is None:
            costs, memory = self._costs, self._costs.memory
            slots = [self._order[int(np.argmax(self._limits_at == index))] for index in range(len(self._limits))]
            # Of two or three replicas, each has the most to add up.
            shared = np.array(
                [np.minimum(memory.most_groups(slot, depth, 2), memory.most_groups(slot, depth, 3)) for slot in slots]
            )
            alone = np.array([memory.most_groups(slot, depth, 1) for slot in slots]) >= costs.num_groups
            each = ((shared >= 1) | alone).reshape(len(slots), len(costs.slices.recomputes), costs.slices.num_slices)
            either: NDArray[np.bool_] = np.logical_or.reduce(each, axis=1)
            may_be = np.append(either, np.zeros((len(slots), 1), dtype=bool), axis=1)[:, costs.slices.slice_of]
            some = np.any(may_be, axis=1)
            firsts = np.where(some, np.argmax(may_be, axis=1), np.arange(costs.num_layers + 1))
            found = self._rooms[depth] = shared, alone, firsts
        return found

    def _link_keeps(self, walk: _Walk, place: int, number: int, limit: float) -> bool:
        """Return whether the link to the stage behind carries a batch in time."""
        if walk.behind is None:
            return True
        if not self._costs.links.all_talk(self._order[place - number : place], self._order[slice(*walk.run)]):
            return False
        if self._widest <= limit:
            return True
        uppers, lowers = self._order[place - number : place], self._order[slice(*walk.run)]
        share = min(len(uppers), len(lowers))
        corners = (uppers[0], uppers[-1]), (lowers[0], lowers[-1])
        return self._costs.cuts.boundary_seconds(*corners) * min(len(corners[0]), len(corners[1])) / share <= limit

    def _cut(self, walk: _Walk) -> Cut:
        runs, spans = [], []
        here = walk
        while here.behind is not None:
            runs.append(self._order[slice(*here.run)])
            spans.append((here.first, here.behind.first))
            here = here.behind
        return Cut(runs=tuple(runs), spans=tuple(spans))


def _limits(slot: DeviceSlot) -> tuple[int, int, str]:
    return slot.room_bytes, slot.host_memory_bytes, slot.device.kind
