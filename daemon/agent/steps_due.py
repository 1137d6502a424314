"""Finds the steps that are due on a node: one pure function of its whole knowledge and the plans that name it.

Level-triggered: it looks at the present state and at no event, so it can be called at any time. A step that failed or
was lost is simply due again. docs/architecture.md has the protocol; the functions follow its order.
"""

from collections.abc import Callable, Iterable, Iterator

from headway.daemon.agent.assignment import Post, posts_of
from headway.daemon.agent.copy_steps import copy_steps_of
from headway.daemon.agent.layer_sources import source_of
from headway.daemon.agent.link_steps import links_to_prove, neighbours_of, proven_links
from headway.daemon.agent.local_state import NodeState
from headway.daemon.agent.state_steps import state_steps_of
from headway.daemon.agent.steps import AnswerStop, CopyToCheckpoint, FetchState, GiveUp, OpenData, RegisterWorker, Step
from headway.daemon.costs.blocked_ways import pair_of
from headway.daemon.planning.plan_devices import is_moving, place
from headway.daemon.records.records import Phase, Save, WorkerRecord, WorkerState
from headway.daemon.situation.boundaries import pinned
from headway.daemon.storage.state_key import JOURNAL, StateKey
from headway.daemon.view.cluster_view import ClusterView, JobView
from headway.daemon.workers.orders import (
    OrderChooseStop,
    OrderPrepare,
    OrderRelease,
    OrderStart,
    OrderStopAt,
    OrderWrite,
    Source,
)
from headway.daemon.workers.status import Failure, JobGeneration, OrderKind


def next_steps(view: ClusterView, node: NodeState, *, broken: dict[str, Exception] | None = None) -> list[Step]:
    """Return every step that is due on this node now. A step whose order is on its way is not due again.

    broken: receives the error of each job whose records raise one; such a job has no steps, and others have theirs.
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
    """Return the steps that the plans of one job require of this node."""
    if job.submission is None or view.why_set_aside(job.name):
        return
    is_recovering = job.phase.phase is Phase.RECOVERING
    if job.next is not None and node.may_obey(job, job.next):
        for post in posts_of(job, job.next, node):
            yield from _prepare(post, node)
            yield from links_to_prove(view, post, node)
            if is_recovering:
                yield from _fetch_ahead(view, post, node)
            yield from _register(view, post, node)
    if job.plan is not None and node.may_obey(job, job.plan):
        for post in posts_of(job, job.plan, node):
            if not is_recovering:
                yield from _prepare(post, node)
                yield from _start(view, post, node)
                yield from _stop(post)
                yield from _save(post, node)
            yield from _register(view, post, node)


def is_over(view: ClusterView, of: JobGeneration) -> bool:
    """Return whether no record names a generation any more, so that its failures can be forgotten."""
    job = view.jobs.get(of.job)
    return job is None or all(plan is None or plan.generation != of.generation for plan in (job.plan, job.next))


def is_named(view: ClusterView, node: str, incarnation: str) -> bool:
    """Return whether a plan, in force or being prepared, names this node."""
    return any(
        stage.node == node and stage.node_incarnation == incarnation
        for job in view.jobs.values()
        for plan in (job.plan, job.next)
        if plan is not None
        for stage in plan.stages
    )


def is_awaited(view: ClusterView, held: Iterable[StateKey]) -> bool:
    """Return whether a plan still loads a boundary of which this node holds a file: other nodes may be fetching it."""
    return any((key.timeline, key.boundary) in pinned(view.jobs[key.job]) for key in held if key.job in view.jobs)


# --- Prepare and start ----------------------------------------------------------------------------------------------


def _prepare(post: Post, node: NodeState) -> Iterator[Step]:
    worker, of = post.worker, post.of
    is_done = of in (worker.prepared, worker.started)
    if not worker.is_up or is_done or of in worker.failures or worker.awaits(OrderKind.PREPARE, of):
        return
    if worker.job not in ("", of.job):
        return  # the worker first has to let go of another job
    data_path: str | None = ""
    if post.position in post.plan.replicas[0]:
        data_path = node.data_paths.get(post.data_sha256)
    if data_path is None:
        yield OpenData(worker.device_index, of)
        return
    yield OrderPrepare(worker.device_index, of, post.position, post.plan, data_path)


def _start(view: ClusterView, post: Post, node: NodeState) -> Iterator[Step]:
    worker, of = post.worker, post.of
    is_due = worker.prepared == of and worker.started != of and of not in worker.failures
    if not is_due or worker.awaits(OrderKind.START, of):
        return
    sources: list[Source] = []
    is_complete = True
    for part in post.parts:
        found = source_of(view, post, part, node)
        if isinstance(found, Source):
            sources.append(found)
            continue
        is_complete = False
        if found is not None:
            yield found
    neighbours = neighbours_of(view, post)
    if is_complete and neighbours is not None:
        checkpoint = post.job.checkpoint if post.plan.source == "checkpoint" else None
        origin = checkpoint.origin_job if checkpoint is not None else ""
        yield OrderStart(
            worker.device_index,
            of,
            post.position,
            post.plan,
            tuple(sources),
            neighbours,
            takes_snapshots=_is_first_on_its_node(post),
            source_job=origin,
        )


def _fetch_ahead(view: ClusterView, post: Post, node: NodeState) -> Iterator[Step]:
    """Fetch a recovery's files while its workers are prepared: their sources are already known."""
    if post.of in post.worker.failures:
        return
    for part in post.parts:
        found = source_of(view, post, part, node)
        if isinstance(found, FetchState | GiveUp):
            yield found


def _is_first_on_its_node(post: Post) -> bool:
    """Return whether no earlier replica of the stage is on this node: they would write the same files."""
    workers = post.plan.replicas[post.plan.stage_index(post.position)]
    return next(other for other in workers if post.plan.stages[other].node == post.stage.node) == post.position


# --- Stop and save --------------------------------------------------------------------------------------------------


def _stop(post: Post) -> Iterator[Step]:
    stop, worker, of = post.job.stop, post.worker, post.of
    is_due = stop is not None and stop.generation == post.plan.generation and worker.started == of
    if stop is None or not is_due or of in worker.failures:
        return
    if stop.boundary is None:
        if post.position != 0:
            return
        if worker.chosen is not None and worker.chosen.of == of:
            yield AnswerStop(of, worker.chosen.boundary)
        elif not worker.awaits(OrderKind.CHOOSE_STOP, of):
            yield OrderChooseStop(worker.device_index, of)
        return
    chose_itself = worker.chosen is not None and worker.chosen.of == of
    if post.standstill is None and not chose_itself and not worker.awaits(OrderKind.STOP_AT, of):
        yield OrderStopAt(worker.device_index, of, stop.boundary)


def _save(post: Post, node: NodeState) -> Iterator[Step]:
    stop, standstill = post.job.stop, post.standstill
    is_due = stop is not None and stop.generation == post.plan.generation
    if stop is None or not is_due or standstill is None or stop.boundary != standstill.boundary:
        return
    worker, of = post.worker, post.of
    keys = [
        StateKey(post.job.name, post.plan.timeline, standstill.boundary, part)
        for part in _parts_to_save(post, stop.save)
    ]
    missing = tuple(key.layer for key in keys if key not in node.held)
    if missing and worker.is_up and of not in worker.failures and not worker.awaits(OrderKind.WRITE, of):
        yield OrderWrite(worker.device_index, of, post.plan.timeline, standstill.boundary, missing)
    if stop.save is Save.CHECKPOINT and of not in worker.failures:
        for key in keys:
            if key in node.held and key not in node.durable:
                yield CopyToCheckpoint(key)


def _parts_to_save(post: Post, save: Save) -> tuple[str, ...]:
    """Return all parts for a checkpoint; otherwise the layers that move, and the journal at every stop.

    All replicas of a stage have equal parts, so only the lead writes.
    """
    plan, successor = post.plan, post.job.next
    if not plan.is_lead(post.position):
        return ()
    if save is Save.CHECKPOINT:
        return post.parts
    return tuple(
        part for part in post.parts if part == JOURNAL or (successor is not None and is_moving(plan, successor, part))
    )


# --- Reports to etcd --------------------------------------------------------------------------------------------


def _register(view: ClusterView, post: Post, node: NodeState) -> Iterator[Step]:
    record = _worker_record(view, post, node)
    known = post.job.workers.get((post.plan.generation, post.position))
    if record is None or record == known:
        return
    if record.state is WorkerState.FAILED and not (
        _tells_of_the_device(view, post, node) and _tells_of_the_pair(view, post, record)
    ):
        return
    if known is not None and known.state is WorkerState.FAILED and record.state is WorkerState.FAILED:
        return
    yield RegisterWorker(post.of, post.position, record)


def _tells_of_the_device(view: ClusterView, post: Post, node: NodeState) -> bool:
    """Return whether our node record says if the device has a worker now: the next plan after a failure
    depends on it.
    """
    own = view.nodes.get(node.name)
    return own is None or (post.worker.device_index in own.down_devices) == post.worker.has_died


def _tells_of_the_pair(view: ClusterView, post: Post, record: WorkerRecord) -> bool:
    """Return whether etcd says that the neighbour is out of reach or gone, so that the next plan avoids the pair."""
    if not record.was_unreached or not 0 <= record.lost_peer < len(post.plan.stages):
        return True
    other = post.plan.stages[record.lost_peer]
    peer = view.nodes.get(other.node)
    if peer is None or peer.incarnation != other.node_incarnation:
        return True
    return pair_of(post.stage.node, other.node) in view.blocked.pairs


def _worker_record(view: ClusterView, post: Post, node: NodeState) -> WorkerRecord | None:
    worker, of = post.worker, post.of
    boundary = None
    failure = worker.failures.get(of, Failure(""))
    if of in worker.failures:
        state = WorkerState.FAILED
    elif post.standstill is not None:
        state, boundary = WorkerState.STOPPED, post.standstill.boundary
    elif worker.started == of:
        state = WorkerState.RUNNING
    elif worker.prepared == of:
        state = WorkerState.READY
    else:
        return None
    proven, proven_workers = proven_links(view, post, node) if state is WorkerState.READY else ((), ())
    return WorkerRecord(
        node=node.name,
        incarnation=worker.incarnation,
        address=worker.address,
        pid=worker.pid,
        state=state,
        boundary=boundary,
        error=failure.text,
        batch=failure.batch,
        fault=failure.fault,
        is_hopeless=failure.is_hopeless,
        lost_peer=failure.lost_peer,
        was_unreached=failure.was_unreached,
        was_moved=failure.was_moved,
        proven=proven,
        proven_workers=proven_workers,
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
        if not any(place(stage) == mine for plan in plans for stage in plan.stages):
            yield OrderRelease(worker.device_index, worker.job)
