"""The Node service: a daemon's service for other daemons and the command line. TCP, mTLS in both directions."""

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import structlog

from headway.daemon.agent.probing import SentSegments, sent_segments
from headway.daemon.base.addresses import JOB_NAME_RULE, is_job_name
from headway.daemon.base.errors import ConfigError, NoAccessError, RecoveryError, StoreError
from headway.daemon.base.fault_points import fault_point
from headway.daemon.base.places import is_store, why_no_place
from headway.daemon.blobs.checkpoint import CHUNK_BYTES, layer_at, probe, resolve_checkpoint_dir
from headway.daemon.blobs.file_threads import Beat, FileThreads
from headway.daemon.blobs.library import DataLibrary
from headway.daemon.blobs.peer_client import NodeClient, add_reading, layer_request
from headway.daemon.blobs.state_store import StateStore
from headway.daemon.cluster.cluster_records import InvitationRecord
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.records import PROTOCOL_VERSION, Phase
from headway.daemon.cluster.state_key import StateKey, StoredFile
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.models.origin_parts import read_part
from headway.daemon.net.certificates import own_names
from headway.daemon.net.invitation import RefusedError
from headway.daemon.net.rate_limit import OutgoingTransfers, TransferKind
from headway.daemon.net.signer import Signer
from headway.daemon.node.data_service import DataService
from headway.daemon.node.job_sources import JournalSource, TraceSource
from headway.daemon.node.relays import stand_by_replies
from headway.daemon.reports.job_report import reports_in
from headway.proto import control_pb2, control_pb2_grpc
from headway.stages.errors import DamagedFileError, DataError, PeerError, UnavailableError
from headway.stages.sockets.tls_identity import (
    certificate_of_client,
    is_borne,
    names_of_client,
)
from headway.stages.state.state_file import content_checksum

log = structlog.get_logger()

SILENCE_S: Final = 10.0
"""Seconds of silence after which a store counts as out of reach: a user waits at a terminal."""


_IN_BETWEEN = {
    Phase.QUEUED: "its start",
    Phase.PREPARING: "its start",
    Phase.CHANGING: "its change of plan",
    Phase.STOPPING: "its checkpoint",
    Phase.RECOVERING: "its recovery",
}


def status_reply(view: ClusterView, *, node: str, away_s: float | None, job: str = "") -> control_pb2.StatusReply:
    """Return the answer to Status. away_s: how long etcd has been away; None: it is there. job: empty for every one."""
    jobs = [found for found in view.jobs_in_order() if job in ("", found.name)]
    return control_pb2.StatusReply(
        node=node,
        etcd_reachable=away_s is None,
        etcd_away_s=away_s or 0.0,
        jobs=encode({report.name: report for report in reports_in(view, jobs)}),
        waits_for="" if away_s is None else waits_for(jobs),
    )


def waits_for(jobs: Iterable[JobView]) -> str:
    """Return what cannot continue without etcd; each job amid a transition is named."""
    named = [f"{job.name}: {what}" for job in jobs if (what := _IN_BETWEEN.get(job.phase.phase)) is not None]
    return "; ".join([*named, "changes of plan, recovery from failures, and users' requests"])


FOLLOW_PERIOD_S = 0.2
READ_BYTES = 1 << 16


async def read_log(
    path: Path, threads: FileThreads, *, last_lines: int = 0, follow: bool = False
) -> AsyncIterator[str]:
    """Yield lines of a log file: all, or the last ones; then, if followed, new ones until the caller stops.

    A file that does not exist yet has no lines. A rotated file (`.1` next to it) is read before the present one. Raises
    RecoveryError.
    """
    lines, position, inode = await threads.run(str(path), lambda _: _read_existing(path, last_lines))
    for line in lines:
        yield line
    rest = ""
    while follow:
        text, position, inode = await threads.run(str(path), partial(_read_new, path, position, inode))
        *complete, rest = (rest + text).split("\n")
        for line in complete:
            yield line
        if not text:
            await asyncio.sleep(FOLLOW_PERIOD_S)


def _read_existing(path: Path, last_lines: int) -> tuple[list[str], int, int]:
    lines: deque[str] = deque(maxlen=last_lines or None)
    position, inode = 0, 0
    for file_path in (path.with_name(path.name + ".1"), path):
        try:
            with file_path.open("rb") as file:
                raw = file.read()
                complete = raw[: raw.rfind(b"\n") + 1] if file_path == path else raw
                lines.extend(complete.decode("utf-8", errors="replace").splitlines())
                position, inode = len(complete), os.fstat(file.fileno()).st_ino
        except FileNotFoundError:
            position, inode = 0, 0
    return list(lines), position, inode


def _read_new(path: Path, position: int, inode: int, _: Beat) -> tuple[str, int, int]:
    """Return new lines; if the file was replaced, from its beginning."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno()).st_ino
            file.seek(position if found == inode else 0)
            raw = file.read(READ_BYTES)
            return raw.decode("utf-8", errors="replace"), file.tell(), found
    except FileNotFoundError:
        return "", 0, 0


NUM_FORWARDED = 4
"""Number of pieces of files that are read from one checkpoint folder at once, for others."""
NUM_LOGS = 8
"""Number of pieces of logs that are read at once."""
LOG_SILENCE_S = 10.0
MAX_PROBE_BYTES = 16 << 20
PROBE_CHUNK_BYTES = 256 << 10


async def no_workers(device_index: int) -> control_pb2.RecentOperations:
    """Raise UnavailableError, before a daemon has started its workers."""
    raise UnavailableError(f"worker {device_index}", "is not up yet")


async def no_ways(_: Sequence[str]) -> list[control_pb2.DialledPort]:
    """Raise UnavailableError, before a daemon is a member of the cluster."""
    raise UnavailableError("this daemon", "is not a member of the cluster yet")


@dataclass(slots=True, kw_only=True)
class NodeDesk:
    """The parts of a daemon that its service answers from."""

    node: str
    incarnation: str
    view: ClusterView
    store: StateStore
    library: DataLibrary
    client: NodeClient
    logs_dir: Path
    checkpoint_root: Path | None
    etcd_away_s: Callable[[], float | None] = lambda: None
    """Seconds for which etcd has been unreachable; None: it is reachable."""
    certificate_ends: Callable[[], dict[str, float]] = dict
    """Ends of this node's certificate and of its authority, by name, in seconds since the epoch."""
    recent_operations: Callable[[int], Awaitable[control_pb2.RecentOperations]] = no_workers
    """Returns the last operations of a device's worker; raises UnavailableError."""
    dial_peers: Callable[[Sequence[str]], Awaitable[list[control_pb2.DialledPort]]] = no_ways
    """Dials registered ports of other nodes; raises UnavailableError."""
    outgoing: OutgoingTransfers = field(default_factory=OutgoingTransfers)
    clock: Callable[[], float] = time.perf_counter
    """CLOCK_MONOTONIC, as for the workers' times."""
    standing_by: Callable[[str], AbstractContextManager[str]] | None = None
    """Lets a node stand by at this node's shared port; None: there is none."""
    signer: Signer | None = None
    """Signs with the cluster's authority; None: this daemon does not have it."""
    met_rival: Callable[[str], None] = lambda _: None
    """Called with the address of another daemon that has this node's certificate."""
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the daemon ends."""


class NodeService(control_pb2_grpc.NodeServicer):
    """The gRPC service headway.control.Node."""

    def __init__(self, desk: NodeDesk) -> None:
        self._desk = desk
        self._journals = JournalSource(
            node=desk.node,
            view=desk.view,
            store=desk.store,
            client=desk.client,
            checkpoint_root=desk.checkpoint_root,
        )
        self._reads = FileThreads("forwarded reads", num_at_once=NUM_FORWARDED)
        self._logs = FileThreads("logs", num_at_once=NUM_LOGS, silence_s=LOG_SILENCE_S)
        self._trials = FileThreads("trial of checkpoint folders", silence_s=SILENCE_S, most_hung=1)
        self._data = DataService(desk.node, desk.view, desk.library)
        self._traces = TraceSource(
            node=desk.node,
            view=desk.view,
            client=desk.client,
            ask_worker=lambda device_index: desk.recent_operations(device_index),
            clock=lambda: desk.clock(),
        )

    async def Describe(self, request: control_pb2.DescribeRequest, context: Any) -> control_pb2.DescribeReply:  # noqa: N802
        """Return this node's identity, and whether it still reaches etcd. Another daemon that has it too is noted."""
        if request.rival and is_borne(self._desk.node, names_of_client(context.auth_context())):
            self._desk.met_rival(request.rival)
        leader = self._desk.view.leader
        return control_pb2.DescribeReply(
            node=self._desk.node,
            incarnation=self._desk.incarnation,
            protocol=PROTOCOL_VERSION,
            etcd_reachable=self._desk.etcd_away_s() is None,
            leader=leader.node if leader is not None else "",
            clock_s=self._desk.clock(),
        )

    async def Status(self, request: control_pb2.StatusRequest, context: Any) -> control_pb2.StatusReply:  # noqa: ARG002, N802
        """Return this daemon's knowledge, also while etcd is away."""
        desk = self._desk
        return status_reply(desk.view, node=desk.node, away_s=desk.etcd_away_s(), job=request.job)

    async def Accompany(  # noqa: N802
        self,
        request: control_pb2.AccompanyRequest,  # noqa: ARG002
        context: Any,  # noqa: ARG002
    ) -> AsyncIterator[control_pb2.AccompanyReply]:
        """Send one message, then nothing until this daemon ends."""
        yield control_pb2.AccompanyReply(incarnation=self._desk.incarnation)
        await self._desk.ending.wait()

    async def StandBy(  # noqa: N802
        self, request: control_pb2.StandByRequest, context: Any
    ) -> AsyncIterator[control_pb2.StandByReply]:
        """Let the caller's own node stand by at this node's port, as long as the stream lasts."""
        if self._desk.standing_by is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"node {self._desk.node} has no one_port")
            return
        async for reply in stand_by_replies(request, context, self._desk.standing_by, self._desk.ending):
            yield reply

    async def Probe(self, request: control_pb2.ProbeRequest, context: Any) -> AsyncIterator[control_pb2.ProbeReply]:  # noqa: N802
        """Send empty bytes and count lost ones, to measure the way from here."""
        if request.num_bytes > MAX_PROBE_BYTES:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"at most {MAX_PROBE_BYTES} bytes")
        if request.counted:
            sent = sent_segments(context.peer()) or SentSegments(number=0, num_lost=0)
            yield control_pb2.ProbeReply(num_segments=sent.number, num_lost=sent.num_lost)
        for offset in range(0, request.num_bytes, PROBE_CHUNK_BYTES):
            yield control_pb2.ProbeReply(data=bytes(min(PROBE_CHUNK_BYTES, request.num_bytes - offset)))

    async def DialPeers(self, request: control_pb2.DialPeersRequest, context: Any) -> control_pb2.DialPeersReply:  # noqa: N802
        """Return whether this node reaches other nodes, by their registered ports and nothing else."""
        ports: list[control_pb2.DialledPort] = []
        async with _answering(context):
            ports = await self._desk.dial_peers(request.nodes)
        return control_pb2.DialPeersReply(ports=ports)

    async def TryFolder(self, request: control_pb2.TryFolderRequest, context: Any) -> control_pb2.TryFolderReply:  # noqa: N802
        """Return why this node cannot write to a store, if it cannot. Its own tree of files is not tried: a folder
        would appear where it should not.
        """
        reply, url = control_pb2.TryFolderReply(), request.checkpoint_dir.rstrip("/")
        async with _answering(context):
            if why := why_no_place(url) or ("" if is_store(url) else f"{url!r} is not the URL of a store"):
                raise ConfigError(why, "checkpoint_dir")
            try:
                await self._trials.run(url, lambda _: probe(url))
            except RecoveryError as error:
                reply.reason, reply.lacks_access = error.reason, isinstance(error, NoAccessError)
        return reply

    async def Invite(self, request: control_pb2.InviteRequest, context: Any) -> control_pb2.InviteReply:  # noqa: N802
        """Let somebody join once."""
        if self._desk.signer is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{self._desk.node} has no authority")
        wish = InvitationRecord(
            name=request.name,
            role=request.role,
            hosts=tuple(request.hosts),
            etcd=tuple(request.etcd),
            secret_sha256="",
            expires_at=0.0,
            valid_s=request.valid_s,
            invited_by=own_names(names_of_client(context.auth_context())),
        )
        reply = control_pb2.InviteReply()
        async with _answering(context):
            assert self._desk.signer is not None
            secret = await self._desk.signer.invite(wish, lasts_s=request.lasts_s, again=request.again)
            reply.secret, reply.ca_sha256 = secret, self._desk.signer.ca_sha256
        return reply

    async def Renew(self, request: control_pb2.RenewRequest, context: Any) -> control_pb2.RenewReply:  # noqa: N802
        """Certify the caller again."""
        if self._desk.signer is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{self._desk.node} has no authority")
        reply = control_pb2.RenewReply()
        async with _answering(context):
            assert self._desk.signer is not None
            shown = certificate_of_client(context.auth_context())
            reply.certificate = await self._desk.signer.renew(shown, request.request)
        return reply

    async def read(self, request: control_pb2.ReadRequest, context: Any) -> AsyncIterator[bytes]:
        """Send a layer's file, a token shard or the index of a data set."""
        if request.HasField("shard"):
            kind, pieces = TransferKind.DATA, self._data.pieces(request)
        else:
            kind, pieces = TransferKind.COPY if request.unhurried else TransferKind.RECOVERY, self._layer(request)
        async with _answering(context):
            async for piece in self._desk.outgoing.send(kind, pieces):
                yield piece

    async def HasData(self, request: control_pb2.HasDataRequest, context: Any) -> control_pb2.HasDataReply:  # noqa: N802
        """Return whether a data set lies here, and how much room there is for one."""
        async with _answering(context):
            return await self._data.has(request)

    async def GiveData(  # noqa: N802
        self, given: AsyncIterator[control_pb2.GivenData], context: Any
    ) -> AsyncIterator[control_pb2.WantedData]:
        """Take a data set that the caller offers: ask it for one file after the other."""
        async with _answering(context):
            async for wanted in self._data.take(given, caller=f"the caller at {context.peer()}"):
                yield wanted

    async def Logs(self, request: control_pb2.LogsRequest, context: Any) -> AsyncIterator[control_pb2.LogLine]:  # noqa: N802
        """Send the output of a job's workers: of this node, of the named one, or of all."""
        async with _answering(context):
            if not is_job_name(request.job):
                raise RecoveryError(repr(request.job[:60]), f"is not a job's name: one has {JOB_NAME_RULE}")
            if request.forwarded or request.node == self._desk.node:
                async for line in self._own_log(request):
                    yield line
                return
            async for line in self._all_logs(request):
                yield line

    async def History(  # noqa: N802
        self, request: control_pb2.JournalRequest, context: Any
    ) -> AsyncIterator[control_pb2.JournalRows]:
        """Send the newest written journal of a job, from a batch on."""
        async with _answering(context):
            async for rows in self._journals.rows(request.job, from_batch=request.from_batch, every=request.every):
                yield rows

    async def Trace(  # noqa: N802
        self, request: control_pb2.TraceRequest, context: Any
    ) -> AsyncIterator[control_pb2.WorkerTrace]:
        """Yield the last operations of a job's workers: of this node, or of all."""
        async with _answering(context):
            async for trace in self._traces.own(request.job) if request.forwarded else self._traces.all(request.job):
                yield trace

    async def _layer(self, request: control_pb2.ReadRequest) -> AsyncIterator[bytes]:
        """Yield one layer's file: from the store or, when asked to forward, from a holder or the checkpoint."""
        desk, offset, wanted = self._desk, request.offset, request.layer
        key = StateKey(wanted.job, wanted.timeline, wanted.boundary, wanted.layer)
        if (file := desk.store.get(key)) is not None:
            if offset >= file.size_bytes:
                await self._check(key, file)
            fault_point("transfer.file", path=file.path, layer=key.layer, boundary=key.boundary, node=desk.node)
            pieces = desk.store.read(key, offset=offset)
            while piece := await desk.store.in_thread(lambda _: next(pieces, b"")):
                fault_point("transfer.chunk", layer=key.layer, offset=offset, boundary=key.boundary, node=desk.node)
                yield piece
                offset += len(piece)
            return
        if not request.forward:
            raise RecoveryError(str(key), f"is not held by node {desk.node}")
        job = desk.view.jobs.get(key.job)
        if job is None:
            raise RecoveryError(str(key), "there is no such job")
        for holder in sorted(job.holders(key.timeline, key.boundary, key.layer)):
            if holder not in desk.view.nodes or holder == desk.node:
                continue
            try:
                asked = layer_request(key, offset=offset, unhurried=request.unhurried)
                async for piece in desk.client.read(desk.view.nodes[holder].endpoint, asked):
                    yield piece
                    offset += len(piece)
            except (PeerError, RecoveryError) as error:
                log.warning("state_not_forwarded", key=str(key), peer=holder, error=str(error))
                continue
            return
        async for piece in self._checkpointed(job, key, offset):
            yield piece

    async def _check(self, key: StateKey, file: StoredFile) -> None:
        """Check a file whose reader asks for more than all its bytes: it may differ from its registration.

        Raises RecoveryError, and deletes the file, when it does.
        """

        def is_good(beat: Beat) -> bool:
            try:
                return content_checksum(file.path, beat=beat) == file.checksum
            except (DamagedFileError, OSError):
                return False

        if not await self._desk.store.in_thread(is_good):
            self._desk.store.drop_damaged(key)
            raise RecoveryError(str(key), f"is damaged on node {self._desk.node}, which has deleted it")

    async def _checkpointed(self, job: JobView, key: StateKey, offset: int) -> AsyncIterator[bytes]:
        if key.is_of_origin:
            async for piece in self._of_origin(job, key, offset):
                yield piece
            return
        checkpoint = job.checkpoint
        if checkpoint is None or (checkpoint.timeline, checkpoint.boundary) != (key.timeline, key.boundary):
            raise RecoveryError(str(key), "no node holds it, and it is not the newest checkpoint's")
        if key.layer not in checkpoint.files:
            raise RecoveryError(str(key), f"the checkpoint {checkpoint.url} has no such layer")
        url = resolve_checkpoint_dir(checkpoint.url, self._desk.checkpoint_root)
        source = layer_at(url, key.layer, checkpoint.files[key.layer], self._reads, is_forwarded=True)
        async for piece in source.read(offset):
            yield piece

    async def _of_origin(self, job: JobView, key: StateKey, offset: int) -> AsyncIterator[bytes]:
        """Send a part of the folder with the initial weights; whoever asked compares its checksum."""
        if job.spec is None or not job.spec.origin.url:
            raise RecoveryError(str(key), "the job did not start from a folder")
        begin_at = partial(read_part, job.spec, key.layer, offset=offset)
        async for piece in self._reads.pieces(job.spec.origin.url, lambda beat: begin_at(beat=beat)):
            for begin in range(0, len(piece), CHUNK_BYTES):
                yield piece[begin : begin + CHUNK_BYTES]

    async def _own_log(self, request: control_pb2.LogsRequest) -> AsyncIterator[control_pb2.LogLine]:
        path = self._desk.logs_dir / f"{request.job}.log"
        async for text in read_log(path, self._logs, last_lines=request.last_lines, follow=request.follow):
            yield control_pb2.LogLine(node=self._desk.node, text=text)

    async def _all_logs(self, request: control_pb2.LogsRequest) -> AsyncIterator[control_pb2.LogLine]:
        """Yield the lines of all nodes as they arrive. A failing node has a line of its own."""
        desk = self._desk
        if request.node and request.node not in desk.view.nodes:
            raise RecoveryError(f"node {request.node}", "is not in the cluster")
        names = [request.node] if request.node else sorted({desk.node, *desk.view.nodes})
        lines: asyncio.Queue[control_pb2.LogLine | None] = asyncio.Queue(maxsize=1000)
        forwarded = control_pb2.LogsRequest(
            job=request.job, follow=request.follow, last_lines=request.last_lines, forwarded=True
        )

        async def pump(name: str) -> None:
            try:
                is_ours = name == desk.node
                source = (
                    self._own_log(request) if is_ours else desk.client.logs(desk.view.nodes[name].endpoint, forwarded)
                )
                async for line in source:
                    await lines.put(line)
            except (PeerError, RecoveryError) as error:
                await lines.put(control_pb2.LogLine(node=name, text=f"(not available: {error})"))
            finally:
                await lines.put(None)

        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(pump(name), name=f"logs of {name}")
            num_open = len(names)
            while num_open:
                if (line := await lines.get()) is None:
                    num_open -= 1
                else:
                    yield line


class _answering:  # noqa: N801 (reads as a statement)
    """Translate errors of the body into gRPC's, in one line each."""

    def __init__(self, context: Any) -> None:
        self._context = context

    async def __aenter__(self) -> None:
        return

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, UnavailableError):
            await self._context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        elif isinstance(error, RefusedError):
            await self._context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        elif isinstance(error, StoreError):
            await self._context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        elif isinstance(error, RecoveryError | ConfigError | DataError | OSError):
            await self._context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        elif isinstance(error, PeerError):
            await self._context.abort(grpc.StatusCode.INTERNAL, str(error))


def add_node_service(server: grpc.aio.Server, desk: NodeDesk) -> None:
    """Let a bound server answer from a desk."""
    service = NodeService(desk)
    control_pb2_grpc.add_NodeServicer_to_server(service, server)
    add_reading(server, service.read)
