"""A node that is slower than it looks is measured, the plan is cut anew, and no bit of the result knows of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import job_of, submit
from headway.daemon.jobs.job import FaultSpec, PlacementSpec
from headway.daemon.local.cluster import LocalCluster
from headway.stages.spec import ModelSpec
from tests.integration.exactness.training import (
    WITHOUT_SPARES,
    Oracle,
    assert_same_bits,
    finished,
    small_job,
)
from tests.rigs.paces import paced_layers

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

MODEL = ModelSpec(
    num_hidden_layers=10, hidden_size=64, intermediate_size=172, num_attention_heads=4, num_key_value_heads=2
)
FAST_S, SLOW_S = 0.002, 0.008
"""The forward of a layer on either node."""


async def test_a_straggler_gets_less_of_the_model_and_the_bits_stay(oracle: Oracle, tmp_path: Path) -> None:
    """Two nodes, one slowed, equal for all that is known at the start: the job moves layers away from it by itself."""
    spec = small_job("straggler", batches=60, microbatch_size=4, sequence_length=64)
    spec = replace(spec, model=MODEL, fault=FaultSpec(snapshot_every=0, checkpoint_every=0))
    wanted = replace(spec, placement=PlacementSpec(min_nodes=2, max_nodes=2))
    paces = paced_layers(tmp_path, FAST_S, node_2=SLOW_S - FAST_S)
    async with (
        LocalCluster(tmp_path / "cluster", num_nodes=2, node_settings=WITHOUT_SPARES, environment=paces) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        await submit(session, wanted)
        result = await finished(session, "straggler", tmp_path)
        job = job_of(await session.view(), "straggler")
        events = [event.text for event in job.events.values()]
    assert len(set(result.generations)) > 1, events
    assert any("Other layers by measured times" in event for event in events), events
    assert_same_bits(result, oracle(spec))
