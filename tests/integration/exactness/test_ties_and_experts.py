"""Tied embeddings, and mixtures of experts, on a cluster: the plain loop's bits at any cut, with replicas, through a
kill, a join and a pause.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import pause, resume, submit
from headway.daemon.client.job_watch import wait_for_phase
from headway.daemon.cluster.records import Phase
from headway.daemon.jobs.job import JobSpec, PlacementSpec
from headway.daemon.local.cluster import LocalCluster
from tests.integration.exactness.training import (
    WITHOUT_SPARES,
    Oracle,
    assert_same_bits,
    finished,
    small_job,
    train,
    until_batch,
)
from tests.rigs.fault_harness import FaultHarness, at_operation
from tests.rigs.paces import paced_layers
from tests.rigs.replicas import replicated_job

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

LAYER_S = 0.02
"""Pace of the layers until the last change, so that none comes too late."""


def with_experts(spec: JobSpec) -> JobSpec:
    """The job with a mixture of experts in each block, whose router has all that a router can have."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_shared_experts": 1}
    router = {"router_scoring": "sigmoid", "router_bias": True, "norm_topk_prob": True}
    return replace(
        spec,
        model=replace(spec.model, qk_norm=True, **experts, **router),  # type: ignore[arg-type]
        train=replace(spec.train, router_balance_loss=0.02, router_z_loss=0.001),
    )


def tied(spec: JobSpec) -> JobSpec:
    """The job with one matrix for embed and head."""
    return replace(spec, model=replace(spec.model, tie_word_embeddings=True))


@pytest.mark.slow
async def test_replicas_at_both_ends_survive_a_kill(harness: FaultHarness, oracle: Oracle) -> None:
    """2-1-2: both workers of each end add up with those that share their groups; one of the last stage dies. Each block
    is a mixture of experts."""
    spec = with_experts(tied(replicated_job("tied", 2, 1, 2, batches=20)))
    outcome = await harness.train(spec, at_operation(2, 12))
    (struck,) = outcome.struck
    outcome.assert_exact(oracle, hit=frozenset({struck["node"]}))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_any_cut_has_the_bits_of_the_plain_loop(
    oracle: Oracle, tmp_path: Path, schedule: Literal["2bw", "1f1b"], dtype: str
) -> None:
    """One, two, three and five stages."""
    async with LocalCluster(tmp_path / "cluster", num_nodes=5, node_settings=WITHOUT_SPARES) as cluster:
        for num_nodes in (1, 2, 3, 5):
            spec = tied(small_job(f"tied-{num_nodes}", schedule=schedule, dtype=dtype, reduction_groups=2))
            piped = await train(cluster, spec, tmp_path / str(num_nodes), num_nodes=num_nodes)
            assert_same_bits(piped, oracle(spec))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
async def test_experts_at_any_cut_have_the_bits_of_the_plain_loop(
    oracle: Oracle, tmp_path: Path, schedule: Literal["2bw", "1f1b"]
) -> None:
    """One, two, three and five stages of a mixture that is not tied."""
    async with LocalCluster(tmp_path / "cluster", num_nodes=5, node_settings=WITHOUT_SPARES) as cluster:
        for num_nodes in (1, 2, 3, 5):
            spec = with_experts(small_job(f"experts-{num_nodes}", schedule=schedule, reduction_groups=2))
            piped = await train(cluster, spec, tmp_path / str(num_nodes), num_nodes=num_nodes)
            assert_same_bits(piped, oracle(spec))


@pytest.mark.slow
async def test_a_join_and_a_pause_change_no_bit(oracle: Oracle, tmp_path: Path) -> None:
    """Two nodes, then a third, then a pause and a resume: the ends move, and their link with them."""
    name = "tied-joined"
    spec = tied(small_job(name, batches=20))
    environment = paced_layers(tmp_path, LAYER_S)
    async with (
        LocalCluster(
            tmp_path / "cluster", num_nodes=2, node_settings=WITHOUT_SPARES, environment=environment
        ) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        await submit(session, replace(spec, placement=PlacementSpec(min_nodes=2)))
        job = await until_batch(session, name, 2)
        await cluster.add_node()
        await until_batch(session, name, 3, generation=job.phase.generation + 1)
        await pause(session, name)
        await wait_for_phase(session, name, frozenset({Phase.PAUSED}), timeout_s=60.0)
        (tmp_path / "paces").unlink()
        await resume(session, name)
        piped = await finished(session, name, tmp_path / "out", timeout_s=120.0)
    assert_same_bits(piped, oracle(spec))
    assert len(set(piped.generations)) >= 3
