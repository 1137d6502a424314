"""One worker process: started by torch's elastic multiprocessing, its end noticed at once by a pidfd."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    RunProcsResult,
    Std,
    SubprocessContext,
    start_processes,
)

from headway.daemon.machine_share import memory_limit_bytes, num_memory_kills

# start_processes installs handlers that raise an exception for each signal of this variable, over the daemon's own.
# No process sends this signal.
os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGUSR2"

LAST_LINES = 200
MAX_LINE_CHARACTERS = 2000
MAX_FAULT_CHARACTERS = 300


class WorkerProcess:
    """A running worker. Make it in the main thread: the kernel binds its parent-death signal to the starting thread."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        output_dir: Path,
        on_exit: Callable[["WorkerProcess"], None],
    ) -> None:
        self.name = name
        self.started_at = time.monotonic()
        self._memory_kills = num_memory_kills()
        self._on_exit = on_exit
        # An empty NOTIFY_SOCKET: a worker does not report to the service manager.
        own = {"PYTHONSAFEPATH": "1", "NOTIFY_SOCKET": "", "TORCHELASTIC_RUN_ID": name, **environment}
        self._context = start_processes(
            name,
            sys.executable,
            args={0: tuple(arguments)},
            envs={0: own},
            logs_specs=DefaultLogsSpecs(log_dir=str(output_dir), redirects=Std.ALL),
        )
        self.pid: int = self._context.pids()[0]
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

    def kill(self, signal_number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal, unless the process has exited."""
        if not self.exited.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal_number)

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
        try:
            self.exit_reason = self._take_leave()
        except Exception as error:  # its files about its end may be damaged, but its end is certain
            self.exit_reason = (
                f"{self.name} (pid {self.pid}) ended, and how is not known: {type(error).__name__}: {error}"
            )
        self.exited.set()
        self._on_exit(self)

    def _take_leave(self) -> str:
        """Close what belongs to the process. Return how it ended."""
        result = self._context.wait(timeout=0)
        self._context.close()
        assert isinstance(self._context, SubprocessContext), "a command, not a function, was started"
        for handler in self._context.subprocess_handlers.values():
            # Elastic closes these only for processes that it has ended itself.
            for output in (handler._stdout, handler._stderr):
                if output is not None:
                    output.close()
        return self._describe(result)

    def _describe(self, result: RunProcsResult | None) -> str:
        failure = result.failures.get(0) if result is not None else None
        if failure is None:
            return f"{self.name} (pid {self.pid}) exited"
        how = f"by signal {failure.signal_name()}" if failure.exitcode < 0 else f"with exit status {failure.exitcode}"
        if failure.exitcode == -signal.SIGKILL and num_memory_kills() > self._memory_kills:
            limit = memory_limit_bytes()
            of = f" within {limit / (1 << 30):.1f} GiB, a cgroup's limit" if limit else ""
            how += f": the kernel kills processes for lack of memory{of}; use fewer nodes here, or give more"
        lines = [f"{self.name} (pid {self.pid}) ended {how}"]
        message = failure.message
        if isinstance(message, dict):
            self.fault = " ".join(str(message.get("message", "")).split())[:MAX_FAULT_CHARACTERS]
            lines.append(str(message.get("extraInfo", {}).get("py_callstack") or message.get("message", "")))
        elif os.path.exists(failure.error_file):  # noqa: PTH110 (elastic's own path, a string)
            lines.append(str(message))
        lines += last_lines(Path(self._context.stderrs[0]))
        return "\n".join(line.rstrip("\n") for line in lines)


def last_lines(path: Path) -> list[str]:
    """Return the last lines of a text file, very long ones shortened; none when the file does not exist."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return [line.rstrip("\n")[:MAX_LINE_CHARACTERS] for line in deque(file, maxlen=LAST_LINES)]
    except FileNotFoundError:
        return []
