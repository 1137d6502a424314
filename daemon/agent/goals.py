"""Finds the goal of each worker of a node, and the steps that are missing before it can be given. Pure."""

from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

import msgspec

from headway.daemon.agent.link_steps import neighbours_of
from headway.daemon.agent.local_state import Assignment, NodeState
from headway.daemon.agent.state_steps import spacing_of
from headway.daemon.agent.steps import Fetch, GiveUp, OpenData, SetGoal, Step
from headway.daemon.cluster.lineage import end_of, own_parts
from headway.daemon.cluster.records import CheckpointRecord, Phase, Save
from headway.daemon.cluster.state_key import BASE_PREFIX, CARRIED_PART, JOURNAL, ORIGIN_PLACE, StateKey
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.deadlines import LEASE_TTL_S
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import OriginSpec
from headway.daemon.plan.cluster_plan import is_moving, place
from headway.daemon.worker.goal import Goal, Preparation, Source, SourceKind, Start

HEARD_AFTER_S: Final = 2 * LEASE_TTL_S
"""Time of uninterrupted contact with etcd after which every living node has registered again, with its files."""


def goal_steps(
    view: ClusterView, node: NodeState, coming: Iterable[Assignment], present: Iterable[Assignment]
) -> Iterator[Step]:
    """Yield what the plans of a job require of this node's workers: new goals, and what is missing for them.

    coming: the places in the plan that is being prepared; present: those in the plan in force.
    """
    next_of = {each.worker.device_index: each for each in coming}
    plan_of = {each.worker.device_index: each for each in present}
    for index, mine in sorted((plan_of | next_of).items(), key=lambda entry: entry[0]):
        worker = mine.worker
        if not worker.is_up or worker.job not in ("", mine.job.name):
            continue  # the worker must first be released by its previous job
        goal = yield from _goal_of(view, next_of.get(index), plan_of.get(index), node)
        if goal is not None and goal != worker.goal:
            yield SetGoal(index, goal)


def release_steps(view: ClusterView, node: NodeState) -> Iterator[Step]:
    """Yield the goal to let a job go for each worker that no plan of its job names."""
    for worker in node.workers:
        job = view.jobs.get(worker.job)
        if not worker.is_up or not worker.job or worker.goal == Goal():
            continue
        if job is not None and (node.is_behind(job) or view.why_set_aside(job.name)):
            continue
        plans = [plan for plan in (job.plan, job.next) if plan is not None] if job is not None else []
        mine = (node.name, node.incarnation, worker.device_index)
        if not any(place(stage) == mine for plan in plans for stage in plan.workers):
            yield SetGoal(worker.device_index, Goal())


def _goal_of(
    view: ClusterView, coming: Assignment | None, present: Assignment | None, node: NodeState
) -> Generator[Step, None, Goal | None]:
    """Return a worker's goal by the plan that is being prepared and the plan in force; None: there is nothing to do."""
    mine = coming or present
    assert mine is not None, "a plan names the worker"
    job, worker = mine.job, mine.worker
    assert job.spec is not None, "only jobs with a spec are served"
    is_recovering = job.phase.phase is Phase.RECOVERING
    prepare = start = None
    if coming is not None:
        frozen = frozen_fetches(coming, node)
        yield from frozen
        if not frozen or is_recovering or job.plan is None:  # otherwise it trains under its plan meanwhile
            prepare = yield from _preparation(coming, node)
    if present is not None and not is_recovering and prepare is None:
        prepare = yield from _preparation(present, node)
    if present is not None and worker.has_started(present.run_key):
        start = worker.goal.start
        if start is None or start.plan.generation != present.plan.generation:
            start = Start(plan=present.plan, position=present.position)
    elif present is not None and not is_recovering and worker.is_prepared(present.run_key):
        start = yield from _start(view, present, node)
    if prepare is None and start is None and not worker.job:
        return None
    goal = Goal(
        job=job.name,
        spec=job.spec,
        log_path=node.log_path(job.name),
        device_index=worker.device_index,
        prepare=prepare,
        start=start,
    )
    return _of_its_run(view, goal, present, node) if present is not None else goal


def _of_its_run(view: ClusterView, goal: Goal, present: Assignment, node: NodeState) -> Goal:
    """Return the goal with what is wanted of a run in progress: where it stops, what it writes and keeps."""
    job, worker, run_key = present.job, present.worker, present.run_key
    if not worker.is_running(run_key):
        return goal
    last, changes = worker.goal, dict[str, Any]()
    changes["spacing"] = spacing_of(view, job, worker)
    changes["journal_from"] = last.journal_from
    if job.phase.phase is not Phase.RECOVERING:
        changes["journal_from"] = max(last.journal_from, _end_of_durable_rows(present))
        if (stop := present.stop) is not None:
            changes["chooses_stop"] = stop.boundary is None and present.position == 0
            changes["stop_at"] = stop.boundary
            missing = [key.layer for key in keys_to_save(present) if key not in node.held]
            changes["write"] = tuple(missing) if stop.boundary == worker.actual.boundary is not None else ()
    return msgspec.structs.replace(goal, **changes)


def _preparation(assignment: Assignment, node: NodeState) -> Generator[Step, None, Preparation | None]:
    """Return what a worker is to get ready for; None: it is ready, has failed, or lacks its data."""
    worker, run_key, last = assignment.worker, assignment.run_key, assignment.worker.goal.prepare
    if run_key in worker.failures:
        return None
    if why := assignment.plugins.why_not_on(node.name, node.allow_plugins, {}):  # whatever the leader has planned
        yield GiveUp(worker.device_index, run_key, why)
        return None
    if last is not None and last.plan.generation == run_key.generation and worker.goal.job == run_key.job:
        return last  # its data is not verified again
    if worker.is_prepared(run_key) or worker.has_started(run_key):
        return None
    names, plugins = assignment.data_names, assignment.plugins.data.sha256
    if not node.data_paths.keys() >= {*names, *filter(None, [plugins])}:
        yield OpenData(worker.device_index, run_key)
        return None
    paths = tuple(node.data_paths[name] for name in names)
    return Preparation(
        plan=assignment.plan,
        position=assignment.position,
        data_paths=paths,
        data_states=tuple(map(node.data_state, paths)),
        plugins_path=node.data_paths.get(plugins, ""),
    )


def _start(view: ClusterView, assignment: Assignment, node: NodeState) -> Generator[Step, None, Start | None]:
    """Return what a worker starts with; None: it has failed, or a part or a neighbour's address is missing."""
    if assignment.run_key in assignment.worker.failures:
        return None
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
            if not isinstance(base, Fetch):
                continue
            missing = base
        is_complete = False
        if missing is not None:
            yield missing
    if assignment.position == 0 and isinstance(carried := carried_source(assignment, node), Fetch):
        is_complete = False
        yield carried
    neighbours = neighbours_of(view, assignment)
    if not is_complete or neighbours is None:
        return None
    checkpoint = assignment.job.checkpoint if assignment.plan.source == "checkpoint" else None
    return Start(
        plan=assignment.plan,
        position=assignment.position,
        sources=tuple(sources),
        neighbours=neighbours,
        state_dir=node.state_dir(assignment.job.name, assignment.plan.timeline),
        takes_snapshots=_is_first_on_its_node(assignment),
        source_job=checkpoint.origin_job if checkpoint is not None else "",
        num_damaged=assignment.worker.actual.num_damaged,
    )


def _is_first_on_its_node(assignment: Assignment) -> bool:
    """Return whether no earlier replica of the stage is on this node, because both would write the same files."""
    plan, own = assignment.plan, assignment.stage.node
    workers = plan.replicas[plan.stage_index(assignment.position)]
    return next(other for other in workers if plan.workers[other].node == own) == assignment.position


def keys_to_save(assignment: Assignment) -> list[StateKey]:
    """Return the parts to write at a stop: all for a checkpoint; otherwise the layers that move, and the journal.

    All replicas of a stage have equal parts, so only the lead writes.
    """
    stop, plan, successor = assignment.stop, assignment.plan, assignment.job.next
    if stop is None or stop.boundary is None or not plan.is_lead(assignment.position):
        return []
    return [
        StateKey(assignment.job.name, plan.timeline, stop.boundary, part)
        for part in assignment.parts
        if stop.save is Save.CHECKPOINT
        or part == JOURNAL
        or (successor is not None and is_moving(plan, successor, part))
    ]


def _end_of_durable_rows(assignment: Assignment) -> int:
    """Return the first batch whose row only the worker has: the checkpoint's journal parts have the earlier ones.

    The parts of a job from whose checkpoint this one started are not this job's own before its first checkpoint.
    """
    checkpoint = assignment.job.checkpoint
    if checkpoint is None or checkpoint.origin_job or not assignment.worker.actual.has_journal:
        return 0
    return end_of(own_parts(checkpoint.journal_parts, assignment.plan.lineage))


def source_of(view: ClusterView, assignment: Assignment, part: str, node: NodeState) -> Source | Fetch | GiveUp | None:
    """Return the source of a part, or the step that fetches it, or None while neither is known."""
    plan, worker = assignment.plan, assignment.worker
    if plan.source == "initial" and _has_adapter(assignment):
        return Source(part, SourceKind.INITIAL)
    if plan.source == "initial":
        return _initial_source(assignment, part, node)
    if _is_live(assignment, part):
        return Source(part, SourceKind.LIVE)
    key = StateKey(assignment.job.name, plan.source_timeline, plan.boundary, part)
    if key in node.held:
        return Source(part, SourceKind.FILE, str(node.held[key].path))
    checkpoint = assignment.job.checkpoint if plan.source == "checkpoint" else None
    if checkpoint is not None and not _has(checkpoint, key):
        return GiveUp(worker.device_index, assignment.run_key, f"the checkpoint {checkpoint.url} has no {key}")
    told = {
        name: file
        for name, file in assignment.job.holders(key.timeline, key.boundary, key.layer).items()
        if name != node.name
    }
    living = {name: file for name, file in told.items() if _is_living(view, assignment.job, key, name)}
    if checkpoint is not None:
        expected = checkpoint.files[part]
        living = {name: file for name, file in living.items() if file.checksum == expected.checksum}
        if not living:
            return Fetch(worker.device_index, assignment.run_key, key, (), checkpoint.url, expected)
    if living:
        file = living[min(living)]
        same = tuple(sorted(name for name in living if living[name].checksum == file.checksum))
        expected = file.digest
        return Fetch(worker.device_index, assignment.run_key, key, same, "", expected)
    if told or not has_heard_all(view, node.now):
        return None  # its holders are away: either they come back, or their records expire
    return GiveUp(worker.device_index, assignment.run_key, f"no node holds {key}")


def carried_source(assignment: Assignment, node: NodeState) -> Source | Fetch | None:
    """Return the source of the files that an export carries over; None: the plan does not begin with a model's folder.

    The node of the first worker keeps them, so that an export has them when the folder is gone.
    """
    spec = assignment.job.spec
    if assignment.plan.source != "initial" or spec is None or not spec.origin.url:
        return None
    return _initial_source(assignment, CARRIED_PART, node)


def base_source(assignment: Assignment, layer: str, node: NodeState) -> Source | Fetch | None:
    """Return the source of the frozen weights beside a layer's adapters: its part of the model's folder.

    None: the layer has none, or they are a function of the seed.
    """
    spec = assignment.job.spec
    if spec is None or not _has_adapter(assignment) or spec.origin.digest_of(layer) is None:
        return None
    found = _initial_source(assignment, layer, node)
    return replace(found, layer=f"{BASE_PREFIX}{layer}") if isinstance(found, Source) else found


def frozen_fetches(assignment: Assignment, node: NodeState) -> list[Fetch]:
    """Return the fetches of frozen weights for layers that come to a worker with a plan in preparation."""
    worker = assignment.worker
    if assignment.run_key in worker.failures:
        return []
    there = worker.actual.layers if worker.actual.job == assignment.job.name else ()
    found = (base_source(assignment, layer, node) for layer in assignment.stage.layers if layer not in there)
    return [each for each in found if isinstance(each, Fetch)]


def _has_adapter(assignment: Assignment) -> bool:
    return assignment.job.spec is not None and assignment.job.spec.model.has_adapter


def _initial_source(assignment: Assignment, part: str, node: NodeState) -> Source | Fetch:
    """Return the source of boundary 0: a function of the seed, or a part of the folder with the initial weights."""
    origin = assignment.job.spec.origin if assignment.job.spec is not None else OriginSpec()
    expected = origin.digest_of(part)
    if expected is None:  # the journal, or a layer of a job without such a folder
        return Source(part, SourceKind.INITIAL)
    key = StateKey(assignment.job.name, *ORIGIN_PLACE, part)
    if key in node.held:
        return Source(part, SourceKind.FILE, str(node.held[key].path))
    return Fetch(assignment.worker.device_index, assignment.run_key, key, (), origin.url, expected)


def has_heard_all(view: ClusterView, now: float) -> bool:
    """Return whether missing records prove absence: etcd may have been unreachable for longer than a lease."""
    return view.steady_since is not None and now >= view.steady_since + HEARD_AFTER_S


def _has(checkpoint: CheckpointRecord, key: StateKey) -> bool:
    is_there = (checkpoint.timeline, checkpoint.boundary) == (key.timeline, key.boundary)
    return is_there and key.layer in checkpoint.files


def _is_living(view: ClusterView, job: JobView, key: StateKey, name: str) -> bool:
    """Return whether the node that reported a file is up, in the incarnation that reported it."""
    node = view.nodes.get(name)
    return node is not None and node.incarnation == job.state[key.timeline, key.boundary][name].incarnation


def _is_live(assignment: Assignment, part: str) -> bool:
    """Return whether the worker still has the part in its buffers, at the plan's boundary, from the previous
    generation.
    """
    actual, plan = assignment.worker.actual, assignment.plan
    is_planned = plan.source == "nodes" and plan.source_timeline == plan.timeline
    is_there = actual.job == assignment.job.name and actual.boundary == plan.boundary
    return is_planned and is_there and (actual.has_journal if part == JOURNAL else part in actual.layers)
