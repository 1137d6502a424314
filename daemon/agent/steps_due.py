"""Finds the steps that are due on a node: a pure function of the node's knowledge and the plans that name it.

It is level-triggered: it depends on the present state only, so it can be called at any time. A step that failed or
was lost is simply due again. docs/architecture.md has the protocol; the functions follow its order.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from headway.daemon.agent.goals import goal_steps, keys_to_save, release_steps, source_of
from headway.daemon.agent.link_steps import links_to_prove, proven_links
from headway.daemon.agent.local_state import Assignment, NodeState, assignments_of
from headway.daemon.agent.state_steps import copy_steps_of, state_steps_of
from headway.daemon.agent.steps import Fetch, GiveUp, Register, Step, Upload
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import (
    Failure,
    Phase,
    Save,
    WorkerRecord,
    WorkerState,
)
from headway.daemon.cluster.state_key import StateKey
from headway.daemon.decide.boundaries import pinned
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.plan.paths import pair_of


def next_steps(view: ClusterView, node: NodeState, *, broken: dict[str, Exception] | None = None) -> list[Step]:
    """Return every step that is due on this node now. A goal that a worker has is not due again.

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
    steps += release_steps(view, node)
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
    coming, present = (list(assignments_of(job, plan, node)) for plan in (job.next, job.plan))
    yield from goal_steps(view, node, coming, present)
    for assignment in coming:
        yield from links_to_prove(view, assignment, node)
        if is_recovering:
            yield from _fetch_ahead(view, assignment, node)
        yield from _register(view, assignment, node)
    for assignment in present:
        if not is_recovering:
            yield from _stop(assignment, node)
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


def is_awaited(view: ClusterView, held: Iterable[StateKey]) -> bool:
    """Return whether a plan still loads a boundary of which this node holds a file: other nodes may be fetching it."""
    return any((key.timeline, key.boundary) in pinned(view.jobs[key.job]) for key in held if key.job in view.jobs)


# --- Ahead of a start, and at a stop --------------------------------------------------------------------------------


def _fetch_ahead(view: ClusterView, assignment: Assignment, node: NodeState) -> Iterator[Step]:
    """Fetch a recovery's files while its workers are prepared, because their sources are already known."""
    if assignment.run_key in assignment.worker.failures:
        return
    for part in assignment.parts:
        found = source_of(view, assignment, part, node)
        if isinstance(found, Fetch | GiveUp):
            yield found


def _stop(assignment: Assignment, node: NodeState) -> Iterator[Step]:
    """Write down where the lead of the first stage chose to stop; copy what a checkpoint needs."""
    stop, worker, run_key = assignment.stop, assignment.worker, assignment.run_key
    if stop is None or not worker.has_started(run_key) or run_key in worker.failures:
        return
    chosen = worker.actual.chosen
    if stop.boundary is None and assignment.position == 0 and chosen is not None:
        job, answer = assignment.job.name, replace(stop, boundary=chosen)
        yield Register(Keys.of(job, "stop"), job, answer, ("plan", "stop"), is_leased=False)
    if stop.save is Save.CHECKPOINT and stop.boundary == worker.actual.boundary is not None:
        for key in keys_to_save(assignment):
            if key in node.held and key not in node.durable:
                yield Upload(key)


# --- Reports to etcd --------------------------------------------------------------------------------------------


def _register(view: ClusterView, assignment: Assignment, node: NodeState) -> Iterator[Step]:
    record = _worker_record(view, assignment, node)
    known = assignment.job.workers.get((assignment.plan.generation, assignment.position))
    if record is None or record == known:
        return
    if record.state is WorkerState.FAILED and not (
        _tells_of_the_device(view, assignment, node, record) and _tells_of_the_pair(view, assignment, record)
    ):
        return
    if known is not None and known.state is WorkerState.FAILED and record.state is WorkerState.FAILED:
        return
    job, generation = assignment.job, assignment.plan.generation
    is_in_force = job.plan is not None and job.plan.generation == generation
    key = Keys.worker(job.name, generation, assignment.position)
    yield Register(key, job.name, record, ("plan",) if is_in_force else ("next",))


def _tells_of_the_device(view: ClusterView, assignment: Assignment, node: NodeState, record: WorkerRecord) -> bool:
    """Return whether our node record shows the device's present worker state, and the code that it cannot import: the
    next plan depends on both.
    """
    own = view.nodes.get(node.name)
    if own is None:
        return True
    is_told = not record.failure.refuses_plugins or assignment.plugins.ailment in own.ailments
    return is_told and (assignment.worker.device_index in own.down_devices) == assignment.worker.has_died


def _tells_of_the_pair(view: ClusterView, assignment: Assignment, record: WorkerRecord) -> bool:
    """Return whether etcd shows that the neighbour is out of reach or gone, so that the next plan avoids the pair."""
    failure, workers = record.failure, assignment.plan.workers
    if not failure.was_unreached or not 0 <= failure.lost_peer < len(workers):
        return True
    other = workers[failure.lost_peer]
    peer = view.nodes.get(other.node)
    if peer is None or peer.incarnation != other.node_incarnation:
        return True
    return pair_of(assignment.stage.node, other.node) in view.blocked.pairs


def _worker_record(view: ClusterView, assignment: Assignment, node: NodeState) -> WorkerRecord | None:
    worker, run_key = assignment.worker, assignment.run_key
    boundary = best_batch = None
    if run_key in worker.failures:
        state = WorkerState.FAILED
    elif worker.has_started(run_key) and worker.actual.boundary is not None:
        state, boundary, best_batch = WorkerState.STOPPED, worker.actual.boundary, worker.actual.best_batch
    elif worker.has_started(run_key):
        state = WorkerState.RUNNING
    elif worker.is_prepared(run_key):
        state = WorkerState.READY
    else:
        return None
    return WorkerRecord(
        node=node.name,
        incarnation=worker.incarnation,
        address=worker.address,
        pid=worker.pid,
        state=state,
        boundary=boundary,
        best_batch=best_batch,
        failure=worker.failures.get(run_key, Failure()),
        proven=proven_links(view, assignment, node) if state is WorkerState.READY else {},
    )
