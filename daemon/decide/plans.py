"""The plans that decisions need: which are wanted, which exist, and which may still be used. Pure.

A decision never computes a plan. It looks one up, and names a missing plan in `Decision.missing`; it is repeated when
the plan exists. The cluster may change in the meantime, so an answer may be for an earlier question:

- other measurements, but equal devices: the plan is used, and a newer one is requested;
- other devices: the plan is overtaken, and requested again. After `MAX_OVERTAKEN` in a row, a plan is used if all its
  devices may still be used, although it ignores later newcomers.
"""

from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Final, Protocol, Unpack

from headway.daemon.cluster.memo import remembered
from headway.daemon.cluster.records import DeviceKey, NodeRecord, Phase, WorkerPart
from headway.daemon.decide.failures import lessons
from headway.daemon.decide.outlook import (
    concerned,
    measured,
    on_probation,
    outlook,
    planned_nodes,
    predicted,
    slowest_way,
)
from headway.daemon.decide.quarantine import charged_by, left_out
from headway.daemon.jobs.job import JobSpec
from headway.daemon.plan.cluster_plan import ClusterPlan, PlanRefused
from headway.daemon.plan.devices import MemoryLessons
from headway.daemon.plan.plan_question import (
    Conditions,
    PlanQuestion,
    ask,
    differs_in_measurements_alone,
    still_answers,
)
from headway.daemon.plan.planner import answer
from headway.daemon.plan.profiles import Profiles
from headway.daemon.plan.rebalance import Outlook, Verdict, judge

if TYPE_CHECKING:
    from headway.daemon.decide.situation import JobSituation

MAX_OVERTAKEN: Final = 2
"""Maximum number of plans in a row that are overtaken by changes of devices."""

Outcome = ClusterPlan | PlanRefused


class Purpose(StrEnum):
    """The purpose of a plan. The last answer for each purpose is remembered."""

    BEST = "best"
    WITH_FLAPPING_NODES = "with flapping nodes"
    RECOVERY = "recovery"
    RECOVERY_WITH_SUSPECTS = "recovery with suspects"
    RECOVERY_WITH_DRAINING_NODES = "recovery with draining nodes"
    ON_EVERYTHING = "on everything"
    CLAIM = "claim"
    CLAIM_OF_MORE = "claim of more"
    SHRUNK = "shrunk"
    SHRUNK_FURTHER = "shrunk further"


RECOVERIES: Final = (Purpose.RECOVERY, Purpose.RECOVERY_WITH_SUSPECTS, Purpose.RECOVERY_WITH_DRAINING_NODES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A plan that a job wants."""

    job: str
    purpose: Purpose
    question: PlanQuestion


def urgency(request: PlanRequest, *, is_content: bool) -> int:
    """Order of computation, the lowest first: a job that recovers, then one that waits to start or to leave a node.

    A job that already trains, and could train faster, comes last.
    """
    if request.purpose in RECOVERIES:
        return 0
    return 2 if is_content else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan that may be used."""

    outcome: Outcome
    is_current: bool = True
    """True if the plan answers the present question, measurements included; otherwise a newer one is requested."""


class PlanMissingError(Exception):
    """A decision needs a plan that does not exist yet."""

    def __init__(self, request: PlanRequest) -> None:
        super().__init__(f"job {request.job} has no {request.purpose} plan yet")
        self.request = request


class Plans(Protocol):
    """The source of a decision's plans."""

    def find(self, request: PlanRequest) -> Found | None:
        """Return a plan that may be used now; None: there is none yet."""
        ...

    def wanted_since(self, job: str) -> float | None:
        """Return since when a job has missed a plan, by the clock of the decisions; None: it misses none."""
        ...


class PlansAtOnce:
    """Computes every plan at once when it is requested, for callers that can wait."""

    def find(self, request: PlanRequest) -> Found:
        """Compute the plan."""
        return Found(outcome=answer(request.question))

    def wanted_since(self, job: str) -> None:
        """Return None: nothing is missing."""


class Inquiry:
    """The plans that one decision about one job looks up, and those that it misses."""

    def __init__(self, plans: Plans, job: str) -> None:
        self._plans = plans
        self._job = job
        self._missing: dict[Purpose, PlanMissingError] = {}
        self.stale: list[PlanRequest] = []
        """Plans that were used although measurements have changed since then."""

    @property
    def missing(self) -> tuple[PlanRequest, ...]:
        """Return the plans that do not exist yet, without which a decision was impossible."""
        return tuple(each.request for each in self._missing.values())

    @property
    def waits_since(self) -> float | None:
        """Return since when decisions have missed a plan that this one misses; None: none, or this is the first."""
        return self._plans.wanted_since(self._job) if self._missing else None

    def plan(
        self,
        purpose: Purpose,
        spec: JobSpec,
        nodes: Collection[NodeRecord],
        *,
        profiles: Profiles,
        **conditions: Unpack[Conditions],
    ) -> Found:
        """Look a plan up, or compute it. Raises PlanMissingError, again for its purpose too."""
        if purpose in self._missing:
            raise self._missing[purpose]
        question = ask(spec, nodes, profiles=profiles, **conditions)
        request = PlanRequest(job=self._job, purpose=purpose, question=question)
        found = self._plans.find(request)
        if found is None:
            self._missing[purpose] = PlanMissingError(request)
            raise self._missing[purpose]
        if not found.is_current:
            self.stale.append(request)
        return found


@dataclass(slots=True)
class _Entry:
    """The entry of one job and purpose."""

    question: PlanQuestion | None = None
    outcome: Outcome | None = None
    """The last answer, and its question."""
    num_overtaken: int = 0
    is_unread: bool = False
    """True if no decision has been taken since the answer came."""
    wanted_since: float | None = None


class PlanCache:
    """The plans that a leader has had computed. One owner writes (`answered` and then `decided`); decisions read."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, Purpose], _Entry] = {}

    def find(self, request: PlanRequest) -> Found | None:
        """Look a plan up, see Plans."""
        entry = self._entries.get((request.job, request.purpose))
        if entry is None or entry.question is None or entry.outcome is None:
            return None
        if entry.question == request.question:
            return Found(outcome=entry.outcome)
        if differs_in_measurements_alone(entry.question, request.question):
            return Found(outcome=entry.outcome, is_current=False)
        is_patient = entry.num_overtaken < MAX_OVERTAKEN
        if is_patient or isinstance(entry.outcome, PlanRefused):
            return None
        if not still_answers(entry.outcome, entry.question, request.question):
            return None
        return Found(outcome=entry.outcome, is_current=False)

    def wanted_since(self, job: str) -> float | None:
        """Return the time, see Plans."""
        waits = [entry.wanted_since for (name, _), entry in self._entries.items() if name == job]
        return min((since for since in waits if since is not None), default=None)

    def answered(self, request: PlanRequest, outcome: Outcome) -> None:
        """Store a computed plan. The next decision shows whether it came in time."""
        entry = self._entry(request)
        entry.question, entry.outcome, entry.is_unread = request.question, outcome, True

    def decided(self, missing: Sequence[PlanRequest], *, jobs: Collection[str], now: float) -> None:
        """Note a decision. missing: the plans that it needed and did not have. jobs: all present jobs."""
        for key in [key for key in self._entries if key[0] not in jobs]:
            del self._entries[key]
        wanted = {(request.job, request.purpose) for request in missing}
        for request in missing:
            self._entry(request)
        for key, entry in self._entries.items():
            if entry.is_unread:
                entry.num_overtaken = entry.num_overtaken + 1 if key in wanted else 0
                entry.is_unread = False
            if key not in wanted:
                entry.wanted_since = None
            elif entry.wanted_since is None:
                entry.wanted_since = now

    def knows(self, job: str, purpose: Purpose) -> bool:
        """Return whether an existing job has requested such a plan."""
        return (job, purpose) in self._entries

    def forget(self, request: PlanRequest) -> None:
        """Request a plan again, although none of its inputs has changed."""
        entry = self._entries.get((request.job, request.purpose))
        if entry is not None and entry.question == request.question:
            entry.question = entry.outcome = None

    def clear(self) -> None:
        """Forget everything: the next leader begins with an empty cache."""
        self._entries.clear()

    def _entry(self, request: PlanRequest) -> _Entry:
        return self._entries.setdefault((request.job, request.purpose), _Entry())


class PlanLookup:
    """The plans of one job at one moment. A property that needs a missing plan raises PlanMissingError."""

    def __init__(self, situation: "JobSituation") -> None:
        self._situation = situation
        self.inquiry = Inquiry(situation.plan_source, situation.job.name)
        """Records which plans were requested, and which are missing."""

    @cached_property
    def best(self) -> Outcome:
        """Return the best plan on devices that no other job has, without flapping nodes if possible."""
        flapping, unsettled = self.on_probation, self.unsettled
        nodes = self.without(unsettled)
        steady = self._plan_on(Purpose.BEST, self.without(unsettled | flapping.keys()))
        if flapping and isinstance(steady, PlanRefused):
            return self._plan_on(Purpose.WITH_FLAPPING_NODES, nodes)
        return steady

    @cached_property
    def recovery(self) -> Outcome:
        """Return the best plan after a failure, if possible without late workers and draining nodes.

        If only draining nodes are left, the job resumes on them, so that it can be saved from there.
        """
        nodes, situation = self.present, self._situation
        is_again = situation.job.phase.phase is Phase.RECOVERING
        suspects = [
            loss.stage for loss in situation.lost.found if loss.is_late or (is_again and loss.death.failure.fault)
        ]
        without = frozenset((stage.node, stage.device_index) for stage in suspects)
        plan = self._plan_on(Purpose.RECOVERY, nodes, without=without)
        if isinstance(plan, PlanRefused) and without:
            plan = self._plan_on(Purpose.RECOVERY_WITH_SUSPECTS, nodes)
        if isinstance(plan, PlanRefused):
            every = (replace(node, is_draining=False) for node in nodes)
            staying = self._plan_on(Purpose.RECOVERY_WITH_DRAINING_NODES, every)
            plan = staying if isinstance(staying, ClusterPlan) else plan
        return plan

    @cached_property
    def on_everything(self) -> Outcome:
        """Return the best plan if every device were free: whether the job could run at all now."""
        return self.look_up(
            Purpose.ON_EVERYTHING,
            self.present,
            previous=None,
            busy=frozenset(),
            held=None,
            blocked=self._situation.view.blocked,
        )

    def _plan_on(
        self, purpose: Purpose, nodes: Iterable[NodeRecord], *, without: frozenset[DeviceKey] = frozenset()
    ) -> Outcome:
        """Raises PlanMissingError."""
        situation, job = self._situation, self._situation.job
        is_under_way = job.plan is not None and job.phase.phase is not Phase.RECOVERING
        return self.look_up(
            purpose,
            nodes,
            previous=job.plan,
            busy=situation.busy | without if without else situation.busy,
            held=None if is_under_way else self._held,
            blocked=situation.view.blocked,
        )

    def look_up(self, purpose: Purpose, nodes: Iterable[NodeRecord], **conditions: Unpack[Conditions]) -> Outcome:
        """Return a plan that respects the job's past, with its seconds by present measurements. Raises
        PlanMissingError.
        """
        conditions |= {
            "history": self.history,
            "was_rounded": self.was_rounded,
            "quarantined": self.quarantined,
            "memory": self.memory,
        }
        found = self.inquiry.plan(purpose, self._situation.spec, tuple(nodes), profiles=self.profiles, **conditions)
        if found.is_current or isinstance(found.outcome, PlanRefused):
            return found.outcome
        seconds = self._predicted(found.outcome.workers)
        return found.outcome if seconds is None else replace(found.outcome, predicted_batch_seconds=seconds)

    @cached_property
    def history(self) -> tuple[str, ...]:
        """Return the arithmetic classes that the weights have seen."""
        job = self._situation.job
        if job.plan is not None:
            return job.plan.arithmetic_classes
        if job.phase.lineage is not None:
            return job.phase.arithmetic_classes
        return job.checkpoint.arithmetic_classes if job.checkpoint is not None else ()

    @cached_property
    def was_rounded(self) -> bool:
        """Return whether the weights have seen a lossy wire."""
        job = self._situation.job
        if job.plan is not None:
            return job.plan.was_rounded
        if job.phase.lineage is not None:
            return job.phase.was_rounded
        return job.checkpoint is not None and job.checkpoint.was_rounded

    @cached_property
    def _held(self) -> dict[str, tuple[str, ...]]:
        """Return the layers that each node holds at the boundary where a start would begin."""
        origin = self._situation.origin
        if origin.source != "nodes":
            return {}
        records = self._situation.job.state.get((origin.source_timeline, origin.boundary), {})
        return {name: tuple(record.files) for name, record in records.items()}

    @cached_property
    def nodes(self) -> dict[str, NodeRecord]:
        """Return the present nodes that can read the job, by name, as plans see them."""
        return planned_nodes(self._situation.view, self._situation.job.name)

    @property
    def present(self) -> tuple[NodeRecord, ...]:
        """Return these nodes in a row: the same object, as long as they are the same."""
        return _row(self.nodes, frozenset())

    def without(self, names: Set[str]) -> tuple[NodeRecord, ...]:
        """Return the present nodes but for some."""
        return _row(self.nodes, frozenset(names))

    @cached_property
    def profiles(self) -> Profiles:
        """Return the measurements."""
        return measured(self._situation.job, self._situation.view)

    @cached_property
    def memory(self) -> MemoryLessons:
        """Return what the job has learned of its memory, the present shortage included."""
        return lessons(self._situation.job, self._situation.shortages)

    @cached_property
    def on_probation(self) -> dict[str, float]:
        """Return nodes that a running job does not move to yet, and until when. Without quarantine there are none."""
        situation = self._situation
        if not situation.quarantine_after:
            return {}
        return on_probation(situation.job.plan, situation.view, now=situation.now)

    @cached_property
    def unsettled(self) -> frozenset[str]:
        """Return nodes that are left out because they have just changed, while other nodes are settled."""
        job, view, now = self._situation.job, self._situation.view, self._situation.now
        if now < view.unrest.settled_at:
            return frozenset()  # before all nodes have settled, nothing starts or changes
        own = {stage.node for stage in job.plan.workers} if job.plan is not None else set()
        return view.unrest.unsettled(view.nodes, now=now) - own

    @cached_property
    def quarantined(self) -> frozenset[str]:
        """Return the nodes that failed too often recently, the present failure included."""
        situation, view = self._situation, self._situation.view
        charged = {name: [*found.values()] for name, found in view.failures.items()}
        for name, charge in situation.lost.charges(situation.lost.found).items():
            charged.setdefault(name, []).append(charge)
        left = left_out(charged, limit=situation.quarantine_after, for_job=situation.job.name)
        num_left = len(view.nodes) - sum(name in view.nodes for name in left)
        if num_left >= max(situation.spec.placement.min_nodes, 1):
            return left
        # A job that fails on every node is ended by its own failure budget, not by quarantine.
        return left_out(charged, limit=situation.quarantine_after)

    @cached_property
    def why_quarantined(self) -> str:
        """Return who charges the nodes that the job's plans leave out; empty: none is left out."""
        failures = self._situation.view.failures
        found = {name: failures.get(name, {}).values() for name in sorted(self.quarantined & set(self.nodes))}
        return "; ".join(f"{name} has {charged_by(charges)}" for name, charges in found.items() if charges)

    @cached_property
    def outlook(self) -> Outlook | None:
        """Return what the best plan would change; None: there is nothing to compare."""
        return self.outlook_of(self.best) if isinstance(self.best, ClusterPlan) else None

    def outlook_of(self, plan: ClusterPlan) -> Outlook | None:
        """Return what a plan would change; None: there is nothing to compare."""
        job = self._situation.job
        return outlook(
            job,
            plan,
            predicted_s=self.predicted_s,
            slowest_bytes_per_s=slowest_way(self._situation.view),
            now=self._situation.now,
            newcomers=self._situation.view.newcomers(job, {stage.node for stage in plan.workers}),
        )

    @cached_property
    def predicted_s(self) -> float | None:
        """Return a batch's seconds under the plan in force, by present measurements; None: a worker is gone."""
        plan = self._situation.job.plan
        return self._predicted(plan.workers) if plan is not None else None

    def _predicted(self, stages: tuple[WorkerPart, ...]) -> float | None:
        present = self._situation.job.plan
        if present is not None and stages is not present.workers and stages == present.workers:
            return self.predicted_s  # the best plan is mostly the one in force
        situation, known = self._situation, concerned(stages, self.nodes)
        return predicted(situation.spec, stages, known=known, profiles=self.profiles)

    @cached_property
    def verdict(self) -> Verdict | None:
        """Return whether the best plan is worth a change."""
        return judge(self.outlook) if self.outlook is not None else None

    @property
    def reconsidered_at(self) -> float:
        """Return when the verdict on a better plan may change by time alone; a time in the past means never."""
        steady_at = self._situation.view.unrest.steady_at
        waits = [*self.on_probation.values(), *map(steady_at, self.unsettled)]
        if self.verdict is not None and self.verdict.wait_s > 0:
            waits.append(self._situation.now + self.verdict.wait_s)
        return min(waits, default=0.0)


@remembered()
def _row(nodes: dict[str, NodeRecord], without: frozenset[str]) -> tuple[NodeRecord, ...]:
    """Return the nodes but for some: the same object for all jobs, so that they share what these nodes offer."""
    return tuple(node for name, node in nodes.items() if name not in without)
