"""The daemon's side of its shared port: it owns the listening socket, and keeps the process up that serves it.

A process of its own, so that a busy or hung daemon delays no link of its workers. Whoever dials between two of these
processes waits in the kernel's queue of the socket.
"""

import asyncio
import errno
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
import structlog

from headway.daemon.base.addresses import join_address
from headway.daemon.base.errors import ConfigError
from headway.daemon.net.port import BACKLOG, PortOrder, Relay

log = structlog.get_logger()

SILENT_S: Final = 5.0
"""Silence that counts."""
NUM_SILENCES: Final = 2
"""Number of silences in a row after which it hangs. The first one may be that of a daemon that stood still itself."""
START_S: Final = 60.0
"""Time for the first byte."""
_PIECE_BYTES: Final = 4096


async def falls_silent(beats: asyncio.StreamReader) -> bool:
    """Return True once the process hangs, False once it has ended."""
    has_begun, num_silences = False, 0
    while num_silences < NUM_SILENCES:
        try:
            async with asyncio.timeout(SILENT_S if has_begun else START_S):
                raw = await beats.read(_PIECE_BYTES)
        except TimeoutError:
            num_silences += 1
            continue
        if not raw:
            return False
        has_begun, num_silences = True, 0
    return True


PAUSE_S: Final = 0.2
"""Pause before an ended process is replaced."""


class PortProcess:
    """Listens from the start; `run` serves."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        daemon_port: int,
        folder: Path,
        most_passages: int = 0,
        most_bytes_per_s: float = 0.0,
        tells: bool = False,
    ) -> None:
        """daemon_port: where the daemon listens on the loopback. folder: of the workers' sockets.

        most_passages, most_bytes_per_s: its limits; 0: what the machine allows. tells: it logs each passage's end.
        Raises ConfigError when the address is not available.
        """
        self._listener = _listen(host, port)
        self._arguments = ["-m", "headway.daemon.net.port", "--listener", str(self._listener.fileno())]
        self._arguments += ["--daemon-port", str(daemon_port), "--folder", str(folder)]
        self._arguments += ["--most-passages", str(most_passages), "--most-bytes-per-s", str(most_bytes_per_s)]
        self._arguments += ["--tells"] if tells else []
        self._order = PortOrder()
        self._relays: dict[str, Relay] = {}
        """By address."""
        self._process: asyncio.subprocess.Process | None = None

    @property
    def port(self) -> int:
        """Return the port."""
        return int(self._listener.getsockname()[1])

    @property
    def inner_address(self) -> str:
        """Return where this machine itself finds the port, whatever a router maps to it."""
        host = str(self._listener.getsockname()[0])
        return join_address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), self.port)

    @contextmanager
    def standing_by(self, node: str) -> Iterator[str]:
        """Let a node that can only dial out stand by here while the body lasts, with the token that is yielded."""
        token = secrets.token_hex(16)
        self._tell(replace(self._order, tokens={**self._order.tokens, token: node}))
        try:
            yield token
        finally:
            left = {other: name for other, name in self._order.tokens.items() if other != token}
            self._tell(replace(self._order, tokens=left))

    def stand_by(self, address: str, relay: Relay | None) -> None:
        """Stand by at a relay from now on; None: no more."""
        self._relays.pop(address, None)
        self._relays |= {address: relay} if relay is not None else {}
        self._tell(replace(self._order, relays=tuple(self._relays.values())))

    async def run(self) -> None:
        """Keep a process serving until cancelled."""
        while True:
            files = (self._listener.fileno(),)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *self._arguments,
                pass_fds=files,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            self._process = process
            self._tell(self._order)
            assert process.stdout is not None
            try:
                if await falls_silent(process.stdout):
                    log.warning("shared_port_process_hangs", pid=process.pid)
                    process.kill()
                status = await process.wait()
            finally:
                self._process = None
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            log.warning("shared_port_process_ended", status=status)
            await asyncio.sleep(PAUSE_S)

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()

    def _tell(self, order: PortOrder) -> None:
        self._order = order
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=host == "::")
    except OSError as error:
        # create_server adds the address, which stands here already.
        reason = (error.strerror or str(error)).partition(" (while ")[0]
        remedy = "; name another port with --listen" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen at {join_address(host, port)}: {reason}{remedy}", "listen") from error
