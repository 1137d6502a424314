"""Reports to systemd by sd_notify(3)'s protocol: a datagram of KEY=value lines goes to NOTIFY_SOCKET."""

import asyncio
import os
import socket
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from headway.daemon.base.errors import ConfigError


class Notifier:
    """Reports the daemon's state to a service manager. Without NOTIFY_SOCKET every method does nothing.

    The watchdog is fed from the event loop at half of WATCHDOG_USEC, so that it starves when the loop hangs.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        environment = os.environ if environment is None else environment
        self._address = environment.get("NOTIFY_SOCKET", "")
        watchdog_pid = environment.get("WATCHDOG_PID", "")
        is_for_us = not watchdog_pid or watchdog_pid == str(os.getpid())
        usec = environment.get("WATCHDOG_USEC", "") if is_for_us else ""
        self._watchdog_s = int(usec) / 1e6 if usec.isdigit() else 0.0
        self._socket: socket.socket | None = None
        self._feeding: asyncio.TimerHandle | None = None

    @property
    def watchdog_interval_s(self) -> float:
        """Return the seconds between two signs of life; 0 when no watchdog waits for them."""
        return self._watchdog_s / 2

    def __enter__(self) -> Self:
        """Open the socket. Raises ConfigError when NOTIFY_SOCKET names nothing that listens."""
        if self._address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
            # A leading @ stands for the zero byte of Linux's abstract namespace.
            address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
            try:
                self._socket.connect(address)
            except OSError as error:
                self._socket.close()
                raise ConfigError(f"cannot be reached: {error.strerror}", "NOTIFY_SOCKET") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._feeding is not None:
            self._feeding.cancel()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def ready(self, status: str) -> None:
        """Report that start-up is over; may be repeated. From now on the running event loop feeds the watchdog."""
        self._send("READY=1", _status(status))
        if self._feeding is not None:
            self._feeding.cancel()
        if self._watchdog_s and self._socket is not None:
            self._feed(asyncio.get_running_loop())

    def status(self, status: str) -> None:
        """Report one line for `systemctl status`."""
        self._send(_status(status))

    def stopping(self, status: str) -> None:
        """Report that shutdown has begun."""
        self._send("STOPPING=1", _status(status))

    def extend_timeout(self, seconds: float) -> None:
        """Report that shutdown, or start-up, continues for at most this long from now."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def _feed(self, loop: asyncio.AbstractEventLoop) -> None:
        self._send("WATCHDOG=1")
        self._feeding = loop.call_later(self.watchdog_interval_s, self._feed, loop)

    def _send(self, *lines: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.send("\n".join(lines).encode())
        except (BlockingIOError, ConnectionRefusedError):
            return  # its queue is full, and the next sign of life follows; or the service manager is gone


def _status(text: str) -> str:
    return "STATUS=" + " ".join(text.split())
