"""Where links come from: one endpoint per worker process, which listens for the upstream neighbour and dials the
downstream one, over TCP with mTLS.

A hello names protocol, job, generation and both processes. One that is too early is answered `not yet` and dialled
again; one that is too late or not meant for this process is answered with the reason, and the dialler gives up.
"""

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from headway.proto.data_pb2 import Hello, HelloReply
from headway.stages.errors import ProtocolError
from headway.stages.frame_codec import MAX_MESSAGE_BYTES
from headway.stages.frame_contract import DOWNSTREAM_KINDS, UPSTREAM_KINDS, FrameContract
from headway.stages.grpc_link import GrpcLink, MessageStream
from headway.stages.ids import Generation, StageIndex
from headway.stages.link import Inbox
from headway.stages.loop_thread import LoopThread
from headway.stages.tls_identity import CHANNEL_OPTIONS, TlsIdentity

SERVICE = "headway.data.Link"
METHOD = "Stream"
START_TIMEOUT = timedelta(seconds=10)
HELLO_TIMEOUT = timedelta(seconds=10)
FIRST_REDIAL_S = 0.02
LAST_REDIAL_S = 0.5

_TRANSPORT_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
)
_SERVER_OPTIONS = (*_TRANSPORT_OPTIONS, ("grpc.so_reuseport", 0))
_DIAL_OPTIONS = (
    *_TRANSPORT_OPTIONS,
    *CHANNEL_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
)
_TRANSIENT = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})


@dataclass(slots=True)
class _Awaited:
    """The link that the upstream neighbour is expected to dial."""

    link: GrpcLink
    generation: Generation
    peer_stage: StageIndex
    peer_incarnation: str
    is_connected: bool = False


class LinkEndpoint:
    """Listens from `start` to `stop`. `accept` and `dial` return at once, from any thread but the loop's."""

    def __init__(self, *, loop: LoopThread, identity: TlsIdentity, host: str, incarnation: str, protocol: int) -> None:
        self._loop = loop
        self._identity = identity
        self._host = host
        self._incarnation = incarnation
        self._protocol = protocol
        self._server: grpc.aio.Server | None = None
        self._port = 0
        self._awaited: dict[str, _Awaited] = {}
        self._generations: dict[str, Generation] = {}
        self._num_stale = 0

    @property
    def port(self) -> int:
        """Where neighbours dial; known after `start`."""
        return self._port

    @property
    def num_stale(self) -> int:
        """Hellos of generations that were over."""
        return self._num_stale

    def start(self) -> None:
        """Listen on a free port of the host. Raises RuntimeError when the host is not this machine's."""
        self._loop.run(self._start(), timeout=START_TIMEOUT, what=f"listening on {self._host}")

    def stop(self) -> None:
        """Stop listening; streams that are left are cut."""
        if self._server is not None:
            self._loop.run(self._server.stop(None), timeout=START_TIMEOUT, what="closing the link server")

    def accept(
        self,
        job: str,
        generation: Generation,
        *,
        stage: StageIndex,
        peer_incarnation: str,
        inbox: Inbox,
        contract: FrameContract,
        timeout: timedelta,
        address: str = "",
    ) -> GrpcLink:
        """The link to the upstream neighbour, which dials. `stage` is ours; `address` is for messages only.

        LinkLost arrives in the inbox if the neighbour has not dialled within `timeout`.
        """
        peer_stage = StageIndex(stage - 1)
        link = GrpcLink(
            self._loop,
            f"stage {peer_stage} at {address or 'an unknown address'}",
            generation=generation,
            inbox=inbox,
            contract=contract,
            receives=DOWNSTREAM_KINDS,
        )
        self._loop.call_soon(self._await, job, _Awaited(link, generation, peer_stage, peer_incarnation), timeout)
        return link

    def dial(
        self,
        address: str,
        job: str,
        generation: Generation,
        *,
        stage: StageIndex,
        peer_incarnation: str,
        inbox: Inbox,
        contract: FrameContract,
        timeout: timedelta,
    ) -> GrpcLink:
        """The link to the downstream neighbour at `address`. `stage` is ours.

        LinkLost arrives in the inbox if it has not accepted within `timeout`, or at once if it refuses for good.
        """
        link = GrpcLink(
            self._loop,
            f"stage {stage + 1} at {address}",
            generation=generation,
            inbox=inbox,
            contract=contract,
            receives=UPSTREAM_KINDS,
        )
        hello = Hello(
            protocol=self._protocol,
            job=job,
            generation=generation,
            incarnation=self._incarnation,
            expected_incarnation=peer_incarnation,
            next_sequence=0,
            stage=stage,
        )
        self._loop.call_soon(self._meet, job, generation)
        self._loop.spawn(self._dial(link, address, hello, timeout), name=f"dial {link.peer}")
        return link

    # --- the listening side, in the loop's thread -------------------------------------------------------------------

    async def _start(self) -> None:
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._serve)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        credentials = grpc.ssl_server_credentials(
            [(self._identity.key, self._identity.certificate)],
            root_certificates=self._identity.ca,
            require_client_auth=True,
        )
        self._port = server.add_secure_port(f"{self._host}:0", credentials)
        await server.start()
        self._server = server

    def _meet(self, job: str, generation: Generation) -> None:
        self._generations[job] = max(generation, self._generations.get(job, generation))

    def _await(self, job: str, awaited: _Awaited, timeout: timedelta) -> None:
        self._meet(job, awaited.generation)
        self._awaited[job] = awaited
        self._loop.loop.call_later(timeout.total_seconds(), self._on_awaited_too_long, awaited, timeout)

    def _on_awaited_too_long(self, awaited: _Awaited, timeout: timedelta) -> None:
        if not awaited.is_connected:
            awaited.link.lose(f"did not dial within {timeout.total_seconds():g} s")

    async def _serve(self, _: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        stream = _ServerStream(context)
        try:
            async with asyncio.timeout(HELLO_TIMEOUT.total_seconds()):
                first = await stream.read()
        except (TimeoutError, ConnectionError):
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no hello")
        reply, awaited = self._judge(first)
        reply.incarnation = self._incarnation
        if awaited is None:
            self._num_stale += reply.verdict == HelloReply.STALE
            await context.write(reply.SerializeToString())
            return
        awaited.is_connected = True
        try:
            await context.write(reply.SerializeToString())
            await awaited.link.run(stream)
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.reason)
        finally:
            awaited.link.lose("the stream was cut")

    def _judge(self, first: bytes | None) -> tuple[HelloReply, _Awaited | None]:
        """The answer to a hello, and the link it is for if it is accepted."""
        try:
            hello = Hello.FromString(first or b"")
        except DecodeError:
            return HelloReply(verdict=HelloReply.WRONG_PROTOCOL, reason="the first message is not a hello"), None
        if hello.protocol != self._protocol:
            reason = f"protocol {hello.protocol} instead of {self._protocol}"
            return HelloReply(verdict=HelloReply.WRONG_PROTOCOL, reason=reason), None
        if hello.expected_incarnation != self._incarnation:
            return HelloReply(verdict=HelloReply.WRONG_PEER, reason="another process listens here now"), None
        known = self._generations.get(hello.job, Generation(-1))
        awaited = self._awaited.get(hello.job)
        if hello.generation > known:
            return HelloReply(verdict=HelloReply.NOT_YET, reason=f"generation {known} is the newest here"), None
        if hello.generation < known:
            return HelloReply(verdict=HelloReply.STALE, reason=f"generation {known} is in force here"), None
        if awaited is None or awaited.generation != known:
            return HelloReply(verdict=HelloReply.WRONG_PEER, reason="no upstream stage is expected here"), None
        if awaited.link.is_closed:
            return HelloReply(verdict=HelloReply.STALE, reason=f"generation {known} is over here"), None
        if (hello.stage, hello.incarnation) != (awaited.peer_stage, awaited.peer_incarnation) or awaited.is_connected:
            reason = f"stage {hello.stage} of process {hello.incarnation} is not the one that is awaited"
            return HelloReply(verdict=HelloReply.WRONG_PEER, reason=reason), None
        return HelloReply(verdict=HelloReply.ACCEPTED, next_sequence=0), awaited

    # --- the dialling side, in the loop's thread --------------------------------------------------------------------

    async def _dial(self, link: GrpcLink, address: str, hello: Hello, timeout: timedelta) -> None:
        credentials = grpc.ssl_channel_credentials(self._identity.ca, self._identity.key, self._identity.certificate)
        reason = "no answer"
        async with grpc.aio.secure_channel(address, credentials, options=_DIAL_OPTIONS) as channel:
            method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(f"/{SERVICE}/{METHOD}")
            pause_s = FIRST_REDIAL_S
            give_up_at = self._loop.loop.time() + timeout.total_seconds()
            while not link.is_closed and self._loop.loop.time() < give_up_at:
                call = method()
                try:
                    async with asyncio.timeout_at(give_up_at):
                        reply = await _greet(_ClientStream(call), hello)
                except TimeoutError:
                    break
                except ConnectionError as error:
                    reason = str(error)
                    if call.done() and await call.code() not in _TRANSIENT:
                        return link.lose(reason)
                else:
                    if reply.verdict == HelloReply.ACCEPTED:
                        return await self._serve_dialled(link, _ClientStream(call))
                    reason = reply.reason
                    if reply.verdict != HelloReply.NOT_YET:
                        return link.lose(f"{HelloReply.Verdict.Name(reply.verdict)}: {reason}")
                finally:
                    if link.is_closed or not call.done():
                        call.cancel()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LAST_REDIAL_S)
        return link.lose(f"not connected within {timeout.total_seconds():g} s: {reason}")

    async def _serve_dialled(self, link: GrpcLink, stream: MessageStream) -> None:
        try:
            await link.run(stream)
        except ProtocolError:
            return  # told by LinkLost; the channel's end cancels the call


async def _greet(stream: MessageStream, hello: Hello) -> HelloReply:
    await stream.write(hello.SerializeToString())
    reply = await stream.read()
    if reply is None:
        raise ConnectionError("closed without an answer to the hello")
    try:
        return HelloReply.FromString(reply)
    except DecodeError as error:
        raise ConnectionError("an undecodable answer to the hello") from error


class _ClientStream:
    """A call as a MessageStream."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def read(self) -> bytes | None:
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise ConnectionError(f"{error.code().name}: {error.details()}") from error
        if not isinstance(message, bytes):
            if (code := await self._call.code()) != grpc.StatusCode.OK:
                raise ConnectionError(f"{code.name}: {await self._call.details()}")
            return None
        return message

    async def write(self, message: bytes) -> None:
        try:
            await self._call.write(message)
        except grpc.aio.AioRpcError as error:
            raise ConnectionError(f"{error.code().name}: {error.details()}") from error
        except asyncio.InvalidStateError as error:
            raise ConnectionError(f"{(await self._call.code()).name}: {await self._call.details()}") from error

    async def finish(self) -> None:
        await self._call.done_writing()
        await self._call.code()  # the server's handler has returned: it has read to the end


class _ServerStream:
    """A servicer's context as a MessageStream."""

    def __init__(self, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        self._context = context

    async def read(self) -> bytes | None:
        try:
            message = await self._context.read()
        except grpc.aio.BaseError as error:
            raise ConnectionError(f"the stream broke: {error}") from error
        return message if isinstance(message, bytes) else None

    async def write(self, message: bytes) -> None:
        try:
            await self._context.write(message)
        except (grpc.aio.BaseError, grpc.RpcError) as error:
            raise ConnectionError(f"the stream broke: {error}") from error

    async def finish(self) -> None:
        """The handler's return says it; there is nothing to do before."""
