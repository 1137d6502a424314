"""Lets stopped processes go on when whoever stopped them is gone, however it went: a shell at the end of a pipe."""

import os
import signal
import subprocess

TIMEOUT_S = 10.0

_SCRIPT = """
pids=""
while read -r pid; do pids="$pids $pid"; done
for pid in $pids; do kill -CONT "$pid" 2>/dev/null; done
exit 0
"""


class Healer:
    """Stops and continues processes. Those that are stopped when this process ends go on by themselves."""

    def __init__(self) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "headway-healer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._told: set[int] = set()
        self._stopped: set[int] = set()

    def stop(self, pid: int) -> None:
        """SIGSTOP, after it was noted elsewhere. A process that is gone is no error."""
        if pid not in self._told:
            assert self._shell.stdin is not None
            self._shell.stdin.write(b"%d\n" % pid)
            self._shell.stdin.flush()
            self._told.add(pid)
        self._stopped.add(pid)
        _signal(pid, signal.SIGSTOP)

    def go_on(self, pid: int) -> None:
        """SIGCONT."""
        self._stopped.discard(pid)
        _signal(pid, signal.SIGCONT)

    def close(self) -> None:
        """Everything that is stopped goes on. Idempotent."""
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
