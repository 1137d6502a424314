"""Validates a submission in etcd, or a checkpoint's manifest, before the cluster uses it. Pure.

A job file is checked when it is read, and every submission again here: by the client that writes it, and by every
daemon that reads it. A spec that breaks a rule goes no further than this file, and nothing is computed of what stands
in its place.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Final

from headway.daemon.base.addresses import is_job_name, is_path_part
from headway.daemon.base.errors import ConfigError
from headway.daemon.cluster.lineage import MAX_PARTS
from headway.daemon.cluster.records import CheckpointRecord, SpecRecord
from headway.daemon.cluster.state_key import CARRIED_PART, JOURNAL
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.jobs.rules import check_job, is_sha256
from headway.daemon.plan.layer_costs import layer_costs
from headway.stages.plugin_names import PluginError
from headway.stages.spec import AUTO
from headway.stages.state.file_digest import FileDigest

MAX_NUMBER: Final = 2**31 - 1
"""Maximum of a generation, a timeline, a boundary."""
MAX_FILE_BYTES: Final = 2**50
MAX_SHAPES: Final = 10_000
"""Most parameters of a plug-in's block."""
MAX_ANCESTRY: Final = 100_000
MAX_NAME: Final = 512
"""Maximum characters of a user with host, or of a job with boundary."""


def harmless(record: SpecRecord, name: str) -> SpecRecord:
    """Return a submission that breaks a rule as a job of default sizes, which can harm nobody."""
    uid = record.uid if is_path_part(record.uid) else ""
    submitted_by, parent = ("" if _why_no_text(text) else text for text in (record.submitted_by, record.parent))
    default = JobSpec(job=JobSection(name=name))
    return replace(record, spec=default, uid=uid, submitted_by=submitted_by, parent=parent)


def why_refused(record: SpecRecord, name: str) -> str:
    """Return the rule that a submission under a job's name breaks, as `section.key: sentence`; empty: none."""
    try:
        check_job(record.spec, "")
    except ConfigError as error:
        return str(error).removeprefix(":")
    if record.spec.train.schedule == AUTO:
        return 'train.schedule: "auto" is resolved by whoever submits a job'
    if record.spec.job.name != name:
        return f"job.name: {record.spec.job.name!r} lies under the name {name!r}"
    if not is_path_part(record.uid):
        return f"uid: {record.uid[:60]!r} cannot be a folder's name"
    if why := _why_no_origin(record.spec):
        return f"origin: {why}"
    if why := _why_no_plugins(record.spec):
        return f"plugins: {why}"
    for key, text in (("submitted_by", record.submitted_by), ("parent", record.parent)):
        if why := _why_no_text(text):
            return f"{key}: {why}"
    return ""


def _why_no_origin(spec: JobSpec) -> str:
    """Return the fault of the folder with the initial weights; empty: none."""
    origin = spec.origin
    if not origin.url:
        return "names parts of no folder" if origin.parts or origin.job or origin.adapter else ""
    if not is_job_name(origin.job):
        return f"its job's name, {origin.job[:60]!r}, is not a job name"
    if [part.name for part in origin.parts] != [*spec.layers, CARRIED_PART]:
        return "its parts are not the layers of the model"
    odd = next((part.name for part in origin.parts if not _is_possible(part)), "")
    return f"the entry of {odd!r} has an impossible size or checksum" if odd else ""


def _why_no_plugins(spec: JobSpec) -> str:
    """Return what the trial of a job's own code has left out; empty: nothing."""
    named, plugins = spec.plugin_names, spec.plugins
    if not named:
        return ""
    if "data.source" in named:
        return "the source of data has not run"
    if not (is_sha256(plugins.sha256) and is_sha256(plugins.data.sha256)):
        return "the wheel has no hash"
    if spec.model.has_own_block and not spec.model.block_shapes:
        return "the block's parameters were not counted"
    kept = (each.shape for group in (spec.optim.matrices, spec.optim.rest) for each in group.kept)
    shapes = (*(shape for _, shape in spec.model.block_shapes), *kept)
    are_possible = len(shapes) <= MAX_SHAPES and all(0 < side <= MAX_NUMBER for shape in shapes for side in shape)
    if not are_possible:
        return "a parameter has an impossible shape"
    try:
        layer_costs(spec)
    except PluginError as error:
        return error.reason
    return ""


def _why_no_text(text: str) -> str:
    if len(text) > MAX_NAME:
        return f"has more than {MAX_NAME} characters"
    return "" if text.isprintable() else f"{text[:60]!r} has a character that cannot be printed"


def why_no_checkpoint(checkpoint: CheckpointRecord, spec: JobSpec, *, job: str, generation: int) -> str:
    """Return the fault of a checkpoint from which a new job would start, as a sentence's end; empty: none."""
    if not is_job_name(job):
        return f"its job's name, {job[:60]!r}, is not a job name"
    for what, number in (
        ("generation", generation),
        ("timeline", checkpoint.timeline),
        ("boundary", checkpoint.boundary),
    ):
        if not 0 <= number <= MAX_NUMBER:
            return f"its {what} is out of range"
    if odd := sorted(checkpoint.files.keys() - {*spec.layers, JOURNAL}):
        return f"it names {odd[0][:60]!r}, which is not a layer of its job"
    for layer, file in checkpoint.files.items():
        if not _is_possible(file):
            return f"the entry of {layer!r} has an impossible size or checksum"
    if why := _why_no_parts(checkpoint):
        return why
    numbers = [number for pair in checkpoint.ancestry[: MAX_ANCESTRY + 1] for number in pair]
    if len(checkpoint.ancestry) > MAX_ANCESTRY or not all(0 <= number <= MAX_NUMBER for number in numbers):
        return "its ancestry is out of range"
    return ""


def _why_no_parts(checkpoint: CheckpointRecord) -> str:
    """Return the fault of a checkpoint's list of journal parts; empty: none."""
    parts = checkpoint.journal_parts
    if len(parts) > MAX_PARTS:
        return f"it names more than {MAX_PARTS} journal parts"
    ends = [0, *(part.boundary for part in parts), checkpoint.boundary + 1]
    if any(before >= after for before, after in pairwise(ends)):
        return "its journal parts are out of order"
    if not all(0 <= part.timeline <= MAX_NUMBER and _is_possible(part) for part in parts):
        return "a journal part has an impossible timeline, size or checksum"
    return ""


def _is_possible(file: FileDigest) -> bool:
    """Return whether a file's size and checksum may be real."""
    return 0 <= file.size_bytes <= MAX_FILE_BYTES and len(file.checksum) <= 128 and file.checksum.isalnum()
