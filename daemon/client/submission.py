"""From a job file or a checkpoint to a job in the queue: read, resolved, checked, its data sent, submitted.

Token shards go to one node if no node has them: other nodes fetch them from there.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import join
from typing import Final, Literal

import msgspec

from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.base.errors import ConfigError, RecoveryError
from headway.daemon.base.places import is_url
from headway.daemon.base.terminal import counted
from headway.daemon.blobs.checkpoint_names import MANIFEST
from headway.daemon.blobs.data_source import check_tokenizer, index_at
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.client import checkpoint_folder, job_requests
from headway.daemon.client.checkpoint_folder import Manifest
from headway.daemon.client.cluster_access import ClusterSession, every_answer, node_client
from headway.daemon.client.few_rows import few_rows_of
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.outlook import as_fast_as_their_like
from headway.daemon.jobs.changed_keys import Changes
from headway.daemon.jobs.data_choices import OF_THE_DELAY, continued_schedule
from headway.daemon.jobs.device_defaults import (
    FILLED_IN,
    what_was_filled_in,
    why_float32,
    with_optimizers_of,
    with_those_of,
)
from headway.daemon.jobs.job import DataSpec, JobSpec
from headway.daemon.jobs.job_file import read_job_file
from headway.daemon.jobs.resolve import default_cache_dir, resolve_job
from headway.daemon.models.origin_config import beyond_positions, model_opener, read_parts, whole_path
from headway.daemon.plan.schedule_choice import with_chosen_schedule
from headway.daemon.reports.safety_report import why_unprotected
from headway.proto.control_pb2 import HasDataReply
from headway.stages.attention_kernels import KernelDevice
from headway.stages.data.shard_index import INDEX_NAME, read_index
from headway.stages.data.source_choice import BUILT_IN_SOURCES
from headway.stages.errors import DataError

MOST_NODES: Final = 64
"""Maximum number of nodes asked, the first by name."""
PIECE_BYTES: Final = 512 << 10

Tell = Callable[[str, int, int], None]
"""Is called with the node, the bytes that are there, and all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A data set that a node has received."""

    source: str
    node: str
    num_bytes: int

    @property
    def told(self) -> str:
        """Return it as a line for people."""
        return f"{self.source}: no node had it; sent {self.num_bytes / 1e6:,.1f} MB to {self.node}"


async def send_missing(
    session: ClusterSession, data: DataSpec, *, warn: Callable[[str], None], tell: Tell = lambda *_: None
) -> list[Sent]:
    """Send each folder of a job's data that no node has; return what was sent.

    warn: is told why nothing could be sent, if no node answers: a job waits in the queue without its data too. Raises
    ConfigError: no node has room. Raises RecoveryError, PeerError: a node refuses the data, or fails.
    """
    parts = [part for part in data.parts if part.source not in ("", *BUILT_IN_SOURCES) and not is_url(part.source)]
    if session.identity is None or not parts:
        return []
    view = await session.view()
    sent = [await _send_if_missing(session, view, part, warn, tell) for part in parts]
    return [each for each in sent if each is not None]


async def _send_if_missing(
    session: ClusterSession, view: ClusterView, data: DataSpec, warn: Callable[[str], None], tell: Tell
) -> Sent | None:
    folder = Path(data.source)
    try:
        index = read_index(folder)
    except DataError as error:
        raise ConfigError(error.reason, error.path) from error

    async def ask(client: NodeClient, daemon: NodeEndpoint) -> HasDataReply:
        return await client.has_data(daemon, data.sha256, data.source)

    answers = await every_answer(session, view, ask, most=MOST_NODES)
    replies = {name: reply for name, reply in answers.items() if isinstance(reply, HasDataReply)}
    if any(reply.is_here for reply in replies.values()):
        return None
    if not replies:
        why = next((answer for answer in answers.values() if isinstance(answer, str)), "none is up")
        warn(f"no node could be asked whether it has {folder}: {why}; if none has it, run `headway data send {folder}`")
        return None
    node, num_bytes = _roomiest(replies, sum(each.num_bytes for each in index.files), data)
    reader = _FolderReader(folder, lambda done: tell(node, done, num_bytes))
    async with node_client(session.identity) as client:
        await client.give_data(view.nodes[node].endpoint, data.sha256, reader.read)
    return Sent(source=data.source, node=node, num_bytes=num_bytes)


def _roomiest(replies: Mapping[str, HasDataReply], num_bytes: int, data: DataSpec) -> tuple[str, int]:
    """Return the node with the most of it, else with the most room, and the bytes it is to hold in the end.

    Raises ConfigError when they fit nowhere.
    """
    room = {name: reply.free_bytes + reply.there_bytes for name, reply in replies.items()}
    fitting = [name for name in replies if room[name] > num_bytes] or list(replies)
    node = max(fitting, key=lambda name: (replies[name].there_bytes, room[name]))
    if (free := room[node]) <= num_bytes:
        what = f"no node has room for its {num_bytes / 1e9:.1f} GB; {node} has most, {free / 1e9:.1f} GB"
        raise ConfigError(f"{what}; make room there, or name a URL", data.source)
    return node, num_bytes


class _FolderReader:
    """Reads the files that a node asks for."""

    def __init__(self, folder: Path, tell: Callable[[int], None]) -> None:
        self._folder = folder
        self._files = {each.sha256: each for each in read_index(folder).files}
        self._tell = tell
        self._done = 0
        """Bytes of the files before the present one."""
        self._asked: set[str] = set()

    async def read(self, sha256: str, offset: int) -> AsyncIterator[bytes]:
        """Yield a file from an offset on. Raises RecoveryError."""
        wanted = self._files.get(sha256)
        if sha256 and wanted is None:
            raise RecoveryError(str(self._folder), f"has no shard {sha256[:12]}…")
        name = wanted.file if wanted is not None else INDEX_NAME
        num_there = offset
        try:
            with (self._folder / name).open("rb") as file:
                file.seek(offset)
                while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                    yield piece
                    num_there += len(piece)
                    if wanted is not None:
                        self._tell(self._done + num_there)
        except OSError as error:
            raise RecoveryError(str(self._folder / name), f"cannot be read: {error.strerror}") from error
        if wanted is not None and sha256 not in self._asked:
            self._asked.add(sha256)
            self._done += wanted.num_bytes


Link = Literal["auto", "grpc", "collective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A job as its file says it, or the checkpoint from which it begins; nothing of the machine's is decided."""

    spec: JobSpec
    source: Path
    """File that errors name."""
    named: frozenset[str] | None
    """Keys that the file names; None: there is no file, and nothing is open."""
    manifest: Manifest | None = None
    """Checkpoint from which it begins; None: from the beginning."""
    are_changes_meant: bool = False
    """Whether other keys than the checkpoint's may change the recurrence."""

    def resolved(self, devices: Iterable[KernelDevice]) -> JobSpec:
        """Return the job with everything fixed, for devices that may compute it. Raises ConfigError."""
        return resolve_job(
            self.spec,
            job_file=self.source,
            devices=devices,
            cache_dir=default_cache_dir(),
            named=self.named,
            read_url=index_at,
        )

    def resolved_here(self, devices: Iterable[KernelDevice]) -> JobSpec:
        """Return the job for devices of this machine, and say on stderr what they have decided, and what is too
        few. Raises ConfigError."""
        spec = self.resolved(devices)
        if filled_in := what_was_filled_in(self.spec, spec):
            sys.stderr.write(f"headway: the job leaves some keys to the cards: {filled_in}\n")
        check_tokenizer(spec, self.source)
        for remark in _remarks_on(spec):
            sys.stderr.write(f"headway: {remark}\n")
        return spec


def _remarks_on(spec: JobSpec) -> list[str]:
    """Return what people should know of a job's data and model."""
    return [text for text in (few_rows_of(spec, default_cache_dir()), beyond_positions(spec)) if text]


def read_draft(
    job_file: Path | None,
    *,
    checkpoint: str | None = None,
    model: str | None = None,
    are_changes_meant: bool = False,
    link: Link | None = None,
    priority: int | None = None,
) -> Draft:
    """Read a job's file, or the job of a checkpoint, or both. model: its folder of weights, if the file names none.

    Raises ConfigError for options that do not fit each other, and for a job that does not fit its checkpoint.
    """
    if job_file is None and checkpoint is None:
        raise ConfigError("name a job file, or a checkpoint with --from", "submit")
    if are_changes_meant and checkpoint is None:
        raise ConfigError("needs --from: only the job of a checkpoint has keys to change", "--change")
    manifest = checkpoint_folder.read_checkpoint(checkpoint) if checkpoint is not None else None
    if model is not None and job_file is None:
        raise ConfigError("needs JOB.toml: a checkpoint has its own weights", "--model")
    named: frozenset[str] | None = None
    if job_file is not None:
        source = job_file
        spec, named = read_job_file(job_file, open_model=model_opener(job_file.parent), model_from=whole_path(model))
    else:
        assert manifest is not None
        spec, source = manifest.spec, Path(f"{manifest.checkpoint.url}/{MANIFEST}")
    spec = spec.with_link(link).with_priority(priority)
    if manifest is not None:
        if named is not None:
            spec = with_optimizers_of(spec, manifest.spec, named=named)
            spec, named = with_those_of(spec, manifest.spec, named=named), named.union(FILLED_IN, OF_THE_DELAY)
        checkpoint_folder.check_fits(spec, manifest, str(source))
        spec = continued_schedule(spec, manifest.spec, manifest.checkpoint.boundary, str(source))
        spec = replace(spec, origin=manifest.spec.origin)  # the weights are the checkpoint's
    return Draft(spec=spec, source=source, named=named, manifest=manifest, are_changes_meant=are_changes_meant)


class SubmitReport(msgspec.Struct, frozen=True, kw_only=True, rename={"origin": "from"}):
    """What there is to know of a job in the queue."""

    job: str
    """Its name."""
    boundary: int
    """Number of batches that it begins after; 0: it begins from the beginning."""
    origin: str
    """Job of the checkpoint that it begins with, `from` in JSON; empty: there is none."""
    schedule: str
    """The job's, or the one that was chosen for these nodes."""
    unprotected: str
    """Why a failure would lose batches; empty: it would not."""
    changed: list[str]
    """Keys that differ from the checkpoint's job."""
    sent: list[Sent]
    """Data that no node had."""
    warnings: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A job in the queue, and what there is to say about it."""

    draft: Draft
    spec: JobSpec
    changes: Changes
    sent: list[Sent]
    unprotected: str
    warnings: list[str]

    @property
    def report(self) -> SubmitReport:
        """Return the answer for `--json` and Python."""
        manifest = self.draft.manifest
        return SubmitReport(
            job=self.spec.job.name,
            boundary=manifest.checkpoint.boundary if manifest is not None else 0,
            origin=manifest.job if manifest is not None else "",
            schedule=self.spec.train.schedule,
            unprotected=self.unprotected,
            changed=[*self.changes.of_recurrence, *self.changes.others],
            sent=self.sent,
            warnings=self.warnings,
        )

    @property
    def lines(self) -> list[str]:
        """Return the answer for people."""
        name, manifest, train, begins = self.spec.job.name, self.draft.manifest, self.spec.train, ""
        if manifest is not None:
            begins = f" from batch {manifest.checkpoint.boundary} of {manifest.job} ({manifest.checkpoint.url})"
        lines = [each.told for each in self.sent]
        lines.append(f"{name}: submitted{begins}; `headway watch {name}` shows it")
        lines += [f"changed: {self.changes.text}"] if self.changes.text else []
        if options := self.spec.report.options:
            lines.append(f"[report] is written by whoever follows: `headway history {name} --follow {join(options)}`")
        epochs = f"{counted(train.epochs, 'epoch')} of its data: {counted(train.batches, 'batch')}"
        lines += [epochs] if train.epochs else []
        return lines

    @property
    def remarks(self) -> list[str]:
        """Return what people should know before they leave it alone."""
        filled_in = what_was_filled_in(self.draft.spec, self.spec)
        remarks = [f"the job leaves some keys to the cards: {filled_in}"] if filled_in else []
        remarks += [f"{self.spec.job.name} is unprotected: {self.unprotected}"] if self.unprotected else []
        return [*remarks, *_remarks_on(self.spec), *self.warnings]


async def submit(session: ClusterSession, draft: Draft, *, tell: Tell, warn: Callable[[str], None]) -> Submitted:
    """Resolve a draft for a cluster's devices, check what it needs, send its data, and put it in the queue.

    tell: is told how much of its data is sent. Raises ConfigError for a job that cannot be taken.
    """
    view = await session.view()
    devices = [device for node in view.nodes.values() for device in node.devices]
    resolved, changes = await asyncio.to_thread(draft.resolved, devices), Changes()
    if why := why_float32(resolved, devices, named=draft.named):
        warn(why)
    alike = as_fast_as_their_like(view.nodes.values()).values()
    resolved, schedule = await asyncio.to_thread(with_chosen_schedule, resolved, [*alike])
    if (manifest := draft.manifest) is not None:
        if not manifest.is_sealed:
            warn("the checkpoint's manifest has no digest: an earlier release wrote it")
        source, are_meant = str(draft.source), draft.are_changes_meant
        changes = checkpoint_folder.changes_of(resolved, manifest, source, are_meant=are_meant)
    root, are_nodes_asked = session.address.state_dir, session.identity is not None
    checkpoint_folder.check_checkpoint_dir(resolved, job_file=draft.source, root=root, are_nodes_asked=are_nodes_asked)
    folder, where = resolved.fault.checkpoint_dir, f"{draft.source}:fault.checkpoint_dir"
    warnings = await checkpoint_folder.ask_about_folder(session, view, folder, where)
    if manifest is not None:
        await asyncio.to_thread(checkpoint_folder.check_files, manifest)
    else:
        await asyncio.to_thread(check_tokenizer, resolved, draft.source)
        resolved = await asyncio.to_thread(read_parts, resolved)
    sent = list[Sent]()
    if draft.spec.job.name not in view.jobs:  # otherwise the job is refused, and nothing need move
        for data in (resolved.data, resolved.plugins.data):
            sent += await send_missing(session, data, warn=warnings.append, tell=tell)
    if manifest is None:
        await job_requests.submit(session, resolved)
    else:
        first = checkpoint_folder.begin_with(manifest)
        generation = manifest.generation
        await job_requests.submit(session, resolved, checkpoint=first, generation=generation, changed=changes.text)
    return Submitted(
        draft=draft,
        spec=resolved,
        changes=changes,
        sent=sent,
        unprotected=why_unprotected(resolved, view.nodes),
        warnings=[schedule, *warnings] if schedule else warnings,
    )
