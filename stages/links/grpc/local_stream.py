"""A connected unix socket as the stream of messages that serves a link between two workers of one node.

Each message follows its length. The kernel takes a frame's bytes straight from its tensors, outside the
interpreter lock, and the only copy in this process is the one into the received frame: no TLS, no HTTP/2.
"""

import asyncio
import socket
from collections import deque
from itertools import islice
from struct import Struct
from typing import Final

from headway.stages.links.grpc.frame_bundle import MAX_BUNDLE_BYTES
from headway.stages.links.grpc.streams import Ears

LENGTH = Struct("<I")
MAX_PARTS = 256
"""Number of parts for one call of the kernel, which takes 1024 at most."""


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
        # Bytes that are there already suspend nothing: acknowledgements and heartbeats need a turn too.
        await asyncio.sleep(0)
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

    async def write(self, *parts: bytes | memoryview) -> None:
        """Return once the kernel has taken the message, straight from its parts. See `MessageStream`."""
        loop = asyncio.get_running_loop()
        waiting = deque([LENGTH.pack(sum(map(len, parts))), *parts])
        try:
            while waiting:
                self._send_now(waiting)
                if waiting:
                    await loop.sock_sendall(self._connection, waiting.popleft())
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

    def _send_now(self, waiting: "deque[bytes | memoryview]") -> None:
        """Send what the kernel has room for, and drop it from the parts."""
        try:
            sent = self._connection.sendmsg(islice(waiting, MAX_PARTS))
        except BlockingIOError:
            return
        while waiting and sent >= len(waiting[0]):
            sent -= len(waiting.popleft())
        if sent:
            waiting[0] = memoryview(waiting[0])[sent:]

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
