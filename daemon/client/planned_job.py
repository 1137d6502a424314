"""Reads what `plan` plans: a job as far as its data is known, and a file of nodes."""

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from headway.daemon.base.errors import ConfigError
from headway.daemon.base.near_path import near
from headway.daemon.base.places import is_url
from headway.daemon.blobs.data_source import check_tokenizer, index_at, why_no_answer
from headway.daemon.client.few_rows import few_rows_of
from headway.daemon.client.nodes_file import parse_nodes
from headway.daemon.cluster.records import NodeRecord
from headway.daemon.jobs.data_choices import with_schedule
from headway.daemon.jobs.device_defaults import with_device_defaults
from headway.daemon.jobs.job import JobSpec
from headway.daemon.jobs.job_file import read_job_file
from headway.daemon.jobs.plugins import with_plugins
from headway.daemon.jobs.resolve import check_adapter, default_cache_dir, has_data_here, with_data
from headway.daemon.jobs.typed_toml import read_text
from headway.daemon.models.origin_config import beyond_positions, model_opener
from headway.daemon.plan.connections import LinkAssumptions
from headway.stages.data.source_choice import BUILT_IN_SOURCES


def read_planned(job: Path, *, warn: Callable[[str], None]) -> tuple[JobSpec, frozenset[str], bool]:
    """Return a job, the keys that its file names, and whether what its data decides is known: the data need not be on
    this machine. The built-in data decides something only for a few jobs, so it is not made for the others.

    Raises ConfigError for what `submit` would refuse. warn: is told of what it would refuse on this machine alone,
    and of data that is too little.
    """

    def on_no_weights(error: ConfigError) -> None:
        warn(would_be_refused(error))

    spec, named = read_job_file(job, open_model=model_opener(job.parent, on_no_weights=on_no_weights))
    check_adapter(spec, job)
    if beyond := beyond_positions(spec):
        warn(beyond)
    spec = with_plugins(spec, job_file=job, cache_dir=default_cache_dir())
    train = spec.train
    is_built_in = spec.data.source in BUILT_IN_SOURCES  # never of several sources, some of which are folders
    _tell_of_typos(spec, job, warn)
    if not has_data_here(spec, job) or (is_built_in and not (train.epochs or train.eval_every or spec.origin.url)):
        return _of_known_length(spec, job, named), named, False
    if why := why_no_answer(spec.data):
        warn(f"the plan is made without the data: {why}")
        return _of_known_length(spec, job, named), named, False
    spec = with_data(spec, job_file=job, cache_dir=default_cache_dir(), named=named, read_url=index_at)
    check_tokenizer(spec, job)
    if few := few_rows_of(spec, default_cache_dir()):
        warn(few)
    return spec, named, True


def _of_known_length(spec: JobSpec, job: Path, named: frozenset[str]) -> JobSpec:
    """Return the job with what its length decides, unless the data has to be counted for that."""
    return spec if spec.train.epochs else with_schedule(spec, str(job), named=named)


def _tell_of_typos(spec: JobSpec, job: Path, warn: Callable[[str], None]) -> None:
    """Tell of data that is not here, if the name of something that is here is near."""
    for part, key in zip(spec.data.parts, spec.data.part_keys, strict=True):
        if part.source in BUILT_IN_SOURCES or is_url(part.source):
            continue
        if hint := near(job.parent / os.path.expanduser(part.source), BUILT_IN_SOURCES):  # noqa: PTH111 - never raises
            warn(would_be_refused(ConfigError(f"there is no such folder{hint}", f"{job}:{key}.source")))


def would_be_refused(error: ConfigError) -> str:
    """Return a sentence on what a plan lets pass."""
    return f"`headway submit` would refuse the job: {error}"


def nodes_in(
    path: Path, spec: JobSpec, named: Collection[str]
) -> tuple[Sequence[NodeRecord], LinkAssumptions, list[str]]:
    """Return the nodes of a file, the links between them, and sentences on what it leaves to assumptions.

    Raises ConfigError.
    """
    found = parse_nodes(read_text(path, "nodes file"), str(path))
    devices = [device for node in found.records(spec.train) for device in node.devices]
    train = with_device_defaults(spec, devices, named=named).train  # a file's `tflops` are of the job's dtype
    assumed = found.assumed(train)
    told = [f"{path} leaves some to the plan, which {'; '.join(assumed)}"] if assumed else []
    return found.records(train), found.link_assumptions(), told
