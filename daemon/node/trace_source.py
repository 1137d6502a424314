"""Collects the last operations of a plan's workers: from this node's own workers, and from every other node's daemon.

Each node's times are of its own clock. A few short calls measure its offset. The peer read its clock between question
and answer, so the middle is wrong by half the round trip at most. A smaller offset cannot be distinguished from none,
as between two daemons of one machine: then it counts as zero.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.base.errors import RecoveryError
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.cluster.records import PlanRecord
from headway.daemon.decide.cluster_view import ClusterView
from headway.proto.control_pb2 import RecentOperations, WorkerTrace
from headway.stages.errors import PeerError, UnavailableError

NUM_PINGS: Final = 6
"""Number of pings; the shortest counts: the others waited for something, the first for the connection."""
PING_TIMEOUT_S: Final = 5.0


class TraceSource:
    """Answers the Trace calls of one node."""

    def __init__(
        self,
        *,
        node: str,
        view: ClusterView,
        client: NodeClient,
        ask_worker: Callable[[int], Awaitable[RecentOperations]],
        clock: Callable[[], float],
    ) -> None:
        """ask_worker: returns the last operations of a device's worker; raises UnavailableError. clock: the workers',
        seconds.
        """
        self._node = node
        self._view = view
        self._client = client
        self._ask_worker = ask_worker
        self._clock = clock

    async def own(self, job: str) -> AsyncIterator[WorkerTrace]:
        """Yield the operations of this node's workers. Raises RecoveryError when the job has no plan in force."""
        plan = self._plan(job)
        for position, worker in enumerate(plan.workers):
            if worker.node == self._node:
                yield await self._of_worker(job, plan, position)

    async def all(self, job: str) -> AsyncIterator[WorkerTrace]:
        """Yield the operations of all workers of the plan in force; a silent node is the trouble of its workers.

        Raises RecoveryError when there is no plan.
        """
        plan = self._plan(job)
        nodes = sorted({worker.node for worker in plan.workers})
        for found in await asyncio.gather(*(self._of_node(job, plan, node) for node in nodes)):
            for trace in found:
                yield trace

    async def _of_node(self, job: str, plan: PlanRecord, node: str) -> list[WorkerTrace]:
        if node == self._node:
            return [trace async for trace in self.own(job)]
        try:
            if node not in self._view.nodes:
                raise UnavailableError(f"node {node}", "is gone")
            endpoint = self._view.nodes[node].endpoint
            ahead_s, error_s = await measure_clock(self._client, endpoint, clock=self._clock)
            traces = [trace async for trace in self._client.trace(endpoint, job, forwarded=True)]
        except (PeerError, RecoveryError) as error:
            mine = [position for position, worker in enumerate(plan.workers) if worker.node == node]
            return [WorkerTrace(node=node, worker=position, trouble=str(error)) for position in mine]
        for trace in traces:
            trace.clock_ahead_s, trace.clock_error_s = ahead_s, error_s
        return traces

    async def _of_worker(self, job: str, plan: PlanRecord, position: int) -> WorkerTrace:
        trace = WorkerTrace(node=self._node, worker=position)
        try:
            told = await self._ask_worker(plan.workers[position].device_index)
        except UnavailableError as error:
            trace.trouble = str(error)
            return trace
        if (told.job, told.generation, told.worker) != (job, plan.generation, position):
            trace.trouble = f"the worker on node {self._node} has not begun generation {plan.generation}"
        elif not told.kinds:
            trace.trouble = f"the worker on node {self._node} has done nothing yet"
        else:
            trace.operations.CopyFrom(told)
        return trace

    def _plan(self, job: str) -> PlanRecord:
        found = self._view.jobs.get(job)
        if found is None:
            raise RecoveryError(f"job {job}", "there is no such job")
        if found.plan is None:
            raise RecoveryError(f"job {job}", f"is {found.phase.phase}: no worker runs, so there is nothing to trace")
        return found.plan


async def measure_clock(
    client: NodeClient, endpoint: NodeEndpoint, *, clock: Callable[[], float]
) -> tuple[float, float]:
    """Return (seconds by which the clock there is ahead, maximum error); (0, 0): one clock.

    Raises PeerError and RecoveryError.
    """
    best: tuple[float, float] | None = None
    for _ in range(NUM_PINGS):
        asked = clock()
        reply = await client.describe(endpoint, timeout_s=PING_TIMEOUT_S)
        answered = clock()
        half_s = (answered - asked) / 2
        if best is None or half_s < best[1]:
            best = reply.clock_s - (asked + half_s), half_s
    assert best is not None, "at least one ping"
    return best if abs(best[0]) > best[1] else (0.0, 0.0)
