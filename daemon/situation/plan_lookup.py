"""Looks up the plans for one decision about one job, from nodes, measured times and quarantine. Pure."""

from collections.abc import Iterable, Set
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Unpack

from headway.daemon.costs.devices import MemoryLessons
from headway.daemon.costs.profiles import Profiles
from headway.daemon.planning.cluster_plan import ClusterPlan, PlanRefused
from headway.daemon.planning.plan_question import Conditions
from headway.daemon.planning.rebalance import Outlook, Verdict, judge
from headway.daemon.records.memo import remembered
from headway.daemon.records.records import DeviceKey, NodeRecord, Phase, WorkerPart
from headway.daemon.situation.failures import lessons
from headway.daemon.situation.outlook import (
    concerned,
    measured,
    on_probation,
    outlook,
    planned_nodes,
    predicted,
    slowest_way,
)
from headway.daemon.situation.plan_cache import Inquiry, Outcome, Purpose
from headway.daemon.view.quarantine import charged_by, left_out

if TYPE_CHECKING:
    from headway.daemon.situation.situation import JobSituation


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
        suspects = [loss.stage for loss in situation.lost.found if loss.is_late or (is_again and loss.death.fault)]
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
        """Return all present nodes by name, as plans see them."""
        return planned_nodes(self._situation.view)

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
