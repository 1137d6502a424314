"""Ends worker processes, and says why each has ended."""

import asyncio
from collections.abc import Callable, Sequence

import structlog

from headway.daemon.errors import in_one_line
from headway.daemon.workers.process import WorkerProcess, last_lines
from headway.daemon.workers.roster import WorkerHandle, WorkerSettings
from headway.daemon.workers.status import Failure
from headway.proto import control_pb2

log = structlog.get_logger()

QUIT_TIMEOUT_S = 5.0
MAX_ERROR_CHARACTERS = 200_000
"""Maximum number of characters of a failure's text; etcd refuses values beyond 1.5 MB."""
ENDING_S = 5.0
"""Time for a killed process to end. In a call of the kernel that never returns, as a card's driver makes, it cannot."""


class Endings:
    """The ends of a node's workers. Lives in the event loop of the main thread."""

    def __init__(self, settings: WorkerSettings, on_change: Callable[[], None]) -> None:
        """on_change: called after a process has ended, or was given up."""
        self._settings = settings
        self._on_change = on_change
        self._is_stopping = False

    async def end_all(self, everybody: Sequence[WorkerHandle]) -> None:
        """Order every worker to quit, and kill those that do not. No other end is noted from now on."""
        self._is_stopping = True
        processes = [handle.process for handle in everybody if handle.process is not None]
        for handle in everybody:
            if handle.stream is not None:
                handle.stream.send(control_pb2.Order(quit=control_pb2.Quit()))
            elif handle.process is not None:
                handle.process.kill()
        stopping = (process.stop(timeout_s=QUIT_TIMEOUT_S) for process in processes)
        for process, error in zip(processes, await asyncio.gather(*stopping, return_exceptions=True), strict=True):
            if error is not None:
                log.error("worker_left_behind", pid=process.pid, reason=in_one_line(error))

    def condemn(self, handle: WorkerHandle, reason: str, *, was_moved: bool = False) -> None:
        """Kill a worker's process."""
        if handle.process is not None and not handle.verdict:
            log.error("worker_killed", worker=handle.name, reason=reason)
            handle.verdict = f"{handle.name} {reason}; it was killed\n"
            handle.was_moved = was_moved
            handle.process.kill()
            asyncio.get_running_loop().call_later(ENDING_S, self._give_up, handle, handle.process)

    def condemn_later(self, delay_s: float, handle: WorkerHandle, reason: str) -> None:
        """Kill a worker's present process after some time, if it has not ended by then."""
        process = handle.process

        def condemn() -> None:
            if handle.process is process and not self._is_stopping:
                self.condemn(handle, reason)

        asyncio.get_running_loop().call_later(delay_s, condemn)

    def exited(self, handle: WorkerHandle, process: WorkerProcess) -> None:
        """Note that a worker's process has ended."""
        log.error("worker_exited", worker=handle.name, pid=process.pid, reason=process.exit_reason)
        if process.is_given_up:
            handle.start_failure = ""
        elif not handle.status.is_up:
            handle.start_failure = process.fault or process.exit_reason.partition("\n")[0]
        _died(handle, self._obituary(handle, process), fault=process.fault)
        handle.verdict = ""
        asyncio.get_running_loop().call_soon(self._on_change)  # by then a spare may have taken over

    def _give_up(self, handle: WorkerHandle, process: WorkerProcess) -> None:
        """Count a killed process that does not end as dead, so that its job waits for nothing.

        No other process takes its device meanwhile: this one may still have it.
        """
        if handle.process is not process or self._is_stopping:
            return
        what = f"process {process.pid} was killed and does not end: a card or a file system does not answer it"
        log.error("worker_does_not_end", worker=handle.name, pid=process.pid)
        if handle.stream is not None:
            handle.stream.close()
            handle.stream = None
        # Nothing is read from its log, which may be on that file system.
        _died(handle, f"node {self._settings.node}: {handle.verdict}{what}", fault="")
        handle.start_failure, process.is_given_up = what, True
        self._on_change()

    def _obituary(self, handle: WorkerHandle, process: WorkerProcess) -> str:
        """Return how the process ended, and the last lines that it wrote to its job's log."""
        parts = [f"node {self._settings.node}: {handle.verdict}{process.exit_reason}"]
        if handle.status.job:
            parts += last_lines(self._settings.log_path(handle.status.job))
        return "\n".join(parts)[-MAX_ERROR_CHARACTERS:]


def _died(handle: WorkerHandle, text: str, *, fault: str) -> None:
    words, handle.last_words = handle.last_words, control_pb2.Refused()
    batch = words.batch or handle.last_batch(handle.status.started)
    was_moved, handle.was_moved = handle.was_moved, False
    handle.status = handle.status.died(Failure(text, batch, words.fault or fault, was_moved=was_moved))
