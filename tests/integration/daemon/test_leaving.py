"""A daemon leaves at a signal in every phase, or because its machine is taken away: in time, and nothing is left."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.cluster.records import Desired, Phase
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.reports.goodput_report import report_goodput
from tests.rigs.metadata_server import Metadata

STOP_TIMEOUT_S = 10
BOUND_S = STOP_TIMEOUT_S + 30


async def _all_leave(playground: Any, *names: str, number: signal.Signals) -> None:
    began = time.monotonic()
    for name in names:
        playground.signal(name, number)
    assert [await playground.ended(name) for name in names] == [0] * len(names)
    assert time.monotonic() - began < BOUND_S
    await playground.nothing_left()
    assert (await playground.view()).nodes == {}


async def _in_phase(playground: Any, phase: Phase) -> None:
    """Bring a job on node a (and b) to a phase, and return while it is in it."""
    if phase is Phase.QUEUED:
        await playground.submit(batches=100_000, min_nodes=2)
        await playground.phase(Phase.QUEUED)
        return
    await playground.submit(batches=100_000)
    if phase is Phase.PREPARING:
        await playground.phase(Phase.PREPARING, Phase.RUNNING)
        return
    job = await playground.batch(2)

    def is_there(view: ClusterView) -> bool | None:
        now = view.jobs["tiny"].phase
        return now.phase is phase or now.generation > job.phase.generation or None  # short phases may have passed

    if phase is Phase.CHANGING:
        playground.start("b", stop_timeout_s=STOP_TIMEOUT_S)
        await playground.until(is_there, "a change")
    elif phase is Phase.STOPPING:
        await playground.ask(Desired.PAUSED, request=1)
        await playground.phase(Phase.STOPPING, Phase.PAUSED)
    elif phase is Phase.RECOVERING:
        (worker,) = job.workers_of(job.plan).values()
        os.kill(worker.pid, signal.SIGKILL)
        await playground.until(is_there, "a recovery")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "number"),
    [
        (Phase.QUEUED, signal.SIGINT),
        (Phase.PREPARING, signal.SIGTERM),
        (Phase.RUNNING, signal.SIGINT),
        (Phase.CHANGING, signal.SIGTERM),
        (Phase.STOPPING, signal.SIGINT),
        (Phase.RECOVERING, signal.SIGTERM),
    ],
)
async def test_a_daemon_leaves_in_every_phase(playground: Any, phase: Phase, number: signal.Signals) -> None:
    """One node, without a spare so that recovering takes its time; for a change a second one joins, and both leave."""
    playground.start("a", stop_timeout_s=STOP_TIMEOUT_S, num_spares=0)
    await playground.until(lambda view: view.nodes.get("a"), "node a")
    await _in_phase(playground, phase)
    await _all_leave(playground, *playground.daemons, number=number)


@pytest.mark.slow
async def test_a_daemon_leaves_while_etcd_is_away(tmp_path: Path) -> None:
    """Nobody can plan without it: it waits for as long as it may, says so, goes with 0, and is not started again."""
    settings = {"stop_timeout_s": 2, "num_spares": 0}
    async with (
        LocalCluster(tmp_path / "state", num_nodes=2, node_settings=settings) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        first, second = cluster.nodes
        await cluster.stop_etcd()
        first.signal(signal.SIGTERM)
        assert await asyncio.to_thread(first.process.wait, BOUND_S) == 0
        assert "leave_overdue" in first.log_path.read_text()
        await cluster.start_etcd()
        async with asyncio.timeout(BOUND_S):
            while set((await session.view()).nodes) != {second.name}:
                await asyncio.sleep(0.1)
        assert first.num_restarts == 0


async def _on_both(playground: Any) -> None:
    """A job that runs on a and b."""
    await playground.until(lambda view: {"a", "b"} <= set(view.nodes) or None, "both nodes")
    await playground.submit(batches=100_000)

    def is_on_both(view: Any) -> JobView | None:
        job = view.jobs.get("tiny")
        is_running = job is not None and job.plan is not None and job.phase.phase is Phase.RUNNING
        return job if is_running and {stage.node for stage in job.plan.workers} == {"a", "b"} else None

    await playground.until(is_on_both, "the job runs on both")
    await playground.batch(2)


async def _goes_on_without_b(playground: Any) -> None:
    """b has ended well, its records are gone, a trains, and no failure counts."""
    assert await playground.ended("b") == 0
    reached = (await playground.view()).jobs["tiny"].progress.batch

    def has_trained(view: Any) -> JobView | None:
        job = view.jobs["tiny"]
        return job if job.progress.batch > reached + 20 and "b" not in view.nodes else None

    job = await playground.until(has_trained, "a trains alone")
    assert report_goodput(job).num_replayed == 0
    assert not (await playground.view()).failures


@pytest.mark.slow
async def test_a_notice_of_the_cloud_drains_the_node(playground: Any) -> None:
    """No signal: the daemon sees the notice by itself, leaves within it, and no batch is computed again."""
    with Metadata() as cloud:
        playground.start("a")
        playground.start("b", preemption="gcp", preemption_server=f"127.0.0.1:{cloud.port}")
        await _on_both(playground)
        cloud.is_taken = True
        await _goes_on_without_b(playground)
    log = playground.log_of("b").read_text()
    assert "preemption_notice" in log
    assert "leave_overdue" not in log


@pytest.mark.slow
async def test_a_signal_to_every_process_of_a_node_drains_it(playground: Any) -> None:
    """Slurm signals all processes of a step: workers and the port's process go on until the daemon ends them."""
    playground.start("a")
    playground.start("b", environment={"HEADWAY_ONE_PORT": "true"})
    await _on_both(playground)
    for pid in _tree(playground.daemons["b"].pid):
        os.kill(pid, signal.SIGTERM)
    await _goes_on_without_b(playground)
    assert "leave_overdue" not in playground.log_of("b").read_text()


def _tree(root: int) -> list[int]:
    """A process and all below it."""
    found = [root]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found
