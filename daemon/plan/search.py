"""The search for a plan: good orders of devices, the fastest pipeline along each, and moves until none helps. Pure.

An order puts each site's devices together, the fastest site first. Along an order `PaceWalk` finds the pipeline whose
slowest stage is fastest; devices may stay unused. Then two devices change places, or a device comes in or goes, while
a batch gets faster. Last, layers move between neighbours until the stages are as even as they can be. The number of
tries is limited, so a large cluster gets fewer moves, not a slower answer.

Tests compare small clusters with all plans that there are.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, combinations, groupby, pairwise, permutations
from math import inf
from typing import Final

from headway.daemon.cluster.records import WorkerPart
from headway.daemon.plan.devices import DeviceSlot, Kinds, natural
from headway.daemon.plan.pace_walk import PRECISION, PaceWalk
from headway.daemon.plan.predicted_time import Cut, PredictedTime, depths_within_memory, fill_factor, place
from headway.daemon.plan.stage_costs import StageCosts

WORTH_A_STAGE: Final = 1.01
"""One more worker must make a batch at least this many times faster."""
TIE: Final = 1e-9
"""Relative difference below which two predictions count as equal."""
BETTER: Final = 0.998
"""A move must shorten a batch to this part of its time, or less."""
MOST_TRIES: Final = 300
"""Maximum number of places that the walks of one kind of move go through, beyond one walk through all."""
ALL_ORDERS_SEATS: Final = 5
"""Up to so many seats, every order is tried."""
MANY_SEATS: Final = 100
"""With more seats, fewer orders are tried."""
FEW_SEATS: Final = 12
"""Up to so many seats, each number of stages has walks of its own; with more, powers of two."""

Holdings = tuple[tuple[str, tuple[str, ...]], ...]
"""(node, layers whose files it holds)"""
Order = tuple[DeviceSlot, ...]


class AtHome:
    """Counts the layers of a pipeline that its workers already have."""

    def __init__(self, names: tuple[str, ...], previous: tuple[WorkerPart, ...], holdings: Holdings) -> None:
        """names: the model's layers. previous: the workers of the plan in force, whose layers should stay."""
        self._names = names
        self._before = {
            (layer, worker.node, worker.node_incarnation, worker.device_index)
            for worker in previous
            for layer in worker.layers
        }
        self._holdings = {(node, layer) for node, layers in holdings for layer in layers}
        self.holds_files = bool(holdings)
        self.previous = {
            (worker.node, worker.node_incarnation, worker.device_index): index for index, worker in enumerate(previous)
        }
        """Place of each device in the plan in force."""

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
        stay = sum((layer, *slot.key) in self._before for layer, slot in placed)
        return -stay, -sum((slot.node, layer) in self._holdings for layer, slot in placed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A pipeline, how long it takes, and what else speaks for it."""

    seconds: float
    """Predicted seconds of a batch."""
    rank: tuple[int, ...]
    """Links through relays, layers that move, files that are fetched: lower is better among equals."""
    cut: Cut
    order: Order
    """The order along which it was found; some devices of it may be unused."""
    hidden_s: float
    """Seconds of a batch if distance cost nothing."""

    def by_time(self) -> tuple[float, tuple[int, ...]]:
        """Return a key that sorts the fastest first."""
        return self.seconds, self.rank

    @property
    def is_far(self) -> bool:
        """Return whether a batch waits for frames on their way."""
        return self.seconds > self.hidden_s * (1 + TIE)

    def beats(self, other: "Found | None") -> bool:
        """Return whether this is faster, or as fast with a better rank."""
        if other is None or self.seconds < other.seconds * (1 - TIE):
            return True
        return self.seconds <= other.seconds * (1 + TIE) and self.rank < other.rank


class Search:
    """One search over the orders of a set of seats."""

    def __init__(self, costs: StageCosts, slots: Order, kinds: Kinds, at_home: AtHome) -> None:
        self._costs = costs
        self._kinds = kinds
        self._at_home = at_home
        self._placement = costs.spec.placement
        self._slots = self._within_most_nodes(slots)
        self._by_name = {slot: index for index, slot in enumerate(sorted(self._slots, key=self._seat_key))}
        self._most_stages = min(costs.num_layers, costs.num_microbatches)
        has_ranks = costs.links.has_relays or (at_home.holds_files and not at_home.previous)
        self._closeness = 1.0 if has_ranks else 1.0 - PRECISION
        """What part of the best time another order must reach; 1: as good a one may have a better rank."""

    def best(self) -> Found | None:
        """Return the best pipeline that uses as many nodes as the job demands; None: none was found that fits."""
        best: Found | None = None
        for order in self._orders():
            best = self._along(order, best) or best
        if best is not None and (best.is_far or not self._costs.spec.train.delay):
            for order in self._shorter_orders():
                best = self._along(order, best) or best
        if best is None:
            best = self._any_that_fits()
        if best is None:
            return None
        best = self._with_better_order(best)
        if self._costs.memory.is_limited and ALL_ORDERS_SEATS < len(self._slots) <= FEW_SEATS:
            # Where room is short, moves from the best order may not lead to the best plan: the first one starts, too.
            found = self._along(next(self._orders()), None)
            best = best if found is None else min(best, self._with_better_order(found), key=Found.by_time)
        best = self._with_wanted_nodes(best)
        if best is None:
            return None
        return self._first_seats(self._even(self._with_fewer_workers(best)))

    # --- Orders -------------------------------------------------------------------------------------------------------

    def _orders(self) -> Iterator[Order]:
        """Yield good orders: as in the plan in force, then by speed or memory within each site, and their reverses."""
        seen: set[tuple[object, ...]] = set()
        for order in self._plain_orders():
            kinds, most = tuple(map(self._kinds.of, order)), self._placement.max_nodes
            if kinds not in seen and not 0 < most < len({slot.node for slot in order}):
                seen.add(kinds)
                yield from self._alike(self._seated(order))

    def _alike(self, order: Order) -> Iterator[Order]:
        """Yield an order and similar ones: with fewer relays, or with both ends of a tied embedding in one site."""
        direct = self._costs.links.with_fewer_relays(order)
        if direct is not None:
            yield direct
        yield order
        number = next((index for index, slot in enumerate(order) if slot.site != order[0].site), 0)
        if self._costs.cuts.tied_bytes and number > 1:
            # The ends exchange their sums inside the site, for one more crossing of hidden states.
            yield (*order[number // 2 :], *order[: number // 2])

    def _plain_orders(self) -> Iterator[Order]:
        before = self._at_home.previous
        if before:
            known = sorted((slot for slot in self._slots if slot.key in before), key=lambda slot: before[slot.key])
            yield (*known, *self._arranged([slot for slot in self._slots if slot.key not in before], _by_speed))
        is_large = len(self._slots) > MANY_SEATS
        for arrange in _ARRANGEMENTS[: 2 if is_large else None]:
            order = self._arranged(self._slots, arrange)
            turned = tuple(slot for _, site in groupby(order, key=_site_of) for slot in [*site][::-1])
            yield order
            yield order[::-1]
            yield from (() if is_large else (turned, turned[::-1]))
        if len(self._slots) <= ALL_ORDERS_SEATS:
            by_name = sorted(self._slots, key=self._by_name.__getitem__)
            names = dict.fromkeys(slot.node for slot in by_name)
            for nodes in combinations(names, min(self._placement.max_nodes or len(names), len(names))):
                yield from permutations([slot for slot in by_name if slot.node in nodes])

    def _shorter_orders(self) -> Iterator[Order]:
        """Yield the orders of fewer of the seats, if they are few.

        A walk makes the slowest stage fast. Where a batch also waits for its ways, or for the pipe to fill, fewer
        devices may be faster than those that are fast and far from each other.
        """
        seen: set[tuple[object, ...]] = set()
        by_name = sorted(self._slots, key=self._by_name.__getitem__)
        most = self._placement.max_nodes or len(by_name)
        for number in range(len(by_name) - 1, 0, -1) if len(by_name) <= ALL_ORDERS_SEATS else ():
            for order in permutations(by_name, number):
                kinds = tuple(map(self._kinds.of, order))
                if kinds not in seen and len({slot.node for slot in order}) <= most:
                    seen.add(kinds)
                    yield order

    def _arranged(self, slots: Sequence[DeviceSlot], arrange: "_Arrange") -> Order:
        """Return seats site by site, and within a site class by class: only those of one class can be replicas."""
        totals: dict[str, float] = {}
        for slot in slots:
            totals[slot.site] = totals.get(slot.site, 0.0) + self._kinds.speed(slot)
        order = sorted(slots, key=lambda slot: (-self._kinds.speed(slot), self._kinds.of(slot), self._seat_key(slot)))
        groups: dict[tuple[float, str, str], list[DeviceSlot]] = {}
        for slot in order:
            groups.setdefault((-totals[slot.site], slot.site, slot.arithmetic_class), []).append(slot)
        return tuple(slot for key in sorted(groups) for slot in arrange(groups[key]))

    def _seat_key(self, slot: DeviceSlot) -> tuple[object, ...]:
        """Return a key by which seats of the plan in force come first, in its order, then others by name."""
        before = self._at_home.previous
        return before.get(slot.key, len(before)), natural(slot.node), slot.device.index

    def _seated(self, order: Order, pool: Sequence[DeviceSlot] = ()) -> Order:
        """Return equal seats of a pool, or of the order itself, by their names; who stays keeps its place."""
        pool, before = pool or order, self._at_home.previous
        places = {before[slot.key]: slot for slot in pool if slot.key in before} if len(order) == len(before) else {}
        kinds = [self._kinds.of(slot) for slot in order]
        staying = {at: slot for at, slot in places.items() if self._kinds.of(slot) == kinds[at]}
        kept = set(staying.values())
        free: dict[object, list[DeviceSlot]] = {}
        for slot in sorted(pool, key=self._by_name.__getitem__):
            if slot not in kept:
                free.setdefault(self._kinds.of(slot), []).append(slot)
        return tuple(staying.get(at) or free[kind].pop(0) for at, kind in enumerate(kinds))

    def _first_seats(self, best: Found) -> Found:
        """Return a pipeline on the first of equal seats, unless another is at home: spares are the last ones."""
        if self._costs.links.has_relays:
            return best
        seats = iter(self._seated(best.cut.slots, self._slots))
        runs = tuple(tuple(next(seats) for _ in run) for run in best.cut.runs)
        found = self._timed(replace(best.cut, runs=runs), best.order)
        return found if found is not None and found.rank <= best.rank else best

    def _within_most_nodes(self, slots: Order) -> Order:
        """Return the seats of the fastest nodes, if there are more than the job may have."""
        speeds: dict[str, float] = {}
        for slot in slots:
            speeds[slot.node] = speeds.get(slot.node, 0.0) + self._kinds.speed(slot)
        most = self._placement.max_nodes
        if not most or len(speeds) <= most or len(slots) <= ALL_ORDERS_SEATS:
            return slots
        kept = frozenset(sorted(speeds, key=lambda node: (-speeds[node], natural(node)))[:most])
        return tuple(slot for slot in slots if slot.node in kept)

    # --- One order ----------------------------------------------------------------------------------------------------

    def _like(self, best: Found, order: Order, limit: float, shape: tuple[int, ...] = ()) -> Found | None:
        """Return a pipeline along another order, with about as many stages as one, if its batches take at most a
        time.

        shape: number of workers of each stage; empty: as the job says.
        """
        train, number = self._costs.spec.train, min(len(best.cut.runs), len(order))
        walk = PaceWalk(self._costs, order, shape)
        numbers = (number, number + 1) if len(order) <= FEW_SEATS else (number,)
        for most_stages in (0,) if train.delay and not best.is_far else numbers:
            fill = fill_factor(most_stages, train.microbatches, train.delay)
            least = best.hidden_s if limit > best.seconds else 0.0
            cut = walk.best(min(limit, best.hidden_s * limit / best.seconds) / fill, most_stages, least / fill)
            found = None if cut is None else self._timed(cut, order)
            if found is not None and found.seconds <= limit:
                return found
        return None

    def _along(self, order: Order, best: Found | None) -> Found | None:
        """Return the best pipeline along an order, if it beats one; None: there is none."""
        found = None
        is_uneven = self._costs.num_microbatches % self._costs.num_groups > 0
        for is_hopeful in (False, True) if is_uneven and len(order) <= FEW_SEATS else (False,):
            found = self._fastest(PaceWalk(self._costs, order, is_hopeful=is_hopeful), order, found or best) or found
        return found

    def _fastest(self, walk: PaceWalk, order: Order, best: Found | None) -> Found | None:
        """Return the best pipeline of any number of stages along an order, if it beats one.

        Without delay a longer pipe takes longer to fill, and with delay a longer way may be too long for m. Then fewer
        stages may be faster than the cut whose slowest stage is fastest.
        """
        train, found, least_s = self._costs.spec.train, None, 0.0
        most_stages = min(len(order), self._most_stages)
        # Links through one relay share its line: fewer stages may be faster there, too.
        is_relayed = self._costs.links.has_relays
        is_quick = bool(train.delay) and len(order) > FEW_SEATS and not is_relayed
        while most_stages > 0:
            at_most = inf if best is None else (best.hidden_s if is_quick else best.seconds) * self._closeness
            at_most /= fill_factor(walk.num_stages or most_stages, train.microbatches, train.delay)
            cut = walk.best(at_most, most_stages, least_s)
            if cut is None:
                least_s = at_most  # fewer stages are no faster
            timed = None if cut is None else self._timed(cut, order)
            if timed is not None and timed.beats(best):
                best = found = timed
            is_hidden = train.delay and not is_relayed and (timed is None or is_quick or not timed.is_far)
            if walk.num_stages or is_hidden:
                break
            number = most_stages if cut is None else len(cut.runs)
            most_stages = number - 1 if len(order) <= FEW_SEATS else number // 2
        return found

    def _timed(self, cut: Cut, order: Order) -> Found | None:
        """Return a pipeline with its seconds; None: the ends of a tied embedding cannot talk."""
        if not self._costs.cuts.can_tie(cut.runs[0], cut.runs[-1]):
            return None
        placed = place(self._costs, cut)
        times = PredictedTime(self._costs, placed)
        distance = times.distance(depths_within_memory(self._costs, placed, times))
        relayed = self._costs.links.num_relayed(cut.runs, is_tied=bool(self._costs.cuts.tied_bytes))
        rank = (relayed, *self._at_home.rank(cut))
        return Found(seconds=distance.batch_s, hidden_s=distance.hidden_batch_s, rank=rank, cut=cut, order=order)

    # --- Moves --------------------------------------------------------------------------------------------------------

    def _with_better_order(self, best: Found) -> Found:
        """Return the best pipeline after seats change places, or move elsewhere, as long as that helps."""
        left = MOST_TRIES
        while True:
            for order in self._neighbours(best.order):
                left -= len(order)
                if left < 0:
                    return best
                found = self._like(best, order, best.seconds * BETTER)
                if found is not None:
                    best = found
                    break
            else:
                return best

    def _neighbours(self, order: Order) -> Iterator[Order]:
        """Yield the orders that one move makes of one: two seats change places, or one goes elsewhere."""
        number_of = {kind: number for number, kind in enumerate(dict.fromkeys(map(self._kinds.of, order)))}
        kinds = [number_of[self._kinds.of(slot)] for slot in order]
        size, seen = range(len(order)), {tuple(kinds)}
        # The run of seats of one kind in which each seat stands: no move inside it makes another order.
        alike = list(accumulate(pairwise(kinds), lambda run, pair: run + (pair[0] != pair[1]), initial=0))
        swaps = ((True, *pair) for pair in combinations(size, 2))
        for is_swap, index, other in chain(swaps, ((False, *pair) for pair in permutations(size, 2))):
            if alike[index] == alike[other] or (is_swap and kinds[index] == kinds[other]):
                continue
            moved = list(size)
            if is_swap:
                moved[index], moved[other] = other, index
            else:
                moved.insert(other, moved.pop(index))
            key = tuple(kinds[seat] for seat in moved)
            if key not in seen:
                seen.add(key)
                yield tuple(order[seat] for seat in moved)

    def _any_that_fits(self) -> Found | None:
        """Return a pipeline that fits, though none does along good orders: moves that cover more layers; None: none."""
        left = MOST_TRIES
        for start in self._orders():
            order, reached = start, self._costs.num_layers + 1
            is_moving = True
            while is_moving and left > 0:
                is_moving = False
                for each in (order, *self._neighbours(order)):
                    left -= len(each)
                    walk = PaceWalk(self._costs, each)
                    if (first := walk.furthest()) < reached:
                        order, reached, is_moving = each, first, True
                        break
                    if left <= 0:
                        break
                if reached == 0:
                    return self._along(order, None)
        return None

    def _with_fewer_workers(self, best: Found) -> Found:
        """Return a pipeline that is nearly as fast on fewer devices: the slowest ones go, many at once at first."""
        if self._placement.replicas:
            return best
        limit = best.seconds * WORTH_A_STAGE
        number = max(1, len(best.cut.slots) // 2)
        left = MOST_TRIES
        while number:
            used = best.cut.slots
            slowest = sorted(used, key=lambda slot: (self._kinds.speed(slot), -self._by_name[slot]))
            parts = [slowest[:number]] if number > 1 else [[slot] for slot in slowest]
            found, seen = None, set[tuple[object, ...]]()
            for part in parts:
                gone = set(part)
                order = tuple(slot for slot in used if slot not in gone)
                kinds = tuple(map(self._kinds.of, order))
                if kinds in seen:
                    continue
                seen.add(kinds)
                left -= len(order)
                if left < 0:
                    return best
                if not order or not self._has_wanted_nodes(order):
                    continue
                # A walk would leave out the nodes that are there on demand.
                kept = [sum(slot not in gone for slot in run) for run in best.cut.runs]
                shape = tuple(filter(None, kept)) if self._placement.min_nodes > 1 else ()
                found = self._like(best, order, limit, shape)
                if found is not None and self._has_wanted_nodes(found.cut.slots):
                    break
                found = None
            if found is None:
                number //= 2
            else:
                # Without delay replicas cost time to fill the pipe: what is left may be cut better than just as well.
                best = found if self._costs.spec.train.delay else self._along(found.cut.slots, found) or found
                limit = min(limit, best.seconds * WORTH_A_STAGE)
                number = min(number, len(best.cut.slots) // 2) or int(len(best.cut.slots) > 1)
        return best

    def _with_wanted_nodes(self, best: Found) -> Found | None:
        """Return a pipeline with as many nodes as the job demands, and more where they are worth it: each further one
        where it costs least; None: none fits.
        """
        if self._has_wanted_nodes(best.cut.slots):
            return best
        while True:
            has_wanted, used = self._has_wanted_nodes(best.cut.slots), set(best.cut.slots)
            taken = {slot.node for slot in used}
            fresh = [slot for slot in self._slots if slot not in used and (has_wanted or slot.node not in taken)]
            one_of_each = {self._kinds.of(slot): slot for slot in sorted(fresh, key=self._by_name.__getitem__)[::-1]}
            added = (
                self._timed(cut, cut.slots)
                for slot in list(one_of_each.values())[:FEW_SEATS]
                for cut in _with_one_more(best.cut, slot)
                if self._fits(cut)
            )
            found = min(filter(None, added), key=Found.by_time, default=None)
            if has_wanted and (found is None or found.seconds * WORTH_A_STAGE > best.seconds):
                return best
            if found is None:
                return None
            best = found

    def _has_wanted_nodes(self, slots: Sequence[DeviceSlot]) -> bool:
        return len({slot.node for slot in slots}) >= self._placement.min_nodes

    def _fits(self, cut: Cut) -> bool:
        """Return whether each stage fits, its workers may share it, and neighbours can talk."""
        costs, number = self._costs, len(cut.runs)
        if number > min(costs.num_layers, costs.num_microbatches):
            return False
        return all(
            costs.can_share(run) and costs.stage(run, span, number - index) is not None
            for index, (run, span) in enumerate(zip(cut.runs, cut.spans, strict=True))
        ) and all(costs.links.all_talk(*runs) for runs in pairwise(cut.runs))

    def _even(self, best: Found) -> Found:
        """Return the pipeline with its layers spread more evenly, as far as that makes no stage the slowest.

        A layer moves between neighbours while the sum of the stages' squared times falls. Measurements are noisy, and
        the stages with time to spare should be as many as possible.
        """
        spans, runs, costs = list(best.cut.spans), best.cut.runs, self._costs
        left, moved = MOST_TRIES, True

        def seconds(index: int, span: tuple[int, int]) -> float:
            choice = costs.stage(runs[index], span, len(runs) - index)
            return inf if choice is None else choice.seconds

        def times(upper: int, middle: int) -> tuple[float, float]:
            return seconds(upper, (spans[upper][0], middle)), seconds(upper + 1, (middle, spans[upper + 1][1]))

        while moved and left > 0:
            moved = False
            for upper in range(len(runs) - 1):
                middle = spans[upper][1]
                present = times(upper, middle)
                for other in (middle - 1, middle + 1):
                    left -= 1
                    if not spans[upper][0] < other < spans[upper + 1][1]:
                        continue
                    after = times(upper, other)
                    if max(after) <= max(present) and sum(x * x for x in after) < sum(x * x for x in present) - TIE:
                        spans[upper], spans[upper + 1] = (spans[upper][0], other), (other, spans[upper + 1][1])
                        moved = True
                        break
        found = self._timed(replace(best.cut, spans=tuple(spans)), best.order)
        return found if found is not None and found.seconds <= best.seconds * (1 + TIE) else best


def _with_one_more(cut: Cut, slot: DeviceSlot) -> Iterator[Cut]:
    """Yield the pipelines in which one more device works: beside a stage's others, or on a part of its layers."""
    for index, (run, (first, end)) in enumerate(zip(cut.runs, cut.spans, strict=True)):
        yield replace(cut, runs=(*cut.runs[:index], (*run, slot), *cut.runs[index + 1 :]))
        if end - first < 2:
            continue
        for middle in {first + 1, (first + end) // 2, end - 1}:
            halves = (first, middle), (middle, end)
            for pair in (((slot,), run), (run, (slot,))):
                yield Cut(
                    runs=(*cut.runs[:index], *pair, *cut.runs[index + 1 :]),
                    spans=(*cut.spans[:index], *halves, *cut.spans[index + 1 :]),
                )


def _site_of(slot: DeviceSlot) -> str:
    return slot.site


_Arrange = Callable[[list[DeviceSlot]], list[DeviceSlot]]
"""Takes the seats of one site and class from fast to slow."""


def _by_speed(group: list[DeviceSlot]) -> list[DeviceSlot]:
    return group


def _fast_with_slow(group: list[DeviceSlot]) -> list[DeviceSlot]:
    """Return the fastest, the slowest, the second, the second slowest, …"""
    half = (len(group) + 1) // 2
    mixed = [slot for pair in zip(group[:half], group[: half - 1 : -1], strict=False) for slot in pair]
    return mixed + group[len(mixed) // 2 : half]


def _most_memory_first(group: list[DeviceSlot]) -> list[DeviceSlot]:
    """Return the seats by memory, because the first stages hold most microbatches in flight."""
    return sorted(group, key=lambda slot: -slot.room_bytes)


def _every_nth(group: list[DeviceSlot], *, step: int) -> list[DeviceSlot]:
    """Return some series from fast to slow."""
    return [slot for first in range(step) for slot in group[first::step]]


_ARRANGEMENTS: Final[tuple[_Arrange, ...]] = (
    _by_speed,
    _fast_with_slow,
    _most_memory_first,
    partial(_every_nth, step=3),
)
