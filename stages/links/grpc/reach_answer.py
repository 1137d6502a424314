"""Answers whether this worker can be reached: the port, TLS and the hello, without any link."""

from collections.abc import Awaitable, Callable
from typing import Any

from headway.proto.data_pb2 import HelloReply
from headway.stages.links.hello_gate import Gatekeeper

METHOD = "Reach"


def reach_answer(*, incarnation: str, protocol: int) -> Callable[[bytes, Any], Awaitable[bytes]]:
    """The unary method that a link server offers beside its streams."""
    keeper = Gatekeeper(incarnation, protocol)

    async def answer(request: bytes, _: object) -> bytes:
        _, refusal = keeper.misdirected(request)
        return (refusal or keeper.answer(HelloReply.ACCEPTED)).SerializeToString()

    return answer
