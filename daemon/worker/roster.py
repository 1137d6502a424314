"""Knows which worker process computes on which device and how each ended, and the spares that wait to take over.

A spare has imported everything and touched no device. When a worker dies, the spare becomes that device's worker at
once, so a death costs no start of Python. The next spare follows after a pause for the node.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import structlog

from headway.daemon.base.addresses import bracketed, join_address
from headway.daemon.base.errors import in_one_line
from headway.daemon.cluster.records import (
    Device,
    Failure,
)
from headway.daemon.worker.card_host import card_settings
from headway.daemon.worker.goal import (
    Goal,
    Hello,
    JobGeneration,
    WorkerStatus,
)
from headway.daemon.worker.liveness import Liveness
from headway.daemon.worker.process import SPARE_INDEX, WorkerOptions, WorkerProcess, last_lines
from headway.daemon.worker.socket import WorkerStream
from headway.stages.sockets.core_threads import with_encryption_aside
from headway.stages.sockets.shared_port import shared_address
from headway.stages.stage.allocator import with_large_pages
from headway.stages.stage.launched_ops import MOST_AHEAD

log = structlog.get_logger()

FIRST_BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 30.0
HEALTHY_AFTER_S: Final = 60.0
"""A worker that lived this long is replaced without delay."""
CODE_DIR_VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"
SPARE_PAUSE_S: Final = 1.0
"""Time for which a generation runs before the first spare takes CPU time from it."""
QUIT_TIMEOUT_S = 5.0
MAX_ERROR_CHARACTERS = 200_000
"""Maximum number of characters of a failure's text; etcd refuses values beyond 1.5 MB."""
ENDING_S = 5.0
"""Time for a killed process to end. In a call of the kernel that never returns, as a card's driver makes, it cannot."""
LOWERED_BY = 10
HIGHEST_NICE = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The settings of every worker of a node."""

    options: WorkerOptions
    """With what each is started, but for its device."""
    output_dir: Path
    """Folder of the workers' printed output."""
    logs_dir: Path
    num_spares: int = 1
    is_to_be_measured: Callable[[Device], bool] = lambda _device: False
    """True if a device's speed is not known yet."""

    @property
    def node(self) -> str:
        """Return the node's name."""
        return self.options.node

    def address_of(self, hello: Hello) -> str:
        """Return where other nodes dial a worker."""
        if hello.link_port or not self.options.shared_port:
            return join_address(self.options.host, hello.link_port)
        return shared_address(self.options.shared_port, hello.incarnation)

    def at(self, host: str) -> "WorkerSettings":
        """Return the settings of the node at another host."""
        port = self.options.shared_port
        shared = f"{bracketed(host)}:{port.rpartition(':')[2]}" if port else ""
        return replace(self, options=replace(self.options, host=host, shared_port=shared))

    def behind(self, shared_port: str) -> "WorkerSettings":
        """Return the settings of the node behind another port."""
        return replace(self, options=replace(self.options, shared_port=shared_port))

    def log_path(self, job: str) -> Path:
        """Return the log in which the workers of this node write about a job."""
        return self.logs_dir / f"{job}.log"

    @property
    def code_dir(self) -> Path:
        """Return the private folder of code compiled for jobs, for the node's next process. Private, because it is
        executed.
        """
        return self.output_dir.with_name("compiled")


class WorkerHandle:
    """One device's worker, or a spare: its present process, its stream, and its status."""

    def __init__(self, device: Device, index: int) -> None:
        self.device = device
        self.index = index
        self.status = WorkerStatus(device_index=index)
        self.process: WorkerProcess | None = None
        self.stream: WorkerStream | None = None
        self.liveness = Liveness(0.0)
        self.num_quick_deaths = 0
        self.verdict = ""
        self.was_moved = False
        """True if we killed it because its machine's address changed."""
        self.start_failure = ""
        """Reason why its last process ended before it attached; empty once one has."""

    @property
    def name(self) -> str:
        """Return the name for people: `worker cpu:0`."""
        return "spare worker" if self.index == SPARE_INDEX else f"worker {self.device.kind}:{self.index}"

    @property
    def process_name(self) -> str:
        """Return the name for folders."""
        return self.name.replace(" ", "-").replace(":", "-")

    def last_batch(self, run_key: JobGeneration) -> int:
        """Return the batch of its newest heartbeat in a generation; -1: none tells of it."""
        beat = self.liveness.beat
        is_told = beat is not None and run_key == JobGeneration(beat.job, beat.generation)
        return beat.batch if beat is not None and is_told else -1


class Roster:
    """All processes of a node, by device. Lives in the event loop of the main thread."""

    def __init__(
        self,
        devices: tuple[Device, ...],
        settings: WorkerSettings,
        *,
        on_change: Callable[[], None],
    ) -> None:
        """on_change: called after a process has ended, was given up, or could not be started."""
        self._on_change = on_change
        self.workers = [WorkerHandle(device, index) for index, device in enumerate(devices)]
        self._spares = [WorkerHandle(devices[0], SPARE_INDEX) for _ in range(settings.num_spares)]
        self._settings = settings
        self._are_spares_wanted = False
        self._timers: set[asyncio.TimerHandle] = set()
        self._is_stopping = False

    @property
    def everybody(self) -> Iterator[WorkerHandle]:
        """Return workers and spares that have a process."""
        return (handle for handle in self._all if handle.process is not None)

    @property
    def trouble(self) -> str:
        """Return why a worker or a spare does not start; empty: each has, or is about to."""
        failed = (handle for handle in self._all if handle.start_failure)
        return next((f"{handle.name} does not start: {handle.start_failure}" for handle in failed), "")

    @property
    def _all(self) -> Iterator[WorkerHandle]:
        return iter((*self.workers, *self._spares))

    def start(self) -> None:
        """Start one process per device."""
        for handle in self.workers:
            self._spawn(handle)

    def could_not_start(self, reason: str) -> None:
        """Note that no process can be started: plans leave the devices out until `start`."""
        for handle in self.workers:
            handle.status = handle.status.died(Failure(reason))

    def want_spares(self) -> None:
        """Keep spares from now on, the first of them after a pause: a generation has begun to run."""
        if not self._are_spares_wanted:
            self._are_spares_wanted = True
            for handle in self._spares:
                self._later(SPARE_PAUSE_S, handle)

    def listen_at(self, host: str) -> None:
        """Let processes that start from now on listen at another host."""
        self._settings = self._settings.at(host)

    async def end_all(self) -> None:
        """Let every worker end, and kill those that do not. No process starts and no other end is noted from now on."""
        self._is_stopping = True
        for timer in self._timers:
            timer.cancel()
        everybody = list(self.everybody)
        processes = [handle.process for handle in everybody if handle.process is not None]
        for handle in everybody:
            if handle.stream is not None:
                handle.stream.send(Goal(ends=True))
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

    def of_stream(self, stream: WorkerStream) -> WorkerHandle | None:
        """Return the owner of a stream; None when its process was given up."""
        return next((handle for handle in self.everybody if handle.stream is stream), None)

    def claimed_by(self, hello: Hello) -> WorkerHandle | None:
        """Return the worker whose process says hello; None when it is not ours, or names another device than it was
        told.
        """
        for handle in self.everybody:
            assert handle.process is not None, "everybody has one"
            if handle.process.pid == hello.pid:
                return handle if hello.device_index in (handle.index, SPARE_INDEX) else None
        return None

    def did_attach(self, handle: WorkerHandle) -> None:
        """Note that its process has imported everything."""
        handle.start_failure = ""
        if handle.process is not None and handle.process.is_lowered:
            restore_priority(handle.process.pid)
            handle.process.is_lowered = False

    def _exited(self, process: WorkerProcess) -> None:
        handle = next((handle for handle in self.everybody if handle.process is process), None)
        if handle is None:
            return
        stream, handle.stream, handle.process = handle.stream, None, None
        if stream is not None:
            stream.close()
        if self._is_stopping:
            return
        self._note_end(handle, process)
        lived_s = asyncio.get_running_loop().time() - process.started_at
        handle.num_quick_deaths = 0 if lived_s > HEALTHY_AFTER_S else handle.num_quick_deaths + 1
        spare = self._best_spare() if handle.index != SPARE_INDEX else None
        backoff_s = _backoff_s(handle.num_quick_deaths)
        if spare is None:
            self._later(backoff_s, handle)
        else:
            self._promote(spare, handle)
            self._later(max(backoff_s, SPARE_PAUSE_S), spare)

    def _note_end(self, handle: WorkerHandle, process: WorkerProcess) -> None:
        log.error("worker_exited", worker=handle.name, pid=process.pid, reason=process.exit_reason)
        if process.is_given_up:
            handle.start_failure = ""
        elif not handle.status.is_up:
            handle.start_failure = process.fault or process.exit_reason.partition("\n")[0]
        job = handle.status.job
        told = [process.exit_reason, *(last_lines(self._settings.log_path(job)) if job else ())]
        self._bury(handle, "\n".join(told)[-MAX_ERROR_CHARACTERS:], fault=process.fault)
        handle.verdict = ""
        asyncio.get_running_loop().call_soon(self._on_change)  # by then a spare may have taken over

    def _bury(self, handle: WorkerHandle, text: str, *, fault: str = "") -> None:
        """Note that a process is dead, in its own words if it had any."""
        actual = handle.status.actual
        words = actual.dies_of or Failure()
        batch = words.batch if actual.dies_of else handle.last_batch(JobGeneration(actual.job, actual.generation))
        failure = Failure(
            f"node {self._settings.node}: {handle.verdict}{text}",
            batch,
            words.fault or fault,
            was_moved=handle.was_moved,
        )
        handle.status, handle.was_moved = handle.status.died(failure), False

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
        self._bury(handle, what)
        handle.start_failure, process.is_given_up = what, True
        self._on_change()

    def _best_spare(self) -> WorkerHandle | None:
        """Return a spare that has attached, or one that at least has started."""
        begun = [spare for spare in self._spares if spare.process is not None]
        return min(begun, key=lambda spare: spare.stream is None, default=None)

    def _promote(self, spare: WorkerHandle, handle: WorkerHandle) -> None:
        assert spare.process is not None, "only a spare with a process is promoted"
        handle.process, spare.process = spare.process, None
        handle.stream, spare.stream = spare.stream, None
        handle.liveness = spare.liveness
        handle.process.name = handle.process_name
        if spare.status.is_up:
            took = spare.status
            handle.status = handle.status.attached(took.incarnation, pid=took.pid, address=took.address)
        spare.status = WorkerStatus(device_index=SPARE_INDEX)
        self.did_attach(handle)  # its remaining imports are urgent now
        log.info("spare_took_over", worker=handle.name, pid=handle.process.pid, is_ready=handle.status.is_up)

    def _later(self, delay_s: float, handle: WorkerHandle) -> None:
        def spawn() -> None:
            self._timers.discard(timer)
            if not self._is_stopping and handle.process is None:
                self._spawn(handle)

        timer = asyncio.get_running_loop().call_later(delay_s, spawn)
        self._timers.add(timer)

    def _spawn(self, handle: WorkerHandle) -> None:
        settings, loop = self._settings, asyncio.get_running_loop()
        is_spare = handle.index == SPARE_INDEX
        options = replace(
            settings.options,
            device_kind=handle.device.kind,
            device_index=handle.index,
            num_sharers=handle.device.num_sharers,
            is_to_be_measured=not is_spare and settings.is_to_be_measured(handle.device),
        )
        try:
            handle.process = WorkerProcess(
                handle.process_name,
                options,
                environment=environment_for(handle.device.kind, settings.code_dir, os.environ, settings.options.host),
                output_dir=settings.output_dir,
                on_exit=self._exited,
            )
        except Exception as error:  # no memory, no file descriptor, no room for its output
            self._not_started(handle, f"{type(error).__name__}: {error}")
            return
        if is_spare:
            handle.process.is_lowered = lower_priority(handle.process.pid)
        num_ahead = MOST_AHEAD if handle.device.kind == "cuda" else 0
        handle.liveness = Liveness(loop.time(), num_ahead=num_ahead)
        log.info("worker_started", worker=handle.name, pid=handle.process.pid)

    def _not_started(self, handle: WorkerHandle, reason: str) -> None:
        """Mark the device as down until another attempt succeeds."""
        handle.num_quick_deaths += 1
        delay_s = _backoff_s(handle.num_quick_deaths)
        log.error("worker_not_started", worker=handle.name, reason=reason, next_attempt_in_s=delay_s)
        if handle.index != SPARE_INDEX:
            handle.status = handle.status.died(Failure(f"{handle.name} could not be started: {reason}"))
            self._on_change()
        self._later(delay_s, handle)


def environment_for(kind: str, code_dir: Path, own: Mapping[str, str], host: str) -> dict[str, str]:
    """Return what a worker for this kind of device has in its environment beside our own.

    host: where others dial it.
    """
    return {
        CODE_DIR_VARIABLE: own.get(CODE_DIR_VARIABLE, str(code_dir)),
        **with_large_pages(own),
        **with_encryption_aside(own),
        **(card_settings(own, host) if kind == "cuda" else {}),
    }


def _backoff_s(num_quick_deaths: int) -> float:
    return min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (num_quick_deaths - 1)) if num_quick_deaths else 0.0


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
