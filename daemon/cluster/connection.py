"""Calls to etcd: one deadline each, several endpoints, TLS, a login that renews itself, errors that name the target."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from headway.daemon.base.errors import CompactedError, ConfigError, LeaseLostError, StoreError, StoreUnreachableError
from headway.proto import etcd_pb2, etcd_pb2_grpc
from headway.stages.sockets.shared_port import channel_to
from headway.stages.sockets.tls_identity import Identity, TlsIdentity, dialling

ReplyT = TypeVar("ReplyT")
Metadata = tuple[tuple[str, str], ...]

PROBE_KEY = b"\0"
RETRY_PAUSE_S = 0.1
FIRST_ATTEMPT_S = 1.5
"""Time for one endpoint of several before the next is tried; it doubles, for answers that need longer."""

CLOSE_GRACE_S = 10.0
"""Time for the calls on a channel that is no longer used."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),
)

_SILENT = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        # A call may end with one of these when its server dies in the middle of a message:
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.ABORTED,
    }
)
_OVERLOADED = "too many requests"
_FULL = "database space exceeded"
_OLD_LOGIN = ("invalid auth token", "revision of auth store is old", "auth token is not provided", "user name is empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAccess:
    """The addresses of etcd, and the credentials of its client."""

    endpoints: tuple[str, ...]
    """The members of etcd, each as host:port; tried in turn."""
    identity: Identity | None = None
    """TLS identity; None: no TLS. An identity without certificate and key only checks the server's."""
    user: str = ""
    password: str = field(default="", repr=False)
    timeout_s: float = 5.0
    """Deadline of every call, retries included."""


class EtcdConnection:
    """A connection to one endpoint at a time; the next one follows when it is silent. Nothing is dialled before the
    first call.
    """

    def __init__(self, access: EtcdAccess) -> None:
        if not access.endpoints:
            raise ValueError("an etcd connection needs at least one endpoint")
        self.access = access
        self.why_no_change: Callable[[], Awaitable[str]] | None = None
        """Returns before each change why this client may make none; empty: it may. etcd itself decides by its users."""
        self._index = 0
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closing: dict[asyncio.Task[None], grpc.aio.Channel] = {}
        self._opened_as: dict[str, TlsIdentity] = {}
        """Identity that an endpoint's channel shows."""
        self._token: Metadata = ()
        self._login = asyncio.Lock()

    @property
    def target(self) -> str:
        """Return the endpoints, for error messages."""
        return "etcd at " + ", ".join(self.access.endpoints)

    @property
    def channel(self) -> grpc.aio.Channel:
        """Return the channel to the present endpoint."""
        if self.endpoint not in self._channels:
            self._channels[self.endpoint] = self._open(self.endpoint)
        return self._channels[self.endpoint]

    @property
    def is_up(self) -> bool:
        """Return whether a member is connected: a call that has failed found somebody, who took too long."""
        states = [channel.get_state() for channel in self._channels.values()]
        return grpc.ChannelConnectivity.READY in states

    @property
    def endpoint(self) -> str:
        """Return host:port of the member that is asked at present."""
        return self.access.endpoints[self._index]

    @property
    def metadata(self) -> Metadata:
        """Return the login token for every call; empty without a user."""
        return self._token

    def leave(self, endpoint: str) -> None:
        """Switch to the next endpoint, unless another call has already left this one."""
        if endpoint == self.endpoint:
            self._index = (self._index + 1) % len(self.access.endpoints)

    async def close(self) -> None:
        """Close every channel; calls in flight end at once."""
        channels, self._channels = [*self._channels.values(), *self._closing.values()], {}
        for channel in channels:
            await channel.close()

    async def call(
        self,
        send: Callable[[grpc.aio.Channel, float, Metadata], Awaitable[ReplyT]],
        *,
        is_repeatable: bool,
        timeout_s: float | None = None,
    ) -> ReplyT:
        """Run `send(channel, timeout_s, metadata)` on an endpoint that answers.

        A repeatable call is sent again, at another endpoint if there is one, until it is answered or the deadline
        passes. A call that changes something is sent once, on a connection known to be up. If its answer is lost, its
        outcome is unknown, and StoreUnreachableError says so.
        """
        loop = asyncio.get_running_loop()
        timeout_s = self.access.timeout_s if timeout_s is None else timeout_s
        deadline = loop.time() + timeout_s
        may_go_elsewhere = is_repeatable and len(self.access.endpoints) > 1
        attempt_s = min(FIRST_ATTEMPT_S, timeout_s / 2) if may_go_elsewhere else timeout_s
        while True:
            await self._reach(deadline, timeout_s)
            endpoint = self.endpoint
            try:
                return await self._authenticated(send, min(loop.time() + attempt_s, deadline))
            except grpc.aio.AioRpcError as error:
                if not is_silence(error):
                    raise self.translated(error) from error
                self.leave(endpoint)
                if not is_repeatable:
                    raise self._unreachable(error, timeout_s, "whether it was executed is unknown") from error
                if loop.time() + RETRY_PAUSE_S >= deadline:
                    raise self._unreachable(error, timeout_s) from error
            attempt_s *= 2
            await asyncio.sleep(RETRY_PAUSE_S)

    async def unary(
        self,
        method: Callable[[grpc.aio.Channel], Callable[..., Awaitable[ReplyT]]],
        request: Message,
        *,
        is_repeatable: bool,
    ) -> ReplyT:
        """Do `call` for a method with one request and one reply, named by its stub on a channel.

        Raises ConfigError for a change, which is not repeatable, by a client that may make none.
        """
        if self.why_no_change is not None and not is_repeatable and (why := await self.why_no_change()):
            raise ConfigError(why)

        def send(channel: grpc.aio.Channel, timeout_s: float, metadata: Metadata) -> Awaitable[ReplyT]:
            return method(channel)(request, timeout=timeout_s, metadata=metadata)

        return await self.call(send, is_repeatable=is_repeatable)

    async def log_in(self, *, timeout_s: float | None = None) -> None:
        """Get a login token; does nothing without a user. Raises AioRpcError."""
        if not self.access.user:
            return
        request = etcd_pb2.AuthenticateRequest(name=self.access.user, password=self.access.password)
        async with self._login:
            stub = etcd_pb2_grpc.AuthStub(self.channel)
            reply = await stub.Authenticate(request, timeout=self.access.timeout_s if timeout_s is None else timeout_s)
            self._token = (("token", reply.token),)

    def translated(self, error: grpc.aio.AioRpcError) -> StoreError:
        """Return gRPC's error as one of ours."""
        details = (error.details() or "").removeprefix("etcdserver: ").removeprefix("mvcc: ")
        if is_silence(error):
            return self._unreachable(error, self.access.timeout_s)
        if _FULL in details:  # the request is right, and succeeds after an administrator makes room
            return StoreUnreachableError(self.target, f"no room: {details}; `headway doctor` says how to make some")
        if "lease not found" in details:
            return LeaseLostError(self.target, details)
        if "compacted" in details or "future revision" in details:
            return CompactedError(self.target, details)
        is_denied = error.code() is grpc.StatusCode.PERMISSION_DENIED
        if is_denied or "authentication failed" in details or is_login_refused(error):
            user = f"user {self.access.user}" if self.access.user else "a client without a user"
            return StoreError(self.target, f"{user} is refused: {details}")
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return StoreError(self.target, "the server there is not etcd, perhaps a daemon; name etcd's own port")
        return StoreError(self.target, details or error.code().name)

    def _open(self, endpoint: str) -> grpc.aio.Channel:
        identity = self.access.identity
        if identity is None:
            return channel_to(endpoint, None, options=CHANNEL_OPTIONS)
        self._opened_as[endpoint] = identity.now()
        return channel_to(endpoint, dialling(identity), options=CHANNEL_OPTIONS)

    async def _reach(self, deadline: float, timeout_s: float) -> None:
        """Return when the present endpoint is connected; switch to the next endpoint while it is not."""
        loop = asyncio.get_running_loop()
        while self.channel.get_state() is not grpc.ChannelConnectivity.READY:
            endpoint, left = self.endpoint, deadline - loop.time()
            timeout = min(left, FIRST_ATTEMPT_S) if len(self.access.endpoints) > 1 else left
            probe = etcd_pb2.RangeRequest(key=PROBE_KEY, serializable=True, count_only=True)
            try:
                await etcd_pb2_grpc.KVStub(self.channel).Range(probe, timeout=max(timeout, 0.0))
                return
            except grpc.aio.AioRpcError as error:
                if not is_silence(error):
                    return  # any answer proves that the endpoint is up
                await self._close_old(endpoint)
                self.leave(endpoint)
                if loop.time() + RETRY_PAUSE_S >= deadline:
                    raise self._unreachable(error, timeout_s) from error
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _close_old(self, endpoint: str) -> None:
        """Close a channel that shows an earlier certificate: the endpoint may no longer take it.

        Calls on it end first: grpc would cancel those of other tasks.
        """
        identity = self.access.identity
        if identity is None or self._opened_as.get(endpoint) is identity.now():
            return
        if (channel := self._channels.pop(endpoint, None)) is not None:
            closing = asyncio.create_task(channel.close(CLOSE_GRACE_S), name="close of an etcd channel")
            self._closing[closing] = channel
            closing.add_done_callback(self._closing.pop)

    async def _authenticated(
        self,
        send: Callable[[grpc.aio.Channel, float, Metadata], Awaitable[ReplyT]],
        deadline: float,
    ) -> ReplyT:
        def left_s() -> float:
            return max(deadline - loop.time(), 0.0)

        loop = asyncio.get_running_loop()
        if self.access.user and not self._token:
            await self.log_in(timeout_s=left_s())
        try:
            return await send(self.channel, left_s(), self._token)
        except grpc.aio.AioRpcError as error:
            if not (self.access.user and is_login_refused(error)):
                raise
            await self.log_in(timeout_s=left_s())
            # nothing was sent, so a write may be retried too
            return await send(self.channel, left_s(), self._token)

    def _unreachable(self, error: grpc.aio.AioRpcError, timeout_s: float, remark: str = "") -> StoreUnreachableError:
        reason = f"no answer within {timeout_s:.3g} s: {one_line(error)}"
        identity = self.access.identity
        if "Connection refused" in reason:
            reason += "; is etcd running there? --etcd names it"
        elif identity is None or not identity.now().certificate:
            reason += "; no client certificate was given, and a server with TLS may want one"
        return StoreUnreachableError(self.target, f"{reason} ({remark})" if remark else reason)


def one_line(error: grpc.aio.AioRpcError) -> str:
    """Return gRPC's message, for people."""
    details = " ".join((error.details() or "").split()).removeprefix("failed to connect to all addresses; ")
    return details or error.code().name


def is_silence(error: grpc.aio.AioRpcError) -> bool:
    """Return whether the error says nothing about the request: no member answered, or the member cannot serve now."""
    return error.code() in _SILENT or _OVERLOADED in (error.details() or "")


def is_login_refused(error: grpc.aio.AioRpcError) -> bool:
    """Return whether a new login may help: the token is missing, forgotten by the server or older than its users."""
    details = error.details() or ""
    return error.code() is grpc.StatusCode.UNAUTHENTICATED or any(text in details for text in _OLD_LOGIN)
