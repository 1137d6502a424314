"""Train a job in a cluster and in the plain loop, and compare every bit of the two."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.export import export
from headway.daemon.client.job_requests import submit
from headway.daemon.client.job_watch import JournalCopy, wait_for_phase
from headway.daemon.cluster.records import Device, Phase
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import FaultSpec, JobSection, JobSpec, PlacementSpec, QueueSpec
from headway.daemon.jobs.resolve import data_folder, default_cache_dir, resolve_job
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.local.reference_loop import BatchResult, reference
from headway.daemon.models.model_folder import write_model
from headway.optim.layer_optimizer import optimizer_factory
from headway.optim.spec import GroupSpec, OptimSpec
from headway.stages.data.token_mixture import open_tokens
from headway.stages.spec import ModelSpec, TrainSpec

MAX_NODES = 5
TIMEOUT_S = 90.0
WITHOUT_SPARES = {"num_spares": 0}
"""Settings of nodes whose workers nobody kills: no process imports torch for nothing."""

MODEL = ModelSpec(
    num_hidden_layers=5,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=256,
)
MUON_WITH_ERROR_FEEDBACK = OptimSpec(
    matrices=GroupSpec(name="muon", lr=1e-2), rest=GroupSpec(name="adamw", lr=3e-3), warmup_batches=3
)
ADAMW_WITHOUT_ERROR_FEEDBACK = OptimSpec(
    matrices=GroupSpec(name="adamw", lr=3e-3),
    rest=GroupSpec(name="adamw", lr=3e-3),
    error_feedback=0.0,
    warmup_batches=3,
)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run."""

    losses: tuple[float, ...]
    weights: Mapping[str, Tensor]
    """Weights by their names in the exported model."""
    generations: tuple[int, ...] = ()
    eval_losses: tuple[float, ...] = ()
    """Of the evaluations, in order."""
    final_eval_loss: float | None = None
    """After the last update; None: there are no evaluations, or the job was paused before its end."""


def small_job(
    name: str, *, optim: OptimSpec = MUON_WITH_ERROR_FEEDBACK, device: str = "cpu", **train: object
) -> JobSpec:
    """A job of a second or two, resolved for one kind of device. `train` replaces fields of its TrainSpec."""
    fields: dict[str, object] = {
        "batches": 10, "microbatches": 8, "microbatch_size": 2, "sequence_length": 16, "clip_norm": 0.5
    } | train  # fmt: skip
    spec = JobSpec(
        job=JobSection(name=name, seed=11),
        model=MODEL,
        train=TrainSpec(**fields),  # type: ignore[arg-type]
        optim=optim,
    )
    return resolve_job(spec, job_file=Path("job.toml"), devices=(Device(kind=device),), cache_dir=default_cache_dir())


class Oracle:
    """`headway reference`, once per recurrence."""

    def __init__(self, folder: Path, *, device: str = "cpu") -> None:
        self._folder = folder
        self._device = device
        self._known: dict[tuple[JobSpec, tuple[str, ...], int], Result] = {}

    def __call__(self, spec: JobSpec, *, coded_cuts: tuple[str, ...] = (), stop_at: int | None = None) -> Result:
        """The result of the plain loop; a job's name, links, placement and [fault] are no part of it.

        coded_cuts: where the job's codec rounds.
        stop_at: the boundary at which the loop ends, if the job was paused there.
        """
        alike = replace(
            spec,
            job=replace(spec.job, name="oracle"),
            train=replace(spec.train, link="auto"),
            fault=FaultSpec(),
            placement=PlacementSpec(),
            queue=QueueSpec(),
        )
        batches = spec.train.batches if stop_at is None else stop_at
        key = alike, coded_cuts, batches
        if key not in self._known:
            results: list[BatchResult] = []
            folders = [data_folder(part.source, default_cache_dir()) for part in spec.data.parts]
            tokens = open_tokens(folders, [""] * len(folders), spec.data.weights)
            weights = reference(
                replace(spec, train=replace(spec.train, batches=batches)),
                tokens,
                on_batch=results.append,
                coded_cuts=coded_cuts,
                device=self._device,
                # a schedule of learning rates follows the length of the whole job
                optimizers_from=optimizer_factory(spec.optim, **spec.train.of_optimizers),
            )
            folder = self._folder / f"model-{len(self._known)}"
            write_model(folder, spec.model, weights=weights, sequence_length=spec.train.sequence_length)
            self._known[key] = Result(
                tuple(result.loss for result in results),
                read_weights(folder),
                eval_losses=tuple(result.eval_loss for result in results if result.eval_loss is not None),
                final_eval_loss=results[-1].final_eval_loss if stop_at is None else None,
            )
        return self._known[key]


async def train(cluster: LocalCluster, spec: JobSpec, out: Path, *, num_nodes: int) -> Result:
    """Submit a job that may use so many nodes, wait until it has finished, and export it."""
    spec = replace(spec, placement=replace(spec.placement, min_nodes=num_nodes, max_nodes=num_nodes))
    async with ClusterSession(cluster.address) as session:
        await submit(session, spec)
        return await finished(session, spec.job.name, out)


async def until(
    session: ClusterSession,
    condition: Callable[[ClusterView, JobView], bool],
    name: str,
    *,
    timeout_s: float = TIMEOUT_S,
) -> JobView:
    """Wait until something is true of a job."""
    views = session.follow()
    try:
        async with asyncio.timeout(timeout_s):
            async for view in views:
                if name in view.jobs and condition(view, view.jobs[name]):
                    return view.jobs[name]
    finally:
        await views.aclose()
    raise AssertionError("a cluster is followed for ever")


async def until_batch(
    session: ClusterSession, name: str, batch: int, *, generation: int = 0, timeout_s: float = TIMEOUT_S
) -> JobView:
    """Wait until a batch has been reported done by a generation of at least so much."""

    def has_come(_: ClusterView, job: JobView) -> bool:
        assert job.phase.phase is not Phase.FAILED, job.phase.error
        progress = job.progress
        return progress is not None and progress.batch >= batch and progress.generation >= generation

    return await until(session, has_come, name, timeout_s=timeout_s)


async def finished(session: ClusterSession, name: str, out: Path, *, timeout_s: float = TIMEOUT_S) -> Result:
    """Wait for the end of a job and read everything that it leaves. Raises AssertionError unless it finished."""
    job: JobView = await wait_for_phase(session, name, frozenset({Phase.FINISHED}), timeout_s=timeout_s)
    assert job.phase.phase is Phase.FINISHED, f"{job.phase.phase}: {job.phase.reason}\n{job.phase.error}"
    return await come_to(session, name, out)


async def come_to(session: ClusterSession, name: str, out: Path) -> Result:
    """Read everything that a job leaves that has finished or is paused."""
    boundary = await export(session, name, out / "model")
    copy = JournalCopy(session, name, out / "metrics.jsonl")
    try:
        await copy.copy_whole(boundary.number)
    finally:
        await copy.close()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["batch"] for line in lines] == list(range(len(lines)))
    return Result(
        tuple(line["loss"] for line in lines),
        read_weights(out / "model"),
        tuple(line["generation"] for line in lines),
        tuple(line["eval_loss"] for line in lines if "eval_loss" in line),
        lines[-1].get("final_eval_loss"),
    )


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a model folder."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def assert_same_bits(piped: Result, plain: Result) -> None:
    """Equal losses, equal names, and equal bits in every tensor."""
    assert piped.losses == plain.losses
    assert piped.eval_losses == plain.eval_losses
    assert piped.final_eval_loss == plain.final_eval_loss
    assert piped.weights.keys() == plain.weights.keys()
    different = [name for name, tensor in piped.weights.items() if not _equal_bits(tensor, plain.weights[name])]
    assert not different
    assert piped.weights


def _equal_bits(one: Tensor, other: Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    )
