"""Computes which devices each job claims, and so which running jobs give way: fair_share's result, checked by plans.
Pure.

A claim is a set of devices that no other job may take, and that jobs which have them give up. A job claims no more
than a plan of its own uses. A job that gives way shrinks by a planned change. A job that cannot run on the rest is
stopped by a checkpoint and queued again, but only after it has run for a time slice.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Final

from headway.daemon.cluster.records import Desired, DeviceKey, Phase, Save
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.fair_share import Claimant, Dealt, coarse, deal
from headway.daemon.decide.job_view import JobView
from headway.daemon.decide.plans import Outcome, PlanMissingError, Purpose
from headway.daemon.decide.situation import JobSituation, Standing
from headway.daemon.decide.usage import per_share, weight
from headway.daemon.plan.cluster_plan import devices
from headway.daemon.plan.plan_question import usable_devices
from headway.daemon.plan.planner import ClusterPlan, PlanRefused
from headway.daemon.plan.rebalance import judge

STARTS_WORTH: Final = 5.0
"""A job keeps its devices for this multiple of its start time, if that is longer than a time slice."""
NOTHING: Final = frozenset[DeviceKey]()


@dataclass(slots=True)
class Claims:
    """The claims of all jobs at one moment."""

    claimants: dict[str, Claimant] = field(default_factory=dict)
    by_job: dict[str, frozenset[DeviceKey]] = field(default_factory=dict)
    """Job to its claimed devices."""
    errors: dict[str, Exception] = field(default_factory=dict)
    """Errors raised about a job. Such a job claims nothing, and fails when it is decided about."""

    def without(self, job: str) -> "Claims":
        """Return the claims of the other jobs."""
        return replace(self, by_job={name: claimed for name, claimed in self.by_job.items() if name != job})

    def standing(self, situation: JobSituation, *, ahead: Sequence[str] = ()) -> Standing:
        """Return how a job stands in the queue. ahead: the waiting jobs that are served before it, in order."""
        name, own = situation.job.name, self.claimants.get(situation.job.name)
        usable = own.usable if own is not None else NOTHING
        known = (other for other in ahead if other in self.claimants)
        rivals = (other for other in known if not self.claimants[other].usable.isdisjoint(usable))
        return Standing(
            gives_way_to=self.claimed_from(name),
            left_alone_until=left_alone_until(situation) if self.claimants else 0.0,
            in_the_way=self.in_the_way(name),
            after=next(rivals, ""),
        )

    def against(self, job: str) -> frozenset[DeviceKey]:
        """Return the claims of all other jobs."""
        return NOTHING.union(*(claimed for other, claimed in self.by_job.items() if other != job))

    def claimed_from(self, job: str) -> tuple[str, ...]:
        """Return the jobs that claim a device which this job has."""
        claimant = self.claimants.get(job)
        if claimant is None or claimant.is_waiting:
            return ()
        return tuple(
            sorted(
                other
                for other, claimed in self.by_job.items()
                if other != job and not claimed.isdisjoint(claimant.holds)
            )
        )

    def in_the_way(self, job: str) -> tuple[str, ...]:
        """Return the jobs whose devices a waiting job claims or, without a claim, could use."""
        own = self.claimants.get(job)
        if own is None or not (own.is_waiting or own.is_recovering):
            return ()
        wanted = self.by_job.get(job, NOTHING) or own.usable
        others = (other for other in self.claimants.values() if other.job != job)
        return tuple(sorted(other.job for other in others if not other.holds.isdisjoint(wanted)))


def is_contended(situations: Sequence[JobSituation]) -> bool:
    """Return whether devices must be shared: a job waits, or jobs of several users or priorities run."""
    active = [situation for situation in situations if _is_active(situation)]
    if len(active) < 2:
        return False
    if any(_is_waiting(situation) or _is_recovering(situation) for situation in active):
        return True
    return len({(situation.job.user, situation.job.priority) for situation in active}) > 1


def settle_claims(situations: Mapping[str, JobSituation], view: ClusterView, *, now: float) -> Claims:
    """Return what every job claims now."""
    if not is_contended(list(situations.values())):
        return Claims()
    return _Settling(situations, view, now).settle()


def uses(situations: Iterable[JobSituation], view: ClusterView, *, now: float) -> tuple[float, ...]:
    """Return what the user of each active job has used, in steps. It only orders users, so for one alone it is 0."""
    users = [situation.job.user for situation in situations if _is_active(situation)]
    if len(set(users)) < 2:
        return (0.0,) * len(users)
    used = view.usage.read_out(now)
    return tuple(coarse(per_share(used, user, view.shares), slice_s=view.shares.slice_s) for user in users)


def left_alone_until(situation: JobSituation) -> float:
    """Return until when a training job is protected from being stopped for another one."""
    return situation.job.started_at + left_alone_s(situation.job, situation.view)


def left_alone_s(job: JobView, view: ClusterView) -> float:
    """Return how long a job trains before it is stopped for another one."""
    return max(view.shares.slice_s, STARTS_WORTH * job.starting_s)


class _Settling:
    """One settlement in two rounds: in the second, a job that cannot run on its minimum asks for more."""

    def __init__(self, situations: Mapping[str, JobSituation], view: ClusterView, now: float) -> None:
        self._view, self._now = view, now
        self._at_least: dict[str, int] = {}
        self._unable: set[str] = set()
        self._errors: dict[str, Exception] = {}
        self._situations = {name: situation for name, situation in situations.items() if _is_active(situation)}
        self._used = dict(zip(self._situations, uses(situations.values(), view, now=now), strict=True))
        set_aside = (job for name, job in view.jobs.items() if name not in situations)
        self._not_dealt = NOTHING.union(*(job.devices for job in set_aside))
        self._nobody_waits = not any(_is_waiting(situation) for situation in self._situations.values())

    @cached_property
    def _everything(self) -> frozenset[DeviceKey]:
        nodes = self._view.nodes.values()
        return frozenset((node.name, device.index) for node in nodes for device in node.devices)

    def settle(self) -> Claims:
        claims = Claims()
        for is_again in (False, True):
            claimants = self._claimants()
            dealt = deal(list(claimants.values()), slice_s=self._view.shares.slice_s)
            claims = Claims(claimants, {}, self._errors)
            claim, give = partial(self._claim, claims, dealt, is_again), partial(self._give, claims, is_again)
            is_settled = self._of_each(claimants, claim)
            is_settled &= self._of_each(claimants, give)
            if is_settled:
                break
        return claims

    def _of_each(self, claimants: Mapping[str, Claimant], settle: Callable[[str, Claimant], bool]) -> bool:
        """Return the answer for each job. A job that raises an error claims nothing; the others are still settled."""
        is_settled = True
        for name, claimant in claimants.items():
            try:
                is_settled &= settle(name, claimant)
            except Exception as error:
                self._errors.setdefault(name, error)
        return is_settled

    def _claim(self, claims: Claims, dealt: Dealt, is_again: bool, name: str, claimant: Claimant) -> bool:
        """Claim the devices that a job would use from its share. False: the share is too small for a plan."""
        due, situation = dealt.due[name], self._situations[name]
        if name in self._unable or not due - claimant.pinned:
            return True
        if claimant.is_recovering or name in dealt.partial:
            claims.by_job[name] = due - claimant.holds
            return True
        if not claimant.is_waiting and due <= claimant.holds:
            return True
        try:
            plan = self._plan(situation, Purpose.CLAIM_OF_MORE if is_again else Purpose.CLAIM, self._everything - due)
        except PlanMissingError:
            free = due - NOTHING.union(*(other.holds for other in claims.claimants.values()))
            claims.by_job[name] = free if claimant.is_waiting else NOTHING
            return True
        if isinstance(plan, ClusterPlan):
            if claimant.is_waiting or self._is_worth_it(situation, plan):
                claims.by_job[name] = devices(plan)
            return True
        return not claimant.is_waiting or self._needs_no_more(situation, due)

    def _needs_no_more(self, situation: JobSituation, due: frozenset[DeviceKey]) -> bool:
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

    def _give(self, claims: Claims, is_again: bool, name: str, claimant: Claimant) -> bool:
        """Take devices away from a job. False: the job cannot run with fewer, so it gives up all or none."""
        situation, lost = self._situations[name], claimant.holds & claims.against(name)
        if not lost or lost >= claimant.holds or name in self._at_least:
            return True
        busy = claims.against(name) | NOTHING.union(
            *(other.job.devices for other in self._situations.values() if other is not situation)
        )
        try:
            plan = self._plan(situation, Purpose.SHRUNK_FURTHER if is_again else Purpose.SHRUNK, busy)
        except PlanMissingError:
            return True
        if isinstance(plan, PlanRefused):
            self._at_least[name] = len(claimant.holds)
            return False
        return True

    def _plan(self, situation: JobSituation, purpose: Purpose, busy: frozenset[DeviceKey]) -> Outcome:
        """Return a plan that already exists. Raises PlanMissingError."""
        plans = situation.plans
        return plans.look_up(purpose, plans.present, previous=situation.job.plan, busy=busy)

    def _is_worth_it(self, situation: JobSituation, plan: ClusterPlan) -> bool:
        """Return whether a running job would move to a plan with more devices."""
        outlook = situation.plans.outlook_of(plan)
        return outlook is not None and judge(outlook).is_worth_it

    def _claimants(self) -> dict[str, Claimant]:
        found = {}
        for name, situation in self._situations.items():
            try:
                claimant = self._claimant(situation)
            except Exception as error:
                self._errors.setdefault(name, error)
                continue
            if claimant is not None:
                found[name] = claimant
        return found

    def _claimant(self, situation: JobSituation) -> Claimant | None:
        """Return the job as a claimant; None: it is about to release its devices."""
        job, spec, plans = situation.job, situation.spec, situation.plans
        placement, train = spec.placement, spec.train
        if (held := _held(situation)) is None:
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
        least = min(max(placement.min_nodes, sum(placement.replicas), self._at_least.get(job.name, 1)), most)
        claimant = Claimant(
            job=job.name,
            user=job.user,
            priority=job.priority,
            weight=weight(job.user, self._view.shares),
            used=self._used[job.name],
            rank=job.spec_revision,
            usable=usable,
            holds=own,
            is_waiting=_is_waiting(situation),
            is_recovering=not _is_waiting(situation) and (_is_recovering(situation) or bool(situation.lost.found)),
            had=len(job.plan.workers) if job.plan is not None else 0,
            least_devices=least,
            most_devices=most,
            least_nodes=placement.min_nodes,
            most_nodes=placement.max_nodes or 10**6,
        )
        return claimant.with_pinned(self._pinned(situation, claimant))

    def _pinned(self, situation: JobSituation, claimant: Claimant) -> frozenset[DeviceKey]:
        """Return the devices that no other job may take now."""
        if claimant.is_recovering or _phase(situation) is not Phase.RUNNING:
            return claimant.holds
        turn_ends_at = situation.job.devices_changed_at + self._view.shares.slice_s
        if self._nobody_waits and self._now < turn_ends_at:
            return claimant.holds  # running jobs take turns by time slices
        return claimant.least_of_its_own() if self._now < left_alone_until(situation) else NOTHING


def _phase(situation: JobSituation) -> Phase:
    return situation.job.phase.phase


def _is_active(situation: JobSituation) -> bool:
    phase = _phase(situation)
    if situation.job.desired.state is not Desired.RUNNING:
        return False
    return phase in (Phase.QUEUED, Phase.PREPARING, Phase.RUNNING, Phase.CHANGING, Phase.STOPPING, Phase.RECOVERING)


def _is_waiting(situation: JobSituation) -> bool:
    return _phase(situation) is Phase.QUEUED


def _is_recovering(situation: JobSituation) -> bool:
    return _phase(situation) is Phase.RECOVERING and situation.job.next is None


def _held(situation: JobSituation) -> frozenset[DeviceKey] | None:
    """Return the devices of the job after the change in progress; None: it has none and does not wait."""
    job = situation.job
    match _phase(situation):
        case Phase.QUEUED:
            return NOTHING
        case Phase.RUNNING:
            return devices(job.plan)
        case Phase.STOPPING if job.stop is None or job.stop.save is Save.CHECKPOINT:
            return None
        case _:
            return devices(job.next or job.plan)
