"""A connected unix socket as the stream of messages that serves a link between two workers of one node.

Each message follows its length. The kernel copies straight between the message and the peer's buffer, outside the
interpreter lock: no TLS, no HTTP/2, and no other copy.
"""

import asyncio
import socket
from struct import Struct
from typing import Final

from headway.stages.links.grpc.frame_bundle import MAX_BUNDLE_BYTES
from headway.stages.links.grpc.streams import Ears

LENGTH = Struct("<I")


class LocalStream:
    """A MessageStream. It owns the connection; one task may read and one may write."""

    way: Final = "unix socket"

    def __init__(self, connection: socket.socket, ears: Ears) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._ears = ears
        self._length = memoryview(bytearray(LENGTH.size))
        self._received = memoryview(bytearray(MAX_BUNDLE_BYTES))

    async def read(self) -> memoryview | None:
        """Return the next message, which the next read overwrites; None at the end. See `MessageStream`."""
        if not await self._fill(self._length):
            return None
        (length,) = LENGTH.unpack(self._length)
        if length > len(self._received):
            raise ConnectionError(f"a message of {length} bytes")
        message = self._received[:length]
        if not await self._fill(message):
            raise ConnectionError("the stream ended inside a message")
        if self._ears.deaf_until:
            await self._ears.hear()
        return message

    async def write(self, message: bytes) -> None:
        """Return once the kernel has taken the message. See `MessageStream`."""
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._connection, LENGTH.pack(len(message)))
            await loop.sock_sendall(self._connection, message)
        except OSError as error:
            raise ConnectionError(f"the stream broke: {error}") from error

    async def finish(self) -> None:
        """Do nothing: what the kernel has taken reaches the peer, even after the connection is closed."""

    async def is_hopeless(self) -> bool:
        """Return False: whoever refuses a link over a unix socket says so in the answer to the hello."""
        return False

    def close(self) -> None:
        """Close the connection. Call it once no task reads or writes any more."""
        self._connection.close()

    async def _fill(self, buffer: memoryview) -> bool:
        """Fill a buffer; return False if the stream ended before its first byte."""
        loop, filled = asyncio.get_running_loop(), 0
        try:
            while filled < len(buffer):
                received = await loop.sock_recv_into(self._connection, buffer[filled:])
                if not received:
                    break
                filled += received
        except OSError as error:
            raise ConnectionError(f"the stream broke: {error}") from error
        if 0 < filled < len(buffer):
            raise ConnectionError("the stream ended inside a message")
        return filled == len(buffer)
