"""Finds the goal of each worker of a node, and the steps that are missing before it can be given. Pure."""

from collections.abc import Generator, Iterator
from typing import Any

import msgspec

from headway.daemon.agent.copy_steps import spacing_of
from headway.daemon.agent.layer_sources import base_source, carried_source, frozen_fetches, source_of
from headway.daemon.agent.link_steps import neighbours_of
from headway.daemon.agent.local_state import Assignment, NodeState, assignments_of
from headway.daemon.agent.steps import Fetch, OpenData, SetGoal, Step
from headway.daemon.planning.cluster_plan import is_moving, place
from headway.daemon.records.lineage import end_of, own_parts
from headway.daemon.records.records import Phase, Save
from headway.daemon.storage.state_key import JOURNAL, StateKey
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.job_view import JobView
from headway.daemon.workers.goal import Goal, Preparation, Source, SourceKind, Start


def goal_steps(view: ClusterView, job: JobView, node: NodeState) -> Iterator[Step]:
    """Yield what the plans of a job require of this node's workers: new goals, and what is missing for them."""
    coming = {each.worker.device_index: each for each in assignments_of(job, job.next, node)}
    present = {each.worker.device_index: each for each in assignments_of(job, job.plan, node)}
    for index in sorted({*coming, *present}):
        worker = node.workers[index]
        if not worker.is_up or worker.job not in ("", job.name):
            continue  # the worker must first be released by its previous job
        goal = yield from _goal_of(view, coming.get(index), present.get(index), node)
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
    if last is not None and last.plan.generation == run_key.generation and worker.goal.job == run_key.job:
        return last  # its data is not verified again
    if worker.is_prepared(run_key) or worker.has_started(run_key):
        return None
    names = assignment.data_names if assignment.position in assignment.plan.replicas[0] else ()
    if not node.data_paths.keys() >= set(names):
        yield OpenData(worker.device_index, run_key)
        return None
    paths = tuple(node.data_paths[name] for name in names)
    return Preparation(
        plan=assignment.plan,
        position=assignment.position,
        data_paths=paths,
        data_states=tuple(map(node.data_state, paths)),
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
