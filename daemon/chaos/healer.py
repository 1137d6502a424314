"""Undoes faults when the process that made them ends in any way: a shell at the end of a pipe."""

import os
import shlex
import signal
import subprocess

TIMEOUT_S = 10.0

_SCRIPT = """
undo=""
while IFS= read -r command; do undo="$undo
$command"; done
eval "$undo" >/dev/null 2>&1
exit 0
"""


class Healer:
    """Stops and continues processes, and holds the commands that undo other faults.

    When this process ends, the shell undoes the remaining faults. Every command may run twice: a second run must do
    nothing.

    """

    def __init__(self) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "headway-healer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._told: set[str] = set()
        self._stopped: set[int] = set()

    def promise(self, *command: str) -> None:
        """Run a command when this process ends. It must do nothing if the fault was already undone."""
        line = shlex.join(command)
        if line in self._told:
            return
        assert "\n" not in line, "one command is one line"
        assert self._shell.stdin is not None
        self._shell.stdin.write(line.encode() + b"\n")
        self._shell.stdin.flush()
        self._told.add(line)

    def stop(self, pid: int) -> None:
        """Send SIGSTOP, after registering its undoing. An ended process is no error."""
        self.promise("kill", "-CONT", str(pid))
        self._stopped.add(pid)
        _signal(pid, signal.SIGSTOP)

    def go_on(self, pid: int) -> None:
        """Send SIGCONT."""
        self._stopped.discard(pid)
        _signal(pid, signal.SIGCONT)

    def close(self) -> None:
        """Continue every stopped process. Idempotent."""
        for pid in list(self._stopped):
            self.go_on(pid)
        if self._shell.stdin is not None and not self._shell.stdin.closed:
            self._shell.stdin.close()
        self._shell.wait(TIMEOUT_S)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
