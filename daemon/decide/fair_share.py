"""Divides the devices among running and waiting jobs, by priority and by their users' shares. Pure.

Devices are dealt in rounds. In each round, the next user is the one with the fewest devices so far for the weight of
the share; among equals, the one with less recent use. A job first gets its minimum, all at once:

1. jobs that recover get the number they had, from free devices,
2. priority by priority, the minimum of each running job, and of the first waiting job of each user who has none
   running,
3. priority by priority, the rest: first the devices that a user's running jobs hold, then the user's waiting jobs,
   first in first out, then additional devices for running jobs.

So one user's jobs run first in, first out, and new devices go to a waiting job before a running one grows. Another
user's job gets a share at once if running jobs can shrink. If they cannot, the job of the user with less use goes
first, so that users take turns. They change when the difference of use exceeds `slice_s` of one device.

A waiting job that cannot have all it needs yet keeps its free devices, so that a row of small jobs never starves it.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Final

from headway.daemon.cluster.records import Desired, DeviceKey, Phase
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.decide.usage import per_share

EQUAL_WITHIN: Final = 0.1
"""Fraction of a time slice. Users whose use differs by less count as equal; their jobs go first in, first out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimant:
    """A job that has devices or wants some."""

    job: str
    user: str = ""
    priority: int = 0
    weight: float = 1.0
    used: float = 0.0
    """Recent device-seconds of the user, divided by the weight."""
    rank: int = 0
    """Place in the queue: first in, first out."""
    usable: frozenset[DeviceKey] = frozenset()
    holds: frozenset[DeviceKey] = frozenset()
    """Devices that the job has now, and will have when the change under way is done."""
    pinned: frozenset[DeviceKey] = frozenset()
    """The subset of `holds` that no job may take now."""
    is_waiting: bool = False
    is_recovering: bool = False
    least_devices: int = 1
    most_devices: int = 10**6
    least_nodes: int = 1
    most_nodes: int = 10**6
    had: int = 0
    """Number of devices that a recovering job had before."""

    def with_pinned(self, pinned: frozenset[DeviceKey]) -> "Claimant":
        """Return the claimant with pinned devices."""
        return replace(self, pinned=pinned)

    def least_of_its_own(self) -> frozenset[DeviceKey]:
        """Return as many of its held devices as its minimum needs."""
        first_of_nodes = dict(sorted(self.holds, reverse=True))
        in_order = sorted(self.holds, key=lambda key: (first_of_nodes[key[0]] != key[1], key))
        return frozenset(in_order[: max(self.least_devices, self.least_nodes)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """The devices that each job is owed. No device is owed to two jobs."""

    due: dict[str, frozenset[DeviceKey]]
    partial: frozenset[str]
    """Waiting jobs for which free devices are kept, although they are not enough yet."""


def deal(claimants: Sequence[Claimant], *, slice_s: float) -> Dealt:
    """Deal every usable device to at most one job. The deal changes only when its input changes."""
    return _dealt(tuple(claimants), slice_s)


@lru_cache(maxsize=64)
def _dealt(claimants: tuple[Claimant, ...], slice_s: float) -> Dealt:
    return _Dealing(claimants, slice_s).run()


def coarse(used: float, *, slice_s: float) -> float:
    """Round use to steps that matter, so that a deal lasts: a twentieth of a slice, or a hundredth of a large use."""
    step = max(slice_s * EQUAL_WITHIN / 2, 10.0 ** (math.floor(math.log10(max(used, 1.0))) - 2), 1e-9)
    return used // step * step


@dataclass(slots=True)
class _Seat:
    """A user in one round, with the requests of the user's jobs, in order."""

    user: str
    weight: float
    used: float
    asks: "list[_Ask]" = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Ask:
    """A request. least: the job's minimum, all at once. Otherwise one device at a time: its own, or any."""

    claimant: Claimant
    is_least: bool = False
    is_own: bool = False


_Asks = Callable[[Sequence[Claimant]], list[_Ask]]


class _Dealing:
    """One deal."""

    def __init__(self, claimants: Sequence[Claimant], slice_s: float) -> None:
        self._claimants = sorted(claimants, key=lambda claimant: claimant.rank)
        self._slice_s = max(slice_s, 1e-9)
        self._given = {claimant.job: set(claimant.pinned) for claimant in claimants}
        self._holder = {device: claimant for claimant in claimants for device in claimant.holds}
        self._held = frozenset(self._holder)
        pinned = frozenset[DeviceKey]().union(*(claimant.pinned for claimant in claimants))
        # Most jobs can use the same devices, which in a large cluster are many.
        self._usable = Counter(claimant.usable for claimant in claimants)
        self._left = set[DeviceKey]().union(*self._usable) - pinned
        self._wanted_by: dict[DeviceKey, int] = {}
        self._of_higher = {
            priority: {device for device, holder in self._holder.items() if holder.priority > priority}
            for priority in {claimant.priority for claimant in claimants}
        }
        self._served = {claimant.job for claimant in claimants if not claimant.is_waiting and claimant.pinned}
        self._partial: set[str] = set()

    def run(self) -> Dealt:
        for claimant in self._claimants:
            if claimant.is_recovering:
                self._keep_free(claimant, claimant.had)
        priorities = sorted({claimant.priority for claimant in self._claimants}, reverse=True)
        for priority in priorities:
            self._round(priority, self._first_asks, spares_higher=True)
        for priority in priorities:
            self._round(priority, self._further_asks, spares_higher=False)
        return Dealt(
            due={job: frozenset(devices) for job, devices in self._given.items()}, partial=frozenset(self._partial)
        )

    # --- What is asked for --------------------------------------------------------------------------------------------

    def _first_asks(self, own: Sequence[Claimant]) -> list[_Ask]:
        running = [claimant for claimant in own if not claimant.is_waiting]
        return [_Ask(claimant, is_least=True) for claimant in running or own[:1]]

    def _further_asks(self, own: Sequence[Claimant]) -> list[_Ask]:
        running = [claimant for claimant in own if not claimant.is_waiting and claimant.job in self._served]
        asks = [_Ask(claimant, is_own=True) for claimant in running]
        for claimant in own:
            if claimant.is_waiting:
                asks += [_Ask(claimant, is_least=True), _Ask(claimant)]
        return asks + [_Ask(claimant) for claimant in running]

    def _round(self, priority: int, asks: _Asks, *, spares_higher: bool) -> None:
        slots = self._slots(priority, asks)
        while slots:
            slot = min(slots, key=self._turn) if len(slots) > 1 else slots[0]
            is_alone = len(slots) == 1
            if not self._serve(slot.asks[0], spares_higher=spares_higher, is_alone=is_alone):
                slot.asks.pop(0)
                if not slot.asks:
                    slots.remove(slot)

    def _slots(self, priority: int, asks: _Asks) -> list[_Seat]:
        users: dict[str, list[Claimant]] = {}
        for claimant in self._claimants:
            if claimant.priority == priority:
                users.setdefault(claimant.user, []).append(claimant)
        slots = [_Seat(user, own[0].weight, own[0].used, asks(own)) for user, own in users.items()]
        return [slot for slot in slots if slot.asks]

    def _turn(self, slot: _Seat) -> tuple[float, int, int]:
        """Return the sort key of a user's turn; the smallest is next."""
        given = sum(len(self._given[claimant.job]) for claimant in self._claimants if claimant.user == slot.user)
        has = sum(len(claimant.holds) for claimant in self._claimants if claimant.user == slot.user)
        # A user who has more than was dealt so far would have to give devices up: only if another has used clearly
        # less.
        used = slot.used - (self._slice_s / slot.weight if has > given else 0.0)
        return given / slot.weight, int(used // (self._slice_s * EQUAL_WITHIN)), slot.asks[0].claimant.rank

    # --- What is given ------------------------------------------------------------------------------------------------

    def _serve(self, ask: _Ask, *, spares_higher: bool, is_alone: bool) -> bool:
        """Give the requested devices. False: no more can be given to the job. is_alone: no other user is served."""
        claimant, given = ask.claimant, self._given[ask.claimant.job]
        if ask.is_least:
            self._give_least(claimant, spares_higher=spares_higher)
            return False
        if claimant.job not in self._served or len(given) >= claimant.most_devices:
            return False
        wanted = claimant.holds if ask.is_own else claimant.usable
        if ask.is_own and is_alone:
            own = self._left & wanted
            if self._may_have(claimant, given | own):  # one by one would end the same, as nobody takes any meanwhile
                self._give(claimant, own)
                return False
        nodes = {node for node, _ in given}
        if len(nodes) >= claimant.most_nodes:
            # Of a large cluster it may only have what is left of these few nodes.
            wanted = wanted & {device for node in nodes for device in self._left_of_node.get(node, ())}
        choice = self._choice(claimant, self._left & wanted, given)
        if choice is None:
            return False
        self._give(claimant, [choice])
        return True

    @cached_property
    def _left_of_node(self) -> dict[str, list[DeviceKey]]:
        """The devices of each node that were left when this was first asked for; later there are fewer."""
        found: dict[str, list[DeviceKey]] = {}
        for device in self._left:
            found.setdefault(device[0], []).append(device)
        return found

    def _give_least(self, claimant: Claimant, *, spares_higher: bool) -> None:
        if claimant.job in self._served and self._is_enough(claimant, self._given[claimant.job]):
            return
        spared = self._of_higher[claimant.priority] if spares_higher else set[DeviceKey]()
        allowed = (self._left & claimant.holds & claimant.usable) - spared
        with_own = self._given[claimant.job] | allowed
        if not (self._may_have(claimant, with_own) and self._is_enough(claimant, with_own)):
            # Its own devices come first, so others are looked at only if its own are not enough.
            allowed = (self._left & claimant.usable) - spared
        chosen = self._least(claimant, allowed)
        if chosen is not None:
            self._give(claimant, chosen)
            self._served.add(claimant.job)
        elif claimant.is_waiting and self._least(claimant, claimant.usable) is not None:
            self._keep_free(claimant, claimant.least_devices)
            if self._given[claimant.job]:
                self._partial.add(claimant.job)

    def _least(self, claimant: Claimant, allowed: Iterable[DeviceKey]) -> list[DeviceKey] | None:
        """Return enough devices on enough nodes, in addition to those already given; None: there are too few."""
        given, left = set(self._given[claimant.job]), set(allowed)
        chosen: list[DeviceKey] = []
        while not self._is_enough(claimant, given):
            nodes = {node for node, _ in given}
            needs_nodes = len(nodes) < claimant.least_nodes
            among = {device for device in left if device[0] not in nodes} if needs_nodes else left
            choice = self._choice(claimant, among, given)
            if choice is None:
                return None
            chosen.append(choice)
            given.add(choice)
            left.discard(choice)
        return chosen

    def _keep_free(self, claimant: Claimant, number: int) -> None:
        """Keep up to this number of free devices."""
        given = self._given[claimant.job]
        while len(given) < number:
            free = {device for device in self._left & claimant.usable if device not in self._holder}
            choice = self._choice(claimant, free, given)
            if choice is None:
                return
            self._give(claimant, [choice])

    def _give(self, claimant: Claimant, chosen: Iterable[DeviceKey]) -> None:
        for device in chosen:
            self._given[claimant.job].add(device)
            self._left.discard(device)

    def _choice(self, claimant: Claimant, among: set[DeviceKey], given: set[DeviceKey]) -> DeviceKey | None:
        """Return the device whose loss hurts others least: its own, a free one, or one that another job can spare."""
        nodes = {node for node, _ in given}
        if len(nodes) >= claimant.most_nodes:
            among = {device for device in among if device[0] in nodes}
        among = among & claimant.holds or among - self._held or among
        return min(among, key=lambda device: self._harm(claimant, device, nodes), default=None)

    def _harm(self, claimant: Claimant, device: DeviceKey, nodes: set[str]) -> tuple[object, ...]:
        holder = self._holder.get(device)
        if holder is None or holder.job == claimant.job:
            return holder is None, False, 0, 0.0, 0, device[0] not in nodes, self._num_wanting(device), device
        spare = len(self._given[holder.job]) + len(self._left & holder.holds) - holder.least_devices
        # If no job can spare any: the lowest priority, then the largest use, then the latest arrival.
        return (
            True,
            True,
            -min(spare, 1),
            holder.priority,
            -holder.used,
            -spare,
            -holder.rank,
            device[0] not in nodes,
            device,
        )

    def _num_wanting(self, device: DeviceKey) -> int:
        """Return how many jobs could use a device."""
        if device not in self._wanted_by:
            numbers = (number for usable, number in self._usable.items() if device in usable)
            self._wanted_by[device] = sum(numbers)
        return self._wanted_by[device]

    def _may_have(self, claimant: Claimant, devices: set[DeviceKey]) -> bool:
        """Return whether a job may have so many devices on so many nodes."""
        return len(devices) <= claimant.most_devices and len({node for node, _ in devices}) <= claimant.most_nodes

    def _is_enough(self, claimant: Claimant, given: set[DeviceKey]) -> bool:
        return len(given) >= claimant.least_devices and len({node for node, _ in given}) >= claimant.least_nodes


def in_queue_order(jobs: Iterable[JobView], view: ClusterView, *, now: float) -> list[JobView]:
    """Return the jobs in order, the next one first. now: by the clock that the view was fed with."""
    used, equal_s = view.usage.read_out(now), max(view.shares.slice_s * EQUAL_WITHIN, 1e-9)

    def key(job: JobView) -> tuple[int, int, int]:
        return -job.priority, int(per_share(used, job.user, view.shares) // equal_s), job.spec_revision

    return sorted(jobs, key=key)


def in_turn(view: ClusterView, *, now: float) -> list[JobView]:
    """Return all jobs in the order of decisions: those that recover, those that wait, then the others, first
    in first.
    """
    jobs = view.jobs_in_order()
    recovering = [job for job in jobs if job.phase.phase is Phase.RECOVERING]
    waiting = in_queue_order((job for job in jobs if job.phase.phase is Phase.QUEUED), view, now=now)
    others = [job for job in jobs if job.phase.phase not in (Phase.RECOVERING, Phase.QUEUED)]
    return [*recovering, *waiting, *others]


def queue(view: ClusterView, *, now: float) -> list[JobView]:
    """Return the jobs that wait for devices, the next one first."""
    waiting = (job for job in view.jobs.values() if job.submission is not None and is_queued(job))
    return in_queue_order(waiting, view, now=now)


def is_queued(job: JobView) -> bool:
    """Return whether the job wants to start and has not."""
    return job.phase.phase is Phase.QUEUED and job.desired.state is Desired.RUNNING
