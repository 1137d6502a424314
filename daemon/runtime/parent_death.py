"""Ends a process with the daemon that started it."""

import ctypes
import os
import signal
from typing import Final

PR_SET_PDEATHSIG: Final = 1
EXIT_ORPHANED: Final = 75
"""EX_TEMPFAIL: the daemon is gone."""


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends. Exits if that has happened already."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(EXIT_ORPHANED)
