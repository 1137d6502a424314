"""The promise while users share a cluster: jobs shrink for one another, and take turns, and no bit changes."""

import asyncio
import getpass
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import job_of, submit
from headway.daemon.client.node_requests import report_shares, set_times
from headway.daemon.cluster.records import Phase
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import JobSpec, PlacementSpec
from headway.daemon.local.cluster import LocalCluster
from tests.integration.exactness.training import (
    WITHOUT_SPARES,
    Oracle,
    assert_same_bits,
    finished,
    small_job,
    until,
    until_batch,
)
from tests.rigs.paces import paced_layers

pytestmark = pytest.mark.timeout(500)

LAYER_S = 0.005
"""Pace of the layers until all has been seen that is to be seen while jobs train."""
FINISHED_S = 300.0
"""Seconds for a job to end on a busy machine."""


def long_job(name: str) -> JobSpec:
    return small_job(name, batches=140)


def short_job(name: str) -> JobSpec:
    return small_job(name, batches=12)


async def workers_up(session: ClusterSession, num_nodes: int) -> None:
    """Wait until every node has a worker: a job is left alone for five times as long as it took to start."""
    async with asyncio.timeout(FINISHED_S), aclosing(session.follow()) as views:
        async for view in views:
            if sum(bool(node.workers) for node in view.nodes.values()) >= num_nodes:
                return


async def submit_as(monkeypatch: pytest.MonkeyPatch, user: str, session: ClusterSession, spec: JobSpec) -> None:
    """Submit as another user."""
    monkeypatch.setattr(getpass, "getuser", lambda: user)
    await submit(session, spec)


def trains_on(job: JobView, num_nodes: int) -> bool:
    """Also if a node's worker was up later than others'."""
    return job.plan is not None and job.phase.phase is Phase.RUNNING and len(job.plan.workers) == num_nodes


@pytest.mark.slow
async def test_a_job_that_shrinks_for_another_users_changes_no_bit(
    tmp_path: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alice trains on three nodes, bob submits: her job gives up nodes between two batches, his starts, hers takes them
    back when he is done. Both have the bits of the reference, and nothing was computed twice."""
    first, second = long_job("shrinks"), short_job("comes")
    paces = paced_layers(tmp_path, LAYER_S)
    async with (
        LocalCluster(tmp_path / "state", num_nodes=3, node_settings=WITHOUT_SPARES, environment=paces) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        await workers_up(session, 3)
        await submit_as(monkeypatch, "alice", session, first)
        before = await until(session, lambda _, job: trains_on(job, 3), "shrinks")
        assert before.plan is not None
        await submit_as(monkeypatch, "bob", session, second)
        both = await until(session, lambda _, job: job.phase.phase is Phase.RUNNING, "comes")
        view = await session.view()
        paced_layers(tmp_path, 0)
        shrunk, users = job_of(view, "shrinks"), {line.user for line in report_shares(view)}
        assert shrunk.plan is not None
        assert not shrunk.devices & both.devices
        assert len(shrunk.plan.workers) < 3
        assert shrunk.plan.timeline == before.plan.timeline, "batches were computed twice"
        assert any("Gives devices to job comes of bob" in event.text for event in shrunk.events.values())
        of_bob = await finished(session, "comes", tmp_path / "bob", timeout_s=FINISHED_S)
        of_alice = await finished(session, "shrinks", tmp_path / "alice", timeout_s=FINISHED_S)
    assert users == {"alice", "bob"}
    assert_same_bits(of_bob, oracle(second))
    assert_same_bits(of_alice, oracle(first))


@pytest.mark.slow
async def test_a_job_that_is_stopped_for_another_changes_no_bit(
    tmp_path: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs need both nodes: the one of the lower priority is saved and queued, and goes on after the other."""
    both = PlacementSpec(min_nodes=2, max_nodes=2)
    paces = paced_layers(tmp_path, LAYER_S)
    low = replace(long_job("low"), placement=both)
    high = replace(short_job("high"), placement=both).with_priority(5)
    async with (
        LocalCluster(tmp_path / "state", num_nodes=2, node_settings=WITHOUT_SPARES, environment=paces) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        await set_times(session, slice_s=1.0, half_life_s=None)
        await workers_up(session, 2)
        await submit_as(monkeypatch, "alice", session, low)
        await until_batch(session, "low", 5)
        await submit_as(monkeypatch, "bob", session, high)
        of_bob = await finished(session, "high", tmp_path / "bob", timeout_s=FINISHED_S)
        paced_layers(tmp_path, 0)
        of_alice = await finished(session, "low", tmp_path / "alice", timeout_s=FINISHED_S)
        final = job_of(await session.view(), "low")
    assert any(event.text.startswith("Gives way to job high of bob (priority 5)") for event in final.events.values())
    assert_same_bits(of_bob, oracle(high))
    assert_same_bits(of_alice, oracle(low))
