"""Which boundaries of a job there are, which of them a run could go on from, and which must be kept. Pure.

A boundary's place is (timeline, boundary). It is *complete* when living nodes hold every layer and the journal, and
*restorable* when each of these has as many holders as the job wants copies. Coordinator and agents share these rules:
what one side counts on, the other side keeps.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from headway.daemon.coordination.cluster_view import JobView, Place
from headway.daemon.lineage import Lineage
from headway.daemon.planning.copy_places import num_copies
from headway.daemon.records import TERMINAL_PHASES, NodeRecord, Phase, PlanRecord, StagePlan, StateRecord, WorkerState
from headway.daemon.storage.state_key import JOURNAL

NUM_KEPT: Final = 2
"""Restorable boundaries that are kept."""
NUM_OLDEST: Final = 2
NUM_NEWEST: Final = 4
"""Of boundaries that are not restorable yet: the oldest, because copies are made in that order and because what was
safe looks unsafe while its holders register again after an outage; the newest, because they are on their way."""


def age(place: Place) -> tuple[int, int]:
    """Sorts by boundary, then by timeline."""
    return place[1], place[0]


def lineage_of(job: JobView) -> Lineage | None:
    """The job's own past: its plan's, or that of the plan that was dissolved; None: the checkpoint has everything."""
    return job.plan.lineage if job.plan is not None else job.phase.lineage


def parts_of(job: JobView) -> tuple[str, ...]:
    """Every file that a boundary consists of."""
    assert job.spec is not None
    return (*job.spec.layers, JOURNAL)


def holders(job: JobView, place: Place, nodes: Mapping[str, NodeRecord]) -> dict[str, set[str]]:
    """Part to the living nodes that hold it, for all parts of a boundary."""
    found: dict[str, set[str]] = {part: set() for part in parts_of(job)}
    for name, record in job.state.get(place, {}).items():
        node = nodes.get(name)
        if node is not None and node.incarnation == record.incarnation:
            for part in record.files:
                if part in found:
                    found[part].add(name)
    return found


def fewest_holders(job: JobView, place: Place, nodes: Mapping[str, NodeRecord]) -> int:
    """How many nodes hold the part that fewest hold; 0: the boundary is not complete."""
    return min(len(names) for names in holders(job, place, nodes).values())


def own_places(job: JobView) -> tuple[Place, ...]:
    """Every boundary of the job's own past that somebody holds something of, newest first."""
    lineage = lineage_of(job)
    own = [place for place in job.state if lineage is not None and lineage.has(*place)]
    return tuple(sorted(own, key=age, reverse=True))


def restorable(job: JobView, nodes: Mapping[str, NodeRecord]) -> tuple[Place, ...]:
    """The boundaries that survive the loss of copies - 1 nodes, newest first."""
    assert job.spec is not None
    wanted = num_copies(job.spec, nodes)
    return tuple(place for place in own_places(job) if fewest_holders(job, place, nodes) >= wanted)


def newest_complete(job: JobView, nodes: Mapping[str, NodeRecord]) -> Place | None:
    """The newest boundary of which living nodes hold every part, if there is one: where a rollback goes to."""
    return next((place for place in own_places(job) if fewest_holders(job, place, nodes) >= 1), None)


def due_checkpoint(job: JobView) -> Place | None:
    """The boundary that is to be copied to durable storage while training goes on, if there is one.

    The oldest that is newer than the newest checkpoint, so that each is finished before the next is begun, be it of a
    timeline that the run grew out of; one that could not be written gives way to a newer one, and so does one that a
    stage missed when a newer one is whole.
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
    """The node that copies a part to durable storage: of the worker that leads the layer's stage, if it holds it.

    Where some holder has access to the checkpoint folder, not one without.
    """
    names = holders(job, place, nodes).get(part, set())
    names = names - those_without_access(job) or names
    if not names:
        return None
    owner = lead_of(job.plan, part).node if job.plan is not None else ""
    return owner if owner in names else min(names)


def those_without_access(job: JobView) -> set[str]:
    """Nodes that said of anything they hold that they have no access to the job's checkpoint folder."""
    told = (item for records in job.state.values() for item in records.items())
    return {name for name, record in told if record.lacks_access}


def lead_of(plan: PlanRecord, part: str) -> StagePlan:
    """The worker that leads the stage of a layer; that of the last stage has the journal too."""
    return plan.stages[plan.replicas[-1][0]] if part == JOURNAL else plan.holder(part)


def kept(job: JobView, nodes: Mapping[str, NodeRecord]) -> frozenset[Place]:
    """The boundaries of which nodes must keep what they hold.

    What a plan loads from, until all its workers run; what is being written for a stop; the boundary that is being
    copied to durable storage; the newest NUM_KEPT restorable boundaries, or complete ones in their stead; and a bounded
    number of newer ones, even if a stage misses its snapshots or etcd is away for long.
    """
    if job.spec is None or job.phase.phase in TERMINAL_PHASES - {Phase.FAILED}:
        return frozenset()
    own, safe = own_places(job), restorable(job, nodes)
    complete = [place for place in own if fewest_holders(job, place, nodes) >= 1]
    newest = age(safe[0]) if safe else (-1, -1)
    older = [place for place in complete if place not in safe and age(place) < newest]
    newer = [place for place in own if age(place) > newest]
    keep = {*safe[:NUM_KEPT], *older[: max(NUM_KEPT - len(safe), 0)]}
    keep |= _ends([place for place in newer if place in complete])
    keep |= _ends([place for place in newer if place not in complete])
    keep |= set(pinned(job))
    if (due := due_checkpoint(job)) is not None:
        keep.add(due)
    return frozenset(keep)


def depends_on(job: JobView, nodes: Mapping[str, NodeRecord], name: str) -> bool:
    """Whether a job that trains would go back further if a node were gone now, with all that drain.

    Its next snapshot ends that, so a job that takes none waits for nothing.
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
    """What plans load from, while a worker may still have to; and the boundary of a stop."""
    for plan in (job.plan, job.next):
        if plan is not None and plan.source == "nodes" and not _all_run(job, plan.generation, len(plan.stages)):
            yield plan.source_timeline, plan.boundary
    if job.plan is not None and job.stop is not None and job.stop.boundary is not None:
        yield job.plan.timeline, job.stop.boundary


def _is_troubled(record: StateRecord) -> bool:
    """Whether the folder did not take a file; where a node has no access to it, another copies in its stead."""
    return bool(record.trouble) and not record.lacks_access


def _ends(places: Sequence[Place]) -> set[Place]:
    """The newest and the oldest of places that are sorted, newest first."""
    return {*places[:NUM_NEWEST], *places[-NUM_OLDEST:]}


def _is_whole(job: JobView, place: Place) -> bool:
    """Whether somebody has told of every part."""
    told = {part for record in job.state[place].values() for part in record.files}
    return told.issuperset(parts_of(job))


def _all_run(job: JobView, generation: int, num_workers: int) -> bool:
    running = (WorkerState.RUNNING, WorkerState.STOPPED)
    records = [job.workers.get((generation, position)) for position in range(num_workers)]
    return all(record is not None and record.state in running for record in records)
