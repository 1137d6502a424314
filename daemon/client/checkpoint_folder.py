"""Checkpoints in a folder or below a URL: lists them, reads them, and starts a new job from one.

A manifest names the job that wrote a checkpoint, with its whole spec. A new cluster can be set up from the checkpoint
alone. All functions that read block.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Final

from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.base.errors import ConfigError, RecoveryError
from headway.daemon.base.places import is_store
from headway.daemon.blobs.checkpoint_names import MANIFEST, SET_ASIDE
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.client.cluster_access import ClusterSession, every_answer
from headway.daemon.cluster.format import decode
from headway.daemon.cluster.lineage import check_seal
from headway.daemon.cluster.records import CheckpointRecord
from headway.daemon.decide.admission import why_no_checkpoint
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.jobs.changed_keys import Changes, changes
from headway.daemon.jobs.job import JobSpec
from headway.daemon.jobs.rules import check_job
from headway.daemon.models.carried_files import kind_of
from headway.daemon.models.origin_config import as_config_error
from headway.proto.control_pb2 import TryFolderReply

MAX_DEPTH: Final = 3
"""Depth of a checkpoint folder: it holds jobs, a job holds submissions, a submission holds boundaries."""


_BOUNDARY_FOLDER: Final = re.compile(r"(\d{8})-(\d{10})")

SAME: Final = (
    "train.dtype",
    "train.schedule",
    "train.sync_batches",
    "train.microbatches",
    "optim.matrices.name",
    "optim.rest.name",
    "optim.matrices.momentum_dtype",
    "optim.rest.momentum_dtype",
    "optim.matrices.max_precondition_dim",
    "optim.error_feedback_dtype",
    "placement.split_blocks",
)
"""Settings, in addition to all of [model], that decide which state files there are, and their tensors."""


_NOT_READ: Final = CheckpointRecord(timeline=0, boundary=0, url="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The checkpoint's description of itself. Its file has the checkpoint's record beside the first three fields."""

    WHOLE: ClassVar[str] = "spec"
    """As of a SpecRecord."""
    job: str
    generation: int
    spec: JobSpec
    checkpoint: CheckpointRecord = _NOT_READ
    """The checkpoint's record. Its `url` is where the checkpoint was found, not where it was written."""
    is_sealed: bool = True
    """False: an earlier release wrote it, without a digest of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    """One boundary's folder."""

    url: str
    timeline: int
    boundary: int
    is_complete: bool
    """True if the manifest exists, and the checkpoint is not being set aside; otherwise it does not count."""
    written_at: float
    """Seconds since the epoch; 0: the file system does not give the time."""
    size_bytes: int


def read_checkpoint(url: str) -> Manifest:
    """Read the checkpoint of a boundary's folder, or the newest below a job's. Raises ConfigError, naming the fault."""
    try:
        url = url.rstrip("/") if "://" in url else str(Path(url).expanduser().resolve())
    except (OSError, RuntimeError, ValueError) as error:  # ~NAME of an unknown user, a loop of links
        raise ConfigError(f"{url[:80]!r} is no path: {error}", "--from") from error
    found = [entry for entry in list_checkpoints(url) if entry.is_complete]
    if not found:
        hint = kind_of(_names(url), url)
        raise ConfigError(f"found no checkpoint: no folder has a {MANIFEST}{'; ' if hint else ''}{hint}", url)
    manifests = [read_manifest(entry.url) for entry in found]
    if len(jobs := sorted({manifest.job for manifest in manifests})) > 1:
        raise ConfigError(f"holds checkpoints of several jobs: {', '.join(jobs)}; name the folder of one", url)
    newest = max(range(len(found)), key=lambda index: _age(found[index]))
    return manifests[newest]


def _names(url: str) -> list[str]:
    from headway.daemon.models.origin_folder import OriginFolder

    with as_config_error():
        return OriginFolder(url).names()


def read_manifest(url: str) -> Manifest:
    """Read the manifest of one boundary's folder. Raises ConfigError."""
    from headway.daemon.base.file_system import sentence
    from headway.daemon.blobs.checkpoint import read_manifest_bytes

    target = f"{url}/{MANIFEST}"
    with as_config_error():
        raw = read_manifest_bytes(url)
    try:
        is_sealed = check_seal(raw)
        told, checkpoint = decode(raw, Manifest), decode(raw, CheckpointRecord)
    except Exception as error:  # the bytes come from outside: RecursionError is possible too
        raise ConfigError(f"is not a checkpoint's manifest: {sentence(error)}", target) from error
    check_job(told.spec, target)
    if why := why_no_checkpoint(checkpoint, told.spec, job=told.job, generation=told.generation):
        raise ConfigError(f"is not a checkpoint's manifest: {why}", target)
    return replace(told, checkpoint=replace(checkpoint, url=url), is_sealed=is_sealed)


def list_checkpoints(url: str) -> list[FoundCheckpoint]:
    """List every boundary's folder at or below a URL, oldest first, incomplete ones too. Raises ConfigError."""
    from headway.daemon.base.file_system import open_url, told_as

    with as_config_error():
        file_system, path = open_url(url)
        with told_as(url, "listed"):
            found = sorted(_walk(file_system, path, url, MAX_DEPTH), key=_age) if file_system.isdir(path) else None
    if found is None:
        what = (
            "is a file; name the folder in which it lies" if file_system.exists(path) else "the folder does not exist"
        )
        raise ConfigError(what, url)
    return found


def check_files(manifest: Manifest) -> None:
    """Read every file of a checkpoint. Raises ConfigError for a damaged one; it names the checkpoint before."""
    from headway.daemon.blobs.checkpoint import verify_files

    checkpoint = manifest.checkpoint
    try:
        verify_files(checkpoint.url, checkpoint.files)
    except RecoveryError as error:
        beside = list_checkpoints(checkpoint.url.rpartition("/")[0])
        older = [found for found in beside if found.is_complete and found.boundary < checkpoint.boundary]
        before = max(older, key=lambda found: (found.boundary, found.timeline), default=None)
        hint = f"; the one before is {before.url}" if before is not None else "; there is no older one beside it"
        raise ConfigError(f"{error.reason}{hint}", error.item) from error


def begin_with(manifest: Manifest) -> CheckpointRecord:
    """Return the first `checkpoint` record of a new job. The job never deletes this checkpoint or older ones."""
    parts = tuple(replace(part, is_inherited=True) for part in manifest.checkpoint.journal_parts)
    return replace(manifest.checkpoint, origin_job=manifest.job, earlier=(), dropped=(), journal_parts=parts)


def check_fits(spec: JobSpec, manifest: Manifest, source: str) -> None:
    """Raise ConfigError at `source:section.key` for the first key that keeps a job from starting at a checkpoint."""
    names = [
        item.name for item in fields(spec.model) if item.name != "block_shapes"
    ]  # which the trial of a wheel counts
    keys = [f"model.{name}" for name in names] + list(SAME)
    for key in keys:
        ours, theirs = _value(spec, key), _value(manifest.spec, key)
        if ours != theirs:
            raise ConfigError(f"is {ours}, but the checkpoint of {manifest.job} has {theirs}", f"{source}:{key}")
    if bool(spec.optim.error_feedback) != bool(manifest.spec.optim.error_feedback):
        raise ConfigError(
            f"is {spec.optim.error_feedback:g}, but the checkpoint of {manifest.job} was made with "
            f"{manifest.spec.optim.error_feedback:g}; error feedback has its own state",
            f"{source}:optim.error_feedback",
        )


def changes_of(spec: JobSpec, manifest: Manifest, source: str, *, are_meant: bool) -> Changes:
    """Return in which keys a resolved job differs from the checkpoint's job.

    are_meant: they may change the recurrence. Raises ConfigError: no batch is left, or the recurrence changes and that
    is not meant.
    """
    boundary, train = manifest.checkpoint.boundary, spec.train
    if boundary >= train.batches:
        key = "epochs" if train.epochs else "batches"
        asked = f"{train.epochs} epochs of {train.batches}" if train.epochs else f"{train.batches}"
        what = f"{asked} batches are done at boundary {boundary} of the checkpoint; ask for more"
        raise ConfigError(what, f"{source}:train.{key}")
    found = changes(spec, manifest.spec, boundary)
    if found.of_recurrence and not are_meant:
        what = f"other weights than those of {manifest.job} would follow batch {boundary}"
        told = "; ".join(found.of_recurrence)
        raise ConfigError(f"{what}: {told}. If that is meant, add --change; otherwise name the old values", source)
    return found


def _walk(file_system: Any, path: str, url: str, depth: int) -> Iterator[FoundCheckpoint]:
    file_system.invalidate_cache(path)  # object stores cache listings
    entries = file_system.ls(path, detail=True)
    name = path.rstrip("/").rsplit("/", 1)[-1]
    files = {entry["name"].rsplit("/", 1)[-1]: entry for entry in entries}
    manifest = files.get(MANIFEST)
    if (parts := _BOUNDARY_FOLDER.fullmatch(name)) or manifest is not None:
        timeline, boundary = (int(part) for part in parts.groups()) if parts else (0, 0)
        yield FoundCheckpoint(
            url=url,
            timeline=timeline,
            boundary=boundary,
            is_complete=manifest is not None and SET_ASIDE not in files,
            written_at=_written_at(manifest),
            size_bytes=sum(int(entry.get("size") or 0) for entry in entries),
        )
        return
    for entry in entries:
        if depth and entry["type"] == "directory":
            inner = entry["name"].rstrip("/")
            yield from _walk(file_system, inner, f"{url.rstrip('/')}/{inner.rsplit('/', 1)[-1]}", depth - 1)


def _written_at(entry: dict[str, Any] | None) -> float:
    """Return when a file was written, from the field that its file system uses."""
    if entry is None:
        return 0.0
    told = next((entry[key] for key in ("mtime", "LastModified", "created", "updated") if entry.get(key)), 0.0)
    return float(told.timestamp()) if hasattr(told, "timestamp") else float(told) if not isinstance(told, str) else 0.0


def _age(found: FoundCheckpoint) -> tuple[float, int, int]:
    return (found.written_at, found.timeline, found.boundary)


def _value(spec: JobSpec, key: str) -> object:
    value: object = spec
    for name in key.split("."):
        value = getattr(value, name)
    return value


def check_checkpoint_dir(spec: JobSpec, *, job_file: Path, root: Path | None, are_nodes_asked: bool = False) -> None:
    """Check that the job's checkpoints can be written; `root` holds a local cluster's relative folders.

    Without a root only the form is checked: this machine need not see the nodes' folders. are_nodes_asked: a store is
    left to them. Raises ConfigError.
    """
    from headway.daemon.blobs.checkpoint import probe, resolve_checkpoint_dir

    where = f"{job_file}:fault.checkpoint_dir"
    try:
        resolved = resolve_checkpoint_dir(spec.fault.checkpoint_dir, root)
        if root is not None and not (are_nodes_asked and is_store(resolved)):
            probe(resolved)
    except ConfigError as error:
        raise ConfigError(error.what, where) from error
    except RecoveryError as error:
        raise ConfigError(f"{error}; name a folder or URL that can be written to", where) from error


MOST_NODES: Final = 16
"""Maximum number of nodes asked, the first by name; a job's own nodes try the folder anyway."""


async def ask_about_folder(session: ClusterSession, view: ClusterView, checkpoint_dir: str, where: str) -> list[str]:
    """Return what a job on these nodes has to expect of a store, as `warnings_about`; of no store nothing is asked."""
    if session.identity is None or not is_store(checkpoint_dir):
        return []

    async def ask(client: NodeClient, node: NodeEndpoint) -> TryFolderReply:
        return await client.try_folder(node, checkpoint_dir)

    return warnings_about(checkpoint_dir, await every_answer(session, view, ask, most=MOST_NODES), where)


def warnings_about(folder: str, answers: Mapping[str, TryFolderReply | str], where: str) -> list[str]:
    """Return one sentence for each problem. answers: each node's reply, or the reason why it sent none.

    Raises ConfigError if every node lacks access. where: the key that names the folder.
    """
    silent = {node: reply for node, reply in sorted(answers.items()) if isinstance(reply, str)}
    replies = {node: reply for node, reply in sorted(answers.items()) if not isinstance(reply, str)}
    lacking = {node: reply.reason for node, reply in replies.items() if reply.reason and reply.lacks_access}
    away = {node: reply.reason for node, reply in replies.items() if reply.reason and not reply.lacks_access}
    if lacking and len(lacking) == len(answers):
        node, reason = next(iter(lacking.items()))
        raise ConfigError(
            f"no node has access to {folder}, among them {node}: {reason}; give the daemons what is missing, or name "
            "another folder",
            where,
        )
    lines = [f"{node} has no access to {folder}: {reason}" for node, reason in lacking.items()]
    if away:
        node, reason = next(iter(away.items()))
        lines.append(f"{node} cannot write to {folder} now: {reason}; the job trains, and its checkpoints wait")
    if silent and not replies:
        lines.append(f"no node could be asked whether it can write to {folder}: {next(iter(silent.values()))}")
    return lines
