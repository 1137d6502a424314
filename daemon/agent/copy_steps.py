"""Finds the copies that a node fetches for other stages, and spaces out snapshots when copies lag. Pure."""

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Final

from headway.daemon.agent.local_state import NodeState
from headway.daemon.agent.steps import Fetch, Step
from headway.daemon.jobs.job import JobSpec
from headway.daemon.planning.copy_places import Looked, Possible, copy_places, num_copies, possible_holders
from headway.daemon.records.records import Phase, PlanRecord, WorkerPart
from headway.daemon.situation.boundaries import age, living_holders, own_places, restorable, rests_on
from headway.daemon.storage.state_key import JOURNAL, StateKey
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.job_view import JobView, Place
from headway.daemon.workers.goal import Spacing
from headway.daemon.workers.status import JobGeneration, WorkerStatus

Places = tuple[tuple[str, ...], ...]
"""For each stage, the nodes that keep copies of it."""
MAX_LAG: Final = 3
"""Snapshots are spaced out when this many boundaries newer than the newest restorable one lack copies."""


def copy_steps(view: ClusterView, node: NodeState) -> Iterator[Step]:
    """Return, for every stage of which this node keeps copies, the oldest boundary that is neither here nor restorable.

    While a job recovers, the plan that is being prepared decides which nodes keep copies.

    """
    for job in view.jobs.values():
        yield from copy_steps_of(view, job, node)


def copy_steps_of(view: ClusterView, job: JobView, node: NodeState) -> Iterator[Step]:
    """Yield the copy steps of one job."""
    plan, spec = job.plan, job.spec
    if plan is None or spec is None or node.is_behind(job) or view.why_left_alone(job.name):
        return
    newer = _without_copies(view, job)
    if not newer:
        return
    is_recovering = job.phase.phase is Phase.RECOVERING
    coming = job.next if is_recovering and job.next is not None else plan
    places = view.derived.of(
        f"places of copies of {job.name}",
        (spec, coming, view.num_node_changes),
        lambda: _places(job.name, spec, coming, view),
    )
    own = view.derived.of(
        f"stages of {job.name} that {node.name} may copy",
        (coming, places),
        lambda: _stages_to_copy(coming, places, node.name),
    )
    for workers, is_named in own:
        if not is_named and not _has_worker(coming, workers, node):
            continue
        yield from _oldest_missing(view, job, coming, workers, newer, node, is_named=is_named)


def _places(job: str, spec: JobSpec, plan: PlanRecord, view: ClusterView) -> Places:
    """Return the nodes that keep copies of each stage: the same object unless something has changed that they rest on.

    A node that comes or goes in a large cluster leaves the places of most jobs' copies as they are.
    """
    possible, blocked = _possible_holders(spec, view), view.blocked

    def find() -> tuple[Places, Looked]:
        looked = Looked()
        return copy_places(spec, plan, view.nodes, possible=possible, blocked=blocked, looked=looked), looked

    own = (view.nodes.get(stage.node) for stage in plan.workers)
    records = (spec, plan, num_copies(spec, view.nodes), blocked, *own)
    name = f"places of copies of {job}, and what they rest on"
    return view.derived.of(name, records, find, holds=lambda found: found[1].holds(possible))[0]


def _stages_to_copy(plan: PlanRecord, places: Places, node: str) -> list[tuple[tuple[int, ...], bool]]:
    """Return a node's stages and those of which it keeps copies: (its workers, whether copies are meant)."""
    return [
        (tuple(workers), node in names)
        for workers, names in zip(plan.replicas, places, strict=True)
        if node in names or any(plan.workers[position].node == node for position in workers)
    ]


def _possible_holders(spec: JobSpec, view: ClusterView) -> Possible:
    """Return the nodes that may hold copies, found once for all jobs with the same sites."""
    name = f"possible holders at {spec.placement.sites!r}"
    return view.derived.of(name, (view.num_node_changes,), lambda: possible_holders(spec, view.nodes))


def _not_restorable(job: JobView, view: ClusterView) -> list[Place]:
    """Return the boundaries newer than the newest restorable one, oldest first."""
    safe = restorable(job, view.nodes)
    newest = age(safe[0]) if safe else (-1, -1)
    return [place for place in reversed(own_places(job)) if age(place) > newest]


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
    name = f"boundaries without copies of {job.name}"
    return view.derived.of(name, rests_on(job, view), lambda: _not_restorable(job, view))
