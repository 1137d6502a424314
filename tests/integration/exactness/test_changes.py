"""The promise through planned changes: joins, drains, pauses, and a cluster that is stopped and started again."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import job_of, pause, resume, submit
from headway.daemon.client.job_watch import wait_for_phase
from headway.daemon.client.node_requests import drain, release
from headway.daemon.cluster.records import Phase
from headway.daemon.jobs.job import PlacementSpec
from headway.daemon.local.cluster import LocalCluster
from tests.integration.exactness.training import (
    TIMEOUT_S,
    WITHOUT_SPARES,
    Oracle,
    assert_same_bits,
    finished,
    small_job,
    until_batch,
)
from tests.rigs.paces import paced_layers

pytestmark = pytest.mark.timeout(240)  # several starts of a cluster, on a loaded machine

BATCHES = 60
MICROBATCHES = 8
LAYER_S = 0.005
"""Pace of the layers until the last change has happened: half a second a batch, so that no change comes too late."""


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_a_node_that_is_free_again_in_the_middle_changes_no_bit(
    cluster: LocalCluster, set_pace: Callable[[float], None], tmp_path: Path, oracle: Oracle
) -> None:
    """Two nodes train, a third is released, the stages are cut anew between two batches: the reference's bits."""
    spec = small_job("release", batches=BATCHES, microbatches=MICROBATCHES)
    spec = replace(spec, placement=PlacementSpec(min_nodes=2, max_nodes=3))
    set_pace(LAYER_S)
    async with ClusterSession(cluster.address) as session:
        away = [node.name for node in cluster.nodes[2:]]
        for name in away:
            await drain(session, name)
        try:
            await submit(session, spec)
            first = await until_batch(session, "release", 2)
            assert first.plan is not None
            assert len(first.plan.workers) == 2
            await release(session, away[0])
            await until_batch(session, "release", 3, generation=first.phase.generation + 1)
            set_pace(0)
            result = await finished(session, "release", tmp_path / "out")
        finally:
            for name in away:
                await release(session, name)
    assert_same_bits(result, oracle(spec))
    assert len(set(result.generations)) >= 2, "the node came too late to change anything"


@pytest.mark.slow
async def test_a_node_that_joins_in_the_middle_changes_no_bit(tmp_path: Path, oracle: Oracle) -> None:
    """Two nodes train, a third joins, the stages are cut anew between two batches: the reference's bits."""
    spec = small_job("join", batches=BATCHES, microbatches=MICROBATCHES)
    paces = paced_layers(tmp_path, LAYER_S)
    async with (
        LocalCluster(tmp_path / "state", num_nodes=2, node_settings=WITHOUT_SPARES, environment=paces) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        await submit(session, spec)
        first = await until_batch(session, "join", 2)
        assert first.plan is not None
        assert len(first.plan.workers) == 2
        await cluster.add_node()
        await until_batch(session, "join", 3, generation=first.phase.generation + 1)
        paced_layers(tmp_path, 0)
        result = await finished(session, "join", tmp_path / "out")
    assert_same_bits(result, oracle(spec))
    assert len(set(result.generations)) >= 2, "the join came too late to change anything"


@pytest.mark.slow
async def test_a_cluster_stopped_and_started_in_the_middle_changes_no_bit(tmp_path: Path, oracle: Oracle) -> None:
    """A node stops half way, which saves the job; two start on the same folder and finish: the same bits."""
    spec = small_job("stop-start", batches=BATCHES, microbatches=MICROBATCHES)
    paces = paced_layers(tmp_path, LAYER_S)
    async with (
        LocalCluster(tmp_path / "state", num_nodes=1, node_settings=WITHOUT_SPARES, environment=paces) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        await submit(session, spec)
        await until_batch(session, "stop-start", 2)
    async with (
        LocalCluster(tmp_path / "state", num_nodes=2, node_settings=WITHOUT_SPARES) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        before = job_of(await session.view(), "stop-start")
        assert before.checkpoint is not None
        assert 0 < before.checkpoint.boundary < BATCHES
        result = await finished(session, "stop-start", tmp_path / "out")
    assert_same_bits(result, oracle(spec))
    assert len(set(result.generations)) >= 2


@pytest.mark.asyncio(loop_scope="session")
async def test_a_pause_and_a_drain_in_the_middle_change_no_bit(
    cluster: LocalCluster, set_pace: Callable[[float], None], tmp_path: Path, oracle: Oracle
) -> None:
    """Three nodes train; the job is paused and resumed, then a node is told to leave: the reference's bits."""
    spec = small_job("pause-drain", batches=BATCHES, microbatches=MICROBATCHES)
    spec = replace(spec, placement=PlacementSpec(min_nodes=2, max_nodes=3))
    set_pace(LAYER_S)
    async with ClusterSession(cluster.address) as session:
        await submit(session, spec)
        await until_batch(session, "pause-drain", 2)
        await pause(session, "pause-drain")
        paused = await wait_for_phase(session, "pause-drain", frozenset({Phase.PAUSED}), timeout_s=TIMEOUT_S)
        assert paused.checkpoint is not None
        await resume(session, "pause-drain")
        running = await until_batch(
            session, "pause-drain", paused.checkpoint.boundary, generation=paused.phase.generation + 1
        )
        assert running.plan is not None
        leaving = running.plan.workers[0].node
        await drain(session, leaving)
        try:
            await until_batch(session, "pause-drain", 0, generation=running.phase.generation + 1)
            set_pace(0)
            result = await finished(session, "pause-drain", tmp_path / "out")
            view = await session.view()
        finally:
            await release(session, leaving)
    final = job_of(view, "pause-drain")
    assert view.nodes[leaving].is_draining, "the mark went away when the node registered what it had seen"
    assert_same_bits(result, oracle(spec))
    assert len(set(result.generations)) >= 3, f"the drain came too late: {final.phase.reason}"
