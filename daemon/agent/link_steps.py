"""The links that a worker will have: which its node proves first, and which it has lost under a plan."""

from collections.abc import Iterable, Iterator, Set

from headway.daemon.agent.local_state import Assignment, NodeState, ProvenLink, is_over
from headway.daemon.agent.steps import ProveLink
from headway.daemon.cluster.records import (
    Failure,
    WorkerState,
)
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.net.reach_target import Reach, Target, worker_target
from headway.daemon.plan.link_choice import LinkEnd, choose_link, largest_frame_bytes, linked, neighbours
from headway.daemon.worker.goal import (
    JobGeneration,
    Neighbour,
    Neighbours,
    WorkerStatus,
)
from headway.stages.errors import UnavailableError


def links_to_prove(view: ClusterView, assignment: Assignment, node: NodeState) -> Iterator[ProveLink]:
    """Yield the neighbours to dial while the worker gets ready. Both ends of a link dial."""
    if assignment.run_key in assignment.worker.failures:
        return
    records = assignment.job.workers_of(assignment.plan)
    for other in _neighbours(assignment):
        if other in records and records[other].state is not WorkerState.READY:
            continue
        target = _other_end(view, assignment, other)
        if target is not None and (assignment.run_key, assignment.position, other, target.worker) not in node.proven:
            yield ProveLink(assignment.run_key, assignment.position, other, target)


def proven_links(view: ClusterView, assignment: Assignment, node: NodeState) -> dict[int, str]:
    """Return the worker's neighbours and their processes once all are proven, so that the record is written only
    once.
    """
    found = {other: _other_end(view, assignment, other) for other in _neighbours(assignment)}
    workers = {other: target.worker for other, target in found.items() if target is not None}
    proven = {link[2:] for link in node.proven if link[:2] == (assignment.run_key, assignment.position)}
    return workers if len(workers) == len(found) and workers.items() <= proven else {}


def _neighbours(assignment: Assignment) -> tuple[int, ...]:
    return neighbours(assignment.plan.workers, assignment.position, trains_tie=assignment.job.trains_tie)


def _other_end(view: ClusterView, assignment: Assignment, other: int) -> Target | None:
    """Return the worker at the other end of a link: as reported under this plan, or else as its node now lets it
    listen.
    """
    stage, record = assignment.plan.workers[other], assignment.job.workers_of(assignment.plan).get(other)
    node = view.nodes.get(stage.node)
    if record is not None:
        address, worker = record.address, record.incarnation
    elif node is None or node.incarnation != stage.node_incarnation:
        return None
    else:
        port = next((port for port in node.workers if port.device_index == stage.device_index), None)
        if port is None or _has_died(assignment, port.incarnation):
            return None  # the successor's address will be reported soon
        address, worker = port.address, port.incarnation
    return worker_target(stage.node, stage.node_incarnation, stage.device_index, address, worker)


def _has_died(assignment: Assignment, worker: str) -> bool:
    """Return whether a plan of the job has lost the process. A process that only lost a neighbour is alive."""
    return any(
        record.incarnation == worker and record.state is WorkerState.FAILED and record.failure.lost_peer < 0
        for record in assignment.job.workers.values()
    )


def neighbours_of(view: ClusterView, assignment: Assignment) -> Neighbours | None:
    """Return all neighbours of a worker; None while one of them has not reported its address."""
    plan, position = assignment.plan, assignment.position
    records = assignment.job.workers_of(plan)

    around = linked(plan.workers, position, trains_tie=assignment.job.trains_tie)
    if any(other not in records for other in _neighbours(assignment)):
        return None

    def of(positions: tuple[int, ...]) -> tuple[Neighbour, ...]:
        return tuple(
            Neighbour(
                other,
                records[other].address,
                records[other].incarnation,
                _is_collective(view, assignment, other),
            )
            for other in positions
        )

    return Neighbours(of(around.upstream), of(around.downstream), of(around.siblings), of(around.tied))


def _is_collective(view: ClusterView, assignment: Assignment, position: int) -> bool:
    """Return whether the link is collective, by both nodes' records: the other end's daemon then finds the same."""
    assert assignment.job.spec is not None, "only jobs with a spec have posts"
    other = assignment.plan.workers[position]
    own, peer = view.nodes.get(assignment.stage.node), view.nodes.get(other.node)
    if own is None or peer is None:
        return False  # a node is gone, which ends this plan
    ends = LinkEnd.of(own, assignment.stage.device_index), LinkEnd.of(peer, other.device_index)
    spec = assignment.job.spec
    frame_bytes = largest_frame_bytes(spec, assignment.plan, assignment.position, position)
    return choose_link(spec.train.link, *ends, frame_bytes=frame_bytes).is_collective


class ProvenLinks:
    """The proofs for the plans in etcd."""

    def __init__(self, view: ClusterView, reach: Reach) -> None:
        self._view = view
        self._reach = reach
        self._proven: set[ProvenLink] = set()
        self._passed_on: set[tuple[JobGeneration, int]] = set()
        """(plan, device) of our workers whose lost link was already reported."""

    @property
    def proven(self) -> Set[ProvenLink]:
        """Return the links whose other end answered."""
        return self._proven

    async def prove(self, step: ProveLink) -> None:
        """Dial a neighbour. Raises UnavailableError; etcd then records that the neighbour is out of reach."""
        target = step.target
        if reason := await self._reach.prove(target):
            raise UnavailableError(f"the worker of {target.node} at {target.address}", reason)
        self._proven.add((step.run_key, step.position, step.other, target.worker))

    def is_silent(self, run_key: JobGeneration, position: int) -> None:
        """Return whether a neighbour that a worker no longer hears does not answer either."""
        job = self._view.jobs.get(run_key.job)
        plan = job.plan if job is not None else None
        if plan is not None and plan.generation == run_key.generation and position < len(plan.workers):
            self._reach.doubt(plan.workers[position].node)

    def look_again(self, workers: Iterable[WorkerStatus]) -> None:
        """Report each link that a worker has lost once; forget plans that have ended.

        A lost link is a fact about two nodes, so the daemons at both ends are dialled again.
        """
        self._proven = {link for link in self._proven if not is_over(self._view, link[0])}
        self._passed_on = {link for link in self._passed_on if not is_over(self._view, link[0])}
        for worker in workers:
            for run_key, failure in worker.failures.items():
                if failure.lost_peer >= 0 and (run_key, worker.device_index) not in self._passed_on:
                    self._pass_on(run_key, failure)
                    self._passed_on.add((run_key, worker.device_index))

    def _pass_on(self, run_key: JobGeneration, failure: Failure) -> None:
        """Let the neighbour be dialled whom a worker has lost under a plan that etcd still names."""
        job = self._view.jobs.get(run_key.job)
        for plan in (job.plan, job.next) if job is not None else ():
            if plan is None or plan.generation != run_key.generation or failure.lost_peer >= len(plan.workers):
                continue
            assert job is not None, "it has the plan"
            part, record = plan.workers[failure.lost_peer], job.workers_of(plan).get(failure.lost_peer)
            if failure.was_unreached and record is not None:
                target = worker_target(
                    part.node, part.node_incarnation, part.device_index, record.address, record.incarnation
                )
                self._reach.link_failed(target, failure.text.split("\n", 1)[0])
            else:
                self._reach.doubt(part.node)
