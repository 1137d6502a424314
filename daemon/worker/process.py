"""One worker process: how it is started, and its end, which a pidfd tells at once."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from headway.daemon.base.machine_share import memory_limit_bytes, num_memory_kills

SPARE_INDEX: Final = 2**32 - 1
"""Device index of a worker that has no device yet, also in its hello."""
ERROR_FILE: Final = "HEADWAY_ERROR_FILE"
"""Variable with the file in which a process leaves its last error."""
LAST_LINES: Final = 200
MAX_LINE_CHARACTERS: Final = 2000
MAX_FAULT_CHARACTERS: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What a worker process is started with. It is the only argument of its command line, as JSON."""

    socket_path: str
    """The daemon's unix socket."""
    node: str = ""
    """The node's name, for the log."""
    host: str
    """Host where it listens for its neighbours."""
    ports: str = ""
    """Ports where it may listen, such as 7100-7107; empty: any free port."""
    shared_port: str = ""
    """The node's shared port as host:port, behind which it listens; empty: it has a port of its own."""
    inner_port: str = ""
    """Where this machine finds its shared port, if a router maps another one to it."""
    certificates: str
    """Folder with ca.pem, cert.pem, key.pem."""
    renewals: str
    """Folder of this node's renewed certificates."""
    history_dir: str = ""
    """Folder for what each stage did, for tests."""
    device_kind: str = "cpu"
    device_index: int = SPARE_INDEX
    num_sharers: int = 1
    """Nodes that share the card and its memory."""
    is_to_be_measured: bool = False
    """Whether it measures the device's speed, once there is time."""


@dataclass(frozen=True, slots=True)
class LastError:
    """The error by which a process ended."""

    fault: str
    """Its type and text, in one line."""
    trace: str


def leave_error(error: BaseException) -> None:
    """Leave an error for the daemon, in the process that ends by it."""
    if path := os.environ.get(ERROR_FILE):
        fault = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_FAULT_CHARACTERS]
        found = LastError(fault, "".join(traceback.format_exception(error)))
        Path(path).write_bytes(msgspec.json.encode(found))


def command(options: WorkerOptions) -> list[str]:
    """Return the command line of a worker."""
    return [sys.executable, "-m", "headway.daemon.worker", msgspec.json.encode(options).decode()]


class WorkerProcess:
    """A running worker. Make it in the main thread: the kernel binds its parent-death signal to the starting thread."""

    def __init__(
        self,
        name: str,
        options: WorkerOptions,
        *,
        environment: Mapping[str, str],
        output_dir: Path,
        on_exit: Callable[["WorkerProcess"], None],
    ) -> None:
        self.name = name
        self.started_at = time.monotonic()
        self._memory_kills = num_memory_kills()
        self._on_exit = on_exit
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=output_dir))
        self._output, self._error_file = folder / "output.log", folder / "error.json"
        # An empty NOTIFY_SOCKET: a worker does not report to the service manager.
        own = {"PYTHONSAFEPATH": "1", "NOTIFY_SOCKET": "", ERROR_FILE: str(self._error_file), **environment}
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                command(options), env={**os.environ, **own}, stdout=output, stderr=output, start_new_session=True
            )
        self.pid: int = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._exited)
        self.exited = asyncio.Event()
        self.exit_reason = ""
        """How it ended, with its traceback, once it has exited."""
        self.fault = ""
        """The error in one line, if it ended by its own error."""
        self.is_lowered = False
        """True if its priority is lowered, while it has no urgent work."""
        self.is_given_up = False
        """True if it was killed and counts as dead, although it has not ended."""

    def kill(self) -> None:
        """Kill the process, unless it has exited."""
        if not self.exited.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, *, timeout_s: float) -> None:
        """Wait for its exit; when the time is over, kill it and wait for that."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.exited.wait()
        except TimeoutError:
            self.kill()
            async with asyncio.timeout(timeout_s):
                await self.exited.wait()

    def _exited(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        how = "ended"
        try:
            how = self._how(self._process.wait())
            self.exit_reason = "\n".join([f"{self.name} (pid {self.pid}) {how}", *self._traces()])
        except Exception as error:  # its files about its end may be damaged, but its end is certain
            self.exit_reason = (
                f"{self.name} (pid {self.pid}) {how}, and why is not known: {type(error).__name__}: {error}"
            )
        self.exited.set()
        self._on_exit(self)

    def _how(self, code: int) -> str:
        if code >= 0:
            return f"ended with exit status {code}" if code else "exited"
        how = f"ended by signal {signal.Signals(-code).name}"
        if code == -signal.SIGKILL and num_memory_kills() > self._memory_kills:
            limit = memory_limit_bytes()
            of = f" within {limit / (1 << 30):.1f} GiB, a cgroup's limit" if limit else ""
            how += f": the kernel kills processes for lack of memory{of}; use fewer nodes here, or give more"
        return how

    def _traces(self) -> list[str]:
        """Return what the process left of its error, and what it wrote last."""
        found = []
        if self._error_file.exists():
            error = msgspec.json.decode(self._error_file.read_bytes(), type=LastError)
            self.fault = error.fault
            found = [error.trace.rstrip("\n")]
        return found + last_lines(self._output)


def last_lines(path: Path) -> list[str]:
    """Return the last lines of a text file, very long ones shortened; none when the file does not exist."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return [line.rstrip("\n")[:MAX_LINE_CHARACTERS] for line in deque(file, maxlen=LAST_LINES)]
    except FileNotFoundError:
        return []
