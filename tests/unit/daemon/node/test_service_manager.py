"""The sd_notify protocol against a socket that stands in for systemd, and the unit that systemd reads."""

import asyncio
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from headway.daemon.base.errors import EXIT_CONFIG, ConfigError
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


FOLDER = Path(__file__).parents[4] / "systemd"
UNIT = FOLDER / "headway.service"
DROP_IN = "headway.service.d/cuda.conf"
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here"
)


@needs_systemd
@pytest.mark.parametrize(
    "names",
    [[UNIT.name], [UNIT.name, DROP_IN], ["etcd.service"], ["etcd-backup.timer", "etcd-backup.service"]],
    ids=["cpu", "cuda", "etcd", "backup"],
)
def test_systemd_verifies_a_unit_without_a_warning(names: list[str], tmp_path: Path) -> None:
    """As a machine has it, without and with the drop-in for cards. The exit status alone is 0 for unknown keys."""
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(FOLDER / name, tmp_path / name)
    units = [str(tmp_path / name) for name in names if "/" not in name]
    command = ["systemd-analyze", "verify", *units]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_systemd
@pytest.mark.parametrize("name", ["headway.service", "etcd.service", "etcd-backup.service"])
def test_the_units_give_up_what_they_do_not_need(name: str) -> None:
    """systemd's own sum of what a service could do to its machine, of 100: at most 20. Without settings it is 92."""
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(FOLDER / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-200:]


def test_a_card_opens_its_device_files_alone() -> None:
    """What CUDA forbids is taken back in the drop-in, and nothing else is."""
    settings = [line for line in (FOLDER / DROP_IN).read_text().splitlines() if "=" in line and line[0] != "#"]
    taken_back = [line for line in settings if not line.startswith(("Wants=", "After="))]
    assert taken_back == ["PrivateDevices=no", "DevicePolicy=closed", "DeviceAllow=char-nvidia* rw"]


def test_the_unit_has_files_for_connections_and_a_name_in_the_journal() -> None:
    """`journalctl -t headway` has its lines, and thousands of connections leave it files of its own."""
    settings = dict(line.split("=", 1) for line in UNIT.read_text().splitlines() if "=" in line and line[0] != "#")
    assert int(settings["LimitNOFILE"]) >= 65536
    assert int(settings["TasksMax"]) >= 4096
    assert settings["SyslogIdentifier"] == "headway"


def test_the_unit_is_started_again_for_all_but_a_wrong_setting() -> None:
    """What is away may come late: systemd never tires of starting, except after the exit status of a wrong setting."""
    settings = UNIT.read_text().splitlines()
    assert {"Restart=on-failure", "StartLimitIntervalSec=0", f"RestartPreventExitStatus={EXIT_CONFIG}"} <= {*settings}
