"""Allocates devices to jobs, by priority, share and turn. Pure.

`deal` says which devices each job is owed. Devices are dealt in rounds. In each, the next user is the one with the
fewest devices so far for the weight of the share; among equals, the one with less recent use. A job first gets its
minimum, all at once:

1. jobs that recover get the number they had, from free devices,
2. priority by priority, the minimum of each running job, and of the first waiting job of each user who has none
   running,
3. priority by priority, the rest: first the devices that a user's running jobs hold, then the user's waiting jobs,
   first in first out, then additional devices for running jobs.

So one user's jobs run first in, first out, and new devices go to a waiting job before a running one grows. Another
user's job gets a share at once if running jobs can shrink. If they cannot, the job of the user with less use goes
first, so that users take turns. They change when the difference of use exceeds `slice_s` of one device. A waiting job
that cannot have all it needs yet keeps its free devices, so that a row of small jobs never starves it.

`allocate` narrows that to what a plan of the job uses. No other job may take such devices, and jobs which have them
give them up: by a planned change, or by a checkpoint if they cannot run on the rest and have run for a time slice.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, TypeVar

from headway.daemon.cluster.records import Desired, DeviceKey, Phase, Save
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import IN_FORCE, JobView
from headway.daemon.decide.plans import Outcome, PlanMissingError, Purpose
from headway.daemon.decide.usage import EQUAL_WITHIN, per_share, weight
from headway.daemon.plan.cluster_plan import ClusterPlan, PlanRefused, devices
from headway.daemon.plan.plan_question import usable_devices
from headway.daemon.plan.rebalance import judge

if TYPE_CHECKING:
    from headway.daemon.decide.situation import JobSituation

STARTS_WORTH: Final = 5.0
"""A job keeps its devices for this multiple of its start time, if that is longer than a time slice."""
UNLIMITED: Final = 10**6
NOTHING: Final = frozenset[DeviceKey]()
ValueT = TypeVar("ValueT")


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
    usable: frozenset[DeviceKey] = NOTHING
    holds: frozenset[DeviceKey] = NOTHING
    """Devices that the job has now, and will have when the change under way is done."""
    pinned: frozenset[DeviceKey] = NOTHING
    """The subset of `holds` that no job may take now."""
    is_waiting: bool = False
    is_recovering: bool = False
    least_devices: int = 1
    most_devices: int = UNLIMITED
    least_nodes: int = 1
    most_nodes: int = UNLIMITED
    had: int = 0
    """Number of devices that a recovering job had before."""

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
    return _Deal(claimants, slice_s).run()


def coarse(used: float, *, slice_s: float) -> float:
    """Round use to steps that matter, so that a deal lasts: a twentieth of a slice, or a hundredth of a large use."""
    step = max(slice_s * EQUAL_WITHIN / 2, 10.0 ** (math.floor(math.log10(max(used, 1.0))) - 2), 1e-9)
    return used // step * step


_Ask = tuple[Claimant, Callable[[Claimant], bool]]
"""A claimant, and how it is given something. False: it gets no more in this way."""
_Asks = Callable[[Sequence[Claimant]], list[_Ask]]
"""What the jobs of one user and priority ask for, in order."""


class _Deal:
    """One deal."""

    def __init__(self, claimants: Sequence[Claimant], slice_s: float) -> None:
        self._claimants = sorted(claimants, key=lambda claimant: claimant.rank)
        self._slice_s = max(slice_s, 1e-9)
        self._given = {claimant.job: set(claimant.pinned) for claimant in claimants}
        self._left = NOTHING.union(*(claimant.usable for claimant in claimants))
        # Invariant: a device is in `_left` or in one job's `_given`, never in both.
        self._left -= NOTHING.union(*(claimant.pinned for claimant in claimants))
        self._holder = {device: claimant for claimant in claimants for device in claimant.holds}
        self._num_wanting = Counter(device for claimant in claimants for device in claimant.usable)
        self._served = {claimant.job for claimant in claimants if not claimant.is_waiting and claimant.pinned}
        """Jobs that have their minimum: only they get more."""
        self._partial: set[str] = set()

    def run(self) -> Dealt:
        for claimant in self._claimants:
            if claimant.is_recovering:
                self._keep_free(claimant, claimant.had)
        priorities = sorted({claimant.priority for claimant in self._claimants}, reverse=True)
        for asks in (self._first_asks, self._further_asks):
            for priority in priorities:
                self._round([claimant for claimant in self._claimants if claimant.priority == priority], asks)
        due = {job: frozenset(given) for job, given in self._given.items()}
        return Dealt(due=due, partial=frozenset(self._partial))

    def _round(self, claimants: Sequence[Claimant], asks: _Asks) -> None:
        users = dict.fromkeys(claimant.user for claimant in claimants)
        queues = [asks([claimant for claimant in claimants if claimant.user == user]) for user in users]
        while queues := [queue for queue in queues if queue]:
            queue = min(queues, key=self._turn) if len(queues) > 1 else queues[0]
            claimant, give = queue[0]
            if not give(claimant):
                queue.pop(0)

    def _first_asks(self, own: Sequence[Claimant]) -> list[_Ask]:
        running = [claimant for claimant in own if not claimant.is_waiting]
        return [(claimant, partial(self._give_least, spares_higher=True)) for claimant in running or own[:1]]

    def _further_asks(self, own: Sequence[Claimant]) -> list[_Ask]:
        running = [claimant for claimant in own if not claimant.is_waiting and claimant.job in self._served]
        asks: list[_Ask] = [(claimant, self._give_own) for claimant in running]
        for claimant in own:
            if claimant.is_waiting:
                asks += [(claimant, self._give_least), (claimant, self._give_more)]
        return asks + [(claimant, self._give_more) for claimant in running]

    def _turn(self, queue: list[_Ask]) -> tuple[float, int, int]:
        """Return the sort key of a user's turn; the smallest is next."""
        first = queue[0][0]
        given = sum(len(self._given[claimant.job]) for claimant in self._claimants if claimant.user == first.user)
        has = sum(len(claimant.holds) for claimant in self._claimants if claimant.user == first.user)
        # A user who has more than was dealt so far would have to give devices up: only if another has used clearly
        # less.
        used = first.used - (self._slice_s / first.weight if has > given else 0.0)
        return given / first.weight, int(used // (self._slice_s * EQUAL_WITHIN)), first.rank

    def _give_own(self, claimant: Claimant) -> bool:
        return self._give_one(claimant, claimant.holds)

    def _give_more(self, claimant: Claimant) -> bool:
        return self._give_one(claimant, claimant.usable)

    def _give_one(self, claimant: Claimant, wanted: frozenset[DeviceKey]) -> bool:
        given = self._given[claimant.job]
        if claimant.job not in self._served or len(given) >= claimant.most_devices:
            return False
        choice = self._choice(claimant, self._left & wanted, given)
        if choice is None:
            return False
        self._give(claimant, [choice])
        return True

    def _give_least(self, claimant: Claimant, *, spares_higher: bool = False) -> bool:
        if claimant.job in self._served and self._is_enough(claimant, self._given[claimant.job]):
            return False
        allowed = self._left & claimant.usable
        if spares_higher:
            holders = self._holder
            allowed -= {each for each in allowed if each in holders and holders[each].priority > claimant.priority}
        chosen = self._least(claimant, allowed)
        if chosen is not None:
            self._give(claimant, chosen)
            self._served.add(claimant.job)
        elif claimant.is_waiting and self._least(claimant, claimant.usable) is not None:
            self._keep_free(claimant, claimant.least_devices)
            if self._given[claimant.job]:
                self._partial.add(claimant.job)
        return False

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
        """Give free devices to a job that cannot run on them yet."""
        given = self._given[claimant.job]
        while len(given) < number:
            free = {device for device in self._left & claimant.usable if device not in self._holder}
            choice = self._choice(claimant, free, given)
            if choice is None:
                return
            self._give(claimant, [choice])

    def _give(self, claimant: Claimant, chosen: Iterable[DeviceKey]) -> None:
        self._given[claimant.job].update(chosen)
        self._left = self._left.difference(chosen)

    def _choice(self, claimant: Claimant, among: Iterable[DeviceKey], given: Iterable[DeviceKey]) -> DeviceKey | None:
        """Return the device whose loss hurts others least: its own, a free one, or one that another job can spare."""
        nodes = {node for node, _ in given}
        if len(nodes) >= claimant.most_nodes:
            among = {device for device in among if device[0] in nodes}
        among = set(among)
        among = among & claimant.holds or among - self._holder.keys() or among
        return min(among, key=lambda device: self._harm(claimant, device, nodes), default=None)

    def _harm(self, claimant: Claimant, device: DeviceKey, nodes: set[str]) -> tuple[object, ...]:
        holder = self._holder.get(device)
        if holder is None or holder.job == claimant.job:
            return device[0] not in nodes, self._num_wanting[device], device
        spare = len(self._given[holder.job]) + len(self._left & holder.holds) - holder.least_devices
        # If no job can spare any: the lowest priority, then the largest use, then the latest arrival.
        rank = (-min(spare, 1), holder.priority, -holder.used, -spare, -holder.rank)
        return (*rank, device[0] not in nodes, device)

    def _is_enough(self, claimant: Claimant, given: set[DeviceKey]) -> bool:
        return len(given) >= claimant.least_devices and len({node for node, _ in given}) >= claimant.least_nodes


@dataclass(slots=True)
class Allocation:
    """Which devices each job may claim at one moment, beside those that it has."""

    claimants: dict[str, Claimant] = field(default_factory=dict)
    """Jobs that have devices or want some; none while devices need not be shared."""
    claims: dict[str, frozenset[DeviceKey]] = field(default_factory=dict)
    """Job to devices that no other job may take, and that jobs which have them give up."""
    errors: dict[str, Exception] = field(default_factory=dict)
    """Errors raised about a job. Such a job claims nothing, and fails when it is decided about."""

    def against(self, job: str) -> frozenset[DeviceKey]:
        """Return what all other jobs claim."""
        return NOTHING.union(*(claimed for other, claimed in self.claims.items() if other != job))

    def claimed_from(self, job: str) -> tuple[str, ...]:
        """Return the jobs that claim a device which this job has."""
        own = self.claimants.get(job)
        if own is None or own.is_waiting:
            return ()
        others = ((other, claimed) for other, claimed in self.claims.items() if other != job)
        return tuple(sorted(other for other, claimed in others if not claimed.isdisjoint(own.holds)))

    def in_the_way(self, job: str) -> tuple[str, ...]:
        """Return the jobs whose devices a waiting job claims or, without a claim, could use."""
        own = self.claimants.get(job)
        if own is None or not (own.is_waiting or own.is_recovering):
            return ()
        wanted = self.claims.get(job, NOTHING) or own.usable
        others = (other for other in self.claimants.values() if other.job != job)
        return tuple(sorted(other.job for other in others if not other.holds.isdisjoint(wanted)))

    def rival(self, job: str, ahead: Sequence[str]) -> str:
        """Return the first of the jobs ahead in the queue that could use a device of this job's choice; empty: none."""
        usable = self.claimants[job].usable if job in self.claimants else NOTHING
        known = (other for other in ahead if other in self.claimants)
        return next((other for other in known if not self.claimants[other].usable.isdisjoint(usable)), "")


def allocate(situations: Mapping[str, "JobSituation"], view: ClusterView, *, now: float) -> Allocation:
    """Return what every job may claim now: nothing, unless a job waits or jobs of several users or priorities run."""
    active = {name: situation for name, situation in situations.items() if _is_active(situation)}
    kinds = {(situation.job.user, situation.job.priority) for situation in active.values()}
    wants = any(_is_waiting(situation) or _is_recovering(situation) for situation in active.values())
    if len(active) < 2 or not (wants or len(kinds) > 1):
        return Allocation()
    set_aside = (job for name, job in view.jobs.items() if name not in situations)
    return _Allocating(active, view, NOTHING.union(*(job.devices for job in set_aside)), now).run()


def left_alone_s(job: JobView, view: ClusterView) -> float:
    """Return how long a job trains before it is stopped for another one."""
    return max(view.shares.slice_s, STARTS_WORTH * job.starting_s)


class _Allocating:
    """One allocation in two rounds: in the second, a job that cannot run on its minimum asks for more."""

    def __init__(
        self, situations: Mapping[str, "JobSituation"], view: ClusterView, not_dealt: frozenset[DeviceKey], now: float
    ) -> None:
        self._situations, self._view, self._now, self._not_dealt = situations, view, now, not_dealt
        self._at_least: dict[str, int] = {}
        """Number of devices below which a job has no plan, as far as the first round has shown."""
        self._unable: set[str] = set()
        """Jobs to which no number of devices helps: they claim nothing."""
        self._errors: dict[str, Exception] = {}
        self._nobody_waits = not any(map(_is_waiting, situations.values()))
        self._everything = frozenset((node.name, each.index) for node in view.nodes.values() for each in node.devices)
        users = {situation.job.user for situation in situations.values()}
        self._used = view.usage.read_out(now) if len(users) > 1 else {}  # it only orders users

    def run(self) -> Allocation:
        found, slice_s = Allocation(), self._view.shares.slice_s
        for is_again in (False, True):
            claimants = {name: one for name, one in self._of_each(self._situations, self._claimant).items() if one}
            dealt = deal(list(claimants.values()), slice_s=slice_s)
            found = Allocation(claimants, {}, self._errors)
            claimed = self._of_each(claimants, partial(self._claim, found, dealt, is_again))
            given = self._of_each(claimants, partial(self._give, found, is_again))
            if all((*claimed.values(), *given.values())):
                break
        return found

    def _of_each(self, jobs: Iterable[str], settle: Callable[[str], ValueT]) -> dict[str, ValueT]:
        """Return the answers, without those of jobs that raise an error: the others are still served."""
        found = {}
        for name in jobs:
            try:
                found[name] = settle(name)
            except Exception as error:
                self._errors.setdefault(name, error)
        return found

    def _claim(self, found: Allocation, dealt: Dealt, is_again: bool, name: str) -> bool:
        """Claim the devices that a job would use from its share. False: the share is too small for a plan."""
        due, situation, claimant = dealt.due[name], self._situations[name], found.claimants[name]
        if name in self._unable or not due - claimant.pinned:
            return True
        if claimant.is_recovering or name in dealt.partial:
            found.claims[name] = due - claimant.holds
            return True
        if not claimant.is_waiting and due <= claimant.holds:
            return True
        try:
            plan = self._plan(situation, Purpose.CLAIM_OF_MORE if is_again else Purpose.CLAIM, self._everything - due)
        except PlanMissingError:
            free = due - NOTHING.union(*(other.holds for other in found.claimants.values()))
            found.claims[name] = free if claimant.is_waiting else NOTHING
            return True
        if isinstance(plan, PlanRefused):
            return not claimant.is_waiting or self._needs_no_more(situation, due)
        outlook = None if claimant.is_waiting else situation.plans.outlook_of(plan)
        if claimant.is_waiting or (outlook is not None and judge(outlook).is_worth_it):
            found.claims[name] = devices(plan)
        return True

    def _needs_no_more(self, situation: "JobSituation", due: frozenset[DeviceKey]) -> bool:
        """Return False if the job could use more devices than its share, and asks for them."""
        name = situation.job.name
        try:
            whole = situation.plans.on_everything
        except PlanMissingError:
            return True
        if isinstance(whole, PlanRefused) or len(whole.workers) <= len(due) or name in self._at_least:
            self._unable.add(name)
            return True
        self._at_least[name] = len(whole.workers)
        return False

    def _give(self, found: Allocation, is_again: bool, name: str) -> bool:
        """Take devices away from a job. False: the job cannot run with fewer, so it gives up all or none."""
        situation, holds = self._situations[name], found.claimants[name].holds
        lost = holds & found.against(name)
        if not lost or lost >= holds or name in self._at_least:
            return True
        others = (other.job.devices for other in self._situations.values() if other is not situation)
        try:
            purpose = Purpose.SHRUNK_FURTHER if is_again else Purpose.SHRUNK
            plan = self._plan(situation, purpose, found.against(name).union(*others))
        except PlanMissingError:
            return True
        if isinstance(plan, ClusterPlan):
            return True
        self._at_least[name] = len(holds)
        return False

    def _plan(self, situation: "JobSituation", purpose: Purpose, busy: frozenset[DeviceKey]) -> Outcome:
        """Return a plan that already exists. Raises PlanMissingError."""
        plans = situation.plans
        return plans.look_up(purpose, plans.present, previous=situation.job.plan, busy=busy)

    def _claimant(self, name: str) -> Claimant | None:
        """Return the job as a claimant; None: it is about to release its devices."""
        situation, shares = self._situations[name], self._view.shares
        job, spec, plans = situation.job, situation.spec, situation.plans
        placement, train = spec.placement, spec.train
        if (held := _held(job)) is None:
            return None
        left_out = {*plans.on_probation, *plans.unsettled}
        possible = usable_devices(spec, plans.present, quarantined=plans.quarantined, busy=self._not_dealt)
        own = held & possible
        if left_out:
            others = usable_devices(spec, plans.without(left_out), quarantined=plans.quarantined, busy=self._not_dealt)
            usable = own | others if not own <= others else others
        else:
            usable = possible
        most = sum(placement.replicas) or min(len(spec.layers), train.microbatches) * train.reduction_groups
        least = min(max(placement.min_nodes, sum(placement.replicas), self._at_least.get(name, 1)), most)
        is_waiting = _is_waiting(situation)
        claimant = Claimant(
            job=name,
            user=job.user,
            priority=job.priority,
            weight=weight(job.user, shares),
            used=coarse(per_share(self._used, job.user, shares), slice_s=shares.slice_s),
            rank=job.spec_revision,
            usable=usable,
            holds=own,
            is_waiting=is_waiting,
            is_recovering=not is_waiting and (_is_recovering(situation) or bool(situation.lost.found)),
            had=len(job.plan.workers) if job.plan is not None else 0,
            least_devices=least,
            most_devices=most,
            least_nodes=placement.min_nodes,
            most_nodes=placement.max_nodes or UNLIMITED,
        )
        return replace(claimant, pinned=self._pinned(situation, claimant))

    def _pinned(self, situation: "JobSituation", claimant: Claimant) -> frozenset[DeviceKey]:
        """Return the devices that no other job may take now."""
        if claimant.is_recovering or situation.job.phase.phase is not Phase.RUNNING:
            return claimant.holds
        turn_ends_at = situation.job.devices_changed_at + self._view.shares.slice_s
        if self._nobody_waits and self._now < turn_ends_at:
            return claimant.holds  # running jobs take turns by time slices
        is_left_alone = self._now < situation.job.started_at + left_alone_s(situation.job, self._view)
        return claimant.least_of_its_own() if is_left_alone else NOTHING


def _is_active(situation: "JobSituation") -> bool:
    phases = (Phase.QUEUED, Phase.PREPARING, *IN_FORCE)
    return situation.job.desired.state is Desired.RUNNING and situation.job.phase.phase in phases


def _is_waiting(situation: "JobSituation") -> bool:
    return situation.job.phase.phase is Phase.QUEUED


def _is_recovering(situation: "JobSituation") -> bool:
    return situation.job.phase.phase is Phase.RECOVERING and situation.job.next is None


def _held(job: JobView) -> frozenset[DeviceKey] | None:
    """Return the devices of the job after the change in progress; None: it has none and does not wait."""
    match job.phase.phase:
        case Phase.QUEUED:
            return NOTHING
        case Phase.RUNNING:
            return devices(job.plan)
        case Phase.STOPPING if job.stop is None or job.stop.save is Save.CHECKPOINT:
            return None
        case _:
            return devices(job.next or job.plan)
