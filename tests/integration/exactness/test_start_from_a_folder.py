"""Jobs that start from a model's folder: of each family, where a node cannot read it, or gets no answer."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import submit
from headway.daemon.client.node_requests import drain, release
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import FaultSpec, JobSpec, PlacementSpec
from headway.daemon.jobs.resolve import data_folder, default_cache_dir
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.local.reference_loop import Weights, reference
from headway.daemon.models.adapter_folder import AdapterFolderWriter
from headway.daemon.models.model_folder import write_model
from headway.daemon.models.origin_config import model_opener
from headway.daemon.models.origin_model import initial_weights_of, with_parts
from headway.stages.data.tokens import TokenShards
from headway.stages.spec import AdapterSpec
from tests.integration.exactness.training import (
    WITHOUT_SPARES,
    Result,
    assert_same_bits,
    finished,
    read_weights,
    small_job,
    until,
    until_batch,
)
from tests.rigs.file_server import serving
from tests.rigs.paces import paced_layers

pytest.importorskip("transformers")

from tests.rigs.hub_to_adapter import workers_of
from tests.rigs.tiny_models import FAMILIES, write_tiny_model

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow, pytest.mark.timeout(240)]

LAYER_S = 0.005
PATIENCE_S = 180.0


def plain_run(spec: JobSpec) -> tuple[Weights, tuple[float, ...]]:
    """What the plain loop makes of the folder's weights, and its losses."""
    losses: list[float] = []
    weights = reference(
        spec,
        TokenShards.open(data_folder(spec.data.source, default_cache_dir())),
        on_batch=lambda result: losses.append(result.loss),
        initial=initial_weights_of(spec),
    )
    return weights, tuple(losses)


def plain_result(spec: JobSpec, folder: Path) -> Result:
    """The weights and losses of the plain loop."""
    weights, losses = plain_run(spec)
    write_model(folder, spec.model, weights=weights, sequence_length=spec.train.sequence_length)
    return Result(losses, read_weights(folder))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def unlike(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """Three nodes of unlike speed."""
    folder = tmp_path_factory.mktemp("unlike")
    environment = paced_layers(folder, LAYER_S, node_2=LAYER_S / 2, node_3=LAYER_S / 4)
    async with LocalCluster(
        folder / "cluster", num_nodes=3, node_settings=WITHOUT_SPARES, environment=environment
    ) as cluster:
        yield cluster


SEVERAL = (
    *("glm4", "gemma3_text", "olmo3", "qwen3_5_text", "qwen3_5_moe_text", "smollm3", "granite"),
    *("phi3", "qwen2_moe", "seed_oss", "ministral", "gpt_oss"),
)


@pytest.mark.parametrize("model_type", SEVERAL)
async def test_a_family_through_a_kill(unlike: LocalCluster, tmp_path: Path, model_type: str) -> None:
    """The worker of the last stage dies half way. Windows and longrope's first length are shorter than a row: the job
    ends in the bits of the plain loop.
    """
    name = f"family-{model_type.replace('_', '-')}"
    await asyncio.to_thread(write_tiny_model, tmp_path / "model", model_type=model_type, **FAMILIES[model_type])
    opened, model = model_opener(tmp_path)("model", ())
    spec = replace(small_job(name, batches=24, sequence_length=24), model=model, origin=replace(opened, job=name))
    spec = with_parts(
        replace(spec, fault=FaultSpec(snapshot_every=4), placement=PlacementSpec(min_nodes=3, max_nodes=3))
    )
    async with ClusterSession(unlike.address) as session:
        await submit(session, spec)
        job = await until_batch(session, name, 6, timeout_s=PATIENCE_S)
        os.kill(workers_of(job)[-1].pid, signal.SIGKILL)
        piped = await finished(session, name, tmp_path / "piped", timeout_s=PATIENCE_S)
    assert len(set(piped.generations)) > 1, "the kill came too late"
    assert_same_bits(piped, plain_result(spec, tmp_path / "plain"))


async def test_a_node_without_the_folder_gets_its_layers_from_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is in the home folder of one node alone. The job ends in the bits of the plain loop from it."""
    home = tmp_path / "home"
    await asyncio.to_thread(write_tiny_model, home / "model", model_type="qwen3", head_dim=16, shard_size="30KB")
    monkeypatch.setenv("HOME", str(home))
    opened, model = model_opener(tmp_path)("file://~/model", ())
    spec = replace(small_job("from-a-folder", batches=4), model=model, origin=replace(opened, job="from-a-folder"))
    spec = with_parts(replace(spec, placement=PlacementSpec(min_nodes=2, max_nodes=2)))
    async with LocalCluster(tmp_path / "cluster", num_nodes=1, node_settings=WITHOUT_SPARES) as cluster:
        await cluster.add_node(settings={"allowed_places": tmp_path / "cluster"})
        async with ClusterSession(cluster.address) as session:
            await submit(session, spec)
            piped = await finished(session, spec.job.name, tmp_path / "piped")
    assert_same_bits(piped, plain_result(spec, tmp_path / "plain"))


async def test_a_job_trains_on_while_a_new_node_reads_its_frozen_layers(
    cluster: LocalCluster, set_pace: Callable[[float], None], tmp_path: Path
) -> None:
    """A node is free again, and the model's URL does not answer it: the job goes on without it, and says which node
    reads what. The URL answers: the node takes its layers. The adapters are those of the plain loop.
    """
    name = "frozen"
    await asyncio.to_thread(write_tiny_model, tmp_path / "model", model_type="qwen3", head_dim=16)
    away = [node.name for node in cluster.nodes[1:]]
    with serving(tmp_path) as server:
        opened, model = model_opener(tmp_path)(f"{server.url}/model", ())
        spec = small_job(name, batches=60)
        spec = replace(spec, model=replace(model, adapter=AdapterSpec(rank=4)), origin=replace(opened, job=name))
        spec = with_parts(replace(spec, placement=PlacementSpec(min_nodes=1, max_nodes=2)))
        set_pace(LAYER_S)
        async with ClusterSession(cluster.address) as session:
            for node in away:
                await drain(session, node)
            try:
                await submit(session, spec)
                before = await until_batch(session, name, 1)
                server.gate.clear()
                await release(session, away[0])

                def is_told(_: ClusterView, job: JobView) -> bool:
                    reading = job.readings.get(away[0])
                    return reading is not None and reading.url == opened.url and reading.silent_s > 0

                job = await until(session, is_told, name)
                assert job.progress is not None
                job = await until_batch(session, name, job.progress.batch + 3)
                assert (job.plan, server.gate.is_set()) == (before.plan, False)
                server.gate.set()
                await until_batch(session, name, 0, generation=before.phase.generation + 1)
                set_pace(0)
                piped = await finished(session, name, tmp_path / "piped")
            finally:
                for node in away:
                    await release(session, node)
        weights, losses = plain_run(spec)
    with AdapterFolderWriter(tmp_path / "plain", spec.model, base=opened.url) as writer:
        for layer, parameters in weights.items():
            writer.add(layer, parameters)
    assert piped.losses == losses
    files = [tmp_path / "piped" / "model", tmp_path / "plain"]
    assert len({(folder / "adapter_model.safetensors").read_bytes() for folder in files}) == 1
