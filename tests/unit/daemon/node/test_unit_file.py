"""systemd/headway.service, as systemd itself reads it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from headway.daemon.base.errors import EXIT_CONFIG

FOLDER = Path(__file__).parents[4] / "systemd"
UNIT = FOLDER / "headway.service"
DROP_IN = "headway.service.d/cuda.conf"
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here"
)


@pytest.fixture(params=["cpu", "cuda"])
def unit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The unit as a machine has it, without and with the drop-in for cards."""
    shutil.copy(UNIT, tmp_path)
    if request.param == "cuda":
        (tmp_path / DROP_IN).parent.mkdir()
        shutil.copy(FOLDER / DROP_IN, tmp_path / DROP_IN)
    return tmp_path / UNIT.name


@needs_systemd
def test_systemd_verifies_the_unit_without_a_warning(unit: Path) -> None:
    """The exit status alone is not enough: it is 0 for unknown keys."""
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_systemd
@pytest.mark.parametrize("name", ["headway.service", "etcd.service"])
def test_the_units_give_up_what_they_do_not_need(name: str) -> None:
    """systemd's own sum of what a service could do to its machine, of 100: at most 20. Without settings it is 92."""
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(FOLDER / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-200:]


@needs_systemd
def test_the_example_of_etcd_is_a_valid_unit() -> None:
    """No warning of systemd's."""
    command = ["systemd-analyze", "verify", str(FOLDER / "etcd.service")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


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
