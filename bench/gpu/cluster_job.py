"""The jobs that probes train on this machine's devices."""

from dataclasses import replace

from rigs.submitted import as_submitted

from gpu.sizes import stage_model, stage_train
from headway.daemon.cluster.records import Device
from headway.daemon.jobs.job import FaultSpec, JobSection, JobSpec
from headway.daemon.node.hardware import find_devices
from headway.stages.spec import ModelSpec


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
