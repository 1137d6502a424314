"""Finds the workers that a plan has lost, what is to blame, and how often a job may fail without progress. Pure.

Without a limit, a job that fails at the same place after each rollback would repeat that without end. A job that gets
further has a new budget. deadlines.py says when a worker is late. Memory that ran out is a lesson for the next plan.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from headway.daemon.cluster.cluster_records import NodeFailureRecord
from headway.daemon.cluster.measurements import DeviceShortage, LinkCuts
from headway.daemon.cluster.records import (
    Device,
    Failure,
    FailureCount,
    Phase,
    PlanRecord,
    Save,
    WorkerPart,
    WorkerState,
)
from headway.daemon.decide.boundaries import lead_of
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.plan.devices import MemoryLessons, Model, after_shortage, still_of_use
from headway.daemon.plan.paths import BlockedWays, Pair, pair_of

if TYPE_CHECKING:
    from headway.daemon.decide.situation import JobSituation, PlanHealth

MAX_SAME_BATCH: Final = 3
"""Failures in a row at one batch."""
MAX_SAME_FAULT: Final = 4
"""Failures by one error on one node. After three plans leave the node out; a fourth shows that no other takes its
place.
"""
MOST_SILENT: Final = 2
"""Failures without a new boundary after which each sentence about the job says how often it failed, and why."""
MAX_DEATHS: Final = 10
"""Incidents without a new boundary. Workers that fail together count once: one switch may take ten of them."""
DEATH_SIGNS: Final = ("ended by signal", "it was killed")
"""Signs, in the first lines of a worker's error, that its process was ended from outside."""


@dataclass(frozen=True, slots=True)
class Death:
    """A worker that failed, or did not answer in time."""

    node: str
    failure: Failure


def was_killed(failure: Failure) -> bool:
    """Return whether the process was ended from outside, which is not the job's fault."""
    head = failure.text.split("\n", 2)[:2]
    return not failure.fault and any(sign in line for line in head for sign in DEATH_SIGNS)


def counted(
    before: FailureCount, deaths: Sequence[Death], *, boundary: int, plan: PlanRecord | None = None
) -> FailureCount:
    """Return the count after one more failure. boundary: the newest that the job can go back to; no deaths: only nodes
    went.

    plan: the plan in force. Holders that come and go move that boundary to and fro. Only a boundary beyond all that
    earlier failures found on the plan's timeline is progress. A plan that begins further back, after a loss of files,
    resets it.
    """
    if plan is not None and plan.timeline != before.timeline:
        reached = min(before.boundary, plan.boundary) if before.timeline else before.boundary
        before = replace(before, timeline=plan.timeline, boundary=reached)
    if boundary > before.boundary:
        before = FailureCount(boundary=boundary, timeline=before.timeline)
    if not deaths:
        return before
    batch = max(death.failure.batch for death in deaths)
    is_same = batch >= 0 and batch == before.batch
    faults = (*before.faults, *{(death.failure.fault, death.node) for death in deaths if death.failure.fault})
    return FailureCount(
        boundary=before.boundary,
        timeline=before.timeline,
        num_deaths=before.num_deaths + 1,
        batch=batch,
        num_same_batch=before.num_same_batch + 1 if is_same else int(batch >= 0),
        faults=tuple(sorted(faults)),
    )


def repetition(count: FailureCount) -> str:
    """Return how often a job failed without progress, and why the last time, as the end of a sentence; empty: not
    often.
    """
    if count.num_deaths <= MOST_SILENT:
        return ""
    why = f", the last time because {count.cause}" if count.cause else ""
    return f"; it failed {count.num_deaths} times without a new boundary{why}; after {MAX_DEATHS} it is given up"


def broken_rule(count: FailureCount, deaths: Sequence[Death]) -> str:
    """Return which rule a count breaks, as the end of a sentence; empty: the job may continue."""
    if any(death.failure.is_hopeless for death in deaths):
        return "another attempt would end in the same error"
    for fault in dict.fromkeys(fault for fault, _ in count.faults):
        nodes = sorted({node for other, node in count.faults if other == fault})
        if len(nodes) > 1:
            return f"the same error occurred on {' and '.join(nodes)}: {fault}"
    (fault, node), num_same = max(Counter(count.faults).items(), key=itemgetter(1), default=(("", ""), 0))
    if num_same >= MAX_SAME_FAULT:
        return f"the same error occurred {num_same} times on {node} without a new boundary to go back to: {fault}"
    if count.num_same_batch >= MAX_SAME_BATCH:
        return f"batch {count.batch} failed {count.num_same_batch} times without a new boundary to go back to"
    if count.num_deaths >= MAX_DEATHS:
        return f"it failed {count.num_deaths} times without a new boundary to go back to"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostWorker:
    """A worker that a plan has lost: it failed or did not answer in time, or its node is gone."""

    position: int
    """Position among the plan's workers."""
    plan: PlanRecord
    failure: Failure | None = None
    """What the worker's record says, if it failed."""
    is_late: bool = False
    storage_trouble: str = ""
    """Reason why its node cannot read the data or checkpoint, if the worker is late for that. It counts against no
    node.
    """

    @property
    def stage(self) -> WorkerPart:
        """Return the worker's stage and device."""
        return self.plan.workers[self.position]

    @property
    def is_death(self) -> bool:
        """Return whether the worker, or the process that ended it, is to blame: not its node's end, not a
        neighbour's.
        """
        if self.is_nobodys:
            return False
        return self.is_late or self.is_jobs_error or (self.failure is not None and was_killed(self.failure))

    @property
    def is_held_against_node(self) -> bool:
        """Return whether the loss counts against the node: the node was lost, or its worker died or did not answer."""
        return (self.failure is None and not self.is_late) or self.is_death

    @property
    def is_jobs_error(self) -> bool:
        """Return whether the worker reported an error of its own, which may be the job's."""
        return self.failure is not None and (bool(self.failure.fault) or self.failure.is_hopeless)

    @property
    def was_moved(self) -> bool:
        """Return whether its daemon ended it because the machine's address has changed."""
        return self.failure is not None and self.failure.was_moved

    @property
    def is_nobodys(self) -> bool:
        """Return whether it counts against no node and no job: the machine moved, storage is away, memory ran out, or
        the machine lacks what plug-ins import.
        """
        is_without_code = self.failure is not None and self.failure.refuses_plugins
        return self.was_moved or bool(self.storage_trouble) or self.is_out_of_memory or is_without_code

    @property
    def is_out_of_memory(self) -> bool:
        """Return whether its device had no memory left, and the next plan will ask less of that device."""
        shortage = self.failure.shortage if self.failure is not None else None
        return shortage is not None and bool(self.stage.device_bytes or shortage.needed_bytes)

    @property
    def explains_others(self) -> bool:
        """Return whether this loss explains the neighbours' lost links."""
        return self.is_held_against_node or self.is_nobodys

    def charge(self, job: str, *, at: float, brings_code: bool) -> NodeFailureRecord:
        """Return the charge against its node. at: seconds since the epoch. brings_code: the job has plug-ins, which may
        have ended or held up the worker.
        """
        if self.failure is None and not self.is_late:
            incarnation = self.stage.node_incarnation
            return NodeFailureRecord(at=at, text=f"it was lost in job {job}", job=job, incarnation=incarnation)
        how = "did not answer" if self.is_late else "failed"
        why = f": {self.failure.fault}" if self.failure is not None and self.failure.fault else ""
        text = f"its worker {how} in job {job}{why}"
        return NodeFailureRecord(at=at, text=text, job=job, is_jobs_error=self.is_jobs_error or brings_code)

    def is_between(self, blocked: BlockedWays) -> bool:
        """Return whether a pair of nodes is to blame: the link never opened, or one node does not reach the
        other now.
        """
        failure = self.failure
        if failure is None or not 0 <= failure.lost_peer < len(self.plan.workers):
            return False
        pair = pair_of(self.stage.node, self.plan.workers[failure.lost_peer].node)
        return failure.was_unreached or pair in blocked.pairs

    @property
    def death(self) -> Death:
        """Return the loss as a death for the failure budget."""
        return Death(self.stage.node, self.failure or Failure())


STARTED = (WorkerState.RUNNING, WorkerState.STOPPED, WorkerState.FAILED)


def late_workers(situation: "JobSituation") -> tuple[int, ...]:
    """Return the positions of late workers in the plan of the phase."""
    job, now, deadlines = situation.job, situation.now, situation.deadlines
    plan, stop = job.plan, job.stop
    match job.phase.phase:
        case Phase.PREPARING | Phase.RECOVERING if job.next is not None and now >= deadlines.prepare:
            return situation.next.unready_workers(WorkerState.READY)
        case Phase.RUNNING if plan is not None:
            late = situation.current.unready_workers(*STARTED) if now >= deadlines.start else ()
            return late or (_late_at_the_end(situation, plan) if now >= deadlines.end else ())
        case Phase.STOPPING if plan is not None and stop is not None and now >= deadlines.stop:
            if stop.boundary is None:
                return (0,)
            if late := situation.current.unready_workers(WorkerState.STOPPED):
                return late
            return _late_to_write(situation, plan, stop.boundary) if stop.save is Save.MOVES else ()
    return ()


def _late_at_the_end(situation: "JobSituation", plan: PlanRecord) -> tuple[int, ...]:
    """Return workers that still train although others have reached the end."""
    running = situation.current.unready_workers(WorkerState.STOPPED)
    return running if len(running) < len(plan.workers) else ()


def _late_to_write(situation: "JobSituation", plan: PlanRecord, boundary: int) -> tuple[int, ...]:
    """Return the leads of stages whose layers move and are not yet held by any node."""
    missing = [layer for layer in situation.moving if not situation.job.holders(plan.timeline, boundary, layer)]
    return tuple(sorted({plan.workers.index(lead_of(plan, layer)) for layer in missing}))


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
                found.append(LostWorker(position=position, plan=plan, failure=worker.failure))
            elif health.is_lost(position):
                found.append(LostWorker(position=position, plan=plan))
            elif position in late:
                node = situation.view.nodes.get(stage.node)
                trouble = node.storage_trouble(job.name) if node is not None else ""
                found.append(LostWorker(position=position, plan=plan, is_late=True, storage_trouble=trouble))
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
        told = [loss.failure.text for loss in (*self.causes, *self.found) if loss.failure is not None]
        return next((error for error in told if error), "")

    @cached_property
    def deaths(self) -> tuple[Death, ...]:
        """Return the deaths that the failure budget counts: those to blame, or else one of the workers that failed.

        Nobody is to blame for a blocked pair of nodes (the next plan avoids it), a moved worker or absent storage.
        """
        blocked = self._situation.view.blocked
        to_blame = [loss.death for loss in self.found if loss.is_death]
        is_nobodys = any(loss.is_between(blocked) or loss.is_nobodys for loss in self.found)
        if not to_blame and not is_nobodys and all(loss.failure is not None for loss in self.found):
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
        job, at, brings_code = situation.job.name, situation.written_at, bool(situation.spec.plugins.sha256)
        for loss in losses:
            charge, name = loss.charge(job, at=at, brings_code=brings_code), loss.stage.node
            known = {record.incarnation for record in situation.view.failures.get(name, {}).values()} - {""}
            if loss.is_held_against_node and charge.incarnation not in known:
                found.setdefault(name, charge)
        return found


def lessons(job: JobView, shortages: Iterable[DeviceShortage]) -> MemoryLessons:
    """Return what plans of the job respect. shortages: earlier and present ones."""
    return MemoryLessons.of(shortages, _measured(job))


def shortages_now(job: JobView, view: ClusterView, plans: "Iterable[PlanHealth]") -> tuple[DeviceShortage, ...]:
    """Return the job's shortages with those that workers of these plans report."""
    found = job.phase.shortages
    for health in plans:
        for position, worker in sorted(health.workers.items()):
            shortage = worker.failure.shortage
            if health.plan is None or position >= len(health.stages) or shortage is None:
                continue
            if not LostWorker(position=position, plan=health.plan, failure=worker.failure).is_out_of_memory:
                continue
            stage = health.stages[position]
            device = _device(view, stage)
            if device is None:
                continue
            found = after_shortage(
                found,
                shortage,
                place=(stage.node, stage.node_incarnation, stage.device_index),
                device=device,
                predicted_bytes=stage.device_bytes,
                demand=MemoryLessons.of(found, _measured(job)).demand(device),
            )
    return still_of_use(found, ((name, node.incarnation) for name, node in view.nodes.items()))


def _measured(job: JobView) -> dict[Model, float]:
    """Return the largest measured factor of each model of device."""
    demands: dict[Model, float] = {}
    for profile in job.profiles.values():
        model = profile.device_kind, profile.device_model
        demands[model] = max(profile.demand, demands.get(model, 1.0))
    return demands


def _device(view: ClusterView, stage: WorkerPart) -> Device | None:
    """Return a stage's device. None if its daemon is gone: no plan uses it, and its model is not known."""
    record = view.nodes.get(stage.node)
    if record is None or record.incarnation != stage.node_incarnation or stage.device_index >= len(record.devices):
        return None
    return record.devices[stage.device_index]


def standing(job: JobView, plan: PlanRecord) -> dict[int, int]:
    """Return the position of each worker that stands still, with that of the neighbour for which it waits."""
    places = range(len(plan.workers))
    return {
        position: record.awaited_worker
        for (generation, position), record in job.goodput.items()
        if generation == plan.generation and position in places and record.awaited_worker in places
    }


def standing_pairs(job: JobView, plan: PlanRecord) -> frozenset[Pair]:
    """Return pairs of nodes: one that waits, and the one for which it waits."""
    return frozenset(
        pair_of(plan.workers[position].node, plan.workers[peer].node) for position, peer in standing(job, plan).items()
    )


def awaited_pair(job: JobView, plan: PlanRecord) -> tuple[int, int] | None:
    """Return the end of the chain of workers that wait for one another; None: some other worker is working."""
    waits = standing(job, plan)
    if not waits or len(waits) + 1 < len(plan.workers):
        return None
    position, seen = min(waits), set[int]()
    while waits[position] in waits and position not in seen:
        seen.add(position)
        position = waits[position]
    return position, waits[position]


CUTS_ONE_BY_ONE: Final = 8
"""Cuts of a plan's links that are told one by one; after them a link's first, and each time that all have doubled."""
MOST_CUT_S: Final = 1e6
MOST_LINKS_TOLD: Final = 32
"""Links that one event tells of."""


def link_news(job: JobView) -> tuple[LinkCuts, ...]:
    """Return the links of the plan in force that were cut or went on since events told of them, with the seconds since
    then.
    """
    plan, seen = job.plan, dict[tuple[int, int], LinkCuts]()
    if plan is None:
        return ()
    for (generation, position), record in job.goodput.items():
        for cuts in record.cuts if generation == plan.generation else ():
            if position in cuts.ends and 0 <= cuts.ends[0] < cuts.ends[1] < len(plan.workers):
                seen[cuts.ends] = _together(seen.get(cuts.ends, cuts), cuts)
    if not seen:
        return ()
    none, told = LinkCuts(ends=(0, 0), num_cut=0, num_back=0, cut_s=0.0), dict[tuple[int, int], LinkCuts]()
    for _, event in sorted(job.events.items()):
        for cuts in event.cuts if event.generation == plan.generation else ():
            told[cuts.ends] = replace(cuts, cut_s=told.get(cuts.ends, none).cut_s + cuts.cut_s)
    num_seen, num_told = (sum(cuts.num_cut for cuts in each.values()) for each in (seen, told))
    is_worth_it = num_told < CUTS_ONE_BY_ONE or num_seen >= 2 * num_told
    news = []
    for ends, cuts in sorted(seen.items()):
        known = told.get(ends, none)
        is_back = known.num_back < known.num_cut <= cuts.num_back
        is_cut = cuts.num_cut > known.num_cut and (is_worth_it or not known.num_cut)
        if is_back or is_cut:
            news.append(replace(cuts, cut_s=min(max(cuts.cut_s - known.cut_s, 0.0), MOST_CUT_S)))
    return tuple(news[:MOST_LINKS_TOLD])


def _together(one: LinkCuts, other: LinkCuts) -> LinkCuts:
    """Return what both ends of a link tell; their reports come one after the other."""
    pairs = ((getattr(one, name), getattr(other, name)) for name in ("num_cut", "num_back", "cut_s"))
    num_cut, num_back, cut_s = map(max, pairs)
    return LinkCuts(ends=one.ends, num_cut=num_cut, num_back=num_back, cut_s=cut_s)
