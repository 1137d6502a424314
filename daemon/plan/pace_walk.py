"""Finds a pipeline for many devices: halves the interval of the slowest stage's time, and tries each along an order.
Pure.

For a given time T one walk along the order decides. From the last layer on, each stage takes the next one or several
devices, and as many layers as they manage within T. A walk that has covered more layers is never worse, so for each
place in the order only the furthest walks are kept. A device may stay unused. Where a walk neglects a cost (a few
links, uneven groups), it assumes the worse case; the plan's figures are computed from the resulting pipeline.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, inf
from typing import Final

import numpy as np

from headway.daemon.plan.devices import DeviceSlot
from headway.daemon.plan.predicted_time import Cut
from headway.daemon.plan.replica_shares import Bools, Counts, Floats, largest_share
from headway.daemon.plan.stage_costs import SHARING_GAIN, StageCosts

MORE_REPLICAS: Final = 6
"""Maximum number of replicas of a stage, beyond twice the number of devices per layer."""
PRECISION: Final = 1e-3
"""Relative precision of the time with which the search ends."""
NUM_WALKS: Final = 4096
"""Maximum number of walks kept at once, over all places of the order."""
SHARING_SEATS: Final = 24
"""With more seats, a walk does not count what replicas save by sharing an update; the plan then does."""
WALKS_AROUND_BLOCKED: Final = 16
"""Minimum number of walks kept for each place where some devices cannot talk."""
WIDER: Final = 1.25
"""Factor by which the time grows until a first pipeline is found; its square follows."""
ANY_TIME: Final = 1e15
"""Multiple of the least time that stands for no limit."""


_Rooms = tuple[Counts, Bools]
"""Groups that a device has room for as one of several replicas, and whether it has room for a stage alone."""


@dataclass(frozen=True, slots=True)
class _Walk:
    """The end of a pipeline: the layers from `first` on, in a number of stages."""

    first: int
    num_stages: int
    run: tuple[int, int] = (0, 0)
    """(first device, end) of its first stage."""
    behind: "_Walk | None" = None


class PaceWalk:
    """The search along one order of devices."""

    def __init__(
        self,
        costs: StageCosts,
        order: tuple[DeviceSlot, ...],
        shape: tuple[int, ...] = (),
        *,
        is_hopeful: bool = False,
    ) -> None:
        """shape: number of workers of each stage; empty: as the job says. is_hopeful: each reduction group counts as if
        it had as few microbatches as the smallest, not as many as the largest.
        """
        self._costs = costs
        self._order = order
        self._each, self._update, self._shareable = costs.seconds_along(order)
        """Seconds of a microbatch, of an update, and what of it replicas can share. [num seats, num slices]"""
        self._may_share_updates = False
        self._group = (floor if is_hopeful else ceil)(costs.num_microbatches / costs.num_groups)
        self._shape = shape or costs.spec.placement.replicas
        self._reached = costs.num_layers
        """First layer of the furthest walk so far."""
        self._most_stages = self._num_kept = 0
        self._limit_stages(0)
        self._limits = list(dict.fromkeys(map(_limits, order)))
        self._limits_at = np.array([self._limits.index(_limits(slot)) for slot in order])
        """Memory limits of each place."""
        self._rooms: dict[int, _Rooms] = {}
        self._reach = self._class_reach()
        self._slowest_sibling = self._sibling_bandwidths()
        number = np.arange(1, max(self._reach, default=1) + 1)[:, np.newaxis]
        self._others_part = (number - 1) / number
        self._sums_part = (costs.num_groups / number + 1) * self._others_part
        # A share of a small update is not worth its messages, and takes the search three times as long.
        computing = costs.num_microbatches / number[-1] * self._each + self._update
        gain = self._shareable * self._others_part[-1] > SHARING_GAIN * computing
        self._may_share_updates = bool(len(order) <= SHARING_SEATS and costs.may_share_updates and np.any(gain))
        """What each of 1, 2, … replicas sends a batch, in shares of the update and in sums: see `reduction_bytes`."""
        self._widest = costs.cuts.widest_boundary_s(order)
        self._has_limits = any(slot.limit_bytes or slot.host_memory_bytes for slot in order)
        # What one layer more costs: a stage of one layer has frames as well.
        step = 1 + costs.spec.placement.split_blocks  # halves by turns
        one, more = (self._each[:, costs.slices.slice_of.diagonal(number)] for number in (1, 1 + step))
        per_layer = (more - one[:, :-step]) / step
        self._layer_speed = 1.0 / np.maximum(np.median(per_layer, axis=1), 1e-30)
        whole = costs.slices.slice_of[0, costs.num_layers]
        work = costs.num_microbatches * self._each[:, whole] + self._update[:, whole]
        self._least = float(1.0 / np.sum(1.0 / work))

    @property
    def num_stages(self) -> int:
        """Return the number of stages that the pipeline must have; 0: any."""
        return len(self._shape)

    def best(self, at_most: float = inf, most_stages: int = 0, at_least: float = 0.0) -> Cut | None:
        """Return a pipeline whose stages and links keep to a time near the least; None: none within at_most.

        most_stages: 0: as many as the job allows. at_least: a shorter time is of no use.
        """
        self._limit_stages(most_stages)
        above = at_most
        found = self._walk(above) if above < inf else None
        if above == inf:
            above, wider = self._least * WIDER, WIDER
            while (found := self._walk(above)) is None:
                if (
                    wider == WIDER
                    and self._num_kept >= self._most_stages
                    and self._walk(self._least * ANY_TIME) is None
                ):
                    break  # memory is too small, whatever the time
                wider *= wider
                above *= wider
                if above > self._least * ANY_TIME:
                    break
        if found is None:
            return None
        below = max(self._least, at_least)
        while above > below * (1 + PRECISION):
            middle = 0.5 * (below + above)
            walked = self._walk(middle)
            if walked is None:
                below = middle
            else:
                above, found = middle, walked
        return self._cut(found)

    def furthest(self) -> int:
        """Return the first layer that the furthest walk reaches if time is no limit; 0: a pipeline fits."""
        self._walk(self._least * ANY_TIME)
        return self._reached

    def _limit_stages(self, most_stages: int) -> None:
        costs, size = self._costs, len(self._order)
        most = len(self._shape) or most_stages or size
        self._most_stages = min(costs.num_layers, costs.num_microbatches, most)
        counts_stages = costs.memory.is_limited or min(size, costs.num_layers) > self._most_stages
        self._num_kept = max(1, NUM_WALKS // size) if counts_stages else 1

    def _class_reach(self) -> list[int]:
        """Return how many devices before a place, at most, can be replicas of one stage. Index: the place
        behind them.
        """
        enough = max((2 * ceil(len(self._order) / self._costs.num_layers) + MORE_REPLICAS, *self._shape))
        most, reach = min(self._costs.num_groups, enough), [0]
        for end in range(1, len(self._order) + 1):
            number = min(reach[-1] + 1, most)
            while number > 1 and not self._costs.can_share(self._order[end - number : end]):
                number -= 1
            reach.append(number)
        return reach

    def _sibling_bandwidths(self) -> list[Floats]:
        """Return the slowest link between the 1, 2, … devices before a place; inf for one."""
        links, order = self._costs.links, self._order
        differ = links.differ_inside_sites(order)
        found = []
        for place, reach in enumerate(self._reach):
            slowest = [inf]
            for number in range(2, reach + 1):
                new, others = order[place - number], order[place - number + 1 : place]
                if differ:
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
            for walk, first, number in self._stages(walks, place, limit):
                following = _Walk(first, walk.num_stages + 1, (place - number, place), walk)
                self._reached = min(self._reached, first)
                if first == 0 and (not self._shape or following.num_stages == self._most_stages):
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

    def _stages(self, walks: Sequence[_Walk], place: int, limit: float) -> Iterator[tuple[_Walk, int, int]]:
        """Yield (walk, first layer, number of devices) for the stages that could be before walks, ending before a
        place.
        """
        costs, reach, shape = self._costs, self._reach[place], self._shape
        walks = [walk for walk in walks if walk.num_stages < self._most_stages and walk.first > 0]
        if not walks:
            return
        speed = self._layer_speed[place - reach : place].sum()
        most_layers = min(costs.num_layers, int(limit / costs.num_microbatches * speed * 1.2) + 3)
        ends = np.array([[walk.first] for walk in walks])
        firsts = ends - np.arange(most_layers, 0, -1)
        # Each stage in front needs a layer.
        least_first = np.array([[self._most_stages - walk.num_stages - 1 if shape else 0] for walk in walks])
        candidates = costs.slices.slice_of[np.maximum(firsts, 0), ends]
        enough = np.zeros((reach, *firsts.shape), dtype=np.bool_)
        for choice in range(len(costs.slices.recomputes) if self._has_limits else 1):
            # Less memory for more time: some candidates keep to both limits only so.
            slices = candidates + choice * costs.slices.num_slices
            rooms = self._rooms_of(walks, place, slices) if self._has_limits else None
            enough |= self._enough(place, slices.ravel(), limit, rooms).reshape(enough.shape)
        enough &= firsts >= least_first
        # The first layer of the longest stage; where none is enough, the walk's own. [num walks, reach]
        reached = np.where(np.logical_or.reduce(enough, axis=2), ends.T - most_layers + enough.argmax(axis=2), ends.T).T
        for walk, firsts_of_walk in zip(walks, reached.tolist(), strict=True):
            best = walk.first
            for number, first in enumerate(firsts_of_walk, 1):
                if first >= best or (shape and number != shape[-1 - walk.num_stages]):
                    continue
                if self._link_keeps(walk, place, number, limit):
                    yield walk, first, number
                    best = first

    def _enough(self, place: int, slices: Counts, limit: float, rooms: _Rooms | None) -> Bools:
        """Return whether the 1, 2, … devices before a place manage slices within a time. [reach, num candidates]"""
        costs, reach = self._costs, self._reach[place]
        # The nearest device comes first. [reach, num candidates]
        each, update = (table[place - reach : place, slices][::-1] for table in (self._each, self._update))
        most, fits_alone = (costs.num_groups, True) if rooms is None else rooms
        alone = (costs.num_microbatches * each[0] + update[0] <= limit) & fits_alone
        if reach == 1:
            return np.atleast_2d(alone)
        sent = self._sums_part[:reach] * costs.sums_bytes[slices]
        reducing = sent / self._slowest_sibling[place][:, np.newaxis]
        if costs.spec.train.delay:
            computing, is_quick = np.full(sent.shape, limit), reducing <= limit
        else:
            computing, is_quick = limit - reducing, np.ones(reducing.shape, dtype=np.bool_)
        room = np.floor((computing[-1] - update) / each * (1 + 1e-12) + 1e-9) // self._group
        room = np.minimum(room, most)
        enough = np.logical_and.accumulate(room >= 1, axis=0) & (np.cumsum(room, axis=0) >= costs.num_groups) & is_quick
        if self._may_share_updates:
            enough |= self._enough_sharing(place, slices, computing, most) & is_quick
        enough[0] = alone
        return enough

    def _enough_sharing(self, place: int, slices: Counts, computing: Floats, most: int | Counts) -> Bools:
        """Return whether the 1, 2, … devices before a place manage slices if they share the updates."""
        costs, reach = self._costs, self._reach[place]
        slots, number = slice(place - reach, place), np.arange(1, reach + 1)
        each, update = self._each[slots, slices][::-1], self._update[slots, slices][::-1]
        bandwidth = self._slowest_sibling[place][:, np.newaxis]
        sent = self._others_part[:reach] * costs.memory.shared_bytes[slices]
        limit = computing if costs.spec.train.delay else computing - sent / bandwidth
        kept = np.array([largest_share(costs.largest_part[slices], int(n)) for n in number])[:, np.newaxis]
        own = update - self._shareable[slots, slices][::-1] * (1.0 - kept)
        is_used = (number[:, np.newaxis] >= number)[:, :, np.newaxis]
        room = np.floor((limit[:, np.newaxis] - own) / each * (1 + 1e-12) + 1e-9) // self._group
        room = np.where(is_used, np.minimum(room, most), 0)
        enough: Bools = np.all((room >= 1) | ~is_used, axis=1) & (np.sum(room, axis=1) >= costs.num_groups)
        return enough

    def _rooms_of(self, walks: Sequence[_Walk], place: int, slices: Counts) -> _Rooms:
        """Return the room of the devices before a place for stages before walks. slices: [num walks, num candidates]"""
        limits = self._limits_at[place - self._reach[place] : place][::-1]
        shared, alone = [], []
        for walk, candidates in zip(walks, slices, strict=True):
            rooms = self._rooms_at(self._costs.memory.least_depth(walk.num_stages + 1))
            shared.append(rooms[0][limits[:, np.newaxis], candidates])
            alone.append(rooms[1][limits[0], candidates])
        return np.concatenate(shared, axis=1), np.concatenate(alone)

    def _rooms_at(self, depth: int) -> _Rooms:
        """Return the room on devices, by their memory. Both [memory, slice]"""
        found = self._rooms.get(depth)
        if found is None:
            memory = self._costs.memory
            slots = [self._order[int(np.argmax(self._limits_at == index))] for index in range(len(self._limits))]
            # Of two or three replicas, each has the most to add up.
            shared = np.array(
                [np.minimum(memory.most_groups(slot, depth, 2), memory.most_groups(slot, depth, 3)) for slot in slots]
            )
            alone = np.array([memory.most_groups(slot, depth, 1) for slot in slots]) >= self._costs.num_groups
            found = self._rooms[depth] = shared, alone
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
