"""Runs a command that dies with its parent: `python tethered.py PARENT_PID COMMAND ARGUMENT…` (Linux).

The parent-death signal survives exec. It cannot be set between fork and exec by a parent that has threads, hence this
step between. Started by path, so that it imports nothing of Headway and costs some ten milliseconds.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent, then become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit(1)  # it died before we were tied
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
