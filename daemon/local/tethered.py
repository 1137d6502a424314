"""Runs a command that dies with its parent: `python tethered.py PARENT_PID COMMAND ARGUMENT…` (Linux).

The parent-death signal survives exec. A parent that has threads cannot set it between fork and exec, hence this step
in between. It is started by path, so that it imports nothing of Headway and costs some ten milliseconds.
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
        sys.exit(1)  # the parent died before we were tied
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
