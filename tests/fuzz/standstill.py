"""Whether a process stands still, told from one that others keep from computing. Looks at it from outside.

A process that has no processor waits to run, and its own clock stands with it: that says nothing about it. One that
has computed for longer than all of its work takes, or that sleeps and sleeps, stands still.
"""

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Final

ASLEEP_S: Final = 60.0
LOOK_EVERY_S: Final = 0.5
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Look:
    """A process at one moment."""

    at: float
    """Limit by the wall clock."""
    computed_s: float
    """Limit by its own processor time."""
    is_asleep: bool
    """It waits for something other than a processor, a disk or a signal to go on."""


def why_it_stands_still(looks: Sequence[Look], *, most_s: float) -> str:
    """Empty: it does not, as far as can be seen. most_s: processor time that all of its work takes. Pure."""
    last = looks[-1]
    if last.computed_s > most_s:
        return f"it has computed for {last.computed_s:.0f} s and has not ended"
    asleep = list(takewhile(lambda look: look.is_asleep and look.computed_s == last.computed_s, reversed(looks)))
    slept_s = last.at - asleep[-1].at if asleep else 0.0
    return f"it has slept for {slept_s:.0f} s" if slept_s >= ASLEEP_S else ""


def look_at(pid: int) -> Look:
    """Raises OSError when there is no such process."""
    state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    computed_s = (int(fields[10]) + int(fields[11])) / _TICKS_PER_S
    return Look(time.monotonic(), computed_s, state == "S")


def wait_for(process: "subprocess.Popen[str]", *, most_s: float) -> str:
    """Wait until a process has ended, or end it because it stands still: then, why. Empty: it ended by itself."""
    looks: list[Look] = []
    while True:
        try:
            process.wait(LOOK_EVERY_S)
            return ""
        except subprocess.TimeoutExpired:
            looks.append(look_at(process.pid))
        if reason := why_it_stands_still(looks, most_s=most_s):
            process.kill()
            process.wait()
            return reason
