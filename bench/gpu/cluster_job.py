"""The job that probes train in a local cluster on this machine's devices."""

from dataclasses import replace
from pathlib import Path

from gpu.sizes import stage_model, stage_train
from headway.daemon.jobs.job import FaultSpec, JobSection, JobSpec
from headway.daemon.jobs.resolve import default_cache_dir, resolve_job
from headway.daemon.node.hardware import find_devices


def stage_job(name: str, device: str, batches: int) -> JobSpec:
    """Return a job without snapshots, resolved for this machine."""
    spec = JobSpec(
        job=JobSection(name=name, seed=1),
        model=stage_model(device),
        train=replace(stage_train(device, batches=batches), attention_backend="auto"),
        fault=FaultSpec(snapshot_every=0, copies=1, checkpoint_every=0),
    )
    kind = find_devices("cpu" if device == "cpu" else "cuda", 0)
    return resolve_job(spec, job_file=Path(f"{name}.toml"), devices=kind, cache_dir=default_cache_dir())
