"""What the workers of a plan did last: asked of this node's own workers, and of every other node's daemon.

Each node's times are of its own clock. How far it is ahead of this one's is measured with a few short calls: the peer
read its clock somewhere between question and answer, so the middle is wrong by half the round trip at most. An offset
that is smaller than that cannot be told from none, as between two daemons of one machine: then it is none.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from headway.daemon.addresses import NodeEndpoint
from headway.daemon.coordination.cluster_view import ClusterView
from headway.daemon.errors import RecoveryError
from headway.daemon.node.peer_client import NodeClient
from headway.daemon.records import PlanRecord
from headway.proto.control_pb2 import RecentOperations, WorkerTrace
from headway.stages.errors import PeerError, UnavailableError

NUM_PINGS: Final = 6
"""The shortest counts: the others waited for something, the first for the connection."""
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
        """ask_worker: what the worker of a device did last; raises UnavailableError. clock: the workers', seconds."""
        self._node = node
        self._view = view
        self._client = client
        self._ask_worker = ask_worker
        self._clock = clock

    async def own(self, job: str) -> AsyncIterator[WorkerTrace]:
        """Of this node's workers. Raises RecoveryError when the job has no plan in force."""
        plan = self._plan(job)
        for position, worker in enumerate(plan.stages):
            if worker.node == self._node:
                yield await self._of_worker(job, plan, position)

    async def all(self, job: str) -> AsyncIterator[WorkerTrace]:
        """Of all workers of the plan in force; a node that does not answer is the trouble of its workers.

        Raises RecoveryError when there is no plan.
        """
        plan = self._plan(job)
        nodes = sorted({worker.node for worker in plan.stages})
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
            mine = [position for position, worker in enumerate(plan.stages) if worker.node == node]
            return [WorkerTrace(node=node, worker=position, trouble=str(error)) for position in mine]
        for trace in traces:
            trace.clock_ahead_s, trace.clock_error_s = ahead_s, error_s
        return traces

    async def _of_worker(self, job: str, plan: PlanRecord, position: int) -> WorkerTrace:
        trace = WorkerTrace(node=self._node, worker=position)
        try:
            told = await self._ask_worker(plan.stages[position].device_index)
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
            raise RecoveryError(f"job {job}", f"is {found.phase.phase}: nothing runs that could be traced")
        return found.plan


async def measure_clock(
    client: NodeClient, endpoint: NodeEndpoint, *, clock: Callable[[], float]
) -> tuple[float, float]:
    """(seconds that the clock there is ahead of this one, most that this may be wrong by); (0, 0): the same clock.

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
