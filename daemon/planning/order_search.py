"""Searches the orders of devices: every order of a few, good orders of many. Pure.

With few devices, each order that keeps sites together gets the exact best pipeline along it. With many, good orders of
all usable devices are tried, along which devices may stay unused. Where not all orders are tried, one more comes from
any_order.py: it has room if any order has.
"""

from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from math import inf
from typing import Final

from headway.daemon.costs.devices import (
    DeviceSlot,
    Kinds,
    long_orders,
    natural,
    orders,
    rearranged,
    with_ends_together,
)
from headway.daemon.costs.stage_costs import StageCosts
from headway.daemon.planning.any_order import AnyOrder
from headway.daemon.planning.pace_search import PaceSearch
from headway.daemon.planning.pipeline_cut import Cut, PipelineCut
from headway.daemon.planning.plan_assembly import depths_within_memory, place
from headway.daemon.planning.predicted_time import PredictedTime
from headway.daemon.records.records import WorkerPart

ALL_ORDERS_SEATS: Final = 5
"""Maximum number of seats of which all orders are tried, whatever they are."""
WORTH_A_STAGE: Final = 1.01
"""One more worker must make a batch at least this many times faster."""
TIE: Final = 1e-9
"""Relative difference below which two predictions count as equal."""
FEW_SEATS: Final = 8
"""Maximum number of seats for which every length of a pipeline is searched exactly."""
FEW_ALIKE_SEATS: Final = 12
"""The same maximum for seats that are all equal, which have one order of each length."""
BALANCED_WORKERS: Final = 32
"""Maximum number of workers for which layers are spread evenly in the best pipeline."""
FEWER: Final = (0.5, 0.625, 0.75, 0.875)
"""Fractions of many devices that are tried too, so that marginal ones stay unused."""
SEATS_WITHIN_MEMORY: Final = 16
"""Maximum number of seats for which good orders are compared by the depth that memory leaves; of more, only the taken
one.
"""
QUICK_SEATS: Final = 100
"""Maximum number of seats for which these fractions, and more orders, are tried."""

Holdings = tuple[tuple[str, tuple[str, ...]], ...]
"""(node, layers whose files it holds)"""


class AtHome:
    """Counts the layers of a pipeline that its workers already have."""

    def __init__(self, names: tuple[str, ...], previous: tuple[WorkerPart, ...], holdings: Holdings) -> None:
        """names: the model's layers. previous: the workers of the plan in force, whose layers should stay."""
        self._names = names
        self._before = {
            (layer, stage.node, stage.node_incarnation, stage.device_index)
            for stage in previous
            for layer in stage.layers
        }
        self._holdings = {(node, layer) for node, layers in holdings for layer in layers}
        self.previous = previous

    def rank(self, cut: Cut) -> tuple[int, int]:
        """Return a rank; lower is better. Layers that stay count first, then layers whose files are on the node."""
        if not self._before and not self._holdings:
            return 0, 0
        placed = [
            (layer, slot)
            for run, (first, end) in zip(cut.runs, cut.spans, strict=True)
            for slot in run
            for layer in self._names[first:end]
        ]
        stay = sum((layer, slot.node, slot.incarnation, slot.device.index) in self._before for layer, slot in placed)
        return -stay, -sum((slot.node, layer) in self._holdings for layer, slot in placed)


class OrderSearch:
    """One search over the orders of a set of seats."""

    def __init__(self, costs: StageCosts, slots: tuple[DeviceSlot, ...], kinds: Kinds, at_home: AtHome) -> None:
        self._costs = costs
        self._slots = slots
        self._kinds = kinds
        self._at_home = at_home
        self._placement = costs.spec.placement
        num_stages = min(costs.num_layers, costs.num_microbatches)
        self._most_workers = min(len(slots), num_stages * costs.num_groups)
        self._can_talk = costs.links.can_talk if costs.links.has_blocked else None

    def best(self) -> Cut | None:
        """Return the best pipeline that uses as many nodes as the job demands; None: nothing fits."""
        shape = self._placement.replicas
        if sum(shape) > FEW_ALIKE_SEATS:
            return self._best_of(self._long_orders(sum(shape), is_short=True))
        if shape:
            return self._best_of(chain(self._orders((sum(shape),)), self._any_order()))
        are_alike = len(set(map(self._kinds.of, self._slots))) == 1
        if len(self._slots) <= (FEW_ALIKE_SEATS if are_alike else FEW_SEATS):
            return self._best_of(chain(self._orders(range(1, self._most_workers + 1)), self._any_order()))
        all_slots = self._slots
        self._keep_most_nodes()
        found = self._best_of_long_orders()
        if found is None:
            self._slots = all_slots
            return self._best_of(self._any_order())
        if self._has_wanted_nodes(found.slots):
            return self._balanced(found)
        return self._as_many_as_demanded()

    def _orders(self, lengths: Iterable[int]) -> Iterator[tuple[DeviceSlot, ...]]:
        found = orders(
            self._slots, lengths=lengths, kinds=self._kinds, previous=self._previous, can_talk=self._can_talk
        )
        return self._with_direct_orders(found)

    def _with_direct_orders(self, found: Iterable[tuple[DeviceSlot, ...]]) -> Iterator[tuple[DeviceSlot, ...]]:
        """Yield orders, each after a similar one that needs fewer relays: the first of equals is taken."""
        for order in found:
            direct = self._costs.links.with_fewer_relays(order)
            if direct is not None:
                yield direct if self._can_talk is None else rearranged(direct, self._can_talk)
            yield order

    def _any_order(self) -> Iterator[tuple[DeviceSlot, ...]]:
        """Yield an order of devices with room for the job, where not all orders are tried; nothing if none has."""
        if len(self._slots) > ALL_ORDERS_SEATS:
            staying = {(stage.node, stage.device_index) for stage in self._previous}
            slots = sorted(self._slots, key=lambda slot: (slot.node, slot.device.index) not in staying)
            found = AnyOrder(self._costs, slots, self._kinds, self._has_wanted_nodes).best()
            if found is not None:
                yield found

    def _long_orders(self, length: int, *, is_short: bool) -> Iterator[tuple[DeviceSlot, ...]]:
        found = long_orders(
            self._slots, length, self._kinds, self._previous, is_short=is_short, can_talk=self._can_talk
        )
        for order in self._with_direct_orders(found):
            yield order
            if self._costs.cuts.tied_bytes and (ring := with_ends_together(order)):
                yield ring

    @property
    def _previous(self) -> tuple[WorkerPart, ...]:
        return self._at_home.previous

    def _has_wanted_nodes(self, slots: tuple[DeviceSlot, ...]) -> bool:
        used = len({slot.node for slot in slots})
        return used >= self._placement.min_nodes and not (
            self._placement.max_nodes and used > self._placement.max_nodes
        )

    def _seconds(self, cut: Cut, *, within_memory: bool = True) -> float:
        """Return a batch's seconds, with the cost of distance that too few microbatches, or too little memory, leave
        unhidden.

        within_memory=False is several times quicker, and leaves out the effect of too little memory. inf: the ends of a
        tied embedding cannot talk.
        """
        if not self._costs.cuts.can_tie(cut.runs[0], cut.runs[-1]):
            return inf
        placed = place(self._costs, cut)
        times = PredictedTime(self._costs, placed)
        depths = (
            depths_within_memory(self._costs, placed, times)
            if within_memory
            else [times.depth(stage) for stage in range(len(placed))]
        )
        return times.distance(depths).batch_s

    # --- Few devices --------------------------------------------------------------------------------------------------

    def _best_of(self, candidates: Iterator[tuple[DeviceSlot, ...]]) -> Cut | None:
        """Return the fastest of the orders in which every device works, or one of fewer devices that is
        nearly as fast.
        """
        best_by_length: dict[int, tuple[float, tuple[int, int, int], Cut]] = {}
        for order in candidates:
            if not self._has_wanted_nodes(order):
                continue
            before = best_by_length.get(len(order))
            found = self._along(order, inf if before is None else before[0])
            if found is None:
                continue
            seconds, cut = found
            num_relayed = self._costs.links.num_relayed(cut.runs, is_tied=bool(self._costs.cuts.tied_bytes))
            rank = (num_relayed, *self._at_home.rank(cut))
            is_tie = before is not None and seconds <= before[0] * (1 + TIE)
            if before is None or seconds < before[0] * (1 - TIE) or (is_tie and rank < before[1]):
                best_by_length[len(order)] = (seconds, rank, cut)
        if not best_by_length:
            return None
        fastest = min(seconds for seconds, _, _ in best_by_length.values())
        shortest = min(
            length for length, (seconds, _, _) in best_by_length.items() if seconds <= fastest * WORTH_A_STAGE
        )
        return best_by_length[shortest][2]

    def _along(self, order: tuple[DeviceSlot, ...], at_most: float) -> tuple[float, Cut] | None:
        """Return the best pipeline along an order.

        If distance costs time, fewer stages may be faster than the cut whose slowest stage is fastest.
        """
        search = PipelineCut(self._costs, order, shape=self._placement.replicas)
        best = search.best(at_most)
        if best is None:
            return None
        hidden, (seconds, cut) = best[0], (self._seconds(best[1]), best[1])
        if seconds <= hidden * (1 + TIE):
            return seconds, cut
        for _, other in search.of_each_length(min(at_most, seconds)):
            if (taken := self._seconds(other)) < seconds * (1 - TIE):
                seconds, cut = taken, other
        return (seconds, cut) if seconds < inf else None

    # --- Many devices -------------------------------------------------------------------------------------------------

    def _best_of_long_orders(self) -> Cut | None:
        most = min(self._most_workers, len(self._slots))
        if self._costs.links.has_relays:
            return self._best_over_relays(most)
        best = self._fastest(most, inf)
        if best is None or len(self._slots) > QUICK_SEATS:
            return None if best is None else best[1]
        for part in FEWER:
            fewer = max(1, int(most * part))
            nearly = self._fastest(fewer, best[0] * WORTH_A_STAGE, best[0] * WORTH_A_STAGE)
            if nearly is not None and len(nearly[1].slots) < len(best[1].slots):
                return nearly[1]
        return best[1]

    def _best_over_relays(self, most: int) -> Cut | None:
        """Return the best pipeline of any length: each link through a relay makes all others through it slower."""
        parts = FEWER if len(self._slots) <= QUICK_SEATS else ()
        lengths = {most >> shift for shift in range(most.bit_length())} | {max(1, int(most * part)) for part in parts}
        best: tuple[float, Cut] | None = None
        for length in sorted(lengths, reverse=True):
            limit = inf if best is None else best[0] * WORTH_A_STAGE
            found = self._fastest(length, limit, is_short=best is not None)
            if found is not None and (best is None or self._has_wanted_nodes(found[1].slots)):
                best = min(best[0], found[0]) if best is not None else found[0], found[1]
        return None if best is None else best[1]

    def _fastest(
        self, length: int, at_most: float, enough: float = 0.0, *, is_short: bool = False
    ) -> tuple[float, Cut] | None:
        """Return the fastest pipeline along good orders of `length` devices. enough: a time that need not be beaten.
        is_short: along fewer orders, as for more devices.
        """
        best: tuple[float, Cut] | None = None
        is_quick = len(self._slots) <= QUICK_SEATS and bool(self._costs.spec.train.delay)
        for order in self._long_orders(length, is_short=is_short or not is_quick):
            for most_stages in self._numbers_of_stages(length):
                limit = at_most if best is None else best[0] * (1 - TIE)
                found = PaceSearch(self._costs, order, most_stages=most_stages).best(limit)
                if found is None:
                    continue
                cut = found[1]
                seconds = self._seconds(cut, within_memory=len(self._slots) <= SEATS_WITHIN_MEMORY)
                if seconds < inf and seconds <= (at_most if best is None else best[0] * (1 - TIE)):
                    best = seconds, cut
                    if seconds <= enough:
                        return best
        return best

    def _balanced(self, cut: Cut) -> Cut:
        """Return a pipeline of the given stages' devices, with layers as even as possible."""
        if len(cut.slots) > BALANCED_WORKERS:
            return cut
        found = PipelineCut(self._costs, cut.slots, shape=tuple(map(len, cut.runs))).best()
        return cut if found is None else found[1]

    def _numbers_of_stages(self, length: int) -> tuple[int, ...]:
        """Return limits of the number of stages to try. Without delay a longer pipe takes longer to fill; replicas do
        not.
        """
        if self._costs.spec.train.delay:
            return (0,)
        most = min(length, self._costs.num_layers, self._costs.num_microbatches)
        return tuple(max(1, most >> shift) for shift in range(most.bit_length()))

    def _keep_most_nodes(self) -> None:
        """Keep only the fastest nodes, if there are more than the job may have."""
        speeds: dict[str, float] = {}
        for slot in self._slots:
            speeds[slot.node] = speeds.get(slot.node, 0.0) + self._kinds.speed(slot)
        most = self._placement.max_nodes
        if most and len(speeds) > most:
            kept = frozenset(sorted(speeds, key=lambda node: (-speeds[node], natural(node)))[:most])
            self._slots = tuple(slot for slot in self._slots if slot.node in kept)

    def _as_many_as_demanded(self) -> Cut | None:
        """Return more devices than are worth it, because the job demands so many nodes: spread evenly over
        the stages.
        """
        found: tuple[float, Cut] | None = None
        most = min(self._most_workers, len(self._slots))
        # More devices than nodes may be needed where nodes have several.
        for length in sorted({min(most, self._placement.min_nodes + more) for more in (0, 1, 2, 4, 8, 16, 32, most)}):
            num_stages = min(length, self._costs.num_layers, self._costs.num_microbatches)
            ends = [length * index // num_stages for index in range(num_stages + 1)]
            shape = tuple(end - first for first, end in pairwise(ends))
            for order in self._long_orders(length, is_short=True):
                if not self._has_wanted_nodes(order):
                    continue
                cut = PipelineCut(self._costs, order, shape=shape).best(inf if found is None else found[0])
                if cut is None or not self._costs.cuts.can_tie(cut[1].runs[0], cut[1].runs[-1]):
                    continue
                seconds = max(cut[0], self._costs.cuts.tie_seconds(cut[1].runs[0], cut[1].runs[-1]))
                if found is None or seconds < found[0] * (1 - TIE):
                    found = seconds, cut[1]
            if found is not None:
                return found[1]
        return None
