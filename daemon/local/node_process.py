"""One daemon of a local cluster: started, and restarted when it dies, as systemd would do."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from headway.daemon.errors import EXIT_CONFIG
from headway.daemon.local import tethered

FIRST_BACKOFF_S: Final = 0.2
MAX_BACKOFF_S: Final = 10.0
HEALTHY_AFTER_S: Final = 10.0
MAX_FALSE_STARTS: Final = 5
"""Number of failed starts in a row after which a daemon counts as one that does not start."""
SELDOM_S: Final = 60.0
"""Interval of attempts to start such a daemon."""


@dataclass(slots=True, kw_only=True)
class NodeProcess:
    """The process of a daemon, replaced after each death."""

    name: str
    flags: Mapping[str, object]
    """Flags of NodeConfig, except `listen`."""
    environment: Mapping[str, str]
    """Variables in addition to ours."""
    log_path: Path
    port: int = 0
    """Port where it listened, so that it keeps its address; 0: not known yet."""
    process: "subprocess.Popen[bytes]" = field(init=False)
    started_at: float = field(init=False)
    num_restarts: int = 0
    _began: float = 0.0
    _num_quick: int = 0
    _num_false_starts: int = 0
    _restart_at: float | None = None
    _is_failing: bool = False

    def __post_init__(self) -> None:
        self._spawn()

    @property
    def pid(self) -> int:
        """Return the pid of the newest process."""
        return self.process.pid

    @property
    def has_left(self) -> bool:
        """Return whether it ended cleanly, on request."""
        return self.process.poll() == 0

    @property
    def failure(self) -> str:
        """Return why it does not start, between rare attempts; None: it runs, or the next attempt is near."""
        return self.last_words if self._is_failing and self.process.poll() is not None else ""

    @property
    def last_words(self) -> str:
        """Return how it ended, with the last line that it wrote."""
        text = self.log_path.read_text(errors="replace").strip()
        last = text.splitlines()[-1][:300] if text else "it wrote nothing"
        return f"its daemon ended with status {self.process.returncode}: {last} (see {self.log_path})"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if it runs."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def keep_up(self) -> bool:
        """Restart the daemon if it died and its pause is over; call this repeatedly. Return whether it was started."""
        ended = self.process.poll()
        if ended is None or ended == 0:
            return False
        if self._restart_at is None:
            self._rest(ended)
        if self._restart_at is None or time.monotonic() < self._restart_at:
            return False
        self._restart_at = None
        self.num_restarts += 1
        self._spawn()
        return True

    def _rest(self, ended: int) -> None:
        is_quick = time.monotonic() - self._began < HEALTHY_AFTER_S
        self._num_quick = self._num_quick + 1 if is_quick else 1
        self._num_false_starts = self._num_false_starts + 1 if is_quick and ended > 0 else 0
        is_misconfigured = ended == EXIT_CONFIG and not self.port
        self._is_failing = is_misconfigured or self._num_false_starts >= MAX_FALSE_STARTS
        pause_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (self._num_quick - 1))
        self._restart_at = time.monotonic() + (SELDOM_S if self._is_failing else pause_s)
        if ended == EXIT_CONFIG:
            self.port = 0  # another process may have taken the port in the meantime

    def _spawn(self) -> None:
        command = [sys.executable, tethered.__file__, str(os.getpid()), sys.executable, "-m", "headway.daemon.cli.main"]
        flags = {**self.flags, "name": self.name, "listen": f"127.0.0.1:{self.port}"}
        command += ["daemon", *(f"--{flag.replace('_', '-')}={_text(value)}" for flag, value in flags.items())]
        self.started_at, self._began = time.time(), time.monotonic()
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal must reach the parent only
                env={**os.environ, **self.environment},
            )


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
