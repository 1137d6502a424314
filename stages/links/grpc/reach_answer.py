"""Answers a process that tests whether this worker can be reached: the port, TLS and the hello, without any link."""

from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.message import DecodeError

from headway.proto.data_pb2 import Hello, HelloReply

METHOD = "Reach"


def reach_answer(*, incarnation: str, protocol: int) -> Callable[[bytes, Any], Awaitable[bytes]]:
    """Return the unary method that a link server offers next to its streams."""

    async def answer(request: bytes, _: object) -> bytes:
        reply = _judged(request, incarnation, protocol)
        reply.incarnation = incarnation
        return reply.SerializeToString()

    return answer


def _judged(request: bytes, incarnation: str, protocol: int) -> HelloReply:
    try:
        hello = Hello.FromString(request)
    except DecodeError:
        return HelloReply(verdict=HelloReply.WRONG_PROTOCOL, reason="the message is not a hello")
    if hello.protocol != protocol:
        reason = f"protocol {hello.protocol} instead of {protocol}"
        return HelloReply(verdict=HelloReply.WRONG_PROTOCOL, reason=reason)
    if hello.expected_incarnation != incarnation:
        return HelloReply(verdict=HelloReply.WRONG_PEER, reason="another worker listens there")
    return HelloReply(verdict=HelloReply.ACCEPTED)
