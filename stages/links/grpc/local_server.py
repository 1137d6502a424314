"""Serves the links that workers of the same node dial over this process's unix socket."""

import asyncio
import socket
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from headway.stages.links.grpc.local_stream import LocalStream
from headway.stages.links.grpc.streams import Ears
from headway.stages.links.sparse_log import SparseLog
from headway.stages.sockets.local_socket import enlarged, is_own_user, listen_locally

log = structlog.get_logger()

MAX_CONNECTIONS = 64
"""Maximum number of open connections: a node has fewer workers. Whoever gets none dials over TCP."""
RETRY_S = 1.0
"""Pause after the kernel refused to hand a connection over, for example for want of file descriptors."""


@dataclass(frozen=True, slots=True)
class LocalPlace:
    """The node of a process, and the private folder that the node's processes share."""

    node: str
    folder: Path


class LocalServer:
    """Accepts connections of this process's own user. Lives in the loop's thread."""

    def __init__(self, ears: Ears, serve: Callable[[LocalStream], Awaitable[None]]) -> None:
        """serve: serves one connection; its end closes the connection."""
        self._ears = ears
        self._serve = serve
        self._listener: socket.socket | None = None
        self._file: tuple[int, int] | None = None
        """Device and inode of this server's own socket file."""
        self._refused, self._not_accepted = SparseLog(), SparseLog()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, place: LocalPlace, incarnation: str) -> None:
        """Listen. Without a socket, which the log explains, the node's links go over TCP with TLS."""
        try:
            self._listener = listen_locally(place.folder, incarnation)
        except OSError as error:
            log.warning("no_local_links", folder=str(place.folder), reason=str(error))
            return
        if self._listener is None:
            log.warning("no_local_links", folder=str(place.folder), reason="the path is too long for a unix socket")
            return
        with suppress(OSError):  # the folder may be gone again
            about = Path(self._listener.getsockname()).lstat()
            self._file = (about.st_dev, about.st_ino)
        self._keep(asyncio.create_task(self._accept(self._listener)))

    def stop(self) -> None:
        """Stop listening, delete the socket and cut what remains. Another file in its place stays."""
        for task in self._tasks:
            task.cancel()
        if self._listener is not None:
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
                self._say_not_accepted(str(error))
                await asyncio.sleep(RETRY_S)
                continue
            try:
                self._take(connection)
            except (OSError, MemoryError) as error:  # one connection is lost, and the next ones are served
                self._say_not_accepted(str(error) or "no memory is left")
                connection.close()
            # A connection that waits already suspends nothing: whoever dials without end must leave turns to others.
            await asyncio.sleep(0)

    def _take(self, connection: socket.socket) -> None:
        """Serve a connection, or hang up. Raises OSError, MemoryError; nothing serves it then."""
        own_user, num_connections = is_own_user(connection), len(self._tasks) - 1
        if own_user and num_connections < MAX_CONNECTIONS:
            self._keep(asyncio.create_task(self._answer(LocalStream(enlarged(connection), self._ears))))
        else:
            if num := self._refused.due(asyncio.get_running_loop().time()):
                log.warning("local_link_refused", own_user=own_user, connections=num_connections, num=num)
            connection.close()

    def _say_not_accepted(self, reason: str) -> None:
        if num := self._not_accepted.due(asyncio.get_running_loop().time()):
            log.warning("local_link_not_accepted", reason=reason, num=num)

    async def _answer(self, stream: LocalStream) -> None:
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
