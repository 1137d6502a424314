"""The streams of messages that serve a link: gRPC's calls and contexts, and sockets, between workers of one node or of
one private site.

On a socket each message follows its length. The kernel takes a frame's bytes straight from its tensors, outside the
interpreter lock, and the only copy in this process is the one into the received frame: no TLS, no HTTP/2.
"""

import asyncio
import socket
import stat
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
import structlog

from headway.stages.links.frame_codec import LENGTH, MAX_BUNDLE_BYTES
from headway.stages.sockets.local_socket import enlarged, is_own_user, listen_locally
from headway.stages.sockets.tls_sentences import in_words

log = structlog.get_logger()

MAX_PARTS = 256
"""Number of parts for one call of the kernel, which takes 1024 at most."""
MAX_CONNECTIONS = 64
"""Maximum number of open connections of a socket: a node has fewer workers. Whoever gets none dials over TCP."""
RETRY_S = 1.0
"""Pause after the kernel refused to hand a connection over, for example for want of file descriptors."""
_LOG_EVERY_S = 10.0
_HOPELESS = frozenset(
    {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
)


class MessageStream(Protocol):
    """A connected stream of messages."""

    async def read(self) -> bytes | memoryview | None:
        """The next message, None at the end. The next read may overwrite it.

        Raises ConnectionError with the reason when the stream broke.
        """
        ...

    async def write(self, *parts: bytes | memoryview) -> None:
        """Send the parts as one message, and return when flow control has room for more.

        Raises ConnectionError like `read`.
        """
        ...

    async def finish(self) -> None:
        """Announce the end of messages, and return when the stream can be dropped without losing one."""
        ...


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


class ClientStream:
    """A gRPC call as a MessageStream."""

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
            if await self._call.code() != grpc.StatusCode.OK:
                raise await self._broken()
            return None
        return message

    async def write(self, *parts: bytes | memoryview) -> None:
        try:
            await self._call.write(b"".join(parts))  # gRPC takes nothing but bytes
        except grpc.aio.AioRpcError as error:
            raise ConnectionError(f"{error.code().name}: {in_words(error.details() or '')}") from error
        except asyncio.InvalidStateError as error:
            raise await self._broken() from error

    async def finish(self) -> None:
        await self._call.done_writing()
        await self._call.code()  # the server's handler has returned, so it has read to the end

    async def is_hopeless(self) -> bool:
        """Return whether the call ended for a reason that no later attempt changes."""
        return self._call.done() and await self._call.code() in _HOPELESS

    async def _broken(self) -> ConnectionError:
        return ConnectionError(f"{(await self._call.code()).name}: {in_words(await self._call.details())}")


class ServerStream:
    """The context of a gRPC servicer as a MessageStream."""

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


class SocketStream:
    """A connected socket as a MessageStream. It owns the connection; one task may read and one may write."""

    def __init__(self, connection: socket.socket, ears: Ears) -> None:
        connection.setblocking(False)
        self.way: Final = "unix socket" if connection.family == socket.AF_UNIX else "plain TCP"
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._ears = ears
        self._length = memoryview(bytearray(LENGTH.size))
        self._received = memoryview(bytearray(MAX_BUNDLE_BYTES))

    async def read(self) -> memoryview | None:
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
        """Return once the kernel has taken the message, straight from its parts."""
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
        """Return False: whoever refuses a link over a socket says so in the answer to the hello."""
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


@dataclass(frozen=True, slots=True)
class LocalPlace:
    """The node of a process, and the private folder that the node's processes share."""

    node: str
    folder: Path


class SparseLog:
    """Tells of an event that may come a thousand times a second, with one line a while that counts them."""

    def __init__(self, tell: Callable[..., object], event: str) -> None:
        """tell: takes the event and its fields, such as log.warning."""
        self._tell = tell
        self._event = event
        self._num_untold = 0
        self._told_at = -_LOG_EVERY_S

    def note(self, **fields: object) -> None:
        """Count an event, and log those since the last line if that is long enough ago."""
        self._num_untold += 1
        now = asyncio.get_running_loop().time()
        if now >= self._told_at + _LOG_EVERY_S:
            self._tell(self._event, **fields, num=self._num_untold)
            self._num_untold, self._told_at = 0, now


class SocketServer:
    """Accepts connections of sockets. Lives in the loop's thread."""

    def __init__(self, ears: Ears, serve: Callable[[SocketStream], Awaitable[None]]) -> None:
        """serve: serves one connection; its end closes the connection."""
        self._ears = ears
        self._serve = serve
        self._listener: socket.socket | None = None
        self._file: tuple[int, int] | None = None
        """Device and inode of this server's own socket file."""
        self._refused = SparseLog(log.warning, "local_link_refused")
        self._not_accepted = SparseLog(log.warning, "local_link_not_accepted")
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, place: LocalPlace, incarnation: str) -> None:
        """Listen at a unix socket, for processes of this one's own user. Without a socket, which the log explains, the
        node's links go over TCP with TLS.
        """
        reason = "the path is too long for a unix socket"
        try:
            self._listener = listen_locally(place.folder, incarnation)
        except OSError as error:
            reason = str(error)
        if self._listener is None:
            log.warning("no_local_links", folder=str(place.folder), reason=reason)
            return
        with suppress(OSError):  # the folder may be gone again
            about = Path(self._listener.getsockname()).lstat()
            self._file = (about.st_dev, about.st_ino)
        self._keep(asyncio.create_task(self._accept(self._listener)))

    def port(self, host: str) -> int:
        """Return the TCP port where it listens; from the first call on it does. Raises OSError."""
        if self._listener is None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, 0), family=family)
            self._listener.setblocking(False)
            self._keep(asyncio.create_task(self._accept(self._listener)))
        return int(self._listener.getsockname()[1])

    def stop(self) -> None:
        """Stop listening, delete the socket's file and cut what remains. Another file in its place stays."""
        for task in self._tasks:
            task.cancel()
        if self._listener is not None:
            if self._file is not None:
                with suppress(OSError):  # the folder may be gone
                    path = Path(self._listener.getsockname())
                    about = path.lstat()
                    if stat.S_ISSOCK(about.st_mode) and (about.st_dev, about.st_ino) == self._file:
                        path.unlink()
            self._listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:
                self._not_accepted.note(reason=str(error))
                await asyncio.sleep(RETRY_S)
                continue
            try:
                self._take(connection)
            except (OSError, MemoryError) as error:  # one connection is lost, and the next ones are served
                self._not_accepted.note(reason=str(error) or "no memory is left")
                connection.close()
            # A connection that waits already suspends nothing: whoever dials without end must leave turns to others.
            await asyncio.sleep(0)

    def _take(self, connection: socket.socket) -> None:
        """Serve a connection, or hang up. Raises OSError, MemoryError; nothing serves it then."""
        is_local, num_connections = connection.family == socket.AF_UNIX, len(self._tasks) - 1
        own_user = not is_local or is_own_user(connection)
        if own_user and num_connections < MAX_CONNECTIONS:
            connection = enlarged(connection) if is_local else connection
            self._keep(asyncio.create_task(self._answer(SocketStream(connection, self._ears))))
        else:
            self._refused.note(own_user=own_user, connections=num_connections)
            connection.close()

    async def _answer(self, stream: SocketStream) -> None:
        try:
            await self._serve(stream)
        finally:
            stream.close()

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("local_link_failed", error=repr(error))
