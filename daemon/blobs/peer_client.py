"""Calls to other nodes' daemons: mTLS, a deadline each, errors that name the peer."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import grpc
import grpc.aio
import structlog

from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.base.errors import RecoveryError
from headway.daemon.blobs.fetch import Source
from headway.daemon.cluster.state_key import StateKey
from headway.proto import control_pb2, control_pb2_grpc
from headway.proto.control_pb2 import LayerFile, ReadRequest
from headway.stages.errors import PeerError, ProtocolError, UnavailableError
from headway.stages.sockets.shared_port import listening_port, listening_ports, open_channel
from headway.stages.sockets.tls_identity import Identity, dialling
from headway.stages.sockets.tls_sentences import OTHER_NAME, in_words
from headway.stages.state.file_digest import FileDigest

log = structlog.get_logger()

_FILES, _READ = "headway.control.Files", "Read"


def add_reading(server: grpc.aio.Server, read: Callable[[ReadRequest, Any], AsyncIterator[bytes]]) -> None:
    """Let a server answer Read, by a method that takes the request and gRPC's context. Its answers are raw bytes."""
    handler: Any = grpc.unary_stream_rpc_method_handler(read, request_deserializer=ReadRequest.FromString)
    server.add_registered_method_handlers(_FILES, {_READ: handler})


def layer_request(key: StateKey, *, offset: int = 0, forward: bool = False, unhurried: bool = False) -> ReadRequest:
    """Return the request for one layer's file."""
    layer = LayerFile(job=key.job, timeline=key.timeline, boundary=key.boundary, layer=key.layer)
    return ReadRequest(layer=layer, offset=offset, forward=forward, unhurried=unhurried)


KEEPALIVE_S: Final = 10.0
"""Interval of a client's pings on a silent connection."""
ANSWER_S: Final = 5.0
"""Time for the answer to a ping. Without it the connection is over."""

Options = tuple[tuple[str, int], ...]


def client_keepalive(interval_s: float = KEEPALIVE_S) -> Options:
    """Return the options of a channel. It pings while a call is in flight, even on a silent stream."""
    return (
        ("grpc.keepalive_time_ms", int(interval_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(ANSWER_S * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
    )


def server_keepalive(interval_s: float = KEEPALIVE_S) -> Options:
    """Return the options of a server with such clients: twice their rate is allowed, and a higher one still refused."""
    return (("grpc.http2.min_ping_interval_without_data_ms", int(interval_s * 500)),)


MessageT = TypeVar("MessageT")

CALL_TIMEOUT_S = 10.0
TRACE_TIMEOUT_S = 30.0
DIAL_TIMEOUT_S = 90.0
"""Time for a node to dial others, some of which do not answer."""
FOLDER_TIMEOUT_S = 20.0
"""Time for a node to write to a store, or to find that it does not answer."""
TRANSFER_TIMEOUT_S = 600.0
SILENCE_S: Final = 10.0
"""Seconds of silence after which the next source of a file is asked."""
MOST_SILENCES: Final = 6
"""Multiple of that time for a file that does not move while its connection does."""
MAX_MESSAGE_BYTES = 16 << 20
IDLE_S = 60.0
"""A connection without a call is closed after this time: its node may have left, and gRPC would dial it for ever."""
_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.client_idle_timeout_ms", int(IDLE_S * 1000)),
)
_GONE = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,  # busy: the node already runs its maximum of such calls
        grpc.StatusCode.ABORTED,  # the peer gave the stream up, because we read too slowly
    }
)


@dataclass(slots=True)
class _Line:
    """A channel to one endpoint, and its users."""

    channel: grpc.aio.Channel
    num_calls: int = 0
    """Calls in flight."""
    used_at: float = 0.0


class NodeClient:
    """The Node service of any node, by endpoint. For one event loop.

    An endpoint has one channel while it is used. The channel is closed when a call got no answer, or when none was made
    for `IDLE_S`. So a node that has left is not dialled.
    """

    def __init__(self, identity: Identity, *, keepalive_s: float = KEEPALIVE_S, idle_s: float = IDLE_S) -> None:
        self._identity = identity
        self._options = (*_OPTIONS, *client_keepalive(keepalive_s))
        self._idle_s = idle_s
        self._lines: dict[NodeEndpoint, _Line] = {}
        self._attempts: dict[NodeEndpoint, int] = {}
        """Number of channels that led nowhere, of endpoints behind several ports."""
        self.unanswered: Callable[[str], None] = lambda _: None
        """Told of each node that did not send a file."""
        self._heard: dict[str, float] = {}
        """Time at which each address with a channel sent the last piece of a file."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the addresses with a channel."""
        return tuple(endpoint.address for endpoint in self._lines)

    def port_to(self, endpoint: NodeEndpoint) -> str:
        """Return the host:port at which an endpoint is dialled, after calls that led nowhere."""
        return listening_port(endpoint.address, self._attempts.get(endpoint, 0))

    def anew(self) -> "NodeClient":
        """Return one with connections of its own, which dials the first port of each endpoint; the caller closes it."""
        found = NodeClient(self._identity, idle_s=self._idle_s)
        found._options = self._options
        return found

    async def close(self) -> None:
        """Close every channel; calls in flight end."""
        lines, self._lines = list(self._lines.values()), {}
        for line in lines:
            await line.channel.close()

    async def describe(
        self, endpoint: NodeEndpoint, *, rival: str = "", timeout_s: float = CALL_TIMEOUT_S
    ) -> control_pb2.DescribeReply:
        """Return the identity of the node that answers. rival: address of this side, if it has that name. Raises
        PeerError.
        """
        request = control_pb2.DescribeRequest(rival=rival)
        return await self._ask(endpoint, lambda stub: stub.Describe(request, timeout=timeout_s))

    async def status(self, endpoint: NodeEndpoint, *, timeout_s: float = CALL_TIMEOUT_S) -> control_pb2.StatusReply:
        """Return what a daemon knows of all jobs, also while etcd is away. Raises PeerError."""
        request = control_pb2.StatusRequest()
        return await self._ask(endpoint, lambda stub: stub.Status(request, timeout=timeout_s))

    async def dial_peers(self, endpoint: NodeEndpoint, nodes: Iterable[str]) -> control_pb2.DialPeersReply:
        """Return which registered ports of some nodes a node reaches. Raises PeerError."""
        request = control_pb2.DialPeersRequest(nodes=nodes)
        return await self._ask(endpoint, lambda stub: stub.DialPeers(request, timeout=DIAL_TIMEOUT_S))

    async def try_folder(self, endpoint: NodeEndpoint, checkpoint_dir: str) -> control_pb2.TryFolderReply:
        """Return whether a node can write to a checkpoint folder. Raises PeerError."""
        request = control_pb2.TryFolderRequest(checkpoint_dir=checkpoint_dir)
        return await self._ask(endpoint, lambda stub: stub.TryFolder(request, timeout=FOLDER_TIMEOUT_S))

    async def invite(self, endpoint: NodeEndpoint, request: control_pb2.InviteRequest) -> control_pb2.InviteReply:
        """Let somebody join once. Raises PeerError: ProtocolError if the daemon refuses."""
        return await self._ask(endpoint, lambda stub: stub.Invite(request, timeout=CALL_TIMEOUT_S))

    async def renew(self, endpoint: NodeEndpoint, request: str) -> str:
        """Return the next certificate for this side's own name in PEM. Raises PeerError: ProtocolError if refused."""
        asked = control_pb2.RenewRequest(request=request)
        reply: control_pb2.RenewReply
        reply = await self._ask(endpoint, lambda stub: stub.Renew(asked, timeout=CALL_TIMEOUT_S))
        return reply.certificate

    def probe(
        self, endpoint: NodeEndpoint, num_bytes: int, *, timeout_s: float, counted: bool = False
    ) -> AsyncIterator[control_pb2.ProbeReply]:
        """Fetch empty bytes from a node to measure the rate. Raises PeerError.

        counted: the first reply has no bytes, but the number of segments that the connection has sent so far.
        """
        request = control_pb2.ProbeRequest(num_bytes=num_bytes, counted=counted)
        return self._read(endpoint, lambda stub: stub.Probe(request, timeout=timeout_s))

    def accompany(self, endpoint: NodeEndpoint, node: str) -> AsyncIterator[control_pb2.AccompanyReply]:
        """Open a stream that lives as long as the daemon there; keepalive ends it when the machine is gone."""
        request = control_pb2.AccompanyRequest(node=node)
        return self._read(endpoint, lambda stub: stub.Accompany(request))

    def stand_by(self, endpoint: NodeEndpoint, node: str) -> AsyncGenerator[control_pb2.StandByReply]:
        """Open a stream during which this node may stand by at another's port, with the token that comes first."""
        request = control_pb2.StandByRequest(node=node)
        return self._read(endpoint, lambda stub: stub.StandBy(request))

    async def read(self, endpoint: NodeEndpoint, request: ReadRequest) -> AsyncIterator[bytes]:
        """Yield a file from the request's offset on, in unverified pieces; an empty one says that the node is at work.

        A file may have any size, so there is no overall deadline, but one for each piece: see `in_time`. RecoveryError:
        the node does not have it; PeerError otherwise.
        """

        def call(channel: grpc.aio.Channel) -> AsyncIterator[bytes]:
            method: Any = channel.unary_stream(f"/{_FILES}/{_READ}", request_serializer=ReadRequest.SerializeToString)
            return method(request)  # type: ignore[no-any-return]

        try:
            async with (
                aclosing(self._stream(endpoint, call)) as coming,
                aclosing(in_time(endpoint, coming, heard=self._heard)) as pieces,
            ):
                async for piece in pieces:
                    yield piece
        except UnavailableError:
            self.unanswered(endpoint.name)
            raise

    async def has_data(self, endpoint: NodeEndpoint, sha256: str, source: str) -> control_pb2.HasDataReply:
        """Return whether a node has a data set in its cache or in a folder, and its room for one. Raises PeerError."""
        request = control_pb2.HasDataRequest(sha256=sha256, source=source)
        return await self._ask(endpoint, lambda stub: stub.HasData(request, timeout=FOLDER_TIMEOUT_S))

    async def give_data(
        self, endpoint: NodeEndpoint, sha256: str, read: Callable[[str, int], AsyncIterator[bytes]]
    ) -> None:
        """Send a data set, by the SHA-256 of its index, file by file as the node asks for them.

        read: yields the pieces of a file, by its SHA-256 and from an offset on; an empty hash means the index. Raises
        PeerError, RecoveryError: the node refuses the data, or a file cannot be read.
        """
        wanted_files: asyncio.Queue[control_pb2.WantedData] = asyncio.Queue()

        async def given() -> AsyncIterator[control_pb2.GivenData]:
            yield control_pb2.GivenData(sha256=sha256)
            while True:
                wanted = await wanted_files.get()
                try:
                    async for piece in read(wanted.sha256, wanted.offset):
                        yield control_pb2.GivenData(piece=piece)
                except RecoveryError as error:
                    yield control_pb2.GivenData(error=str(error))
                    return
                yield control_pb2.GivenData(is_last=True)

        async for wanted in self._read(endpoint, lambda stub: stub.GiveData(given())):
            wanted_files.put_nowait(wanted)

    def logs(self, endpoint: NodeEndpoint, request: control_pb2.LogsRequest) -> AsyncIterator[control_pb2.LogLine]:
        """Yield the lines of a job's workers. Following has no deadline: it ends with the caller or the peer."""
        timeout_s = None if request.follow else TRANSFER_TIMEOUT_S
        return self._read(endpoint, lambda stub: stub.Logs(request, timeout=timeout_s))

    def journal(
        self, endpoint: NodeEndpoint, job: str, *, from_batch: int = 0, every: int = 1
    ) -> AsyncIterator[control_pb2.JournalRows]:
        """Yield the newest written journal of a job. every: only batches that it divides, and evaluated ones."""
        request = control_pb2.JournalRequest(job=job, from_batch=from_batch, every=every)
        return self._read(endpoint, lambda stub: stub.History(request, timeout=TRANSFER_TIMEOUT_S))

    def trace(
        self, endpoint: NodeEndpoint, job: str, *, forwarded: bool = False
    ) -> AsyncIterator[control_pb2.WorkerTrace]:
        """Return the workers' last operations of a job; forwarded: only of that node. RecoveryError: it has no plan."""
        request = control_pb2.TraceRequest(job=job, forwarded=forwarded)
        return self._read(endpoint, lambda stub: stub.Trace(request, timeout=TRACE_TIMEOUT_S))

    async def _ask(self, endpoint: NodeEndpoint, call: Callable[[Any], Awaitable[MessageT]]) -> MessageT:
        """Return the answer to one call. Raises PeerError."""
        async with aclosing(self._read(endpoint, lambda stub: _once(call(stub)))) as replies:
            return await anext(replies)

    def _read(self, endpoint: NodeEndpoint, call: Callable[[Any], AsyncIterator[MessageT]]) -> AsyncGenerator[MessageT]:
        return self._stream(endpoint, lambda channel: call(control_pb2_grpc.NodeStub(channel)))

    async def _stream(
        self, endpoint: NodeEndpoint, call: Callable[[grpc.aio.Channel], AsyncIterator[MessageT]]
    ) -> AsyncGenerator[MessageT]:
        """Yield the answers of a call. One that no answer came to is made again by the next port that leads there."""
        num_left = len(listening_ports(endpoint.address))
        while num_left:
            num_left -= 1
            try:
                async with aclosing(self._stream_once(endpoint, call)) as replies:
                    async for message in replies:
                        num_left = 0
                        yield message
            except UnavailableError:
                if not num_left:
                    raise
            else:
                return

    async def _stream_once(
        self, endpoint: NodeEndpoint, call: Callable[[grpc.aio.Channel], AsyncIterator[MessageT]]
    ) -> AsyncGenerator[MessageT]:
        """Yield the answers of a call. The channel of a call without answer is closed, unless others use it."""
        line = await self._line(endpoint)
        line.num_calls += 1
        is_there = False
        replies = call(line.channel)
        try:
            async for message in replies:
                is_there = True
                yield message
            is_there = True
        except grpc.aio.AioRpcError as error:
            is_there = error.code() not in _GONE
            raise _translated(endpoint, error) from error
        finally:
            line.num_calls -= 1
            line.used_at = asyncio.get_running_loop().time()
            if isinstance(replies, grpc.aio.Call):
                replies.cancel()  # a reader that has left: the answering side need not wait for our garbage collector
            if not is_there:
                if len(listening_ports(endpoint.address)) > 1:
                    self._attempts[endpoint] = self._attempts.get(endpoint, 0) + 1
                await self._drop(endpoint, line)

    async def _line(self, endpoint: NodeEndpoint) -> _Line:
        now = asyncio.get_running_loop().time()
        for other, idle in [(other, line) for other, line in self._lines.items() if now - line.used_at >= self._idle_s]:
            if other != endpoint:
                await self._drop(other, idle)
        if endpoint not in self._lines:
            where, attempt = endpoint.address, self._attempts.get(endpoint, 0)
            channel = open_channel(
                where, dialling(self._identity), node=endpoint.name, options=self._options, attempt=attempt
            )
            self._lines[endpoint] = _Line(channel, used_at=now)
        return self._lines[endpoint]

    async def _drop(self, endpoint: NodeEndpoint, line: _Line) -> None:
        """Close a channel that no call uses."""
        if not line.num_calls and self._lines.get(endpoint) is line:
            del self._lines[endpoint]
            self._heard.pop(endpoint.address, None)
            await line.channel.close()


async def in_time(
    endpoint: NodeEndpoint, pieces: AsyncIterator[bytes], *, heard: dict[str, float]
) -> AsyncGenerator[bytes]:
    """Yield the pieces as they come. Raises UnavailableError when the next one does not.

    heard: when each address sent the last piece of any file. On a slow line the pieces of many files take turns. So a
    file is not given up while its connection delivers others, or only after MOST_SILENCES times as long.
    """
    while True:
        piece = await _next_in_time(endpoint, pieces, heard)
        if piece is None:
            return
        heard[endpoint.address] = time.monotonic()
        yield piece


async def _next_in_time(endpoint: NodeEndpoint, pieces: AsyncIterator[bytes], heard: dict[str, float]) -> bytes | None:
    asked = time.monotonic()
    coming: asyncio.Future[bytes | None] = asyncio.ensure_future(anext(pieces, None))
    try:
        while not coming.done():
            silent_from = min(max(asked, heard.get(endpoint.address, 0.0)), asked + (MOST_SILENCES - 1) * SILENCE_S)
            left_s = silent_from + SILENCE_S - time.monotonic()
            if left_s <= 0:
                raise UnavailableError(str(endpoint), f"sent nothing for {time.monotonic() - silent_from:.3g} s")
            await asyncio.wait({coming}, timeout=left_s)
        return coming.result()
    finally:
        if not coming.done():
            coming.cancel()
            await asyncio.wait({coming})


def holder(
    client: NodeClient,
    endpoint: NodeEndpoint,
    key: StateKey,
    expected: FileDigest,
    *,
    unhurried: bool = False,
    is_forwarded: bool = False,
) -> Source:
    """Return a node as the source of a layer's file.

    After wrong bytes it is asked for those after the last one: that makes it check its own file, and delete a damaged
    one. unhurried: no worker waits for the file, so it may come slowly. is_forwarded: a node without it reads it where
    it can, also from the checkpoint folder.
    """

    def read(offset: int) -> AsyncIterator[bytes]:
        asked = layer_request(key, offset=offset, forward=is_forwarded, unhurried=unhurried)
        return client.read(endpoint, asked)

    async def let_it_check(_error: RecoveryError) -> None:
        if is_forwarded:
            return
        try:
            async for _ in client.read(endpoint, layer_request(key, offset=expected.size_bytes)):
                pass
        except (PeerError, RecoveryError) as error:
            log.warning("holder_checked_its_file", key=str(key), peer=endpoint.address, error=str(error))

    return Source(str(endpoint), read, let_it_check)


async def _once(answer: Awaitable[MessageT]) -> AsyncIterator[MessageT]:
    yield await answer


def _translated(endpoint: NodeEndpoint, error: grpc.aio.AioRpcError) -> PeerError | RecoveryError:
    peer, details = str(endpoint), in_words(error.details() or error.code().name)
    if details == OTHER_NAME:
        details += f" {endpoint.name or endpoint.address.rpartition(':')[0]}"
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        details = "it runs another release, which does not know this call: use its `headway`, or upgrade it"
    if error.code() in _GONE:
        return UnavailableError(peer, details)
    if error.code() is grpc.StatusCode.NOT_FOUND:
        return RecoveryError(peer, details)
    return ProtocolError(peer, details)
