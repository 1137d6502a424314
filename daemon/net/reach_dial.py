"""Dials one port of another node as its neighbours would: TCP, TLS and a hello to the expected process."""

import asyncio
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from headway.daemon.base.fault_points import InjectedFaultError, fault_point
from headway.daemon.cluster.measurements import Port
from headway.daemon.cluster.records import PROTOCOL_VERSION
from headway.daemon.net.reach_target import MAX_REASON, Target
from headway.proto import control_pb2, control_pb2_grpc
from headway.proto.data_pb2 import Hello, HelloReply
from headway.stages.sockets.shared_port import LINKS, REACH_METHOD, dialled_port, listening_ports, open_channel
from headway.stages.sockets.tls_identity import Identity, dialling
from headway.stages.sockets.tls_sentences import in_words

CONNECT_S: Final = 2.0
"""Timeout for TCP. The other machine's kernel answers even if its processes are busy, and resends a lost packet after
a second.
"""
ANSWER_S: Final = 15.0
"""Timeout for TLS and the hello: a busy process answers late, and a stopped one is noticed by its own daemon sooner."""
NUM_DIALS: Final = 3
"""Number of failed attempts in a row after which a port counts as unreachable."""
NUM_SILENT: Final = 2
"""Number of attempts without any answer to TCP after which a port counts as unreachable: by then the kernel has sent
four packets. After a standstill of 5 s, this leaves time to write the reason within the 15 s in which a job reports it.
"""
PAUSE_S: Final = 0.3
"""Pause after a failed attempt, times its number."""
NO_ANSWER: Final = f"no answer to a connection within {CONNECT_S:g} s"
_OPTIONS: Final[tuple[tuple[str, Any], ...]] = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)


async def dial(target: Target, identity: Identity, *, source: str) -> str:
    """Return why the target does not answer, after several attempts; empty: it does. source: the node that dials."""
    reason, num_silent = "", 0
    most_silent = max(NUM_SILENT, len(listening_ports(target.address)))
    for attempt in range(1, max(NUM_DIALS, most_silent) + 1):
        reason = await _dial_once(target, identity, source, attempt - 1)
        num_silent += reason == NO_ANSWER
        if not reason or num_silent == most_silent:
            break
        if attempt < NUM_DIALS:
            await asyncio.sleep(PAUSE_S * attempt)
    return reason


async def _dial_once(target: Target, identity: Identity, source: str, attempt: int) -> str:
    """Dial TCP first, because its failures are clearer than gRPC's. attempt: as in `listening_port`."""
    try:
        fault_point("reach.dial", node=source, peer=target.node, port=str(target.port))
        await _connect(dialled_port(target.address, attempt))
        return (await _greet(target, identity, attempt))[:MAX_REASON]
    except InjectedFaultError:
        return "the connection was refused"
    except (OSError, ValueError, OverflowError) as error:
        return _reason_of(error)


async def _connect(address: str) -> None:
    """Connect. Raises OSError, and ValueError or OverflowError for an invalid address."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(CONNECT_S):
        _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    writer.close()


async def _greet(target: Target, identity: Identity, attempt: int) -> str:
    """Do TLS and the hello over a new connection, because an open one proves nothing."""
    where = target.address
    async with open_channel(where, dialling(identity), node=target.node, options=_OPTIONS, attempt=attempt) as channel:
        try:
            if target.port is Port.DAEMON:
                return await _ask_daemon(target, channel)
            return await _ask_worker(target, channel)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"it takes connections, but does not answer within {ANSWER_S:g} s"
            return in_words(error.details() or error.code().name)


async def _ask_daemon(target: Target, channel: grpc.aio.Channel) -> str:
    describe = control_pb2_grpc.NodeStub(channel).Describe
    reply: control_pb2.DescribeReply = await describe(control_pb2.DescribeRequest(), timeout=ANSWER_S)
    if reply.node != target.node:
        return f"node {reply.node} answers there"
    return "" if reply.incarnation == target.incarnation else "another process of this name answers there"


async def _ask_worker(target: Target, channel: grpc.aio.Channel) -> str:
    reach: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{LINKS}/{REACH_METHOD}")
    hello = Hello(protocol=PROTOCOL_VERSION, expected_incarnation=target.worker)
    try:
        reply = HelloReply.FromString(await reach(hello.SerializeToString(), timeout=ANSWER_S))
    except DecodeError:
        return "the process there does not answer as a worker"
    return "" if reply.verdict == HelloReply.ACCEPTED else reply.reason


def _reason_of(error: Exception) -> str:
    if isinstance(error, TimeoutError) and not getattr(error, "errno", None):
        return NO_ANSWER
    if isinstance(error, ConnectionRefusedError):
        return "the connection was refused"
    return (getattr(error, "strerror", None) or str(error)).lower()
