"""Decides which files a node registers, which it copies and which it deletes. Pure.

A file is registered before any process may rely on it, and unregistered before it is deleted.
situation/boundaries.py decides which boundaries stay, for coordinator and nodes alike.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from typing import Final

from headway.daemon.agent.local_state import NodeState
from headway.daemon.agent.steps import Delete, Fetch, Register, Step, Upload
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.memo import remembered
from headway.daemon.cluster.records import NodeRecord, Phase, PlanRecord, Save, StateFile, StateRecord, WorkerPart
from headway.daemon.cluster.state_key import CARRIED_PART, JOURNAL, ORIGIN_PLACE, StateKey, StoredFile
from headway.daemon.decide.boundaries import (
    age,
    copier,
    due_checkpoint,
    fewest_holders,
    holders,
    kept,
    lineage_of,
    living_holders,
    own_places,
    parts_of,
    restorable,
    those_without_access,
)
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView, Place
from headway.daemon.jobs.job import JobSpec
from headway.daemon.plan.copy_places import copy_places
from headway.daemon.plan.paths import BlockedWays
from headway.daemon.worker.goal import JobGeneration, Spacing, WorkerStatus

KEPT_AFTER_RESTORE_S: Final = 3600.0
"""Time for which files of a job unknown to etcd are kept after etcd was restored from a backup."""
Places = tuple[tuple[str, ...], ...]
"""For each stage, the nodes that keep copies of it."""
MAX_LAG: Final = 3
"""Snapshots are spaced out when this many boundaries newer than the newest restorable one lack copies."""


def state_steps(view: ClusterView, node: NodeState) -> Iterator[Step]:
    """Yield registrations, deletions and durable copies that are due."""
    for name in sorted({key.job for key in node.held} | set(view.jobs)):
        yield from state_steps_of(view, name, node)


def state_steps_of(view: ClusterView, name: str, node: NodeState) -> Iterator[Step]:
    """Yield the due steps of one job, or of files of a job that is gone."""
    job = view.jobs.get(name)
    if view.why_left_alone(name):
        return  # an unreadable record, or one that is not believed: no file of the job is deleted
    if job is None or job.submission is None:
        if view.epoch and node.now < (view.started_at or 0.0) + KEPT_AFTER_RESTORE_S:
            return  # etcd may be older than the job: leave its administrator time to restore the job
        for (timeline, boundary), files in node.held_of(name).items():
            yield Delete(name, timeline, boundary, tuple(sorted(files)))
    elif not node.is_behind(job):
        # A node of a large cluster has nothing to do with most of its jobs.
        holds_files = any(key.job == name for key in node.held)
        if holds_files or any(node.name in records for records in job.state.values()):
            yield from _registrations(view, job, node)
        if holds_files:
            yield from _durable_copies(view, job, node)
        yield from _copies_for_others(view, job, node)


def is_welcome(job: JobView, timeline: int, boundary: int) -> bool:
    """Return whether a file that a worker wrote belongs to the job's own past."""
    lineage = lineage_of(job)
    return lineage is not None and lineage.has(timeline, boundary)


def _registrations(view: ClusterView, job: JobView, node: NodeState) -> Iterator[Step]:
    assert job.submission is not None
    held = node.held_of(job.name)
    of_this_job = {
        place: {layer: file for layer, file in files.items() if file.uid == job.submission.uid}
        for place, files in held.items()
    }
    told = {place: records[node.name] for place, records in job.state.items() if node.name in records}
    shown = _kept(view, job, of_this_job, node) - _of_its_parent(job)
    loaded = set(_loaded(job, node))
    journal = _last_journal(job, of_this_job)
    for place in sorted(held.keys() | told.keys()):
        files = of_this_job.get(place, {})
        if place not in shown:
            files = {JOURNAL: files[JOURNAL]} if place == journal else {}
        if place == ORIGIN_PLACE:
            files = {}  # not registered: each node can also read them in the folder
        staying = of_this_job.get(place, {}) if place in loaded else files
        if place == ORIGIN_PLACE and CARRIED_PART in of_this_job.get(place, {}):
            staying = {**staying, CARRIED_PART: of_this_job[place][CARRIED_PART]}  # for exports of any boundary
        registered = told.get(place)
        record, key = _record(job.name, place, files, node), Keys.state(job.name, *place, node.name)
        if record.files and record != registered:
            yield Register(key, job.name, record, ("plan",) if job.plan is not None else ("plan", "phase"))
        elif not record.files and registered is not None:
            yield Register(key, job.name, None, ("plan", "next", "phase"))
        counted_on = registered.files if registered is not None else {}
        going = tuple(sorted(held.get(place, {}).keys() - staying.keys() - counted_on.keys()))
        if going:
            yield Delete(job.name, *place, going)


def _of_its_parent(job: JobView) -> set[Place]:
    """Return the boundary of another job from which this job starts: it is loaded, but is not the job's own past."""
    checkpoint = job.checkpoint
    return {(checkpoint.timeline, checkpoint.boundary)} if checkpoint is not None and checkpoint.origin_job else set()


def _kept(
    view: ClusterView, job: JobView, held: dict[Place, dict[str, StoredFile]], node: NodeState
) -> frozenset[Place]:
    """Return what to keep as if every boundary held here were registered, with files on which no process relies yet."""
    empty = StateRecord(incarnation=node.incarnation, generation=0)
    new: dict[Place, dict[str, StateRecord]] = {place: {node.name: empty} for place in held if place not in job.state}
    if new:
        return kept(replace(job, state={**job.state, **new}), view.nodes)
    return kept(job, view.nodes)


def _record(job: str, place: Place, files: dict[str, StoredFile], node: NodeState) -> StateRecord:
    keys = {layer: StateKey(job, *place, layer) for layer in sorted(files)}
    return StateRecord(
        incarnation=node.incarnation,
        generation=max((file.generation for file in files.values()), default=0),
        files={
            layer: StateFile(
                size_bytes=files[layer].size_bytes, checksum=files[layer].checksum, is_durable=key in node.durable
            )
            for layer, key in keys.items()
        },
        trouble=next((node.troubles[key] for key in keys.values() if key in node.troubles), ""),
        lacks_access=job in node.no_access,
    )


def _loaded(job: JobView, node: NodeState) -> Iterator[Place]:
    """Yield the boundaries that this node's own workers still have to load, from any source."""
    for plan in (job.plan, job.next):
        if plan is not None and not _has_begun(job, plan, node):
            yield ORIGIN_PLACE if plan.source == "initial" else (plan.source_timeline, plan.boundary)
            if job.spec is not None and job.spec.model.has_adapter:
                yield ORIGIN_PLACE  # frozen weights come from the model's folder at any boundary


def _has_begun(job: JobView, plan: PlanRecord, node: NodeState) -> bool:
    run_key = JobGeneration(job.name, plan.generation)
    mine = [worker for stage in plan.workers if (worker := node.worker_of(stage)) is not None]
    return all(worker.has_started(run_key) for worker in mine)


def _last_journal(job: JobView, held: dict[Place, dict[str, StoredFile]]) -> Place | None:
    """Return the newest journal of a job that has no past of its own any more, because users may ask for it."""
    if lineage_of(job) is not None:
        return None
    return max((place for place, files in held.items() if JOURNAL in files), default=None)


def _durable_copies(view: ClusterView, job: JobView, node: NodeState) -> Iterator[Step]:
    """Yield the files that this node copies to the checkpoint folder during training. steps_due.py copies a stop's
    files.
    """
    place = due_checkpoint(job)
    if place is None or not fewest_holders(job, place, view.nodes):
        return
    for part in parts_of(job):
        key = StateKey(job.name, *place, part)
        if key in node.held and key not in node.durable and copier(job, place, part, view.nodes) == node.name:
            yield Upload(key)


def _copies_for_others(view: ClusterView, job: JobView, node: NodeState) -> Iterator[Step]:
    """At a stop, return the copies that this node makes for nodes without access to the checkpoint folder.

    Nodes with access divide the parts in order, so that each part is fetched once.

    """
    plan, stop = job.plan, job.stop
    if plan is None or stop is None or stop.boundary is None or stop.save is not Save.CHECKPOINT:
        return
    place = (plan.timeline, stop.boundary)
    without = those_without_access(job)
    able = sorted(view.nodes.keys() - without)
    if not without or node.name not in able:
        return
    living = holders(job, place, view.nodes)
    for number, part in enumerate(parts_of(job)):
        told, key = job.holders(*place, part), StateKey(job.name, *place, part)
        is_ours = bool(living[part]) and living[part] <= without | {node.name}
        if not is_ours or able[number % len(able)] != node.name or any(file.is_durable for file in told.values()):
            continue
        if key in node.held:
            yield Upload(key)
        else:
            source = told[min(living[part])]
            run_key = JobGeneration(job.name, plan.generation)
            yield Fetch(None, run_key, key, tuple(sorted(living[part])), "", source.digest)


def copy_steps_of(view: ClusterView, job: JobView, node: NodeState) -> Iterator[Step]:
    """Yield, for every stage of which this node keeps copies, the oldest boundary that is neither here nor restorable.

    While a job recovers, the plan that is being prepared decides which nodes keep copies.
    """
    plan, spec = job.plan, job.spec
    if plan is None or spec is None or node.is_behind(job) or view.why_left_alone(job.name):
        return
    newer = _without_copies(view, job)
    if not newer:
        return
    is_recovering = job.phase.phase is Phase.RECOVERING
    coming = job.next if is_recovering and job.next is not None else plan
    places = _places(spec, coming, view.nodes, view.blocked)
    own = _stages_to_copy(coming, places, node.name)
    for workers, is_named in own:
        if not is_named and not _has_worker(coming, workers, node):
            continue
        yield from _oldest_missing(view, job, coming, workers, newer, node, is_named=is_named)


@remembered(size=256)
def _places(spec: JobSpec, plan: PlanRecord, nodes: dict[str, NodeRecord], blocked: BlockedWays) -> Places:
    """Return the nodes that keep copies of each stage."""
    return copy_places(spec, plan, nodes, blocked=blocked)


def _stages_to_copy(plan: PlanRecord, places: Places, node: str) -> list[tuple[tuple[int, ...], bool]]:
    """Return a node's stages and those of which it keeps copies: (its workers, whether copies are meant)."""
    return [
        (tuple(workers), node in names)
        for workers, names in zip(plan.replicas, places, strict=True)
        if node in names or any(plan.workers[position].node == node for position in workers)
    ]


def _oldest_missing(
    view: ClusterView,
    job: JobView,
    plan: PlanRecord,
    workers: Sequence[int],
    newer: list[Place],
    node: NodeState,
    *,
    is_named: bool,
) -> list[Fetch]:
    """Return the oldest missing boundary. is_named: whether this node is a place for copies of the stage."""
    missed = node.missed.get(JobGeneration(job.name, plan.generation), ())
    for place in newer:
        found = []
        for part in _parts_to_fetch(plan, workers, place, node, is_named=is_named, has_missed=place[1] in missed):
            others = living_holders(job, place, part, view.nodes) - {node.name}
            if others and StateKey(job.name, *place, part) not in node.held:
                found.append(_copy(job, plan.generation, place, part, others, plan.workers[workers[0]]))
        if found:
            return found
    return []


def _parts_to_fetch(
    plan: PlanRecord, workers: Sequence[int], place: Place, node: NodeState, *, is_named: bool, has_missed: bool
) -> tuple[str, ...]:
    """Return the parts that this node must fetch to hold a copy. A replica writes all its own parts except the journal.

    A replica that could not write its snapshot gets it from a sibling, even if the plan does not name it.

    """
    lead = workers[0]
    is_replica = _has_worker(plan, workers, node)
    writes_it = is_replica and place[0] == plan.timeline and place[1] >= plan.boundary
    if not is_named and not (writes_it and has_missed):
        return ()
    layers = plan.workers[lead].layers if has_missed or not writes_it else ()
    return (*layers, JOURNAL) if is_named and plan.has_journal(lead) else layers


def _has_worker(plan: PlanRecord, positions: Iterable[int], node: NodeState) -> bool:
    """Return whether one of these workers is this node's."""
    return any(node.worker_of(plan.workers[position]) is not None for position in positions)


def _copy(job: JobView, generation: int, place: Place, part: str, others: Set[str], owner: WorkerPart) -> Fetch:
    found = job.holders(*place, part)
    first = owner.node if owner.node in others else min(others)
    same = sorted(name for name in others if found[name].checksum == found[first].checksum and name != first)
    key, run_key = StateKey(job.name, *place, part), JobGeneration(job.name, generation)
    return Fetch(None, run_key, key, (first, *same), "", found[first].digest)


def spacing_of(view: ClusterView, job: JobView, worker: WorkerStatus) -> Spacing:
    """Return the interval of snapshots for a worker that runs: it doubles when copies do not keep up."""
    known = max(worker.goal.spacing, worker.actual.spacing, key=lambda spacing: spacing.factor)
    lagging = [boundary for _, boundary in _without_copies(view, job) if boundary > known.boundary]
    return Spacing(2 * known.factor, lagging[-1]) if len(lagging) > MAX_LAG else worker.goal.spacing


def _without_copies(view: ClusterView, job: JobView) -> list[Place]:
    """Return the boundaries newer than the newest restorable one, oldest first."""
    return _not_restorable(job, view.nodes)


@remembered(size=256)
def _not_restorable(job: JobView, nodes: dict[str, NodeRecord]) -> list[Place]:
    safe = restorable(job, nodes)
    newest = age(safe[0]) if safe else (-1, -1)
    return [place for place in reversed(own_places(job)) if age(place) > newest]
