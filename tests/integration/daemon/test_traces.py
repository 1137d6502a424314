"""Nodes report their workers' last operations, each by its own clock."""

import time
from typing import Any

import pytest

from headway.daemon.base.errors import RecoveryError
from headway.daemon.cluster.records import PlanRecord, WorkerPart
from headway.daemon.node.job_sources import measure_clock
from headway.daemon.node.service import NodeDesk
from headway.proto import control_pb2
from tests.rigs.node_network import Network


def plan_on(*nodes: str) -> PlanRecord:
    """One stage per node."""
    stages = [
        WorkerPart(node=node, node_incarnation=f"{node}-1", device_index=0, layers=(f"block.{index}",), depth=1)
        for index, node in enumerate(nodes)
    ]
    return PlanRecord(generation=3, timeline=1, workers=tuple(stages))


def operations_at(clock_s: float, *, worker: int, generation: int = 3) -> control_pb2.RecentOperations:
    """One forward that has just ended by some clock."""
    return control_pb2.RecentOperations(
        job="j",
        generation=generation,
        worker=worker,
        kinds=b"F",
        batches=[7],
        microbatches=[0],
        versions=[6],
        started_s=[clock_s - 0.5],
        ended_s=[clock_s],
    )


async def test_a_trace_tells_how_far_the_clocks_are_apart(network: Network) -> None:
    """b's clock is a thousand seconds ahead: whichever node is asked says so, to within half a round trip."""
    network.job.plan = plan_on("a", "b")
    ahead_s = {"a": 0.0, "b": 1000.0}
    for position, (name, desk) in enumerate(network.desks.items()):
        desk.clock = lambda ahead_s=ahead_s[name]: time.perf_counter() + ahead_s  # type: ignore[misc]

        async def told(device_index: int, desk: NodeDesk = desk, worker: int = position) -> Any:
            assert device_index == 0
            return operations_at(desk.clock(), worker=worker)

        desk.recent_operations = told
    for asked in (network.a, network.b):
        traces = {trace.node: trace async for trace in network.client.trace(asked.endpoint, "j")}
        assert [traces[name].worker for name in "ab"] == [0, 1]
        own, other = (traces[name] for name in (asked.name, "b" if asked is network.a else "a"))
        assert (own.clock_ahead_s, own.clock_error_s) == (0.0, 0.0)
        expected = ahead_s[other.node] - ahead_s[asked.name]
        assert abs(other.clock_ahead_s - expected) <= other.clock_error_s < 1.0
        assert other.operations.batches == [7]


async def test_two_daemons_of_one_machine_have_one_clock(network: Network) -> None:
    """No offset that could be told from none: none is applied."""
    assert await measure_clock(network.client, network.b.endpoint, clock=time.perf_counter) == (0.0, 0.0)


async def test_a_trace_says_who_is_missing_from_it(network: Network) -> None:
    """a has workers of a generation that is over, b none yet, c is gone: three sentences and no operation."""
    network.job.plan = plan_on("a", "b", "c")

    async def of_before(device_index: int) -> Any:
        return operations_at(1.0, worker=device_index, generation=2)

    network.desks["a"].recent_operations = of_before
    traces = {trace.node: trace.trouble async for trace in network.client.trace(network.a.endpoint, "j")}
    assert traces == {
        "a": "the worker on node a has not begun generation 3",
        "b": "worker 0: is not up yet",
        "c": "node c: is gone",
    }
    network.job.plan = None
    with pytest.raises(RecoveryError, match="job j: is queued: no worker runs, so there is nothing to trace"):
        _ = [trace async for trace in network.client.trace(network.a.endpoint, "j")]
    with pytest.raises(RecoveryError, match="job k: there is no such job"):
        _ = [trace async for trace in network.client.trace(network.a.endpoint, "k")]
