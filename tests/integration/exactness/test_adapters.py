"""LoRA on a cluster: the adapters of the plain loop at 1, 2 and 3 stages, merged too, and through what fails."""

import asyncio
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.export import export
from headway.daemon.client.job_requests import pause, resume, submit
from headway.daemon.client.job_watch import wait_for_phase
from headway.daemon.cluster.records import Phase, WorkerRecord
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import DataSpec, FaultSpec, JobSpec, PlacementSpec
from headway.daemon.jobs.resolve import data_folder, default_cache_dir
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.local.reference_loop import reference
from headway.daemon.models.adapter_folder import AdapterFolderWriter
from headway.daemon.models.origin_config import model_opener
from headway.daemon.models.origin_model import initial_adapters_of, initial_weights_of, with_parts
from headway.stages.data.shard_index import read_index
from headway.stages.data.shard_writer import DataForm, writing_shards
from headway.stages.data.tokens import TokenShards
from headway.stages.ids import LayerName
from headway.stages.model.adapters import merged
from headway.stages.model.decoder import parameter_shapes, trained_shapes
from headway.stages.model.initial_weights import frozen_beside
from headway.stages.model.quantized import dequantized
from headway.stages.spec import AdapterSpec, layer_names
from tests.integration.exactness.training import WITHOUT_SPARES, finished, small_job, until_batch

pytest.importorskip("transformers")

from tests.rigs.tiny_models import write_tiny_model

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow, pytest.mark.timeout(480)]
pytestmark.append(pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"))  # of PEFT's own call


PATIENCE_S = 240.0


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
async def test_adapters_of_a_folder_at_any_cut(tmp_path: Path, schedule: Literal["2bw", "1f1b"]) -> None:
    """One, two and three stages: the adapters of the plain loop. Merged, all weights are there."""
    await asyncio.to_thread(write_tiny_model, tmp_path / "model", model_type="qwen3", head_dim=16)
    opened, model = model_opener(tmp_path)("model", ())
    model = replace(model, adapter=AdapterSpec(rank=4, alpha=8.0))
    spec = replace(small_job("lora", schedule=schedule), model=model, origin=replace(opened, job="lora"))
    losses: list[float] = []
    weights = reference(
        with_parts(spec),
        TokenShards.open(data_folder(spec.data.source, default_cache_dir())),
        on_batch=lambda result: losses.append(result.loss),
        initial=initial_weights_of(spec),
    )
    with AdapterFolderWriter(tmp_path / "plain", model, base=opened.url) as writer:
        for layer, parameters in weights.items():
            writer.add(layer, parameters)
    async with LocalCluster(tmp_path / "cluster", num_nodes=3, node_settings=WITHOUT_SPARES) as cluster:
        for num_nodes in (1, 2, 3):
            name = f"lora-{num_nodes}"
            job = replace(spec, job=replace(spec.job, name=name), origin=replace(opened, job=name))
            job = with_parts(replace(job, placement=PlacementSpec(min_nodes=num_nodes, max_nodes=num_nodes)))
            async with ClusterSession(cluster.address) as session:
                await submit(session, job)
                piped = await finished(session, name, tmp_path / name)
                await export(session, name, tmp_path / f"{name}-merged", merge=True)
            assert piped.losses == tuple(losses)
            files = [tmp_path / name / "model", tmp_path / "plain"]
            assert len({(folder / "adapter_model.safetensors").read_bytes() for folder in files}) == 1
    import transformers

    merge = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "lora-3-merged", dtype=torch.float32)
    reader = initial_weights_of(spec)
    assert reader is not None
    expected = merged(reader("block.1"), weights["block.1"], model.adapter)
    for parameter, tensor in expected.items():
        assert torch.equal(merge.get_parameter(f"model.layers.1.{parameter}"), tensor), parameter
    assert not torch.equal(
        expected["mlp.up_proj.weight"],
        load_file(tmp_path / "model" / "model.safetensors")["model.layers.1.mlp.up_proj.weight"],
    )


async def test_adapters_of_experts_are_continued_at_any_cut(tmp_path: Path) -> None:
    """A job begins with an exported folder, B no zeros: one and three nodes end in the plain loop's adapters."""
    family: dict[str, Any] = {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2}
    await asyncio.to_thread(write_tiny_model, tmp_path / "model", **family)
    opened, model = model_opener(tmp_path)("model", ())
    targets = ("q_proj", "gate_proj", "up_proj", "down_proj")
    model = replace(model, adapter=AdapterSpec(rank=4, alpha=8.0, targets=targets))
    with AdapterFolderWriter(tmp_path / "a", model, base=opened.url) as writer:
        for layer in layer_names(model):
            shapes = trained_shapes(layer, model)
            writer.add(layer, {parameter: 0.05 * torch.randn(shape) for parameter, shape in shapes.items()})
    opened, model = model_opener(tmp_path)("a", ())
    spec = replace(small_job("more"), model=model, origin=replace(opened, job="more"))
    plain = reference(
        spec,
        TokenShards.open(data_folder(spec.data.source, default_cache_dir())),
        on_batch=lambda _: None,
        initial=initial_weights_of(spec),
        adapters=initial_adapters_of(spec),
    )
    with AdapterFolderWriter(tmp_path / "plain", model, base=opened.url) as writer:
        for layer, parameters in plain.items():
            writer.add(layer, parameters)
    async with LocalCluster(tmp_path / "cluster", num_nodes=3, node_settings=WITHOUT_SPARES) as cluster:
        for num_nodes in (1, 3):
            name = f"more-{num_nodes}"
            job = replace(spec, job=replace(spec.job, name=name), origin=replace(opened, job=name))
            job = with_parts(replace(job, placement=PlacementSpec(min_nodes=num_nodes, max_nodes=num_nodes)))
            async with ClusterSession(cluster.address) as session:
                await submit(session, job)
                await finished(session, name, tmp_path / name)
            files = [tmp_path / name / "model", tmp_path / "plain"]
            assert len({(folder / "adapter_model.safetensors").read_bytes() for folder in files}) == 1


def of_pairs(spec: JobSpec, folder: Path) -> JobSpec:
    """The job, which learns preferences from rows of two pairs each."""
    random = np.random.default_rng(3)
    flags = np.tile([3, *[1] * 3, *[3, 1, 1, 1] * 3, 1], 60)
    with writing_shards(folder, DataForm(vocab_size=256, has_flags=True, row_tokens=17, holds_pairs=True)) as writer:
        writer.append(random.integers(0, 256, 17 * 60), flags)
    data = DataSpec(source=str(folder), sha256=read_index(folder).sha256)
    train = replace(spec.train, objective="dpo", loss_mask="data", documents="separate", dpo_beta=0.5)
    return replace(spec, data=data, train=train)


@pytest.mark.parametrize("objective", ["next_token", "dpo"])
async def test_a_kill_leaves_no_adapter_behind(tmp_path: Path, objective: str) -> None:
    """A node dies in the middle. The new owners take its adapters from files, and frozen weights from the seed."""
    spec = small_job("lora-killed", batches=400)
    spec = replace(spec, model=replace(spec.model, adapter=AdapterSpec(rank=4)), fault=FaultSpec(snapshot_every=5))
    spec = replace(spec, placement=PlacementSpec(min_nodes=2, max_nodes=3))
    if objective == "dpo":
        spec = of_pairs(spec, tmp_path / "pairs")
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


@pytest.mark.parametrize("are_split", [False, True])
async def test_a_base_in_4_bits_through_a_kill(tmp_path: Path, *, are_split: bool) -> None:
    """A node of three dies. The others load codes, not weights: the plain loop's adapters, and merged the W' of nf4;
    so, too, with halves of blocks, which have parts of their own.
    """
    adapter = AdapterSpec(rank=4, alpha=8.0, quantize="nf4")
    await asyncio.to_thread(write_tiny_model, tmp_path / "model", model_type="qwen3", head_dim=16)
    spec, plain = trained_beside(tmp_path, "model", small_job("lora-nf4", batches=400), adapter)
    async with (
        LocalCluster(tmp_path / "cluster", num_nodes=3, node_settings=WITHOUT_SPARES) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        placement = PlacementSpec(min_nodes=2, max_nodes=3, split_blocks=are_split)
        await submit(session, with_parts(replace(spec, placement=placement)))
        await until_batch(session, spec.job.name, 20, timeout_s=PATIENCE_S)
        cluster.kill_node(cluster.nodes[-1].name)
        piped = await finished(session, spec.job.name, tmp_path / "piped", timeout_s=PATIENCE_S)
        await export(session, spec.job.name, tmp_path / "merged", merge=True)
    assert len(set(piped.generations)) > 1, "the kill came too late"
    assert (tmp_path / "piped/model/adapter_model.safetensors").read_bytes() == plain
    given, name = initial_weights_of(spec), LayerName("block.1")
    assert given is not None
    base = frozen_beside(given(name), name, spec.model, spec.train, device="cpu")
    base = dequantized(base, parameter_shapes(name, spec.model), "nf4")
    trained = load_file(tmp_path / "plain/adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1."
    adapters = {key.removeprefix(prefix): tensor for key, tensor in trained.items() if key.startswith(prefix)}
    found = load_file(tmp_path / "merged/model.safetensors")
    for key, tensor in merged(base, adapters, adapter).items():
        assert torch.equal(found[f"model.layers.1.{key}"], tensor), key


async def test_a_node_without_the_base_recovers_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One node of two reads the folder. A worker of the other is killed, the job is paused and resumed: same bits."""
    spec, plain = await job_in_home(tmp_path, monkeypatch, "lora-without-access")
    async with LocalCluster(tmp_path / "cluster", num_nodes=1, node_settings=WITHOUT_SPARES) as cluster:
        lacking = await cluster.add_node(settings={"allowed_places": tmp_path / "cluster"})
        async with ClusterSession(cluster.address) as session:
            await submit(session, spec)
            job = await until_batch(session, spec.job.name, 10, timeout_s=PATIENCE_S)
            os.kill(worker_on(job, lacking).pid, signal.SIGKILL)
            await until_batch(session, spec.job.name, 20, timeout_s=PATIENCE_S)
            await pause(session, spec.job.name)
            await wait_for_phase(session, spec.job.name, frozenset({Phase.PAUSED}), timeout_s=PATIENCE_S)
            await resume(session, spec.job.name)
            await finished(session, spec.job.name, tmp_path / "piped", timeout_s=PATIENCE_S)
    assert (tmp_path / "piped/model/adapter_model.safetensors").read_bytes() == plain


async def test_a_base_that_is_gone_is_named_and_may_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is moved away and a worker killed: the job fails and names it. Back it goes on: same bits."""
    spec, plain = await job_in_home(tmp_path, monkeypatch, "lora-base-gone")
    async with (
        LocalCluster(tmp_path / "cluster", num_nodes=2, node_settings=WITHOUT_SPARES) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        await submit(session, spec)
        job = await until_batch(session, spec.job.name, 10, timeout_s=PATIENCE_S)
        (tmp_path / "home/model").rename(tmp_path / "home/away")
        os.kill(worker_on(job, "node-1").pid, signal.SIGKILL)
        job = await wait_for_phase(session, spec.job.name, frozenset({Phase.FAILED}), timeout_s=PATIENCE_S)
        gone = r"home/model: is missing, or has no config.json any more; node-[12] cannot send"
        assert re.search(gone, job.phase.error)
        (tmp_path / "home/away").rename(tmp_path / "home/model")
        await resume(session, spec.job.name)
        await finished(session, spec.job.name, tmp_path / "piped", timeout_s=PATIENCE_S)
    assert (tmp_path / "piped/model/adapter_model.safetensors").read_bytes() == plain


async def job_in_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[JobSpec, bytes]:
    """A job of two nodes from a folder in the home folder, and the adapters of its plain loop."""
    home = tmp_path / "home"
    await asyncio.to_thread(write_tiny_model, home / "model", model_type="qwen3", head_dim=16)
    monkeypatch.setenv("HOME", str(home))
    return trained_beside(tmp_path, "file://~/model", small_job(name, batches=80), AdapterSpec(rank=4, alpha=8.0))


def trained_beside(tmp_path: Path, folder: str, spec: JobSpec, adapter: AdapterSpec) -> tuple[JobSpec, bytes]:
    """The job of two nodes beside a folder's weights, and the adapters of its plain loop."""
    opened, model = model_opener(tmp_path)(folder, ())
    spec = replace(spec, fault=FaultSpec(snapshot_every=5), origin=replace(opened, job=spec.job.name))
    spec = replace(spec, model=replace(model, adapter=adapter))
    spec = with_parts(replace(spec, placement=PlacementSpec(min_nodes=2, max_nodes=2)))
    tokens = TokenShards.open(data_folder(spec.data.source, default_cache_dir()))
    weights = reference(spec, tokens, on_batch=lambda _: None, initial=initial_weights_of(spec))
    with AdapterFolderWriter(tmp_path / "plain", spec.model, base=opened.url) as writer:
        for layer, parameters in weights.items():
            writer.add(layer, parameters)
    return spec, (tmp_path / "plain/adapter_model.safetensors").read_bytes()


def worker_on(job: JobView, node: str) -> WorkerRecord:
    """The worker in force on a node."""
    assert job.plan is not None
    return next(worker for worker in job.workers_of(job.plan).values() if worker.node == node)


async def test_replicas_of_a_stage_without_adapters(tmp_path: Path) -> None:
    """Embedding, block and head on stages of their own, the first and last with two replicas: nothing to add there."""
    spec = small_job("lora-replicas", batches=6, reduction_groups=2)
    spec = replace(spec, model=replace(spec.model, num_hidden_layers=1, adapter=AdapterSpec(rank=4)))
    spec = replace(spec, placement=PlacementSpec(replicas=(2, 1, 2)))
    losses: list[float] = []
    tokens = TokenShards.open(data_folder(spec.data.source, default_cache_dir()))
    weights = reference(spec, tokens, on_batch=lambda result: losses.append(result.loss))
    with AdapterFolderWriter(tmp_path / "plain", spec.model, base="") as writer:
        for layer, parameters in weights.items():
            writer.add(layer, parameters)
    async with (
        LocalCluster(tmp_path / "cluster", num_nodes=5, node_settings=WITHOUT_SPARES) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        await submit(session, spec)
        piped = await finished(session, spec.job.name, tmp_path / "piped", timeout_s=PATIENCE_S)
    assert piped.losses == tuple(losses)
    files = [tmp_path / "piped" / "model", tmp_path / "plain"]
    assert len({(folder / "adapter_model.safetensors").read_bytes() for folder in files}) == 1
