"""The boundaries of a job: which exist, from which a run could continue, and which must be kept. Pure.

A boundary's place is (timeline, boundary). It is *complete* when living nodes hold every layer and the journal, and
*restorable* when each of these has as many holders as the job wants copies. Coordinator and agents share these rules,
so nodes keep every boundary that the coordinator relies on.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from headway.daemon.cluster.lineage import Lineage
from headway.daemon.cluster.memo import remembered
from headway.daemon.cluster.records import (
    TERMINAL_PHASES,
    NodeRecord,
    Phase,
    PlanRecord,
    StateRecord,
    WorkerPart,
    WorkerState,
)
from headway.daemon.cluster.state_key import JOURNAL
from headway.daemon.decide.job_view import JobView, Place
from headway.daemon.decide.quarantine import listed
from headway.daemon.plan.copy_places import num_copies

NUM_KEPT: Final = 2
"""Number of restorable boundaries that are kept, with an older one that is being copied to durable storage."""
NUM_OLDEST: Final = 2
NUM_NEWEST: Final = 4
"""Limits on boundaries that are not restorable yet. The oldest are kept because copies are made in that order, and
because a safe boundary looks unsafe while its holders register again after an outage. The newest are kept because they
are being copied.
"""

_NO_ROOM: Final = ("No space left on device", "Disk quota exceeded")


def age(place: Place) -> tuple[int, int]:
    """Sort key: the boundary, then the timeline."""
    return place[1], place[0]


def lineage_of(job: JobView) -> Lineage | None:
    """Return the job's own past: its plan's, or the dissolved plan's; None: the checkpoint has everything."""
    return job.plan.lineage if job.plan is not None else job.phase.lineage


def parts_of(job: JobView) -> tuple[str, ...]:
    """Return every file of a boundary."""
    assert job.spec is not None
    return (*job.spec.layers, JOURNAL)


def holders(job: JobView, place: Place, nodes: Mapping[str, NodeRecord]) -> dict[str, set[str]]:
    """Return, for each part of a boundary, the living nodes that hold it."""
    found: dict[str, set[str]] = {part: set() for part in parts_of(job)}
    for name, record in job.state.get(place, {}).items():
        node = nodes.get(name)
        if node is not None and node.incarnation == record.incarnation:
            for part in record.files:
                if part in found:
                    found[part].add(name)
    return found


def living_holders(job: JobView, place: Place, part: str, nodes: Mapping[str, NodeRecord]) -> set[str]:
    """Return the living nodes that hold one part of a boundary."""
    return {
        name
        for name, record in job.state.get(place, {}).items()
        if part in record.files and name in nodes and nodes[name].incarnation == record.incarnation
    }


def fewest_holders(job: JobView, place: Place, nodes: Mapping[str, NodeRecord]) -> int:
    """Return the number of nodes that hold the rarest part; 0: the boundary is not complete."""
    return min(len(names) for names in holders(job, place, nodes).values())


def own_places(job: JobView) -> tuple[Place, ...]:
    """Return every boundary of the job's own past of which somebody holds a part, newest first."""
    lineage = lineage_of(job)
    own = [place for place in job.state if lineage is not None and lineage.has(*place)]
    return tuple(sorted(own, key=age, reverse=True))


def restorable(job: JobView, nodes: Mapping[str, NodeRecord]) -> tuple[Place, ...]:
    """Return the boundaries that survive the loss of copies - 1 nodes, newest first."""
    assert job.spec is not None
    wanted = num_copies(job.spec, nodes)
    return tuple(place for place in own_places(job) if fewest_holders(job, place, nodes) >= wanted)


def newest_complete(job: JobView, nodes: Mapping[str, NodeRecord]) -> Place | None:
    """Return the newest boundary of which living nodes hold every part: the target of a rollback."""
    return next((place for place in own_places(job) if fewest_holders(job, place, nodes) >= 1), None)


@remembered(size=256)
def due_checkpoint(job: JobView) -> Place | None:
    """Return the boundary that is due for durable storage while training continues, if there is one.

    It is the oldest that is newer than the newest checkpoint, so that each checkpoint ends before the next begins. It
    may be of a timeline from which the run grew. A boundary that could not be written gives way to a newer one. So does
    a boundary that a stage missed, when a newer one is complete.
    """
    plan, spec = job.plan, job.spec
    if plan is None or spec is None or not spec.fault.checkpoint_every:
        return None
    after = job.checkpoint.boundary if job.checkpoint is not None else 0
    due = [place for place in own_places(job) if place[1] > after and place[1] % spec.fault.checkpoint_every == 0]
    whole = max((age(place) for place in due if _is_whole(job, place)), default=(-1, -1))
    due = [place for place in due if _is_whole(job, place) or age(place) > whole]
    untroubled = [place for place in due if not any(_is_troubled(record) for record in job.state[place].values())]
    return min(untroubled, key=age) if untroubled else max(due, key=age, default=None)


def copier(job: JobView, place: Place, part: str, nodes: Mapping[str, NodeRecord]) -> str | None:
    """Return the node that copies a part to durable storage: the lead of the layer's stage, if it holds the part.

    A holder without access to the checkpoint folder copies only if no holder has access.
    """
    names = holders(job, place, nodes).get(part, set())
    names = names - those_without_access(job) or names
    if not names:
        return None
    owner = lead_of(job.plan, part).node if job.plan is not None else ""
    return owner if owner in names else min(names)


def those_without_access(job: JobView) -> set[str]:
    """Return nodes that have reported, for any part, that they have no access to the job's checkpoint folder."""
    told = (item for records in job.state.values() for item in records.items())
    return {name for name, record in told if record.lacks_access}


def lead_of(plan: PlanRecord, part: str) -> WorkerPart:
    """Return the worker that leads the stage of a layer; the lead of the last stage also has the journal."""
    return plan.workers[plan.replicas[-1][0]] if part == JOURNAL else plan.holder(part)


@remembered(size=256)
def kept(job: JobView, nodes: Mapping[str, NodeRecord]) -> frozenset[Place]:
    """Return the boundaries whose parts nodes must keep.

    These are: the source of a plan until all its workers run; the boundary of a stop; the boundary that is being copied
    to durable storage; the newest NUM_KEPT restorable boundaries, or complete ones instead; and a limited number of
    newer ones, even if a stage misses its snapshots or etcd is away for long.
    """
    if job.spec is None or job.phase.phase in TERMINAL_PHASES - {Phase.FAILED}:
        return frozenset()
    own, safe = own_places(job), restorable(job, nodes)
    complete = [place for place in own if fewest_holders(job, place, nodes) >= 1]
    newest = age(safe[0]) if safe else (-1, -1)
    older = [place for place in complete if place not in safe and age(place) < newest]
    newer = [place for place in own if age(place) > newest]
    due = due_checkpoint(job)
    # One that is being copied is also one to go back to.
    num_kept = NUM_KEPT - (due in complete and due not in safe[:NUM_KEPT] and age(due) < newest)
    keep = {*safe[:num_kept], *older[: max(num_kept - len(safe), 0)]}
    keep |= _ends([place for place in newer if place in complete])
    keep |= _ends([place for place in newer if place not in complete])
    keep |= set(pinned(job))
    if due is not None:
        keep.add(due)
    return frozenset(keep)


def depends_on(job: JobView, nodes: Mapping[str, NodeRecord], name: str) -> bool:
    """Return whether a training job would go back further if a node, and all draining nodes, were gone now.

    Its next snapshot ends that. A job that takes no snapshots does not wait.
    """
    if job.plan is None or job.spec is None or not job.spec.fault.snapshot_every:
        return False
    newest = newest_complete(job, nodes)
    if newest is None or (job.checkpoint is not None and job.checkpoint.boundary >= newest[1]):
        return False
    staying = {other: node for other, node in nodes.items() if other != name and not node.is_draining}
    found = newest_complete(job, staying)
    return bool(staying) and (found is None or age(found) < age(newest))


def pinned(job: JobView) -> Iterable[Place]:
    """Return the boundaries that plans load, while a worker may still have to; and the boundary of a stop."""
    for plan in (job.plan, job.next):
        if plan is not None and plan.source == "nodes" and not _all_run(job, plan.generation, len(plan.workers)):
            yield plan.source_timeline, plan.boundary
    if job.plan is not None and job.stop is not None and job.stop.boundary is not None:
        yield job.plan.timeline, job.stop.boundary


def refused(job: JobView) -> dict[str, set[str]]:
    """Return why the checkpoint folder refuses boundaries after the newest checkpoint: reason to nodes."""
    found: dict[str, set[str]] = {}
    for (_, boundary), records in job.state.items():
        for node, record in records.items():
            if boundary > _newest_saved(job) and _is_troubled(record):
                found.setdefault(record.trouble, set()).add(node)
    return found


def refusals(job: JobView) -> list[str]:
    """Return why checkpoints cannot be written, where, and what to do."""
    told = []
    for why, nodes in sorted(refused(job).items()):
        advice = "free space there: " if why.endswith(_NO_ROOM) else ""
        told.append(f"checkpoints fail on {listed(sorted(nodes))}: {why}; {advice}the nodes try again by themselves")
    return told


def unsaved(job: JobView) -> int:
    """Return the boundary from which a checkpoint would end the refusal of which an event is due or told; -1: none."""
    troubled = (place[1] for place, records in job.state.items() if any(map(_is_troubled, records.values())))
    newest = max((job.phase.unsaved, *troubled))
    return newest if newest > _newest_saved(job) else -1


def _newest_saved(job: JobView) -> int:
    return job.checkpoint.boundary if job.checkpoint is not None else -1


def _is_troubled(record: StateRecord) -> bool:
    """Return whether the folder refused a file. If a node has no access to the folder, another node copies instead."""
    return bool(record.trouble) and not record.lacks_access


def _ends(places: Sequence[Place]) -> set[Place]:
    """Return the newest and the oldest places of a list that is sorted newest first."""
    return {*places[:NUM_NEWEST], *places[-NUM_OLDEST:]}


def _is_whole(job: JobView, place: Place) -> bool:
    """Return whether every part has been reported."""
    told = {part for record in job.state[place].values() for part in record.files}
    return told.issuperset(parts_of(job))


def _all_run(job: JobView, generation: int, num_workers: int) -> bool:
    running = (WorkerState.RUNNING, WorkerState.STOPPED)
    records = [job.workers.get((generation, position)) for position in range(num_workers)]
    return all(record is not None and record.state in running for record in records)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The first boundary of a plan, and the source of its files."""

    source: str
    """Source, as in PlanRecord."""
    boundary: int
    source_timeline: int
    lineage: Lineage
    """Lineage of the plan that begins here."""


def find_origin(
    job: JobView, nodes: Mapping[str, NodeRecord], *, generation: int, is_forgetful: bool = False
) -> Origin:
    """Return the newest available boundary of the job's own past; of two equally new, the one that nodes hold.

    Batches beyond it are given up, so a new timeline begins, named after the generation. The timeline continues only if
    nothing ran beyond the checkpoint. is_forgetful: etcd is older than the nodes' knowledge, so batches may have run
    beyond the checkpoint.
    """
    lineage, checkpoint = lineage_of(job), job.checkpoint
    place = newest_complete(job, nodes)
    if lineage is not None and place is not None and (checkpoint is None or place[1] >= checkpoint.boundary):
        return Origin(
            source="nodes",
            boundary=place[1],
            source_timeline=place[0],
            lineage=lineage.rolled_back(place, timeline=generation),
        )
    if checkpoint is None:
        return Origin(source="initial", boundary=0, source_timeline=generation, lineage=Lineage(timeline=generation))
    own = Lineage(timeline=checkpoint.timeline, ancestry=checkpoint.ancestry)
    if checkpoint.origin_job:
        # Another job numbers its timelines by its own generations, so its numbers mean nothing here.
        own = Lineage(timeline=generation)
    elif lineage is not None or is_forgetful:
        own = own.rolled_back((checkpoint.timeline, checkpoint.boundary), timeline=generation)
    return Origin(source="checkpoint", boundary=checkpoint.boundary, source_timeline=checkpoint.timeline, lineage=own)
