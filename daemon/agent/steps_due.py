"""Finds the steps that are due on a node: a pure function of the node's knowledge and the plans that name it.

It is level-triggered: it depends on the present state only, so it can be called at any time. A step that failed or
was lost is simply due again. docs/architecture.md has the protocol; the functions follow its order.
"""

from collections.abc import Callable, Iterable, Iterator

from headway.daemon.agent.copy_steps import copy_steps_of
from headway.daemon.agent.layer_sources import base_source, carried_source, frozen_fetches, source_of
from headway.daemon.agent.link_steps import links_to_prove, neighbours_of, proven_links
from headway.daemon.agent.local_state import Assignment, NodeState, assignments_of
from headway.daemon.agent.state_steps import state_steps_of
from headway.daemon.agent.steps import AnswerStop, CopyToCheckpoint, FetchState, GiveUp, OpenData, RegisterWorker, Step
from headway.daemon.costs.paths import pair_of
from headway.daemon.planning.cluster_plan import is_moving, place
from headway.daemon.records.journal_part import end_of, own_parts
from headway.daemon.records.records import Phase, Save, WorkerRecord, WorkerState
from headway.daemon.situation.boundaries import pinned
from headway.daemon.storage.state_key import JOURNAL, StateKey
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.job_view import IN_FORCE, JobView
from headway.daemon.workers.orders import (
    OrderChooseStop,
    OrderPrepare,
    OrderRelease,
    OrderStart,
    OrderStopAt,
    OrderTrimJournal,
    OrderWrite,
    Source,
    SourceKind,
)
from headway.daemon.workers.status import Failure, JobGeneration, OrderKind


def next_steps(view: ClusterView, node: NodeState, *, broken: dict[str, Exception] | None = None) -> list[Step]:
    """Return every step that is due on this node now. A step whose order was already sent is not due again.

    broken: receives the error of each job whose records raise one. Such a job has no steps; other jobs keep theirs.
    Without it the error is raised.

    """
    errors: dict[str, Exception] = {}

    def of_all(jobs: Iterable[str], steps_of: Callable[[str], Iterator[Step]]) -> list[Step]:
        found: list[Step] = []
        for name in jobs:
            try:
                found += list(steps_of(name))
            except Exception as error:
                if broken is None:
                    raise
                errors.setdefault(name, error)
        return found

    steps = of_all(view.jobs, lambda name: _plan_steps(view, view.jobs[name], node))
    steps += _releases(view, node)
    steps += of_all(view.jobs, lambda name: copy_steps_of(view, view.jobs[name], node))
    with_files = sorted({key.job for key in node.held} | set(view.jobs))
    of_files = of_all(with_files, lambda name: state_steps_of(view, name, node))
    steps += (step for step in of_files if step not in steps)
    if broken is not None:
        broken.update(errors)
    return steps


def _plan_steps(view: ClusterView, job: JobView, node: NodeState) -> Iterator[Step]:
    """Yield the steps that the plans of one job require of this node."""
    if job.submission is None or view.why_left_alone(job.name):
        return
    is_recovering = job.phase.phase is Phase.RECOVERING
    if job.next is not None and node.may_obey(job, job.next):
        for assignment in assignments_of(job, job.next, node):
            frozen = frozen_fetches(assignment, node)
            yield from frozen
            if not frozen or is_recovering or job.plan is None:  # otherwise it trains under its plan meanwhile
                yield from _prepare(assignment, node)
            yield from links_to_prove(view, assignment, node)
            if is_recovering:
                yield from _fetch_ahead(view, assignment, node)
            yield from _register(view, assignment, node)
    if job.plan is not None and node.may_obey(job, job.plan):
        for assignment in assignments_of(job, job.plan, node):
            if not is_recovering:
                yield from _prepare(assignment, node)
                yield from _start(view, assignment, node)
                yield from trim_steps(assignment, node)
                yield from _stop(assignment)
                yield from _save(assignment, node)
            yield from _register(view, assignment, node)


def is_named(view: ClusterView, node: str, incarnation: str) -> bool:
    """Return whether a plan, in force or being prepared, names this node."""
    return any(
        stage.node == node and stage.node_incarnation == incarnation
        for job in view.jobs.values()
        for plan in (job.plan, job.next)
        if plan is not None
        for stage in plan.workers
    )


def has_steps_ahead(view: ClusterView, node: str) -> bool:
    """Return whether others wait for steps of this node: a job in which it has a part starts, changes or stops."""
    return any(
        name == node
        for job in view.jobs.values()
        if job.next is not None or (job.phase.phase in IN_FORCE and job.phase.phase is not Phase.RUNNING)
        for name, _ in job.devices
    )


def is_awaited(view: ClusterView, held: Iterable[StateKey]) -> bool:
    """Return whether a plan still loads a boundary of which this node holds a file: other nodes may be fetching it."""
    return any((key.timeline, key.boundary) in pinned(view.jobs[key.job]) for key in held if key.job in view.jobs)


# --- Prepare and start ----------------------------------------------------------------------------------------------


def _prepare(assignment: Assignment, node: NodeState) -> Iterator[Step]:
    worker, run_key = assignment.worker, assignment.run_key
    is_done = run_key in (worker.prepared, worker.started)
    if not worker.is_up or is_done or run_key in worker.failures or worker.awaits(OrderKind.PREPARE, run_key):
        return
    if worker.job not in ("", run_key.job):
        return  # the worker must first release its previous job
    names = assignment.data_names if assignment.position in assignment.plan.replicas[0] else ()
    if not node.data_paths.keys() >= set(names):
        yield OpenData(worker.device_index, run_key)
        return
    paths = tuple(node.data_paths[name] for name in names)
    yield OrderPrepare(worker.device_index, run_key, assignment.position, assignment.plan, paths)


def _start(view: ClusterView, assignment: Assignment, node: NodeState) -> Iterator[Step]:
    worker, run_key = assignment.worker, assignment.run_key
    is_due = worker.prepared == run_key and worker.started != run_key and run_key not in worker.failures
    if not is_due or worker.awaits(OrderKind.START, run_key):
        return
    sources: list[Source] = []
    is_complete = True
    for part in assignment.parts:
        found = source_of(view, assignment, part, node)
        missing = None if isinstance(found, Source) else found
        if isinstance(found, Source):
            sources.append(found)
            base = None if found.kind is SourceKind.LIVE else base_source(assignment, part, node)
            if isinstance(base, Source):
                sources.append(base)
            if not isinstance(base, FetchState):
                continue
            missing = base
        is_complete = False
        if missing is not None:
            yield missing
    if assignment.position == 0 and isinstance(carried := carried_source(assignment, node), FetchState):
        is_complete = False
        yield carried
    neighbours = neighbours_of(view, assignment)
    if is_complete and neighbours is not None:
        checkpoint = assignment.job.checkpoint if assignment.plan.source == "checkpoint" else None
        origin = checkpoint.origin_job if checkpoint is not None else ""
        yield OrderStart(
            worker.device_index,
            run_key,
            assignment.position,
            assignment.plan,
            tuple(sources),
            neighbours,
            takes_snapshots=_is_first_on_its_node(assignment),
            source_job=origin,
        )


def _fetch_ahead(view: ClusterView, assignment: Assignment, node: NodeState) -> Iterator[Step]:
    """Fetch a recovery's files while its workers are prepared, because their sources are already known."""
    if assignment.run_key in assignment.worker.failures:
        return
    for part in assignment.parts:
        found = source_of(view, assignment, part, node)
        if isinstance(found, FetchState | GiveUp):
            yield found


def _is_first_on_its_node(assignment: Assignment) -> bool:
    """Return whether no earlier replica of the stage is on this node, because both would write the same files."""
    workers = assignment.plan.replicas[assignment.plan.stage_index(assignment.position)]
    return (
        next(other for other in workers if assignment.plan.workers[other].node == assignment.stage.node)
        == assignment.position
    )


# --- Stop and save --------------------------------------------------------------------------------------------------


def _stop(assignment: Assignment) -> Iterator[Step]:
    stop, worker, run_key = assignment.job.stop, assignment.worker, assignment.run_key
    is_due = stop is not None and stop.generation == assignment.plan.generation and worker.started == run_key
    if stop is None or not is_due or run_key in worker.failures:
        return
    if stop.boundary is None:
        if assignment.position != 0:
            return
        if worker.chosen is not None and worker.chosen.run_key == run_key:
            yield AnswerStop(run_key, worker.chosen.boundary)
        elif not worker.awaits(OrderKind.CHOOSE_STOP, run_key):
            yield OrderChooseStop(worker.device_index, run_key)
        return
    chose_itself = worker.chosen is not None and worker.chosen.run_key == run_key
    if assignment.standstill is None and not chose_itself and not worker.awaits(OrderKind.STOP_AT, run_key):
        yield OrderStopAt(worker.device_index, run_key, stop.boundary)


def _save(assignment: Assignment, node: NodeState) -> Iterator[Step]:
    stop, standstill = assignment.job.stop, assignment.standstill
    is_due = stop is not None and stop.generation == assignment.plan.generation
    if stop is None or not is_due or standstill is None or stop.boundary != standstill.boundary:
        return
    worker, run_key = assignment.worker, assignment.run_key
    keys = [
        StateKey(assignment.job.name, assignment.plan.timeline, standstill.boundary, part)
        for part in _parts_to_save(assignment, stop.save)
    ]
    missing = tuple(key.layer for key in keys if key not in node.held)
    if missing and worker.is_up and run_key not in worker.failures and not worker.awaits(OrderKind.WRITE, run_key):
        yield OrderWrite(worker.device_index, run_key, assignment.plan.timeline, standstill.boundary, missing)
    if stop.save is Save.CHECKPOINT and run_key not in worker.failures:
        for key in keys:
            if key in node.held and key not in node.durable:
                yield CopyToCheckpoint(key)


def _parts_to_save(assignment: Assignment, save: Save) -> tuple[str, ...]:
    """Return the parts to save: all parts for a checkpoint; otherwise the layers that move and, always, the journal.

    All replicas of a stage have equal parts, so only the lead writes.

    """
    plan, successor = assignment.plan, assignment.job.next
    if not plan.is_lead(assignment.position):
        return ()
    if save is Save.CHECKPOINT:
        return assignment.parts
    return tuple(
        part
        for part in assignment.parts
        if part == JOURNAL or (successor is not None and is_moving(plan, successor, part))
    )


# --- Reports to etcd --------------------------------------------------------------------------------------------


def _register(view: ClusterView, assignment: Assignment, node: NodeState) -> Iterator[Step]:
    record = _worker_record(view, assignment, node)
    known = assignment.job.workers.get((assignment.plan.generation, assignment.position))
    if record is None or record == known:
        return
    if record.state is WorkerState.FAILED and not (
        _tells_of_the_device(view, assignment, node) and _tells_of_the_pair(view, assignment, record)
    ):
        return
    if known is not None and known.state is WorkerState.FAILED and record.state is WorkerState.FAILED:
        return
    yield RegisterWorker(assignment.run_key, assignment.position, record)


def _tells_of_the_device(view: ClusterView, assignment: Assignment, node: NodeState) -> bool:
    """Return whether our node record shows the device's present worker state, on which the next plan depends."""
    own = view.nodes.get(node.name)
    return own is None or (assignment.worker.device_index in own.down_devices) == assignment.worker.has_died


def _tells_of_the_pair(view: ClusterView, assignment: Assignment, record: WorkerRecord) -> bool:
    """Return whether etcd shows that the neighbour is out of reach or gone, so that the next plan avoids the pair."""
    if not record.was_unreached or not 0 <= record.lost_peer < len(assignment.plan.workers):
        return True
    other = assignment.plan.workers[record.lost_peer]
    peer = view.nodes.get(other.node)
    if peer is None or peer.incarnation != other.node_incarnation:
        return True
    return pair_of(assignment.stage.node, other.node) in view.blocked.pairs


def _worker_record(view: ClusterView, assignment: Assignment, node: NodeState) -> WorkerRecord | None:
    worker, run_key = assignment.worker, assignment.run_key
    boundary = best_batch = None
    failure = worker.failures.get(run_key, Failure(""))
    if run_key in worker.failures:
        state = WorkerState.FAILED
    elif assignment.standstill is not None:
        state, boundary = WorkerState.STOPPED, assignment.standstill.boundary
        best_batch = assignment.standstill.best_batch
    elif worker.started == run_key:
        state = WorkerState.RUNNING
    elif worker.prepared == run_key:
        state = WorkerState.READY
    else:
        return None
    proven, proven_workers = proven_links(view, assignment, node) if state is WorkerState.READY else ((), ())
    return WorkerRecord(
        node=node.name,
        incarnation=worker.incarnation,
        address=worker.address,
        pid=worker.pid,
        state=state,
        boundary=boundary,
        best_batch=best_batch,
        error=failure.text,
        batch=failure.batch,
        fault=failure.fault,
        is_hopeless=failure.is_hopeless,
        lost_peer=failure.lost_peer,
        was_unreached=failure.was_unreached,
        was_moved=failure.was_moved,
        proven=proven,
        proven_workers=proven_workers,
        shortage=failure.shortage,
        damaged=failure.damaged,
    )


# --- Letting go -----------------------------------------------------------------------------------------------------


def _releases(view: ClusterView, node: NodeState) -> Iterator[Step]:
    for worker in node.workers:
        if not worker.is_up or not worker.job or worker.awaits(OrderKind.RELEASE, JobGeneration(worker.job, 0)):
            continue
        job = view.jobs.get(worker.job)
        if job is not None and (node.is_behind(job) or view.why_set_aside(job.name)):
            continue
        plans = [plan for plan in (job.plan, job.next) if plan is not None] if job is not None else []
        mine = (node.name, node.incarnation, worker.device_index)
        if not any(place(stage) == mine for plan in plans for stage in plan.workers):
            yield OrderRelease(worker.device_index, worker.job)


def trim_steps(assignment: Assignment, node: NodeState) -> Iterator[OrderTrimJournal]:
    """Yield the order to drop rows, once for each part that the job's record names.

    The parts of a job from whose checkpoint this one started are not this job's own before its first checkpoint.
    """
    worker, checkpoint, run_key = assignment.worker, assignment.job.checkpoint, assignment.run_key
    if checkpoint is None or checkpoint.origin_job:
        return
    is_running = worker.is_up and worker.started == run_key and run_key not in worker.failures
    end = end_of(own_parts(checkpoint.journal_parts, assignment.plan.lineage))
    if is_running and worker.has_journal and end > node.trimmed.get(run_key, 0):
        yield OrderTrimJournal(worker.device_index, run_key, end)
