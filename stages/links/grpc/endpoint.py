"""Opens links: one endpoint per worker process, which listens for upstream neighbours and dials downstream ones, over
TCP with mTLS. Of two replicas of a stage the one with the lower position dials.

A hello names protocol, job, generation and both processes. One that is too early is answered `not yet` and dialled
again. One that is too late, or for another process, is answered with the reason, and the dialler gives up.

A broken stream is dialled again by the side that dialled it first, over a new connection. The new one supersedes the
old one, even if the listening side still considers that alive. Each side gives up `resume_timeout` after the break.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from headway.proto.data_pb2 import Hello, HelloReply
from headway.stages.errors import ProtocolError
from headway.stages.ids import Generation, StageIndex
from headway.stages.links.frame_contract import DOWNSTREAM_KINDS, SIBLING_KINDS, UPSTREAM_KINDS, FrameContract
from headway.stages.links.grpc.frame_bundle import MAX_BUNDLE_BYTES
from headway.stages.links.grpc.link import GrpcLink, MessageStream, Turn
from headway.stages.links.grpc.streams import ClientStream, Ears, ServerStream
from headway.stages.links.known_generations import KnownGenerations
from headway.stages.links.link import FrameKind, Inbox
from headway.stages.links.loop_thread import LoopThread
from headway.stages.sockets.listening_port import listen_at_first_free
from headway.stages.sockets.server_limits import server_limits
from headway.stages.sockets.tls_identity import TlsIdentity, expecting, is_borne, names_of_client, other_node

log = structlog.get_logger()

SERVICE = "headway.data.Link"
METHOD = "Stream"
START_TIMEOUT = timedelta(seconds=10)
HELLO_TIMEOUT = timedelta(seconds=10)
ANY_PORT = (0,)
FIRST_REDIAL_S = 0.02
LAST_REDIAL_S = 0.5
FIRST_ATTEMPT_S = 2.0
ATTEMPT_GROWTH = 1.5
"""Maximum time of a redial, and its growth for the next one: packets may vanish, and a machine may be slow."""

TRANSPORT_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_BUNDLE_BYTES),
    ("grpc.max_send_message_length", MAX_BUNDLE_BYTES),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
)
STREAMS_PER_CONNECTION = 8
"""Streams per connection: one for the link, and one for the Meet of a collective link."""
_DIAL_OPTIONS = (
    *TRANSPORT_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
)
_HOPELESS = frozenset(
    {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
)


@dataclass(slots=True)
class _Awaited:
    """A link that a neighbour is expected to dial."""

    link: GrpcLink
    generation: Generation
    peer_stage: StageIndex
    peer_incarnation: str
    peer_node: str
    resume_timeout: timedelta
    newest_attempt: int = 0


class _RefusedError(Exception):
    """The neighbour, or another process there, will never accept this link."""


class _NotYetError(ConnectionError):
    """The neighbour is there and not ready: it is loading its layers."""


class LinkEndpoint:
    """Listens from `start` to `stop`. `accept` and `dial` return at once, from any thread but the loop's."""

    def __init__(
        self,
        *,
        loop: LoopThread,
        identity: TlsIdentity,
        host: str,
        incarnation: str,
        protocol: int,
        ports: Sequence[int] = ANY_PORT,
    ) -> None:
        """ports: where it may listen; the first free one is taken."""
        self._loop = loop
        self._identity = identity
        self._host = host
        self._ports = ports
        self._incarnation = incarnation
        self._protocol = protocol
        self._server: grpc.aio.Server | None = None
        self._methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {}
        self._port = 0
        self._awaited: dict[str, dict[int, _Awaited]] = {}
        """Links by job, and by the dialling worker's position in its plan."""
        self._generations = KnownGenerations()
        self._dialled: list[GrpcLink] = []
        self._num_stale = 0
        self._num_resumed = 0
        self._dialled_cut_until = self._accepted_cut_until = 0.0
        self._ears = Ears()

    @property
    def port(self) -> int:
        """Return the port where neighbours dial; known after `start`."""
        return self._port

    @property
    def num_stale(self) -> int:
        """Return the number of hellos of old generations."""
        return self._num_stale

    @property
    def num_resumed(self) -> int:
        """Return how often a link of this endpoint, of any generation, continued over a new stream."""
        return self._num_resumed

    def add_method(self, name: str, answer: Callable[[bytes, Any], Awaitable[bytes]]) -> None:
        """Answer a unary method too, over this port and its certificates. Call before `start`."""
        self._methods[name] = grpc.unary_unary_rpc_method_handler(answer)

    def start(self) -> None:
        """Listen on the first free port of the host. Raises PortsTakenError, NotListeningError."""
        self._loop.run(self._start(), timeout=START_TIMEOUT, what=f"listening on {self._host}")

    def stop(self) -> None:
        """Stop listening; remaining streams are cut."""
        if self._server is not None:
            self._loop.run(self._server.stop(None), timeout=START_TIMEOUT, what="closing the link server")

    def accept(
        self,
        job: str,
        generation: Generation,
        *,
        stage: StageIndex,
        peer_node: str,
        peer_incarnation: str,
        inbox: Inbox,
        contract: FrameContract,
        first_contact: timedelta,
        resume_timeout: timedelta,
        address: str = "",
        peer_stage: StageIndex | None = None,
        peer_worker: int = 0,
        peer: str = "",
        is_last: bool = True,
    ) -> GrpcLink:
        """Return the link to a neighbour that dials: one of the stage before, or a replica of this one.

        stage: ours. address: for messages only. peer_node: whose certificate it has to present. peer_stage: the stage
        before, by default. peer_worker: the neighbour's position among all workers of its plan. peer: its name for
        people. is_last: no other `accept` of this generation follows; until then a dialler is told to come again.

        LinkLost arrives in the inbox if the neighbour has not dialled within `first_contact`, or not again within
        `resume_timeout` of a break.
        """
        if peer_stage is None:
            peer_stage = StageIndex(stage - 1)
        link = GrpcLink(
            self._loop,
            f"{peer or f'stage {peer_stage}'} at {address or 'an unknown address'}",
            generation=generation,
            inbox=inbox,
            contract=contract,
            receives=kinds_between(peer_stage, stage),
        )
        awaited = _Awaited(link, generation, peer_stage, peer_incarnation, peer_node, resume_timeout)
        self._loop.call_soon(self._await, job, peer_worker, awaited, first_contact, is_last)
        return link

    def dial(
        self,
        address: str,
        job: str,
        generation: Generation,
        *,
        stage: StageIndex,
        peer_node: str,
        peer_incarnation: str,
        inbox: Inbox,
        contract: FrameContract,
        first_contact: timedelta,
        resume_timeout: timedelta,
        worker: int = 0,
        peer_stage: StageIndex | None = None,
        peer: str = "",
    ) -> GrpcLink:
        """Return the link to a neighbour that accepts at `address`: one of the stage after, or a replica of this one.

        stage, worker: our stage, and our position among all workers of the plan. peer_node: as in `accept`. peer_stage:
        the stage after, by default. peer: the neighbour's name for people.

        LinkLost arrives in the inbox if it has not answered for `first_contact`, or not again within `resume_timeout`
        of a break, or at once if it refuses for good. The answer that it is not ready yet counts as an answer.
        """
        if peer_stage is None:
            peer_stage = StageIndex(stage + 1)
        link = GrpcLink(
            self._loop,
            f"{peer or f'stage {peer_stage}'} at {address}",
            generation=generation,
            inbox=inbox,
            contract=contract,
            receives=kinds_between(peer_stage, stage),
        )
        hello = Hello(
            protocol=self._protocol,
            job=job,
            generation=generation,
            incarnation=self._incarnation,
            expected_incarnation=peer_incarnation,
            stage=stage,
            worker=worker,
        )
        self._loop.call_soon(self._generations.meet, job, generation)
        self._loop.spawn(
            self._dial(link, address, peer_node, hello, first_contact, resume_timeout), name=f"dial {link.peer}"
        )
        return link

    def cut(self, duration: timedelta, *, dialled: bool = True, accepted: bool = True) -> None:
        """Drop the streams of dialled or accepted links, or both, and allow none for a while. For tests.

        Callable from any thread; the links themselves stay and resume.
        """
        self._loop.call_soon(self._cut, duration, dialled, accepted)

    def deafen(self, duration: timedelta) -> None:
        """Hear nothing for a while, though peers hear us. For tests. Callable from any thread; the links resume."""
        until = self._loop.loop.time() + duration.total_seconds()
        self._loop.call_soon(setattr, self._ears, "deaf_until", until)

    def _cut(self, duration: timedelta, dialled: bool, accepted: bool) -> None:
        until = self._loop.loop.time() + duration.total_seconds()
        links: list[GrpcLink] = []
        if dialled:
            self._dialled_cut_until = until
            links += self._dialled
        if accepted:
            self._accepted_cut_until = until
            links += (awaited.link for of_job in self._awaited.values() for awaited in of_job.values())
        for link in links:
            link.interrupt("cut by a test")

    # --- the listening side, in the loop's thread -------------------------------------------------------------------

    async def _start(self) -> None:
        limits = server_limits(streams_per_connection=STREAMS_PER_CONNECTION)
        server = grpc.aio.server(options=(*TRANSPORT_OPTIONS, *limits))
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._serve)
        methods = {METHOD: handler, **self._methods}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        credentials = grpc.ssl_server_credentials(
            [(self._identity.key, self._identity.certificate)],
            root_certificates=self._identity.ca,
            require_client_auth=True,
        )
        self._port = listen_at_first_free(server, credentials, self._host, self._ports)
        await server.start()
        self._server = server

    def _await(self, job: str, worker: int, awaited: _Awaited, timeout: timedelta, is_last: bool) -> None:
        if is_last:
            self._generations.meet(job, awaited.generation)
        known = {other: links for other, links in self._awaited.items() if other in self._generations}
        of_job = known[job] = self._awaited.get(job, {})
        self._awaited = known
        for other, older in list(of_job.items()):
            if older.generation < awaited.generation:
                del of_job[other]
        of_job[worker] = awaited
        self._loop.loop.call_later(timeout.total_seconds(), self._on_awaited_too_long, awaited, timeout)

    def _on_awaited_too_long(self, awaited: _Awaited, timeout: timedelta) -> None:
        if not awaited.link.was_connected:
            awaited.link.lose(f"did not dial within {timeout.total_seconds():g} s")

    def _on_broken(self, awaited: _Awaited, reason: str) -> None:
        broken_at, timeout_s = awaited.link.broken_at, awaited.resume_timeout.total_seconds()
        if broken_at is not None and not awaited.link.is_over:
            log.info("link_broken", peer=awaited.link.peer, generation=awaited.generation, reason=reason)
            self._loop.loop.call_at(broken_at + timeout_s, self._on_broken_too_long, awaited, broken_at, reason)

    def _on_broken_too_long(self, awaited: _Awaited, broken_at: float, reason: str) -> None:
        if awaited.link.broken_at == broken_at:
            awaited.link.lose(f"not resumed within {awaited.resume_timeout.total_seconds():g} s: {reason}")

    async def _serve(self, _: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        stream = ServerStream(context, self._ears)
        try:
            async with asyncio.timeout(HELLO_TIMEOUT.total_seconds()):
                first = await stream.read()
        except (TimeoutError, ConnectionError):
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no hello")
        if self._loop.loop.time() < self._accepted_cut_until:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "cut by a test")
        reply, awaited, next_sequence = self._judge(first, names_of_client(context.auth_context()))
        reply.incarnation = self._incarnation
        if awaited is None:
            self._num_stale += reply.verdict == HelloReply.STALE
            await context.write(reply.SerializeToString())
            return
        reason = "the stream was cut"
        try:
            async with awaited.link.turn() as turn:
                await self._serve_accepted(awaited.link, stream, turn, reply, next_sequence)
        except ProtocolError as error:
            reason = error.reason
            awaited.link.violated(error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
        except (ConnectionError, TimeoutError) as error:
            reason = str(error) or "took no answer to its hello"
            await context.abort(grpc.StatusCode.ABORTED, reason)
        finally:
            self._on_broken(awaited, reason)

    async def _serve_accepted(
        self, link: GrpcLink, stream: MessageStream, turn: Turn, reply: HelloReply, next_sequence: int
    ) -> None:
        if link.is_over:
            reply = HelloReply(verdict=HelloReply.STALE, reason="the link is over here", incarnation=self._incarnation)
        reply.next_sequence = link.next_sequence
        async with asyncio.timeout(HELLO_TIMEOUT.total_seconds()):
            await stream.write(reply.SerializeToString())
        if not link.is_over:
            self._num_resumed += link.was_connected
            await link.run(stream, turn, acknowledged=next_sequence)

    def _judge(self, first: bytes | None, names: Sequence[str]) -> tuple[HelloReply, _Awaited | None, int]:
        """Return the answer to a hello; if it is accepted, also its link, and the number that its sender expects next.

        names: those of the certificate of the side that dials.
        """
        try:
            hello = Hello.FromString(first or b"")
        except DecodeError:
            return _refusal(HelloReply.WRONG_PROTOCOL, "the first message is not a hello")
        if hello.protocol != self._protocol:
            return _refusal(HelloReply.WRONG_PROTOCOL, f"protocol {hello.protocol} instead of {self._protocol}")
        if hello.expected_incarnation != self._incarnation:
            return _refusal(HelloReply.WRONG_PEER, "another process listens here now")
        known = self._generations.newest(hello.job)
        of_job = self._awaited.get(hello.job, {})
        if hello.generation > known:
            return _refusal(HelloReply.NOT_YET, f"generation {known} is the newest here")
        if hello.generation < known:
            return _refusal(HelloReply.STALE, f"generation {known} is in force here")
        if all(awaited.generation != known for awaited in of_job.values()):
            return _refusal(HelloReply.WRONG_PEER, "nobody is expected here")
        awaited = of_job.get(hello.worker)
        if awaited is None or (hello.stage, hello.incarnation) != (awaited.peer_stage, awaited.peer_incarnation):
            reason = f"stage {hello.stage} of process {hello.incarnation} is not the one that is awaited"
            return _refusal(HelloReply.WRONG_PEER, reason)
        if not is_borne(awaited.peer_node, names):
            log.warning("hello_of_another_node", peer=awaited.link.peer, node=awaited.peer_node, names=names)
            return _refusal(HelloReply.WRONG_PEER, other_node(awaited.peer_node, names))
        if awaited.link.is_over:
            return _refusal(HelloReply.STALE, f"generation {known} is over here")
        if hello.attempt < awaited.newest_attempt:
            return _refusal(HelloReply.STALE, f"attempt {awaited.newest_attempt} was here before")
        awaited.newest_attempt = hello.attempt
        return HelloReply(verdict=HelloReply.ACCEPTED), awaited, hello.next_sequence

    # --- the dialling side, in the loop's thread --------------------------------------------------------------------

    async def _dial(
        self,
        link: GrpcLink,
        address: str,
        node: str,
        hello: Hello,
        first_contact: timedelta,
        resume_timeout: timedelta,
    ) -> None:
        """Dial until the link is over: each attempt serves the link as long as its stream lives."""
        self._dialled = [*(other for other in self._dialled if not other.is_over), link]
        begun_at, reason = self._loop.loop.time(), "no answer"
        pause_s, attempt_s = FIRST_REDIAL_S, HELLO_TIMEOUT.total_seconds()
        while not link.is_over:
            since = begun_at if link.broken_at is None else link.broken_at
            limit_s = (resume_timeout if link.was_connected else first_contact).total_seconds()
            left_s = since + limit_s - self._loop.loop.time()
            if left_s <= 0:
                what = "resumed" if link.was_connected else "connected"
                is_first = not link.was_connected
                return link.lose(f"not {what} within {limit_s:g} s: {reason}", was_unreached=is_first)
            hello.attempt += 1
            num_streams = link.num_streams
            try:
                await self._attempt(link, address, node, hello, timeout_s=min(attempt_s, left_s))
            except _RefusedError as error:
                return link.lose(str(error))
            except ProtocolError as error:
                reason = error.reason
                link.violated(error)
            except _NotYetError as error:
                reason, begun_at = str(error), self._loop.loop.time()
            except ConnectionError as error:
                reason = str(error)
            except TimeoutError:
                reason = f"no answer within {min(attempt_s, left_s):.1f} s"
            if link.is_over:
                return None
            if link.num_streams > num_streams:
                log.info("link_broken", peer=link.peer, generation=hello.generation, reason=reason)
                pause_s, attempt_s = FIRST_REDIAL_S, FIRST_ATTEMPT_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_REDIAL_S)
            attempt_s = min(ATTEMPT_GROWTH * attempt_s, HELLO_TIMEOUT.total_seconds())
        return None

    async def _attempt(self, link: GrpcLink, address: str, node: str, hello: Hello, *, timeout_s: float) -> None:
        """Attempt once over a new connection: the remains of a broken one never delay the next.

        Raises ConnectionError, TimeoutError, ProtocolError, _RefusedError; returns when the link is over.
        """
        if self._loop.loop.time() < self._dialled_cut_until:
            raise ConnectionError("cut by a test")
        credentials = grpc.ssl_channel_credentials(self._identity.ca, self._identity.key, self._identity.certificate)
        options = (*_DIAL_OPTIONS, *expecting(node))
        async with (
            link.turn() as turn,
            grpc.aio.secure_channel(address, credentials, options=options) as channel,
        ):
            method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(f"/{SERVICE}/{METHOD}")
            call = method()
            stream = ClientStream(call, self._ears)
            hello.next_sequence = link.next_sequence
            try:
                async with asyncio.timeout(timeout_s):
                    reply = await _greet(stream, hello)
                if reply.verdict == HelloReply.NOT_YET:
                    raise _NotYetError(reply.reason)
                if reply.verdict != HelloReply.ACCEPTED:
                    raise _RefusedError(f"{HelloReply.Verdict.Name(reply.verdict)}: {reply.reason}")
                self._num_resumed += link.was_connected
                await link.run(stream, turn, acknowledged=reply.next_sequence)
            except ConnectionError as error:
                if call.done() and await call.code() in _HOPELESS:
                    raise _RefusedError(str(error)) from error
                raise
            finally:
                if not call.done():
                    call.cancel()


def kinds_between(peer: StageIndex, own: StageIndex) -> frozenset[FrameKind]:
    """Return the frame kinds from a worker of the peer's stage to one of the own."""
    if peer == own:
        return SIBLING_KINDS
    return DOWNSTREAM_KINDS if peer < own else UPSTREAM_KINDS


def _refusal(verdict: HelloReply.Verdict, reason: str) -> tuple[HelloReply, None, int]:
    return HelloReply(verdict=verdict, reason=reason), None, 0


async def _greet(stream: MessageStream, hello: Hello) -> HelloReply:
    await stream.write(hello.SerializeToString())
    reply = await stream.read()
    if reply is None:
        raise ConnectionError("closed without an answer to the hello")
    try:
        return HelloReply.FromString(reply)
    except DecodeError as error:
        raise ConnectionError("an undecodable answer to the hello") from error
