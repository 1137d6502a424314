"""systemd/headway.service, as systemd itself reads it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from headway.daemon.errors import EXIT_CONFIG

UNIT = Path(__file__).parents[4] / "systemd" / "headway.service"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here")
def test_systemd_verifies_the_unit_without_a_warning() -> None:
    """The exit status alone is not enough: it is 0 for unknown keys."""
    done = subprocess.run(["systemd-analyze", "verify", str(UNIT)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here")
def test_the_unit_gives_up_what_a_node_does_not_need() -> None:
    """systemd's own sum of what the service could do to its machine, of 100: at most 30. Without settings it is 92."""
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=30", str(UNIT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-200:]


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
