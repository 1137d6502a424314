"""Sets a process's share of the CPU relative to others (Linux: niceness belongs to each thread)."""

import os
import threading
from contextlib import suppress
from pathlib import Path

LOWERED_BY = 10
HIGHEST_NICE = 19


def lower_priority(pid: int) -> bool:
    """Lower the priority of a process that has just begun. Returns False when that could not be undone later."""
    if not _may_restore():
        return False
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, min(_own() + LOWERED_BY, HIGHEST_NICE))
    return True


def restore_priority(pid: int) -> None:
    """Give all threads of a process our own priority."""
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), _own())


def _own() -> int:
    return os.getpriority(os.PRIO_PROCESS, os.getpid())


def _may_restore() -> bool:
    """Return whether the kernel lets this user raise a priority again. A separate thread tries it."""
    outcome: list[bool] = []

    def attempt() -> None:
        tid, before = threading.get_native_id(), _own()
        try:
            os.setpriority(os.PRIO_PROCESS, tid, min(before + 1, HIGHEST_NICE))
            os.setpriority(os.PRIO_PROCESS, tid, before)
            outcome.append(True)
        except OSError:
            outcome.append(False)

    trial = threading.Thread(target=attempt, name="priority trial")
    trial.start()
    trial.join()
    return outcome[0]
