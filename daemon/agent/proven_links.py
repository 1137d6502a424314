"""Knows which links of this node's workers are proven before a plan takes effect, and which are lost under it."""

from collections.abc import Iterable, Set

from headway.daemon.agent.local_state import ProvenLink
from headway.daemon.agent.lost_links import lost_links
from headway.daemon.agent.steps import ProveLink
from headway.daemon.agent.steps_due import is_over
from headway.daemon.reach.reach_target import Reach
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.workers.status import JobGeneration, WorkerStatus
from headway.stages.errors import UnavailableError


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
        if plan is not None and plan.generation == run_key.generation and position < len(plan.stages):
            self._reach.hurry(plan.stages[position].node)

    def look_again(self, workers: Iterable[WorkerStatus]) -> None:
        """Report each link that a worker has lost once; forget plans that have ended.

        A lost link is a fact about two nodes, so the daemons at both ends are dialled again.

        """
        self._proven = {link for link in self._proven if not is_over(self._view, link[0])}
        self._passed_on = {link for link in self._passed_on if not is_over(self._view, link[0])}
        for lost in lost_links(self._view, workers):
            if (lost.run_key, lost.device_index) in self._passed_on:
                continue
            self._passed_on.add((lost.run_key, lost.device_index))
            if lost.was_unreached and lost.target is not None:
                self._reach.link_failed(lost.target, lost.reason)
            else:
                self._reach.hurry(lost.node)
