"""Finds the workers that a plan has lost, which losses are the cause, and what they are charged to. Pure."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

from headway.daemon.records.cluster_records import NodeFailureRecord
from headway.daemon.records.records import FailureCount, Phase, WorkerState
from headway.daemon.situation.failure_budget import Death, broken_rule, counted
from headway.daemon.situation.late_workers import late_workers
from headway.daemon.situation.lost_worker import LostWorker

if TYPE_CHECKING:
    from headway.daemon.situation.situation import JobSituation

CAUSE_GRACE_S: Final = 1.5
"""Time for a neighbour's own error to become known after a worker reported a lost link to it."""


class LostWorkers:
    """The losses of the plan that the present phase is about: `next` while it is prepared, else `plan`."""

    def __init__(self, situation: "JobSituation") -> None:
        self._situation = situation

    @cached_property
    def late(self) -> tuple[int, ...]:
        """Return the positions of workers that are late in the present phase."""
        return late_workers(self._situation)

    @cached_property
    def found(self) -> tuple[LostWorker, ...]:
        """Return all losses; none while the cause of a lost link may still become known."""
        situation, job = self._situation, self._situation.job
        is_next = job.phase.phase in (Phase.PREPARING, Phase.RECOVERING)
        health = situation.next if is_next else situation.current
        if (plan := health.plan) is None:
            return ()
        workers, late = health.workers, self.late
        found = []
        for position, stage in enumerate(plan.workers):
            worker = workers.get(position)
            if worker is not None and worker.state is WorkerState.FAILED:
                found.append(LostWorker(position=position, plan=plan, worker=worker))
            elif health.is_lost(position):
                found.append(LostWorker(position=position, plan=plan))
            elif position in late:
                node = situation.view.nodes.get(stage.node)
                trouble = node.storage_trouble(job.name) if node is not None else ""
                is_refused = node is not None and bool(node.refusal(job.name))
                late_one = LostWorker(position=position, plan=plan, is_late=True, storage_trouble=trouble)
                found.append(replace(late_one, is_refused=is_refused))
        is_explained = any(loss.explains_others or loss.is_between(situation.view.blocked) for loss in found)
        return tuple(found) if is_next or is_explained or situation.now >= self.cause_known_at else ()

    @property
    def cause_known_at(self) -> float:
        """Return when the cause of a failed worker of the plan in force is known at the latest; 0: none failed.

        A worker that lost a neighbour often reports before the neighbour's daemon does.
        """
        job = self._situation.job
        failed_at = job.failed_at.get(job.plan.generation) if job.plan is not None else None
        return failed_at + CAUSE_GRACE_S if failed_at is not None else 0.0

    @property
    def causes(self) -> tuple[LostWorker, ...]:
        """Return the losses that explain the others, or else the first loss."""
        return tuple(loss for loss in self.found if loss.explains_others) or self.found[:1]

    @property
    def first_error(self) -> str:
        """Return the error of a worker that is a cause, or else of any worker; empty: there is none."""
        told = [loss.worker.error for loss in (*self.causes, *self.found) if loss.worker is not None]
        return next((error for error in told if error), "")

    @cached_property
    def deaths(self) -> tuple[Death, ...]:
        """Return the deaths that the failure budget counts: those to blame, or else one of the workers that failed.

        Nobody is to blame for a blocked pair of nodes (the next plan avoids it), a moved worker or absent storage.
        """
        blocked = self._situation.view.blocked
        to_blame = [loss.death for loss in self.found if loss.is_death]
        is_nobodys = any(loss.is_between(blocked) or loss.is_nobodys for loss in self.found)
        if not to_blame and not is_nobodys and all(loss.worker is not None for loss in self.found):
            to_blame = [loss.death for loss in self.found[:1]]
        return tuple(to_blame)

    @cached_property
    def failures(self) -> FailureCount:
        """Return the failure budget's count with the present losses."""
        situation, job = self._situation, self._situation.job
        if not self.found:
            return job.phase.failures
        return counted(job.phase.failures, self.deaths, boundary=situation.origin.boundary, plan=job.plan)

    @cached_property
    def broken_rule(self) -> str:
        """Return the rule of the failure budget that the present losses break; empty: none."""
        return broken_rule(self.failures, self.deaths) if self.deaths else ""

    def charges(self, losses: Iterable[LostWorker]) -> dict[str, NodeFailureRecord]:
        """Return the charges for some losses: one failure a node, and the loss of one daemon only once."""
        situation, found = self._situation, dict[str, NodeFailureRecord]()
        for loss in losses:
            charge, name = loss.charge(situation.job.name, at=situation.written_at), loss.stage.node
            known = {record.incarnation for record in situation.view.failures.get(name, {}).values()} - {""}
            if loss.is_held_against_node and charge.incarnation not in known:
                found.setdefault(name, charge)
        return found
