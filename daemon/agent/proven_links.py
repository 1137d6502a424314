"""Knows which links of this node's workers are proven before a plan, and which are lost under it."""

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
    """The proofs for the plans that etcd names."""

    def __init__(self, view: ClusterView, reach: Reach) -> None:
        self._view = view
        self._reach = reach
        self._proven: set[ProvenLink] = set()
        self._passed_on: set[tuple[JobGeneration, int]] = set()
        """(plan, device) of our workers whose lost link was reported."""

    @property
    def proven(self) -> Set[ProvenLink]:
        """Return the links whose other ends were dialled."""
        return self._proven

    async def prove(self, step: ProveLink) -> None:
        """Dial a neighbour. Raises UnavailableError; then etcd has the fact that the neighbour is out of reach."""
        target = step.target
        if reason := await self._reach.prove(target):
            raise UnavailableError(f"the worker of {target.node} at {target.address}", reason)
        self._proven.add((step.run_key, step.position, step.other, target.worker))

    def is_silent(self, run_key: JobGeneration, position: int) -> None:
        """Dial a neighbour from which a worker of ours hears nothing."""
        job = self._view.jobs.get(run_key.job)
        plan = job.plan if job is not None else None
        if plan is not None and plan.generation == run_key.generation and position < len(plan.stages):
            self._reach.hurry(plan.stages[position].node)

    def look_again(self, workers: Iterable[WorkerStatus]) -> None:
        """Report links that workers have lost, each once; forget plans that are over.

        A link that did not open is a fact about two nodes. After a lost link, both ends are dialled again.
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
