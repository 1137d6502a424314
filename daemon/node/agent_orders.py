"""What a node does about the plans that name it: one pure function from all it knows to the steps that are due.

Level-triggered: it looks at how things are, never at what has changed, so it can be asked again at any time, and a step
that failed or was lost is simply due again. docs/architecture.md has the protocol; the functions follow its order.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from headway.daemon.coordination.boundaries import pinned
from headway.daemon.coordination.cluster_view import ClusterView, JobView
from headway.daemon.coordination.deadlines import LEASE_TTL_S
from headway.daemon.node.agent_steps import (
    AnswerStop,
    CopyToCheckpoint,
    FetchState,
    GiveUp,
    Neighbour,
    Neighbours,
    OpenData,
    OrderChooseStop,
    OrderPrepare,
    OrderRelease,
    OrderStart,
    OrderStopAt,
    OrderWrite,
    ProveLink,
    RegisterWorker,
    Source,
    SourceKind,
    Step,
)
from headway.daemon.node.copy_duties import copy_steps_of, parts_of_worker
from headway.daemon.node.node_state import NodeState
from headway.daemon.node.state_duties import state_steps_of
from headway.daemon.planning.blocked_ways import pair_of
from headway.daemon.planning.link_choice import LinkEnd, choose_link, largest_frame_bytes
from headway.daemon.planning.plan_devices import is_moving, place
from headway.daemon.planning.plan_links import linked, neighbours
from headway.daemon.records import (
    CheckpointFile,
    CheckpointRecord,
    Phase,
    PlanRecord,
    Save,
    StagePlan,
    WorkerRecord,
    WorkerState,
)
from headway.daemon.storage.state_key import JOURNAL, StateKey
from headway.daemon.supervision.worker_status import Failure, JobGeneration, OrderKind, Standstill, WorkerStatus

HEARD_AFTER_S: Final = 2 * LEASE_TTL_S
"""In sight of etcd without a break: by then every node that lives has registered again, and its files."""


@dataclass(frozen=True, slots=True)
class _Post:
    """One place in a plan that this node's worker fills."""

    job: JobView
    plan: PlanRecord
    position: int
    worker: WorkerStatus

    @property
    def stage(self) -> StagePlan:
        return self.plan.stages[self.position]

    @property
    def of(self) -> JobGeneration:
        return JobGeneration(self.job.name, self.plan.generation)

    @property
    def data_sha256(self) -> str:
        assert self.job.spec is not None, "only jobs with a spec have posts"
        return self.job.spec.data.sha256

    @property
    def parts(self) -> tuple[str, ...]:
        """Its layers, and for the worker that leads the last stage the journal."""
        return parts_of_worker(self.plan, self.position)

    @property
    def standstill(self) -> Standstill | None:
        """Where the worker stands in this generation, once it has stopped."""
        stopped = self.worker.stopped
        return stopped if stopped is not None and stopped.of == self.of else None


def next_steps(view: ClusterView, node: NodeState, *, broken: dict[str, Exception] | None = None) -> list[Step]:
    """Everything that is due on this node now. Steps whose order is on its way are not due again.

    broken: takes the error of each job whose records raise one; such a job has no steps, and the others have theirs.
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
    """What the plans of one job ask of this node."""
    if job.submission is None or view.why_set_aside(job.name):
        return
    is_recovering = job.phase.phase is Phase.RECOVERING
    if job.next is not None and node.may_obey(job, job.next):
        for post in _posts(job, job.next, node):
            yield from _prepare(post, node)
            yield from _prove(post, node)
            if is_recovering:
                yield from _fetch_ahead(view, post, node)
            yield from _register(view, post, node)
    if job.plan is not None and node.may_obey(job, job.plan):
        for post in _posts(job, job.plan, node):
            if not is_recovering:
                yield from _prepare(post, node)
                yield from _start(view, post, node)
                yield from _stop(post)
                yield from _save(post, node)
            yield from _register(view, post, node)


def is_over(view: ClusterView, of: JobGeneration) -> bool:
    """Whether no record speaks of a generation any more, so that its failures can be forgotten."""
    job = view.jobs.get(of.job)
    return job is None or all(plan is None or plan.generation != of.generation for plan in (job.plan, job.next))


def is_named(view: ClusterView, node: str, incarnation: str) -> bool:
    """Whether any plan, in force or being prepared, names this node."""
    return any(
        stage.node == node and stage.node_incarnation == incarnation
        for job in view.jobs.values()
        for plan in (job.plan, job.next)
        if plan is not None
        for stage in plan.stages
    )


def is_awaited(view: ClusterView, held: Iterable[StateKey]) -> bool:
    """Whether some plan still loads from a boundary of which a file is held here: other nodes may be fetching it."""
    return any((key.timeline, key.boundary) in pinned(view.jobs[key.job]) for key in held if key.job in view.jobs)


def _posts(job: JobView, plan: PlanRecord, node: NodeState) -> Iterator[_Post]:
    for position, stage in enumerate(plan.stages):
        worker = node.worker_of(stage)
        if worker is not None:
            yield _Post(job, plan, position, worker)


# --- Prepare and start ----------------------------------------------------------------------------------------------


def _prepare(post: _Post, node: NodeState) -> Iterator[Step]:
    worker, of = post.worker, post.of
    is_done = of in (worker.prepared, worker.started)
    if not worker.is_up or is_done or of in worker.failures or worker.awaits(OrderKind.PREPARE, of):
        return
    if worker.job not in ("", of.job):
        return  # it has another job to let go of first
    data_path: str | None = ""
    if post.position in post.plan.replicas[0]:
        data_path = node.data_paths.get(post.data_sha256)
    if data_path is None:
        yield OpenData(worker.device_index, of)
        return
    yield OrderPrepare(worker.device_index, of, post.position, post.plan, data_path)


def _prove(post: _Post, node: NodeState) -> Iterator[Step]:
    """Whoever will have a link with the worker and can be dialled is dialled, in both directions."""
    if post.worker.prepared != post.of or post.of in post.worker.failures:
        return
    records = post.job.workers_of(post.plan)
    for other in neighbours(post.plan.stages, post.position):
        record, stage = records.get(other), post.plan.stages[other]
        is_there = record is not None and record.state is WorkerState.READY
        if record is not None and is_there and (post.of, post.position, other) not in node.proven:
            yield ProveLink(
                post.of,
                post.position,
                other,
                stage.node,
                stage.node_incarnation,
                stage.device_index,
                record.address,
                record.incarnation,
            )


def _proven(post: _Post, node: NodeState) -> tuple[int, ...]:
    """The worker's neighbours, once all of them are proven: the record is written once more, and not for each."""
    around = neighbours(post.plan.stages, post.position)
    return around if all((post.of, post.position, other) in node.proven for other in around) else ()


def _start(view: ClusterView, post: _Post, node: NodeState) -> Iterator[Step]:
    worker, of = post.worker, post.of
    is_due = worker.prepared == of and worker.started != of and of not in worker.failures
    if not is_due or worker.awaits(OrderKind.START, of):
        return
    sources: list[Source] = []
    is_complete = True
    for part in post.parts:
        found = _source(view, post, part, node)
        if isinstance(found, Source):
            sources.append(found)
            continue
        is_complete = False
        if found is not None:
            yield found
    neighbours = _neighbours(view, post)
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


def _fetch_ahead(view: ClusterView, post: _Post, node: NodeState) -> Iterator[Step]:
    """A recovery's files come while its workers are prepared: where they are is known already."""
    if post.of in post.worker.failures:
        return
    for part in post.parts:
        found = _source(view, post, part, node)
        if isinstance(found, FetchState | GiveUp):
            yield found


def _source(view: ClusterView, post: _Post, part: str, node: NodeState) -> Source | FetchState | GiveUp | None:
    """Where a part comes from, or the step that would bring it here, or nothing while that is not known."""
    plan, worker = post.plan, post.worker
    if plan.source == "initial":
        return Source(part, SourceKind.INITIAL)
    if _is_live(post, part):
        return Source(part, SourceKind.LIVE)
    key = StateKey(post.job.name, plan.source_timeline, plan.boundary, part)
    if key in node.held:
        return Source(part, SourceKind.FILE, str(node.held[key].path))
    checkpoint = post.job.checkpoint if plan.source == "checkpoint" else None
    if checkpoint is not None and not _has(checkpoint, key):
        return GiveUp(worker.device_index, post.of, f"the checkpoint {checkpoint.url} has no {key}")
    told = {name: file for name, file in post.job.holders(*_of_view(key)).items() if name != node.name}
    living = {name: file for name, file in told.items() if _is_living(view, post.job, key, name)}
    if checkpoint is not None:
        expected = checkpoint.files[part]
        living = {name: file for name, file in living.items() if file.checksum == expected.checksum}
        if not living:
            return FetchState(worker.device_index, post.of, key, (), checkpoint.url, expected)
    if living:
        file = living[min(living)]
        same = tuple(sorted(name for name in living if living[name].checksum == file.checksum))
        expected = CheckpointFile(size_bytes=file.size_bytes, checksum=file.checksum)
        return FetchState(worker.device_index, post.of, key, same, "", expected)
    if told or not has_heard_all(view, node.now):
        return None  # of nodes that are away: either they come back, or their records go
    return GiveUp(worker.device_index, post.of, f"no node holds {key}")


def has_heard_all(view: ClusterView, now: float) -> bool:
    """Whether what etcd does not say is not so: it may have been away for longer than a lease lives."""
    return view.steady_since is not None and now >= view.steady_since + HEARD_AFTER_S


def _has(checkpoint: CheckpointRecord, key: StateKey) -> bool:
    is_there = (checkpoint.timeline, checkpoint.boundary) == (key.timeline, key.boundary)
    return is_there and key.layer in checkpoint.files


def _is_living(view: ClusterView, job: JobView, key: StateKey, name: str) -> bool:
    """Whether a node that told of a file is there, and is the one that told."""
    node = view.nodes.get(name)
    return node is not None and node.incarnation == job.state[key.timeline, key.boundary][name].incarnation


def _is_live(post: _Post, part: str) -> bool:
    """Whether the worker has the part in its buffers, at the plan's boundary, from the generation before."""
    worker, stopped = post.worker, post.worker.stopped
    plan = post.plan
    is_planned = plan.source == "nodes" and plan.source_timeline == plan.timeline
    if not is_planned or stopped is None or stopped.of != worker.started:
        return False
    is_there = stopped.of.job == post.job.name and stopped.boundary == post.plan.boundary
    return is_there and (worker.has_journal if part == JOURNAL else part in worker.layers)


def _neighbours(view: ClusterView, post: _Post) -> Neighbours | None:
    """Everybody that the worker has a link with; None while one of them has not said where it can be dialled."""
    plan, position = post.plan, post.position
    records = post.job.workers_of(plan)

    around = linked(plan.stages, position)
    if any(other not in records for positions in around for other in positions):
        return None
    upstream, downstream, beside = (
        tuple(
            Neighbour(
                other,
                records[other].address,
                records[other].incarnation,
                _is_collective(view, post, other),
            )
            for other in positions
        )
        for positions in around
    )
    return Neighbours(upstream, downstream, beside)


def _is_collective(view: ClusterView, post: _Post, position: int) -> bool:
    """By what both nodes' records say, so that the other end's daemon comes to the same answer."""
    assert post.job.spec is not None, "only jobs with a spec have posts"
    other = post.plan.stages[position]
    own, peer = view.nodes.get(post.stage.node), view.nodes.get(other.node)
    if own is None or peer is None:
        return False  # a node is gone, and this plan with it
    ends = LinkEnd.of(own, post.stage.device_index), LinkEnd.of(peer, other.device_index)
    spec = post.job.spec
    frame_bytes = largest_frame_bytes(spec, post.plan, post.position, position)
    return choose_link(spec.train.link, *ends, frame_bytes=frame_bytes).is_collective


def _is_first_on_its_node(post: _Post) -> bool:
    """Whether no other replica of the stage before it is on this node: they would write the same files."""
    workers = post.plan.replicas[post.plan.stage_index(post.position)]
    return next(other for other in workers if post.plan.stages[other].node == post.stage.node) == post.position


# --- Stop and save --------------------------------------------------------------------------------------------------


def _stop(post: _Post) -> Iterator[Step]:
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


def _save(post: _Post, node: NodeState) -> Iterator[Step]:
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


def _parts_to_save(post: _Post, save: Save) -> tuple[str, ...]:
    """All parts for a checkpoint; else the layers that change hands, and the journal at every stop.

    Of a stage's replicas, which all have the same, the one that leads writes.
    """
    plan, successor = post.plan, post.job.next
    if not plan.is_lead(post.position):
        return ()
    if save is Save.CHECKPOINT:
        return post.parts
    return tuple(
        part for part in post.parts if part == JOURNAL or (successor is not None and is_moving(plan, successor, part))
    )


# --- What etcd is told ----------------------------------------------------------------------------------------------


def _register(view: ClusterView, post: _Post, node: NodeState) -> Iterator[Step]:
    record = _worker_record(post, node)
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


def _tells_of_the_device(view: ClusterView, post: _Post, node: NodeState) -> bool:
    """Whether our node record says if the device has a worker now: the failure's next plan depends on it."""
    own = view.nodes.get(node.name)
    return own is None or (post.worker.device_index in own.down_devices) == post.worker.has_died


def _tells_of_the_pair(view: ClusterView, post: _Post, record: WorkerRecord) -> bool:
    """Whether etcd says that the neighbour is out of reach, so that the next plan avoids the pair; or it is gone."""
    if not record.was_unreached or not 0 <= record.lost_peer < len(post.plan.stages):
        return True
    other = post.plan.stages[record.lost_peer]
    peer = view.nodes.get(other.node)
    if peer is None or peer.incarnation != other.node_incarnation:
        return True
    return pair_of(post.stage.node, other.node) in view.blocked.pairs


def _worker_record(post: _Post, node: NodeState) -> WorkerRecord | None:
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
        proven=_proven(post, node),
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


def _of_view(key: StateKey) -> tuple[int, int, str]:
    return key.timeline, key.boundary, key.layer
