"""Keeps the workers' socket there: cleaners of /tmp delete it."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import grpc.aio
import structlog

from headway.daemon.storage.folders import make_private
from headway.daemon.workers.service import Attachments, serve_workers

log = structlog.get_logger()

SOCKET_CHECK_S = 2.0
"""Interval of looks whether the workers' socket is still there."""


class WorkersSocket:
    """The socket where workers attach, and its server."""

    def __init__(self, path: Path, attachments: Attachments, *, on_loss: Callable[[], None]) -> None:
        """on_loss: called when the socket was deleted, before it is served again."""
        self._path = path
        self._attachments = attachments
        self._on_loss = on_loss
        self._server: grpc.aio.Server | None = None

    async def serve(self) -> None:
        """Serve the socket. Raises OSError when its folder is somebody else's."""
        self._server = await serve_workers(self._path, self._attachments)

    async def keep(self) -> None:
        """Serve the socket again when somebody has deleted it."""
        while True:
            await asyncio.sleep(SOCKET_CHECK_S)
            if self._server is not None and self._path.is_socket():
                continue
            make_private(self._path.parent)
            log.error("socket_of_workers_gone", path=str(self._path))
            self._on_loss()
            if (server := self._server) is not None:
                self._server = None
                await server.stop(grace=None)  # first, because its end deletes whatever has the socket's name
            await self.serve()

    async def stop(self) -> None:
        """Stop serving."""
        if self._server is not None:
            await self._server.stop(grace=0.5)
        self._path.unlink(missing_ok=True)
