"""systemd/headway.service, as systemd itself reads it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from headway.daemon.errors import EXIT_CONFIG

UNIT = Path(__file__).parents[3] / "systemd" / "headway.service"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here")
def test_systemd_has_nothing_to_say_about_the_unit() -> None:
    """verify prints nothing. Its exit status alone would not do: it is 0 for unknown keys."""
    done = subprocess.run(["systemd-analyze", "verify", str(UNIT)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_unit_is_started_again_for_all_but_a_wrong_setting() -> None:
    """What is away may come late: systemd never tires of starting, except after the exit status of a wrong setting."""
    settings = UNIT.read_text().splitlines()
    assert {"Restart=on-failure", "StartLimitIntervalSec=0", f"RestartPreventExitStatus={EXIT_CONFIG}"} <= {*settings}
