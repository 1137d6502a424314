"""The fuzzer's definition of a hang: a process that computes or sleeps too long, but not one that has no processor."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fuzz.one_input import kept_input
from tests.fuzz.standstill import ASLEEP_S, Look, look_at, why_it_stands_still

ENDLESS = """
import sys
from pathlib import Path
from tests.fuzz.one_input import OneInput
def endless(data):
    while data == b"slow":
        pass
run = OneInput(endless, Path(sys.argv[1]), limit_s=1)
run(b"quick")
run(b"slow")
"""
ROOT = Path(__file__).resolve().parents[2]


def looks(*told: tuple[float, float, bool]) -> list[Look]:
    return [Look(*one) for one in told]


@pytest.mark.parametrize(
    ("seen", "is_still"),
    [
        (looks((0, 1, False), (10_000, 1, False)), False),  # starved: it wants to run
        (looks((0, 1, False), (10_000, 99, False)), False),
        (looks((0, 1, False), (10, 101, False)), True),
        (looks((0, 1, True), (ASLEEP_S, 1, True)), True),
        (looks((0, 1, True), (ASLEEP_S, 2, True)), False),  # it has computed in between
        (looks((0, 1, True), (50, 1, False), (ASLEEP_S, 1, True)), False),
        (looks((0, 1, True), (1, 1, True)), False),
    ],
)
def test_only_computing_and_sleeping_count(seen: list[Look], is_still: bool) -> None:
    """A process has 100 s of processor time, however long it waits for it."""
    assert bool(why_it_stands_still(seen, most_s=100)) is is_still


def test_a_stopped_process_is_not_asleep() -> None:
    """SIGSTOP takes the processor from a process that sleeps: it is not one that waits for something else."""
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            _until_asleep(process.pid, is_asleep=True)
            process.send_signal(signal.SIGSTOP)
            _until_asleep(process.pid, is_asleep=False)
        finally:
            process.kill()


def test_an_input_that_computes_too_long_ends_its_process_and_is_kept(tmp_path: Path) -> None:
    """The second input has an endless loop: the kernel ends it after its second, and the file has that input."""
    kept = tmp_path / "input"
    command = [sys.executable, "-c", ENDLESS, str(kept)]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=300, text=True)
    assert done.returncode == -signal.SIGXCPU, done.stderr
    assert "in endless" in done.stderr
    assert kept_input(kept) == b"slow"


def _until_asleep(pid: int, *, is_asleep: bool) -> None:
    deadline = time.monotonic() + 60
    while look_at(pid).is_asleep is not is_asleep:
        assert time.monotonic() < deadline
