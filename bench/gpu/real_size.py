"""docs/examples/8b-8k.toml at its real size, on the built-in data, on all cards of this machine.

mfu: useful operations a second and card, over those of a large matrix product. memory_least, memory_most: planned over
allocated bytes of its workers.
"""

import asyncio
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

from rigs.overhead_sides import NO_SPARES, Pipeline
from rigs.submitted import as_submitted

from gpu.probe import Figures, Parts, absent
from gpu.sizes import num_cards, stage_model, stage_train
from gpu.stages import operations_per_batch, product_rate
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.jobs.job import DataSpec, FaultSpec, JobSpec
from headway.daemon.jobs.job_file import parse_job
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.node.hardware import find_devices
from headway.daemon.plan.cluster_plan import PlanRefused
from headway.daemon.plan.planner import make_plan

JOB: Final = Path(__file__).resolve().parents[2] / "docs/examples/8b-8k.toml"
BATCHES: Final = 12


def job_of(kind: str) -> JobSpec:
    """Return the job, without snapshots; on a CPU a small one under its name."""
    spec = parse_job(JOB.read_text(), str(JOB))
    if kind == "cpu":
        spec = replace(spec, model=stage_model(kind), train=stage_train(kind, batches=BATCHES))
    spec = replace(spec, data=DataSpec(), fault=FaultSpec(snapshot_every=0, copies=1, checkpoint_every=0))
    spec = replace(spec, train=replace(spec.train, batches=BATCHES))
    return as_submitted(spec, find_devices("cpu" if kind == "cpu" else "cuda", 0))


def measure(kind: str) -> Parts:
    """As many batches as give a median."""
    job, number = job_of(kind), num_cards(kind) or 2
    figures, batch_s = asyncio.run(trained(job, kind, number))
    yield figures
    if batch_s:
        rate = number * product_rate(kind, job.train.dtype)
        yield {"mfu": round(operations_per_batch(job) / batch_s / rate, 4)}


async def trained(job: JobSpec, kind: str, number: int) -> tuple[Figures, float]:
    """Return the figures of the job on so many cards, and the seconds of a batch; 0: they have no room for it."""
    peaks: dict[tuple[str, int], float] = {}

    async def watch(session: ClusterSession) -> None:
        async for view in session.follow():
            for found in view.jobs.values():
                peaks.update(
                    (device, profile.predicted_bytes / profile.peak_bytes)
                    for device, profile in found.profiles.items()
                    if profile.peak_bytes and profile.predicted_bytes
                )

    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        settings = {**NO_SPARES, "devices": kind}
        async with (
            LocalCluster(Path(folder), num_nodes=number, node_settings=settings) as cluster,
            ClusterSession(cluster.address) as session,
        ):
            plan = make_plan(job, (await session.view()).nodes.values())
            if isinstance(plan, PlanRefused):
                return absent(plan.reason, "tokens_s", "mfu", "memory_least", "memory_most"), 0.0
            pipeline, watching = Pipeline(session, job), asyncio.create_task(watch(session))
            batch_s = statistics.median((await pipeline.trained(job)).seconds)
            watching.cancel()
            await pipeline.close()
    figures: Figures = {"tokens_s": round(job.train.tokens_per_batch / batch_s, 1)}
    if kind == "cpu":
        return figures | absent("nobody counts a CPU's allocations", "memory_least", "memory_most"), batch_s
    return figures | {"memory_least": min(peaks.values()), "memory_most": max(peaks.values())}, batch_s
