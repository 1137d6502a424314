"""The promise where stages begin and end between attention and MLP of a block: the bits of whole blocks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.base.fault_points import ENVIRONMENT
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import submit
from headway.daemon.cluster.records import PlanRecord
from headway.daemon.jobs.job import FaultSpec, PlacementSpec
from headway.daemon.local.cluster import LocalCluster
from tests.integration.exactness.training import (
    MODEL,
    WITHOUT_SPARES,
    Oracle,
    assert_same_bits,
    finished,
    small_job,
    train,
    until_batch,
)
from tests.rigs.paces import pace_faults, paced_layers

LAYER_S = 0.005
"""Pace of the blocks until the kill, so that it does not come too late and a block counts more than the ends."""


def cut_inside(plan: PlanRecord | None) -> list[str]:
    """The halves with which a plan's stages begin."""
    assert plan is not None
    return [worker.layers[0] for worker in plan.workers if worker.layers[0].endswith(".mlp")]


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    "nodes", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow), 5]
)
async def test_halves_of_blocks_have_the_bits_of_the_plain_loop(
    cluster: LocalCluster, oracle: Oracle, tmp_path: Path, nodes: int
) -> None:
    """Blocks are two layers each, on any number of nodes → losses and exported weights of the loop with whole ones."""
    spec = small_job(f"split-{nodes}", recompute="block" if nodes == 5 else "none")
    spec = replace(spec, placement=PlacementSpec(split_blocks=True))
    assert_same_bits(await train(cluster, spec, tmp_path, num_nodes=nodes), oracle(spec))


@pytest.mark.timeout(240)
async def test_a_kill_that_moves_cuts_into_blocks_changes_no_bit(tmp_path: Path, oracle: Oracle) -> None:
    """Four nodes have a block each, one dies, and three share four blocks by halves: the reference's bits."""
    spec = small_job("split-killed", batches=60)
    placement = PlacementSpec(min_nodes=3, recut=False, split_blocks=True)
    spec = replace(spec, model=replace(MODEL, num_hidden_layers=4), placement=placement)
    spec = replace(spec, fault=FaultSpec(snapshot_every=2))
    environment = paced_layers(tmp_path, 0)
    paces = [fault | {"when": fault["when"] | {"kind": "block"}} for fault in pace_faults(LAYER_S)]
    Path(environment[ENVIRONMENT]).write_text("".join(json.dumps(fault) + "\n" for fault in paces))
    async with (
        LocalCluster(tmp_path / "state", num_nodes=4, node_settings=WITHOUT_SPARES, environment=environment) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        await submit(session, spec)
        first = await until_batch(session, "split-killed", 9)
        assert first.plan is not None
        assert len(first.plan.workers) == 4
        assert not cut_inside(first.plan)
        cluster.kill_node(first.plan.workers[1].node)
        later = await until_batch(session, "split-killed", 9, generation=first.phase.generation + 1)
        assert cut_inside(later.plan)
        paced_layers(tmp_path, 0)
        result = await finished(session, "split-killed", tmp_path / "out")
    assert_same_bits(result, oracle(spec))
    assert len(set(result.generations)) >= 2, "the kill came too late"
