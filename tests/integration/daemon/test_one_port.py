"""Nodes with one port each: a job's bits are those of the plain loop, and nobody listens at another port."""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import submit
from headway.daemon.jobs.job import PlacementSpec
from headway.daemon.local.cluster import LocalCluster
from tests.integration.daemon.conftest import Playground
from tests.integration.exactness.training import (
    WITHOUT_SPARES,
    Oracle,
    assert_same_bits,
    finished,
    small_job,
    until_batch,
)

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]

SAME_CUT = PlacementSpec(min_nodes=2, max_nodes=2, recut=False)
"""No plan follows measured times, so another generation is a link that was not resumed."""
LISTENING = "0A"
"""In /proc/net/tcp."""


def processes_below(pid: int) -> Iterator[int]:
    """Yield a process and all that it has started."""
    yield pid
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            yield from processes_below(int(child))


def ports_of(pid: int) -> set[tuple[str, int]]:
    """Return (address, port) of the TCP sockets at which a process and its children listen."""
    inodes = set()
    for each in processes_below(pid):
        for entry in Path(f"/proc/{each}/fd").iterdir():
            try:
                inodes.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENING and rest[5] in inodes:
                host, _, port = local.partition(":")
                found.add((host, int(port, 16)))
    return found


def front_of(pid: int) -> int:
    """Return the process that serves a daemon's port."""
    for each in processes_below(pid):
        if b"headway.daemon.net.port" in Path(f"/proc/{each}/cmdline").read_bytes():
            return each
    raise AssertionError("nobody serves the port")


@pytest.mark.slow
async def test_a_job_through_one_port_a_node(tmp_path: Path) -> None:
    """Two nodes, of which one loses the process that serves its port in the middle: links resume, no bit changes."""
    spec = replace(small_job("one-port", batches=60), placement=SAME_CUT)
    one_port = {"HEADWAY_ONE_PORT": "true"}
    async with (
        LocalCluster(tmp_path / "state", num_nodes=2, node_settings=WITHOUT_SPARES, environment=one_port) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        await submit(session, spec)
        job = await until_batch(session, "one-port", 5)
        assert job.plan is not None
        nodes = (await session.view()).nodes
        for node in cluster.nodes:
            assert node.pid is not None
            found = ports_of(node.pid)
            assert len(found) == 2, f"one is the shared port, the other the daemon's behind it: {found}"
            assert all("/" in worker.address for worker in nodes[node.name].workers)
        os.kill(front_of(cluster.nodes[-1].pid), signal.SIGKILL)
        result = await finished(session, "one-port", tmp_path / "out")
    assert_same_bits(result, Oracle(tmp_path / "plain")(spec))
    assert len(set(result.generations)) == 1, "a cut link was not resumed"


@pytest.mark.slow
async def test_a_node_that_only_dials_out_takes_part(tmp_path: Path) -> None:
    """All that comes to the second node comes through the first one's port, whose process is killed in the middle."""
    spec = replace(small_job("relayed", batches=60), placement=SAME_CUT)
    one_port = {"HEADWAY_ONE_PORT": "true"}
    async with (
        LocalCluster(tmp_path / "state", num_nodes=1, node_settings=WITHOUT_SPARES, environment=one_port) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        relay = (await session.view()).nodes["node-1"].address
        far = await cluster.add_node(environment={"HEADWAY_RELAY": relay})
        assert (await session.view()).nodes[far].address == f"{relay}/{far}~"
        await submit(session, spec)
        await until_batch(session, "relayed", 5)
        os.kill(front_of(cluster.nodes[0].pid), signal.SIGKILL)
        result = await finished(session, "relayed", tmp_path / "out")
    assert_same_bits(result, Oracle(tmp_path / "plain")(spec))
    assert len(set(result.generations)) == 1, "a cut link was not resumed"


async def test_a_node_that_stands_by_nowhere_stays_out_of_plans(playground: Playground) -> None:
    """Nobody can reach it. Its record says why, and `nodes` shows that, so a job waits and names the node."""
    playground.start("n1", environment={"HEADWAY_ONE_PORT": "true"}, relay="127.0.0.1:1")
    why = await playground.until(
        lambda view: view.nodes["n1"].ailments.get("relay") if "n1" in view.nodes else None, "its trouble"
    )
    assert why.startswith("stands by at no relay: 127.0.0.1:1: ")
    async with asyncio.timeout(10):
        await playground.until(lambda view: view.nodes["n1"].stays_out == why or None, "the same reason for plans")
    await playground.submit("waiting")
    await playground.until(
        lambda view: "node n1 stays out of plans: stands by at no relay" in view.jobs["waiting"].phase.reason or None,
        "a job that waits",
    )
