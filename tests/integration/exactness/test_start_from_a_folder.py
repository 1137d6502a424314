"""A job that starts from a model's folder, on two nodes of which one cannot read the folder."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import submit
from headway.daemon.jobs.job import OriginSpec, PlacementSpec
from headway.daemon.jobs.resolve import data_folder, default_cache_dir
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.origin.origin_config import model_opener
from headway.daemon.origin.origin_model import initial_weights_of, with_parts
from headway.daemon.reference.loop import reference
from headway.daemon.results.model_folder import write_model
from headway.stages.data.tokens import TokenShards
from tests.integration.exactness.training import (
    WITHOUT_SPARES,
    Result,
    assert_same_bits,
    finished,
    read_weights,
    small_job,
)

pytest.importorskip("transformers")

from tests.fakes.tiny_models import write_tiny_model

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow, pytest.mark.timeout(240)]


async def test_a_node_without_the_folder_gets_its_layers_from_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is in the home folder of one node alone. The job ends in the bits of the plain loop from it."""
    home = tmp_path / "home"
    await asyncio.to_thread(write_tiny_model, home / "model", model_type="qwen3", head_dim=16, shard_size="30KB")
    monkeypatch.setenv("HOME", str(home))
    url, model = model_opener(tmp_path)("file://~/model")
    spec = replace(small_job("from-a-folder", batches=4), model=model, origin=OriginSpec(url=url, job="from-a-folder"))
    spec = with_parts(replace(spec, placement=PlacementSpec(min_nodes=2, max_nodes=2)))
    async with LocalCluster(tmp_path / "cluster", num_nodes=1, node_settings=WITHOUT_SPARES) as cluster:
        await cluster.add_node(environment={"HOME": str(tmp_path / "elsewhere")})
        async with ClusterSession(cluster.address) as session:
            await submit(session, spec)
            piped = await finished(session, spec.job.name, tmp_path / "piped")
    losses: list[float] = []
    weights = reference(
        spec,
        TokenShards.open(data_folder(spec.data.source, default_cache_dir())),
        on_batch=lambda result: losses.append(result.loss),
        initial=initial_weights_of(spec),
    )
    write_model(tmp_path / "plain", spec.model, weights=weights, sequence_length=spec.train.sequence_length)
    assert_same_bits(piped, Result(tuple(losses), read_weights(tmp_path / "plain")))
