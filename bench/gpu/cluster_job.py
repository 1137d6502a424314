"""The jobs that probes train on this machine's devices."""

from dataclasses import replace
from pathlib import Path
from typing import Final

from gpu.sizes import stage_model, stage_train
from headway.daemon.cluster.records import Device
from headway.daemon.jobs.job import FaultSpec, JobSection, JobSpec
from headway.daemon.jobs.resolve import default_cache_dir, resolve_job
from headway.daemon.node.hardware import find_devices
from headway.stages.spec import ModelSpec

NAMED: Final = frozenset({"train.batches", "train.sync_batches"})
"""Keys that every probe's job decides itself. Others are open, and the devices decide them as for `headway submit`: on
cards the products of Newton–Schulz are in bfloat16 too.
"""


def stage_job(
    name: str,
    device: str,
    batches: int,
    *,
    model: ModelSpec | None = None,
    devices: tuple[Device, ...] = (),
    **train: object,
) -> JobSpec:
    """Return a job without snapshots, resolved for this machine. devices: those that it is for instead.

    train: fields of its TrainSpec that it has in place of the usual ones.
    """
    spec = JobSpec(
        job=JobSection(name=name, seed=1),
        model=model or stage_model(device),
        train=replace(stage_train(device, batches=batches), **train),  # type: ignore[arg-type]
        fault=FaultSpec(snapshot_every=0, copies=1, checkpoint_every=0),
    )
    return as_submitted(spec, devices or find_devices("cpu" if device == "cpu" else "cuda", 0), *train)


def as_submitted(spec: JobSpec, devices: tuple[Device, ...], *named: str) -> JobSpec:
    """Return the job as `headway submit` records it. named: fields of its TrainSpec that it decides itself too."""
    return resolve_job(
        spec,
        job_file=Path(f"{spec.job.name}.toml"),
        devices=devices,
        cache_dir=default_cache_dir(),
        named=NAMED | {f"train.{key}" for key in named},
    )
