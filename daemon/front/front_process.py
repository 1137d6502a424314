"""The daemon's side of its shared port: it owns the listening socket, and keeps the process up that serves it.

A process of its own, so that a busy or hung daemon delays no link of its workers. Whoever dials between two of these
processes waits in the kernel's queue of the socket.
"""

import asyncio
import socket
import sys
from pathlib import Path
from typing import Final

import structlog

from headway.daemon.addresses import join_address
from headway.daemon.errors import ConfigError
from headway.daemon.front.front import BACKLOG

log = structlog.get_logger()

PAUSE_S: Final = 0.2
"""Pause before an ended process is replaced."""


class FrontProcess:
    """Listens from the start; `run` serves."""

    def __init__(self, host: str, port: int, *, daemon_port: int, folder: Path) -> None:
        """daemon_port: where the daemon listens on the loopback. folder: of the workers' sockets.

        Raises ConfigError when the address is not available.
        """
        self._listener = _listen(host, port)
        self._arguments = ["-m", "headway.daemon.front", "--listener", str(self._listener.fileno())]
        self._arguments += ["--daemon-port", str(daemon_port), "--folder", str(folder)]

    @property
    def port(self) -> int:
        """Return the port."""
        return int(self._listener.getsockname()[1])

    async def run(self) -> None:
        """Keep a process serving until cancelled."""
        while True:
            files = (self._listener.fileno(),)
            process = await asyncio.create_subprocess_exec(sys.executable, *self._arguments, pass_fds=files)
            try:
                status = await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            log.warning("shared_port_process_ended", status=status)
            await asyncio.sleep(PAUSE_S)

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=host == "::")
    except OSError as error:
        what = f"cannot listen at {join_address(host, port)}: {error.strerror or error}"
        raise ConfigError(what, "listen") from error
