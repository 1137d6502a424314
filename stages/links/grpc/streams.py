"""Wraps gRPC's calls and contexts as the streams of messages that serve a link."""

import asyncio
from dataclasses import dataclass
from typing import Any, Final

import grpc

from headway.stages.sockets.tls_sentences import in_words


@dataclass(slots=True)
class Ears:
    """The hearing of all streams of an endpoint, which a test may turn off."""

    deaf_until: float = 0.0
    """End of the deafness, by the loop's clock; 0: they hear."""

    async def hear(self) -> None:
        """Return when they hear again."""
        while (left_s := self.deaf_until - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(left_s)
        self.deaf_until = 0.0


_HOPELESS = frozenset(
    {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
)


class ClientStream:
    """A call as a MessageStream."""

    way: Final = "TCP with TLS"

    def __init__(self, call: Any, ears: Ears) -> None:
        self._call = call
        self._ears = ears

    async def read(self) -> bytes | None:
        try:
            message = await self._call.read()
            if self._ears.deaf_until:
                await self._ears.hear()
        except grpc.aio.AioRpcError as error:
            raise ConnectionError(f"{error.code().name}: {in_words(error.details() or '')}") from error
        if not isinstance(message, bytes):
            if (code := await self._call.code()) != grpc.StatusCode.OK:
                raise ConnectionError(f"{code.name}: {in_words(await self._call.details())}")
            return None
        return message

    async def write(self, *parts: bytes | memoryview) -> None:
        try:
            await self._call.write(b"".join(parts))  # gRPC takes nothing but bytes
        except grpc.aio.AioRpcError as error:
            raise ConnectionError(f"{error.code().name}: {in_words(error.details() or '')}") from error
        except asyncio.InvalidStateError as error:
            raise ConnectionError(
                f"{(await self._call.code()).name}: {in_words(await self._call.details())}"
            ) from error

    async def finish(self) -> None:
        await self._call.done_writing()
        await self._call.code()  # the server's handler has returned, so it has read to the end

    async def is_hopeless(self) -> bool:
        """Return whether the call ended for a reason that no later attempt changes."""
        return self._call.done() and await self._call.code() in _HOPELESS


class ServerStream:
    """A servicer's context as a MessageStream."""

    def __init__(self, context: "grpc.aio.ServicerContext[bytes, bytes]", ears: Ears) -> None:
        self._context = context
        self._ears = ears

    async def read(self) -> bytes | None:
        try:
            message = await self._context.read()
            if self._ears.deaf_until:
                await self._ears.hear()
        except grpc.aio.BaseError as error:
            raise ConnectionError(f"the stream broke: {error}") from error
        return message if isinstance(message, bytes) else None

    async def write(self, *parts: bytes | memoryview) -> None:
        try:
            await self._context.write(b"".join(parts))
        except (grpc.aio.BaseError, grpc.RpcError) as error:
            raise ConnectionError(f"the stream broke: {error}") from error

    async def finish(self) -> None:
        """Do nothing: the handler's return ends the stream."""
