"""Limits the calls that a daemon answers: to callers who may make them, in number, and in the wait for one who reads.

A call holds a piece of a file, or of a probe, until its reader has taken it. So each method has a maximum of running
calls, for one connection and for all. Further calls are refused as busy, and a reader that takes nothing loses its
stream.
"""

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
import structlog

from headway.daemon.base.addresses import join_address
from headway.daemon.base.errors import ConfigError
from headway.daemon.blobs.peer_client import KEEPALIVE_S, server_keepalive
from headway.stages.sockets.open_files import Options, server_limits
from headway.stages.sockets.own_sockets import end_connection
from headway.stages.sockets.roles import ANYBODY, Role, holder, listed_roles, roles_among
from headway.stages.sockets.tls_identity import Identity, names_of_client, serving

log = structlog.get_logger()

_OPERATORS: Final = frozenset({Role.OPERATOR})
_NODES: Final = frozenset({Role.NODE})
_NO_READERS: Final = _OPERATORS | _NODES

CALLERS: Final[Mapping[str, frozenset[Role]]] = {
    "Describe": ANYBODY,
    "Status": ANYBODY,
    "Logs": ANYBODY,
    "History": ANYBODY,
    "Trace": ANYBODY,
    "Accompany": ANYBODY,
    "Read": _NO_READERS,  # weights: a node takes those of its layers, and an operator exports
    "Probe": _NO_READERS,
    "DialPeers": _NO_READERS,
    "HasData": _NO_READERS,
    "GiveData": _OPERATORS,
    "TryFolder": _OPERATORS,
    "StandBy": _NODES,
    "Invite": _OPERATORS,
    "Renew": ANYBODY,  # for the holder of the certificate alone
}
"""Nobody may call a method that is not named here."""


def revocation(names: Iterable[str], revoked: Collection[str]) -> str:
    """Return why a certificate of these names does not count; empty: it does. revoked: names in small letters."""
    found = next((name for name in names if name.casefold() in revoked), "") if revoked else ""
    return f"the certificate of {found} is revoked" if found else ""


def refusal(method: str, names: Iterable[str]) -> str:
    """Return why a caller with a certificate of these names may not call a method; empty: it may."""
    names, callers = tuple(names), CALLERS.get(method, frozenset())
    if callers & roles_among(names):
        return ""
    who = f"only {listed_roles(callers)}" if callers else "nobody"
    return f"{method} is refused: the certificate is of {holder(names)}, and {who} may call it"


STALL_S: Final = 60.0
"""Time for a reader to take one piece."""
STREAMS_PER_CONNECTION: Final = 256
"""Maximum for all methods: gRPC lets further calls of that connection wait at the caller."""
MAX_REQUEST_BYTES: Final = 1 << 20
"""Maximum size of a request: requests contain only names."""


@dataclass(frozen=True, slots=True)
class CallLimit:
    """The maximum number of running calls of one method."""

    in_all: int
    per_connection: int


MOST_CALLS: Final = CallLimit(in_all=512, per_connection=64)
"""Limit of a method without its own."""
CALL_LIMITS: Final[Mapping[str, CallLimit]] = {
    "Probe": CallLimit(in_all=8, per_connection=2),
    "Read": CallLimit(in_all=128, per_connection=64),
    "HasData": CallLimit(in_all=32, per_connection=8),
    "GiveData": CallLimit(in_all=4, per_connection=2),
    "Logs": CallLimit(in_all=128, per_connection=32),
    "History": CallLimit(in_all=16, per_connection=8),
    "DialPeers": CallLimit(in_all=8, per_connection=2),
    "TryFolder": CallLimit(in_all=8, per_connection=2),
    "Trace": CallLimit(in_all=16, per_connection=8),
    "Accompany": CallLimit(in_all=4096, per_connection=8),
    "StandBy": CallLimit(in_all=256, per_connection=2),
    "Invite": CallLimit(in_all=8, per_connection=2),
}


class StalledError(Exception):
    """A reader does not take the bytes that it requested."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A running call."""

    method: str
    peer: str
    """Its connection."""
    names: tuple[str, ...]
    """In the caller's certificate."""


class StreamLimits(grpc.aio.ServerInterceptor):
    """Holds every method of a server to its limits, and every caller to its rights."""

    def __init__(self, *, limits: Mapping[str, CallLimit] = CALL_LIMITS, stall_s: float = STALL_S) -> None:
        self._limits = limits
        self._stall_s = stall_s
        self._revoked: Collection[str] = ()
        self._running: dict[int, _Call] = {}

    def revoke(self, names: Collection[str]) -> None:
        """Refuse whoever's certificate bears one of these names, in small letters, and end their connections."""
        self._revoked = names
        for peer, told in {(call.peer, call.names) for call in self._running.values()}:
            if reason := revocation(told, names):
                log.warning("caller_revoked", peer=peer, reason=reason)
                end_connection(peer)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """Return the method's handler, inside its limits."""
        handler = await continuation(details)
        name = details.method.rpartition("/")[2]
        if handler is None:
            return handler
        if handler.request_streaming:
            assert handler.response_streaming, f"{name} answers a stream with one message"
            wrapped = self._stream(name, handler.stream_stream)
            return grpc.stream_stream_rpc_method_handler(
                wrapped, handler.request_deserializer, handler.response_serializer
            )
        wrapped, make = (
            (self._stream(name, handler.unary_stream), grpc.unary_stream_rpc_method_handler)
            if handler.response_streaming
            else (self._unary(name, handler.unary_unary), grpc.unary_unary_rpc_method_handler)
        )
        return make(wrapped, handler.request_deserializer, handler.response_serializer)

    def _unary(self, name: str, method: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        async def answer(request: Any, context: Any) -> Any:
            async with self._admitted(name, context):
                return await method(request, context)

        return answer

    def _stream(
        self, name: str, method: Callable[[Any, Any], AsyncGenerator[Any]]
    ) -> Callable[[Any, Any], Awaitable[None]]:
        assert inspect.isasyncgenfunction(method), f"{name} is not a generator"

        async def answer(request: Any, context: Any) -> None:
            try:
                async with self._admitted(name, context):
                    await self._write_all(method(request, context), context)
            except StalledError as error:
                # Sent pieces stay in memory until the connection is gone: gRPC cannot take a piece back.
                peer = context.peer()
                end_connection(peer)
                log.warning("reader_dropped", method=name, peer=peer, reason=str(error))
                await context.abort(grpc.StatusCode.ABORTED, str(error))

        return answer

    async def _write_all(self, pieces: AsyncGenerator[Any], context: Any) -> None:
        """Write all pieces. Raises StalledError when the reader takes a piece too late."""
        async with aclosing(pieces):
            async for piece in pieces:
                try:
                    async with asyncio.timeout(self._stall_s):
                        await context.write(piece)
                except TimeoutError as error:
                    raise StalledError(f"nothing was read for {self._stall_s:g} s") from error

    @asynccontextmanager
    async def _admitted(self, method: str, context: Any) -> AsyncIterator[None]:
        """Count a call while the body runs. One that may not be made, or is one too many, ends."""
        call = _Call(method, context.peer(), names_of_client(context.auth_context()))
        if reason := revocation(call.names, self._revoked) or refusal(method, call.names):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
        limit = self._limits.get(method, MOST_CALLS)
        peers = [other.peer for other in self._running.values() if other.method == method]
        if peers.count(call.peer) >= limit.per_connection:
            reason = f"busy: {limit.per_connection} calls of {method} run for this connection already"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        if len(peers) >= limit.in_all:
            reason = f"busy: {limit.in_all} calls of {method} run already"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        self._running[id(context)] = call
        try:
            yield
        finally:
            del self._running[id(context)]


def bind_node_service(
    identity: Identity,
    host: str,
    port: int,
    *,
    limits: Options | None = None,
    stream_limits: StreamLimits | None = None,
    keepalive_s: float = KEEPALIVE_S,
) -> tuple[grpc.aio.Server, int]:
    """Return a server on a TCP port (0: any), not started yet, and the port. Raises ConfigError when it is not
    available.

    limits, stream_limits: its limits before and after TLS, for tests. keepalive_s: the interval of its clients' pings.
    """
    limits = limits or server_limits(streams_per_connection=STREAMS_PER_CONNECTION)
    options = [*limits, *server_keepalive(keepalive_s), ("grpc.max_receive_message_length", MAX_REQUEST_BYTES)]
    server = grpc.aio.server(interceptors=[stream_limits or StreamLimits()], options=options)
    credentials = serving(identity)
    address = join_address(host, port)
    try:
        bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        reason = "the port is in use or the address is not this machine's; name another with --listen"
        raise ConfigError(f"cannot listen at {address}: {reason}", "listen") from error
    return server, bound
