"""The sd_notify protocol against a socket that stands in for systemd."""

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.node.notify import Notifier


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A bound datagram socket and its NOTIFY_SOCKET."""
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(path)
        bound.settimeout(10)
        yield bound, path


async def test_a_service_says_how_it_is(manager: tuple[socket.socket, str]) -> None:
    """Ready, a status, a longer stop, stopping: one datagram each, in order."""
    bound, path = manager
    with Notifier({"NOTIFY_SOCKET": path}) as notifier:
        notifier.ready("two\nlines")
        notifier.status("works")
        notifier.extend_timeout(1.5)
        notifier.stopping("goes")
    said = [bound.recv(1000).decode() for _ in range(4)]
    assert said == [
        "READY=1\nSTATUS=two lines",
        "STATUS=works",
        "EXTEND_TIMEOUT_USEC=1500000",
        "STOPPING=1\nSTATUS=goes",
    ]


async def test_abstract_sockets_are_reached() -> None:
    """NOTIFY_SOCKET begins with @: the address begins with a zero byte."""
    name = f"headway-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind("\0" + name)
        bound.settimeout(10)
        with Notifier({"NOTIFY_SOCKET": "@" + name}) as notifier:
            notifier.status("here")
        assert bound.recv(100) == b"STATUS=here"


async def test_the_watchdog_is_fed_while_the_loop_runs_and_starves_when_it_hangs(
    manager: tuple[socket.socket, str],
) -> None:
    """Fed at half the time; while the loop is blocked nothing is sent."""
    bound, path = manager
    bound.setblocking(False)
    loop = asyncio.get_running_loop()
    with Notifier({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "100000"}) as notifier:
        assert notifier.watchdog_interval_s == 0.05
        notifier.ready("up")
        said = [await asyncio.wait_for(loop.sock_recv(bound, 100), 10) for _ in range(4)]
        assert said[1:] == [b"WATCHDOG=1"] * 3
        with suppress(BlockingIOError):  # more may have been said before this task had its turn
            while True:
                bound.recv(100)
        time.sleep(0.2)  # the loop hangs for twice the watchdog's time
        with pytest.raises(BlockingIOError):
            bound.recv(100)


async def test_what_is_not_for_this_process_changes_nothing(manager: tuple[socket.socket, str]) -> None:
    """No NOTIFY_SOCKET, another process's watchdog, and a manager that is gone."""
    bound, path = manager
    with Notifier({}) as notifier:
        notifier.ready("up")
    environment = {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "100000", "WATCHDOG_PID": str(os.getpid() + 1)}
    with Notifier(environment) as notifier:
        assert notifier.watchdog_interval_s == 0
        bound.close()
        notifier.status("hello?")


async def test_a_wrong_notify_socket_is_logged_once(tmp_path: Path) -> None:
    """NOTIFY_SOCKET names nothing: one line."""
    with (
        pytest.raises(ConfigError, match="NOTIFY_SOCKET: cannot be reached"),
        Notifier({"NOTIFY_SOCKET": str(tmp_path / "none")}),
    ):
        pass
