"""LoRA on a cluster: the adapters of the plain loop at 1, 2 and 3 stages, merged too, and through a kill."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.export import export
from headway.daemon.client.job_requests import submit
from headway.daemon.jobs.job import FaultSpec, OriginSpec, PlacementSpec
from headway.daemon.jobs.resolve import data_folder, default_cache_dir
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.origin.origin_config import model_opener
from headway.daemon.origin.origin_model import initial_weights_of, with_parts
from headway.daemon.reference.loop import reference
from headway.daemon.results.adapter_folder import AdapterFolderWriter
from headway.stages.data.tokens import TokenShards
from headway.stages.model.adapters import merged
from headway.stages.spec import AdapterSpec
from tests.integration.exactness.training import WITHOUT_SPARES, finished, small_job, until_batch

pytest.importorskip("transformers")

from tests.fakes.tiny_models import write_tiny_model

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
async def test_adapters_of_a_folder_at_any_cut(tmp_path: Path, schedule: Literal["2bw", "1f1b"]) -> None:
    """One, two and three stages: the adapters of the plain loop. Merged, all weights are there."""
    await asyncio.to_thread(write_tiny_model, tmp_path / "model", model_type="qwen3", head_dim=16)
    url, model = model_opener(tmp_path)("model")
    model = replace(model, adapter=AdapterSpec(rank=4, alpha=8.0))
    spec = replace(small_job("lora", schedule=schedule), model=model, origin=OriginSpec(url=url, job="lora"))
    losses: list[float] = []
    weights = reference(
        with_parts(spec),
        TokenShards.open(data_folder(spec.data.source, default_cache_dir())),
        on_batch=lambda result: losses.append(result.loss),
        initial=initial_weights_of(spec),
    )
    with AdapterFolderWriter(tmp_path / "plain", model, base=url) as writer:
        for layer, parameters in weights.items():
            writer.add(layer, parameters)
    async with LocalCluster(tmp_path / "cluster", num_nodes=3, node_settings=WITHOUT_SPARES) as cluster:
        for num_nodes in (1, 2, 3):
            name = f"lora-{num_nodes}"
            job = replace(spec, job=replace(spec.job, name=name), origin=OriginSpec(url=url, job=name))
            job = with_parts(replace(job, placement=PlacementSpec(min_nodes=num_nodes, max_nodes=num_nodes)))
            async with ClusterSession(cluster.address) as session:
                await submit(session, job)
                piped = await finished(session, name, tmp_path / name)
                await export(session, name, tmp_path / f"{name}-merged", merge=True)
            assert piped.losses == tuple(losses)
            files = [tmp_path / name / "model", tmp_path / "plain"]
            assert len({(folder / "adapter_model.safetensors").read_bytes() for folder in files}) == 1
    import transformers

    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "lora-3-merged", dtype=torch.float32)
    reader = initial_weights_of(spec)
    assert reader is not None
    expected = merged(reader("block.1"), weights["block.1"], model.adapter)
    for parameter, tensor in expected.items():
        assert torch.equal(opened.get_parameter(f"model.layers.1.{parameter}"), tensor), parameter
    assert not torch.equal(
        expected["mlp.up_proj.weight"],
        load_file(tmp_path / "model" / "model.safetensors")["model.layers.1.mlp.up_proj.weight"],
    )


async def test_a_kill_leaves_no_adapter_behind(tmp_path: Path) -> None:
    """A node dies in the middle. The new owners take its adapters from files, and frozen weights from the seed."""
    spec = small_job("lora-killed", batches=400)
    spec = replace(spec, model=replace(spec.model, adapter=AdapterSpec(rank=4)), fault=FaultSpec(snapshot_every=5))
    spec = replace(spec, placement=PlacementSpec(min_nodes=2, max_nodes=3))
    losses: list[float] = []
    tokens = TokenShards.open(data_folder(spec.data.source, default_cache_dir()))
    weights = reference(spec, tokens, on_batch=lambda result: losses.append(result.loss))
    with AdapterFolderWriter(tmp_path / "plain", spec.model, base="") as writer:
        for layer, parameters in weights.items():
            writer.add(layer, parameters)
    async with (
        LocalCluster(tmp_path / "cluster", num_nodes=3, node_settings=WITHOUT_SPARES) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        await submit(session, spec)
        await until_batch(session, spec.job.name, 20)
        cluster.kill_node(cluster.nodes[-1].name)
        piped = await finished(session, spec.job.name, tmp_path / "piped")
    assert piped.losses == tuple(losses)
    assert len(set(piped.generations)) > 1, "the kill came too late"
    files = [tmp_path / "piped" / "model", tmp_path / "plain"]
    assert len({(folder / "adapter_model.safetensors").read_bytes() for folder in files}) == 1
