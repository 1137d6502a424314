"""A node that is taken away with notice, by a cloud or by a batch system: it leaves, and nothing is computed again."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from headway.daemon.cluster.records import Phase
from headway.daemon.decide.job_view import JobView
from headway.daemon.reports.goodput_report import report_goodput
from tests.rigs.metadata_server import Metadata


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
