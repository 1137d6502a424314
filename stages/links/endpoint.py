"""Opens links: one endpoint per worker process, which listens for upstream neighbours and dials downstream ones. Two
workers of one node use a unix socket (`streams.py`), all others TCP with mTLS, or, where the plan says so, plain TCP.
Of two replicas of a stage the one with the lower position dials.

Who may open a plain connection is settled over mTLS: the dialling side says its hello there, and the answer has a token
and the port where that token opens one connection. Nobody listens there before.

A stream that breaks is dialled again by the side that dialled it first, over a new connection; the new one supersedes
the old, whatever the listening side still thinks of that. Each side gives up when the link's `silence` has passed since
the break. Hellos and the attempts to say one are the business of `hello.py`.
"""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final, Literal

import grpc
import structlog

from headway.proto.data_pb2 import Hello, HelloReply
from headway.stages.errors import ProtocolError
from headway.stages.links.frame_codec import MAX_BUNDLE_BYTES, bundle
from headway.stages.links.hello import (
    HELLO_TIMEOUT_S,
    HelloGate,
    NotYetError,
    RefusedError,
    keep_dialling,
    lose_unless_connected,
    read_reply,
)
from headway.stages.links.link_terms import LinkTerms
from headway.stages.links.loop_thread import LoopThread
from headway.stages.links.stream_link import StreamLink, Turn
from headway.stages.links.streams import (
    ClientStream,
    Ears,
    LocalPlace,
    MessageStream,
    ServerStream,
    SocketServer,
    SocketStream,
    SparseLog,
)
from headway.stages.sockets.local_socket import connect_locally
from headway.stages.sockets.open_files import server_limits
from headway.stages.sockets.shared_port import (
    LINKS,
    REACH_METHOD,
    listen_at_first_free,
    listen_behind_shared_port,
    listening_port,
    open_channel,
)
from headway.stages.sockets.tls_identity import Identity, dialling, names_of_client, serving
from headway.stages.sockets.tls_sentences import in_words

log = structlog.get_logger()

METHOD = "Stream"
MEET_METHOD = "Meet"
"""Answers where a link's plain connection is taken, and the token that opens it."""
MOST_TOKENS: Final = 64
"""Maximum number of tokens that nobody has used yet; the oldest one is forgotten."""
START_TIMEOUT = timedelta(seconds=10)
LOCAL_ANSWER_S = 3.0
"""Time for the answer to a hello over a socket. Then the next attempt goes over TLS, before the link is lost."""
ANY_PORT = (0,)

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
"""Streams per connection: one for the link, or one call."""
_DIAL_OPTIONS = (
    *TRANSPORT_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
)


class _StreamEndedError(Exception):
    """An accepted stream is to end, with a status and its reason."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


Way = Literal["unix", "plain", "tls"]


@dataclass(slots=True)
class _Dialling:
    """What the attempts for one link share."""

    hello: Hello
    ways: tuple[Way, ...]
    """The best one first. One without an answer gives way to the next; after the last one it is the turn of the next
    port that leads to the neighbour.
    """
    num_failed: int = 0
    """Attempts in a row without an answer."""

    @property
    def way(self) -> Way:
        return self.ways[self.num_failed % len(self.ways)]

    @property
    def port_index(self) -> int:
        return self.num_failed // len(self.ways)


class LinkEndpoint:
    """Listens from `start` to `stop`. `accept` and `dial` return at once, from any thread but the loop's."""

    def __init__(
        self,
        *,
        loop: LoopThread,
        identity: Identity,
        host: str,
        incarnation: str,
        protocol: int,
        ports: Sequence[int] = ANY_PORT,
        local: LocalPlace | None = None,
        is_behind_shared_port: bool = False,
    ) -> None:
        """ports: where it may listen; the first free one is taken. local: where the node's workers meet; None: all
        links go over TCP. is_behind_shared_port: it listens in the folder of `local`, and at no port of its own.
        """
        self._loop = loop
        self._identity = identity
        self._host = host
        self._ports = ports
        self._gate = HelloGate(incarnation, protocol)
        self._server: grpc.aio.Server | None = None
        self._port = 0
        self._dialled: list[StreamLink] = []
        self._num_resumed = 0
        self._dialled_cut_until = self._accepted_cut_until = 0.0
        self._ears = Ears()
        self._incarnation = incarnation
        self._local = local
        self._is_behind_shared_port = is_behind_shared_port
        self._local_server = SocketServer(self._ears, self._serve_local)
        self._plain_server = SocketServer(self._ears, self._serve_plain)
        self._tokens: dict[str, tuple[str, ...]] = {}
        """Of plain connections that may come, to the names of the certificate that asked for them."""
        self._local_ends = SparseLog(log.info, "local_link_ended")

    @property
    def port(self) -> int:
        """Return the port where neighbours dial, known after `start`; 0: the node's shared one."""
        return self._port

    @property
    def num_resumed(self) -> int:
        """Return how often a link of this endpoint, of any generation, continued over a new stream."""
        return self._num_resumed

    def start(self) -> None:
        """Listen on the first free port of the host. Raises PortsTakenError, NotListeningError."""
        self._loop.run(self._start(), timeout=START_TIMEOUT, what=f"listening on {self._host}")

    def stop(self) -> None:
        """Stop listening; remaining streams are cut."""
        for server in (self._local_server, self._plain_server):
            self._loop.call_soon(server.stop)
        if self._server is not None:
            self._loop.run(self._server.stop(None), timeout=START_TIMEOUT, what="closing the link server")

    def accept(self, terms: LinkTerms, *, is_last: bool = True) -> StreamLink:
        """The link to a neighbour that dials: one of the stage before, or a replica of this one.

        is_last: no other `accept` of this generation follows; until then whoever dials is told to come again.

        LinkLost arrives in the inbox if the neighbour has not dialled within `first_contact`, or not again within
        `silence` after a break.
        """
        link = StreamLink(self._loop, terms)
        self._loop.call_soon(self._await, terms, link, is_last)
        return link

    def dial(self, terms: LinkTerms) -> StreamLink:
        """The link to a neighbour that accepts: one of the stage after, or a replica of this one.

        LinkLost arrives in the inbox if it has not answered for `first_contact`, or not again within `silence` after a
        break, or at once if it refuses for good. An answer that it is not ready yet is one.
        """
        link = StreamLink(self._loop, terms)
        self._loop.call_soon(self._gate.meet, terms)
        self._loop.spawn(self._dial(link, terms), name=f"dial {link.peer}")
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
        links: list[StreamLink] = []
        if dialled:
            self._dialled_cut_until = until
            links += self._dialled
        if accepted:
            self._accepted_cut_until = until
            links += (expected.link for expected in self._gate)
        for link in links:
            link.interrupt("cut by a test")

    # --- the listening side, in the loop's thread -------------------------------------------------------------------

    async def _start(self) -> None:
        limits = server_limits(streams_per_connection=STREAMS_PER_CONNECTION)
        server = grpc.aio.server(options=(*TRANSPORT_OPTIONS, *limits))
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._serve)
        methods = {
            METHOD: handler,
            REACH_METHOD: grpc.unary_unary_rpc_method_handler(self._answer_reach),
            MEET_METHOD: grpc.unary_unary_rpc_method_handler(self._answer_meet),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(LINKS, methods),))
        credentials = partial(serving, self._identity)
        if self._is_behind_shared_port and self._local is not None:
            listen_behind_shared_port(server, credentials(), self._local.folder, self._incarnation)
        else:
            self._port = listen_at_first_free(server, credentials, self._host, self._ports)
        await server.start()
        self._server = server
        if self._local is not None:
            self._local_server.start(self._local, self._incarnation)

    def _await(self, terms: LinkTerms, link: StreamLink, is_last: bool) -> None:
        self._gate.expect(terms, link, is_last=is_last)
        limit_s = terms.first_contact.total_seconds()
        self._loop.loop.call_later(limit_s, lose_unless_connected, link, f"did not dial within {limit_s:g} s")

    def _on_broken(self, link: StreamLink, terms: LinkTerms, reason: str) -> None:
        silence_s = terms.silence.total_seconds()
        if link.broken_at is not None and not link.is_over:
            log.info("link_broken", peer=link.peer, generation=terms.generation, reason=reason)
            told = f"not resumed within {silence_s:g} s: {reason}"
            self._loop.loop.call_at(link.broken_at + silence_s, _lose_if_broken_since, link, link.broken_at, told)

    async def _answer_reach(self, request: bytes, _: object) -> bytes:
        _, refusal = self._gate.misdirected(request)
        return (refusal or self._gate.answer(HelloReply.ACCEPTED)).SerializeToString()

    async def _answer_meet(self, request: bytes, context: Any) -> bytes:
        names = names_of_client(context.auth_context())
        reply, expected, _ = self._gate.judge(request, names)
        if expected is not None and expected.terms.is_plain:
            try:
                reply.plain_port = self._plain_server.port(self._host.strip("[]"))
            except OSError as error:
                log.warning("no_plain_links", host=self._host, reason=str(error))
            reply.token = secrets.token_hex(16)
            self._tokens[reply.token] = names
            if len(self._tokens) > MOST_TOKENS:
                del self._tokens[next(iter(self._tokens))]
        return reply.SerializeToString()

    async def _serve(self, _: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        try:
            await self._answer(ServerStream(context, self._ears), names_of_client(context.auth_context()))
        except _StreamEndedError as end:
            await context.abort(end.code, end.reason)

    async def _serve_local(self, stream: SocketStream) -> None:
        """The kernel has told that this node's user dials: that proves the node, as its certificate would."""
        assert self._local is not None
        await self._serve_socket(stream, (self._local.node,))

    async def _serve_plain(self, stream: SocketStream) -> None:
        """Who has a token showed a certificate when it got it."""
        token = b""
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                token = bytes(await stream.read() or b"")
        names = self._tokens.pop(token.decode(errors="replace"), None)
        if names is None:
            self._local_ends.note(reason="no token, or one that was not given")
        else:
            await self._serve_socket(stream, names)

    async def _serve_socket(self, stream: SocketStream, names: Sequence[str]) -> None:
        try:
            await self._answer(stream, names)
        except (_StreamEndedError, ConnectionError) as error:
            self._local_ends.note(reason=str(error))

    async def _answer(self, stream: MessageStream, names: Sequence[str]) -> None:
        """Serve a dialled stream of a process of these names until it ends. Raises _StreamEndedError."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await stream.read()
        except (TimeoutError, ConnectionError) as error:
            raise _StreamEndedError(grpc.StatusCode.DEADLINE_EXCEEDED, "no hello") from error
        if self._loop.loop.time() < self._accepted_cut_until:
            raise _StreamEndedError(grpc.StatusCode.UNAVAILABLE, "cut by a test")
        reply, expected, hello = self._gate.judge(first, names)
        if expected is None:
            return await stream.write(reply.SerializeToString())
        link, reason = expected.link, "the stream was cut"
        try:
            async with link.turn() as turn:
                await self._serve_accepted(link, stream, turn, reply, hello.next_sequence)
        except ProtocolError as error:
            reason = error.reason
            link.violated(error)
            raise _StreamEndedError(grpc.StatusCode.INVALID_ARGUMENT, reason) from error
        except (ConnectionError, TimeoutError) as error:
            reason = str(error) or "took no answer to its hello"
            raise _StreamEndedError(grpc.StatusCode.ABORTED, reason) from error
        finally:
            self._on_broken(link, expected.terms, reason)

    async def _serve_accepted(
        self, link: StreamLink, stream: MessageStream, turn: Turn, reply: HelloReply, next_sequence: int
    ) -> None:
        if link.is_over:
            reply = self._gate.answer(HelloReply.STALE, "the link is over here")
        reply.next_sequence = link.next_sequence
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            await stream.write(reply.SerializeToString())
        if not link.is_over:
            self._num_resumed += link.was_connected
            await link.run(stream, turn, acknowledged=next_sequence)

    # --- the dialling side, in the loop's thread --------------------------------------------------------------------

    async def _dial(self, link: StreamLink, terms: LinkTerms) -> None:
        self._dialled = [*(other for other in self._dialled if not other.is_over), link]
        is_local = self._local is not None and terms.peer_node == self._local.node
        ways: tuple[Way, ...] = ("unix", "tls") if is_local else ("plain", "tls") if terms.is_plain else ("tls",)
        await keep_dialling(link, terms, partial(self._attempt, link, terms, _Dialling(self._gate.hello(terms), ways)))

    async def _attempt(self, link: StreamLink, terms: LinkTerms, tries: _Dialling, timeout_s: float) -> None:
        """One connection of its own: what is left of a broken one never delays the next.

        It serves the link as long as its stream lives, and returns when the link is over. Raises as `keep_dialling`
        wants it.
        """
        hello = tries.hello
        hello.attempt += 1
        if self._loop.loop.time() < self._dialled_cut_until:
            raise ConnectionError("cut by a test")
        way, port_index = tries.way, tries.port_index
        limit_s = timeout_s if way == "tls" else min(timeout_s / 2, LOCAL_ANSWER_S)  # time for TLS must be left
        tries.num_failed += 1  # until there is an answer
        try:
            async with link.turn() as turn, self._connected(terms, hello, way, port_index, limit_s) as stream:
                hello.next_sequence = link.next_sequence
                try:
                    async with asyncio.timeout(limit_s):
                        await stream.write(hello.SerializeToString())
                        reply = read_reply(await stream.read())
                    tries.num_failed -= 1
                    log.info("link_opened", peer=link.peer, generation=terms.generation, way=stream.way)
                    self._num_resumed += link.was_connected
                    await link.run(stream, turn, acknowledged=reply.next_sequence)
                except ProtocolError as error:
                    link.violated(error)
                    raise ConnectionError(error.reason) from error
                except ConnectionError as error:
                    if await stream.is_hopeless():
                        raise RefusedError(str(error)) from error
                    raise
        except NotYetError:
            tries.num_failed -= 1
            raise

    @asynccontextmanager
    async def _connected(
        self, terms: LinkTerms, hello: Hello, way: Way, port_index: int, limit_s: float
    ) -> AsyncIterator[ClientStream | SocketStream]:
        """A new connection to a neighbour. Where none of its sockets is, it goes over TLS after all."""
        connection = None
        if way == "unix" and self._local is not None:
            connection = connect_locally(self._local.folder, terms.peer_incarnation)
        elif way == "plain":
            async with asyncio.timeout(limit_s):
                connection = await self._connect_plain(terms, hello, port_index)
        if connection is not None:
            stream = SocketStream(connection, self._ears)
            try:
                yield stream
            finally:
                stream.close()
            return
        async with self._channel(terms, port_index) as channel:
            method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(f"/{LINKS}/{METHOD}")
            call = method()
            try:
                yield ClientStream(call, self._ears)
            finally:
                if not call.done():
                    call.cancel()

    async def _connect_plain(self, terms: LinkTerms, hello: Hello, port_index: int) -> socket.socket:
        """Ask over TLS, connect and show the token. Raises as `read_reply`."""
        async with self._channel(terms, port_index) as channel:
            method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{LINKS}/{MEET_METHOD}")
            try:
                reply = read_reply(await method(hello.SerializeToString()))
            except grpc.aio.AioRpcError as error:
                raise ConnectionError(f"{error.code().name}: {in_words(error.details() or '')}") from error
        if not reply.plain_port:
            raise ConnectionError("the neighbour takes no plain connection")
        host = listening_port(terms.peer_address, port_index).rpartition(":")[0].strip("[]")
        try:
            (family, *_, address), *_ = await self._loop.loop.getaddrinfo(
                host, reply.plain_port, type=socket.SOCK_STREAM
            )
            connection = socket.socket(family)
        except OSError as error:
            raise ConnectionError(f"{host}: {error}") from error
        try:
            connection.setblocking(False)
            await self._loop.loop.sock_connect(connection, address)
            await self._loop.loop.sock_sendall(connection, bundle(reply.token.encode()))
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):
                raise ConnectionError(f"{host}:{reply.plain_port}: {error}") from error
            raise
        return connection

    def _channel(self, terms: LinkTerms, port_index: int) -> grpc.aio.Channel:
        return open_channel(
            terms.peer_address,
            dialling(self._identity),
            node=terms.peer_node,
            options=_DIAL_OPTIONS,
            attempt=port_index,
        )


def _lose_if_broken_since(link: StreamLink, broken_at: float, reason: str) -> None:
    if link.broken_at == broken_at:
        link.lose(reason)
