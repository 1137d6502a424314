"""Calls to other nodes' daemons: mTLS, a deadline each, errors that name the peer."""

from collections.abc import AsyncIterator
from typing import Any, TypeVar

import grpc
import grpc.aio

from headway.daemon.errors import RecoveryError
from headway.daemon.node.byte_streams import byte_stream
from headway.daemon.storage.state_key import StateKey
from headway.proto import control_pb2, control_pb2_grpc
from headway.stages.errors import PeerError, ProtocolError, UnavailableError
from headway.stages.tls_identity import CHANNEL_OPTIONS, TlsIdentity

MessageT = TypeVar("MessageT")

CALL_TIMEOUT_S = 10.0
TRACE_TIMEOUT_S = 30.0
TRANSFER_TIMEOUT_S = 600.0
MAX_MESSAGE_BYTES = 16 << 20
_OPTIONS: tuple[tuple[str, Any], ...] = (
    *CHANNEL_OPTIONS,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_GONE = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,  # busy: as many calls of this kind run as the node answers at once
        grpc.StatusCode.ABORTED,  # it gave the stream up, because we read too slowly
    }
)


class NodeClient:
    """The Node service of any node, by address (host:port). One channel per address, for one event loop."""

    def __init__(self, identity: TlsIdentity) -> None:
        self._credentials = grpc.ssl_channel_credentials(identity.ca, identity.key, identity.certificate)
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def close(self) -> None:
        """Close every channel; calls in flight end."""
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()

    async def describe(self, address: str, *, timeout_s: float = CALL_TIMEOUT_S) -> control_pb2.DescribeReply:
        """Who answers there. Raises PeerError."""
        try:
            reply: control_pb2.DescribeReply = await self._stub(address).Describe(
                control_pb2.DescribeRequest(), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise _translated(address, error) from error
        return reply

    async def status(
        self, address: str, job: str = "", *, timeout_s: float = CALL_TIMEOUT_S
    ) -> control_pb2.StatusReply:
        """What the daemon there knows of a job, or of all, also while etcd is away. Raises PeerError."""
        try:
            request = control_pb2.StatusRequest(job=job)
            reply: control_pb2.StatusReply = await self._stub(address).Status(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _translated(address, error) from error
        return reply

    def probe(
        self, address: str, num_bytes: int, *, timeout_s: float, counted: bool = False
    ) -> AsyncIterator[control_pb2.ProbeReply]:
        """So many bytes of nothing from there, to see how fast they come. Raises PeerError.

        counted: first of all comes a reply without them, with the segments that the connection has sent so far.
        """
        request = control_pb2.ProbeRequest(num_bytes=num_bytes, counted=counted)
        return _read(address, self._stub(address).Probe(request, timeout=timeout_s))

    def accompany(self, address: str, node: str) -> AsyncIterator[control_pb2.AccompanyReply]:
        """A stream that lives as long as the daemon there; keepalive ends it when the machine is gone."""
        return _read(address, self._stub(address).Accompany(control_pb2.AccompanyRequest(node=node)))

    def fetch_state(
        self, address: str, key: StateKey, *, offset: int = 0, forward: bool = False, unhurried: bool = False
    ) -> AsyncIterator[bytes]:
        """One layer's file from an offset on, in pieces. RecoveryError: the node has it not; PeerError otherwise.

        unhurried: no worker waits for it, so it may come slowly, and has no deadline as a whole: who asks limits how
        long he waits for each piece.
        """
        request = control_pb2.FetchStateRequest(
            job=key.job,
            timeline=key.timeline,
            boundary=key.boundary,
            layer=key.layer,
            offset=offset,
            forward=forward,
            unhurried=unhurried,
        )
        call = byte_stream(self._channel(address), "FetchState")
        return _read(address, call(request, timeout=None if unhurried else TRANSFER_TIMEOUT_S))

    def fetch_data(self, address: str, sha256: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        """A token shard, or the index of a whole data set, by its SHA-256. Errors as `fetch_state`."""
        request = control_pb2.FetchDataRequest(sha256=sha256, offset=offset)
        call = byte_stream(self._channel(address), "FetchData")
        return _read(address, call(request, timeout=TRANSFER_TIMEOUT_S))

    def logs(self, address: str, request: control_pb2.LogsRequest) -> AsyncIterator[control_pb2.LogLine]:
        """Lines of a job's workers. Following has no deadline: it ends with the caller or the peer."""
        timeout_s = None if request.follow else TRANSFER_TIMEOUT_S
        return _read(address, self._stub(address).Logs(request, timeout=timeout_s))

    def journal(self, address: str, job: str, *, from_batch: int = 0) -> AsyncIterator[control_pb2.JournalEntry]:
        """The newest written journal of a job."""
        request = control_pb2.JournalRequest(job=job, from_batch=from_batch)
        return _read(address, self._stub(address).Journal(request, timeout=TRANSFER_TIMEOUT_S))

    def trace(self, address: str, job: str, *, forwarded: bool = False) -> AsyncIterator[control_pb2.WorkerTrace]:
        """What a job's workers did last; forwarded: those of the node there alone. RecoveryError: it has no plan."""
        request = control_pb2.TraceRequest(job=job, forwarded=forwarded)
        return _read(address, self._stub(address).Trace(request, timeout=TRACE_TIMEOUT_S))

    def _stub(self, address: str) -> Any:
        return control_pb2_grpc.NodeStub(self._channel(address))

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = grpc.aio.secure_channel(address, self._credentials, options=_OPTIONS)
        return self._channels[address]


async def _read(address: str, call: AsyncIterator[MessageT]) -> AsyncIterator[MessageT]:
    try:
        async for message in call:
            yield message
    except grpc.aio.AioRpcError as error:
        raise _translated(address, error) from error


def _translated(address: str, error: grpc.aio.AioRpcError) -> PeerError | RecoveryError:
    peer, details = f"node at {address}", error.details() or error.code().name
    if error.code() in _GONE:
        return UnavailableError(peer, details)
    if error.code() is grpc.StatusCode.NOT_FOUND:
        return RecoveryError(peer, details)
    return ProtocolError(peer, details)
