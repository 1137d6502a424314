"""Jobs of benches as `headway submit` would record them."""

from pathlib import Path
from typing import Final

from headway.daemon.cluster.records import Device
from headway.daemon.jobs.job import JobSpec
from headway.daemon.jobs.resolve import default_cache_dir, resolve_job

NAMED: Final = frozenset({"train.batches", "train.sync_batches"})
"""Keys that every probe's job decides itself. Others are open, and the devices decide them as for `headway submit`: on
cards the products of Newton–Schulz are in bfloat16 too.
"""


def as_submitted(spec: JobSpec, devices: tuple[Device, ...], *named: str) -> JobSpec:
    """Return the job as `headway submit` records it. named: fields of its TrainSpec that it decides itself too."""
    return resolve_job(
        spec,
        job_file=Path(f"{spec.job.name}.toml"),
        devices=devices,
        cache_dir=default_cache_dir(),
        named=NAMED | {f"train.{key}" for key in named},
    )
