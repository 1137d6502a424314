"""Opens many connections that then send nothing, as a port scanner or a broken client does."""

import asyncio
import resource
import socket
from contextlib import suppress
from typing import Final

NUM_CONNECTIONS: Final = 1500
"""Number of connections: more than the usual limit of 1,024 open files of a process."""
SPARE_FILES: Final = 200


class IdleConnections:
    """Holds connections to one address. An async context manager."""

    def __init__(self, host: str, port: int, *, number: int = NUM_CONNECTIONS) -> None:
        self._address = (host, port)
        self._number = number
        self._sockets: list[socket.socket] = []

    async def __aenter__(self) -> "IdleConnections":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = min(hard, max(soft, self._number + SPARE_FILES))
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        loop = asyncio.get_running_loop()
        for _ in range(min(self._number, wanted - SPARE_FILES)):
            connection = socket.socket()
            connection.setblocking(False)
            self._sockets.append(connection)
            with suppress(OSError, TimeoutError):  # a refused connection shows that the defence works
                async with asyncio.timeout(1.0):
                    await loop.sock_connect(connection, self._address)
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._sockets:
            connection.close()
        self._sockets.clear()
