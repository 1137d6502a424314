"""Keeps one worker process per device up, sends it orders, and reports its state."""

import asyncio
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import grpc.aio
import structlog

from headway.daemon.errors import in_one_line
from headway.daemon.records.records import Device, WorkerPort
from headway.daemon.records.shortages import MemoryShortage
from headway.daemon.runtime.activities import Activities
from headway.daemon.storage.folders import make_private
from headway.daemon.workers.launched_work import LaunchedWork
from headway.daemon.workers.liveness import TICK_S, Beat, StallWatch
from headway.daemon.workers.process import WorkerProcess, last_lines
from headway.daemon.workers.recent_operations import RecentOperationsDesk
from headway.daemon.workers.roster import Roster, WorkerHandle, WorkerSettings
from headway.daemon.workers.service import WorkerStream, serve_workers
from headway.daemon.workers.status import Failure, JobGeneration, OrderKind, Standstill, WorkerStatus
from headway.proto import control_pb2
from headway.stages.errors import UnavailableError
from headway.stages.sockets.shared_port import shared_address
from headway.stages.stage.launched_ops import MOST_AHEAD

log = structlog.get_logger()

QUIT_TIMEOUT_S = 5.0
MAX_ERROR_CHARACTERS = 200_000
"""Maximum number of characters of a failure's text; etcd refuses values beyond 1.5 MB."""
MAX_DAMAGED = 8
"""Files that a worker may refuse before its generation is given up."""


DYING_S = 5.0
"""Grace period for a worker to exit after it reported a fatal error."""
SOCKET_CHECK_S = 2.0
"""Interval of looks whether the workers' socket is still there."""
ENDING_S = 5.0
"""Time for a killed process to end. In a call of the kernel that never returns, as a card's driver makes, it cannot."""


class Listener(Protocol):
    """The listener of the supervisor: the agent."""

    def worker_changed(self) -> None:
        """Note that a worker's status has changed."""
        ...

    async def worker_wrote(self, wrote: control_pb2.Wrote) -> str:
        """Note layer files that a worker wrote. Returns why they cannot be kept, or an empty text."""
        ...

    def worker_progressed(self, progress: control_pb2.Progress) -> None:
        """Note batches that the last stage's worker finished."""
        ...

    def worker_refused_file(self, path: str) -> None:
        """Note a damaged file that a worker was to load; Start is due again once there is another."""
        ...

    def worker_missed_snapshot(self, missed: control_pb2.SnapshotMissed) -> None:
        """Note a periodic snapshot that was not written, or late."""
        ...


class Supervisor:
    """All workers of a node. Lives in the event loop of the main thread."""

    def __init__(
        self,
        devices: tuple[Device, ...],
        settings: WorkerSettings,
        listener: Listener,
        *,
        on_change: Callable[[], None] = lambda: None,
        activities: Activities | None = None,
    ) -> None:
        """activities: owns the watch over workers.

        on_change: called when a process came or went, so that `down_devices` and `worker_ports` may have changed.
        """
        self._settings = settings
        self._listener = listener
        self._on_change = on_change
        self._activities = activities or Activities()
        self._roster = Roster(devices, settings, on_exit=self._exited, on_not_started=self._changed)
        self._recent = RecentOperationsDesk()
        self._server: grpc.aio.Server | None = None
        self._watching: tuple[asyncio.Task[None], ...] = ()
        self._is_stopping = False
        self._taking: set[asyncio.Task[None]] = set()
        """Files of workers that are being taken in."""

    @property
    def socket_path(self) -> Path:
        """Return the socket where workers attach."""
        return self._settings.socket_path

    @property
    def statuses(self) -> tuple[WorkerStatus, ...]:
        """Return the statuses, one per device, by index."""
        return tuple(handle.status for handle in self._roster.workers)

    @property
    def down_devices(self) -> tuple[int, ...]:
        """Return devices whose worker died and has no successor yet."""
        return tuple(handle.index for handle in self._roster.workers if handle.status.has_died)

    @property
    def worker_ports(self) -> tuple[WorkerPort, ...]:
        """Return where the running workers listen, by device."""
        return tuple(
            WorkerPort(device_index=handle.index, address=status.address, incarnation=status.incarnation)
            for handle in self._roster.workers
            if (status := handle.status).is_up
        )

    @property
    def trouble(self) -> str:
        """Return why a worker or a spare does not start; empty: each has, or is about to."""
        return self._roster.trouble

    @property
    def heartbeats(self) -> Mapping[int, control_pb2.Heartbeat]:
        """Return the newest heartbeat of each running worker, by device index."""
        return {handle.index: handle.heartbeat for handle in self._roster.workers if handle.status.is_up}

    async def run(self) -> None:
        """Serve workers until cancelled. `stop` ends them."""
        if not self._watching:
            await self.start()
        await asyncio.Event().wait()

    async def start(self) -> None:
        """Serve the socket and start every worker. Returns before they have said hello.

        When it raises, no worker runs, every device is down, and it may be called again.
        """
        try:
            shutil.rmtree(self._settings.output_dir, ignore_errors=True)
            self._settings.output_dir.mkdir(parents=True, exist_ok=True)
            self._settings.logs_dir.mkdir(parents=True, exist_ok=True)
            self._server = await serve_workers(self.socket_path, self)
        except Exception as error:
            self._roster.could_not_start(in_one_line(error))
            self._changed()
            raise
        self._roster.start()
        watches = {"watch over workers": self._watch, "socket of workers": self._keep_socket}
        self._watching = tuple(
            asyncio.create_task(self._activities.keep(name, watch), name=name) for name, watch in watches.items()
        )

    async def stop(self) -> None:
        """Order every worker to quit, kill those that do not, and stop serving."""
        self._is_stopping = True
        self._roster.close()
        for watching in self._watching:
            watching.cancel()
        everybody = list(self._roster.everybody)
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
        if self._server is not None:
            await self._server.stop(grace=0.5)
        self.socket_path.unlink(missing_ok=True)

    def move(self, host: str) -> None:
        """Let every worker listen at another host, because the machine has lost the address of the present ones."""
        self._settings = self._settings.at(host)
        self._roster.listen_at(host)
        for handle in list(self._roster.everybody):
            reason = f"listened at an address that this machine has lost; the next one is at {host}"
            self._condemn(handle, reason, was_moved=True)

    def announce(self, shared_port: str) -> None:
        """Let others dial the workers behind another port from now on, without touching the processes."""
        self._settings = replace(self._settings, shared_port=shared_port)
        for handle in self._roster.everybody:
            if handle.status.is_up:
                address = shared_address(shared_port, handle.status.incarnation)
                handle.status = replace(handle.status, address=address)
        self._changed()

    def kill(self) -> None:
        """End every worker at once."""
        self._is_stopping = True
        self._roster.close()
        for handle in self._roster.everybody:
            if handle.process is not None:
                handle.process.kill()

    def order(
        self,
        device_index: int,
        kind: OrderKind,
        run_key: JobGeneration,
        order: control_pb2.Order,
        *,
        within_s: float | None = None,
        batch_s: float = 0.0,
    ) -> bool:
        """Send an order to a worker and expect its answer. Returns False when the worker is about to exit.

        within_s, batch_s: as in `Liveness.ordered`.
        """
        handle = self._roster.workers[device_index]
        if handle.stream is None:
            log.warning(
                "order_not_sent", worker=handle.name, order=kind, job=run_key.job, generation=run_key.generation
            )
            return False
        handle.status = handle.status.ordered(kind, run_key)
        if kind is OrderKind.START:
            stage = order.start.stage
            leads = not stage.groups or stage.groups[0] == 0
            has_journal = leads and stage.index + 1 == stage.num_stages
            computes_later = handle.device.kind == "cuda"
            handle.launched = LaunchedWork.of(stage, num_ahead=MOST_AHEAD) if computes_later else None
            handle.status = handle.status.starting(tuple(stage.layers), has_journal=has_journal)
        launches = handle.launched is not None
        handle.liveness.ordered(kind, run_key, _now(), within_s=within_s, batch_s=batch_s, launches=launches)
        handle.stream.send(order)
        log.info("order_sent", worker=handle.name, order=kind, job=run_key.job, generation=run_key.generation)
        return True

    def tell(self, device_index: int, order: control_pb2.Order) -> None:
        """Send an order that has no answer, if the worker is there."""
        handle = self._roster.workers[device_index]
        if handle.stream is not None:
            handle.stream.send(order)

    async def recent_operations(self, device_index: int) -> control_pb2.RecentOperations:
        """Return the last operations of a device's worker. Raises UnavailableError, naming it."""
        handle = self._roster.workers[device_index]
        if handle.stream is None:
            raise UnavailableError(handle.name, "is not up")
        return await self._recent.ask(handle.name, handle.stream.send)

    def fail(self, device_index: int, run_key: JobGeneration, reason: str, *, is_hopeless: bool = False) -> None:
        """Note that a worker cannot do its part of a generation, for an outside reason.

        is_hopeless: another attempt would fail for this reason again.
        """
        handle = self._roster.workers[device_index]
        handle.status = handle.status.failed(Failure(reason, is_hopeless=is_hopeless), run_key=run_key)
        self._listener.worker_changed()

    def forget(self, is_over: Callable[[JobGeneration], bool]) -> None:
        """Drop the failures of generations that are over."""
        for handle in self._roster.workers:
            over = frozenset(run_key for run_key in handle.status.failures if is_over(run_key))
            if over:
                handle.status = handle.status.forgetting(over)

    def log_path(self, job: str) -> Path:
        """Return the log in which the workers of this node write about a job."""
        return self._settings.logs_dir / f"{job}.log"

    # --- Attachments: the socket's side -----------------------------------------------------------------------------

    def attach(self, stream: WorkerStream) -> str:
        """Attach a worker that said hello: it must be an unattached process of ours."""
        hello = stream.hello
        handle = self._roster.claimed_by(hello)
        if handle is None:
            return f"pid {hello.pid} is not this daemon's worker for device {hello.device_index}"
        if handle.stream is not None:
            return f"pid {hello.pid} is already attached"
        handle.stream = stream
        address = self._settings.address_of(hello)
        handle.status = handle.status.attached(hello.incarnation, pid=hello.pid, address=address)
        handle.liveness.heard(_now())
        self._roster.did_attach(handle)
        log.info("worker_attached", worker=handle.name, pid=hello.pid, address=address)
        self._changed()
        return ""

    def report(self, stream: WorkerStream, report: control_pb2.Report) -> None:
        """Turn a report into the worker's next status, and tell the listener."""
        handle = self._roster.of_stream(stream)
        if handle is None:
            return  # the process has been given up
        handle.liveness.heard(_now())
        try:
            self._take(handle, report)
        except Exception as error:  # an error costs the report's generation, not the worker's stream
            self._not_taken(handle, report, error)

    def _not_taken(self, handle: WorkerHandle, report: control_pb2.Report, error: Exception) -> None:
        run_key = handle.status.started or handle.status.prepared
        kind = report.WhichOneof("report")
        log.error("report_not_taken", worker=handle.name, kind=kind, job=handle.status.job, exc_info=error)
        if run_key is not None:
            reason = f"node {self._settings.node}: the daemon could not take {kind!r}: {in_one_line(error)}"
            self.fail(handle.index, run_key, reason)

    def _take(self, handle: WorkerHandle, report: control_pb2.Report) -> None:
        match report.WhichOneof("report"):
            case "progress":
                self._listener.worker_progressed(report.progress)
            case "heartbeat":
                handle.heartbeat = report.heartbeat
                handle.liveness.on_heartbeat(_beat(report.heartbeat, handle.launched), _now())
            case "snapshot_missed":
                self._listener.worker_missed_snapshot(report.snapshot_missed)
            case "recent_operations":
                self._recent.answered(report.recent_operations)
            case _:
                self._advance(handle, report)
                self._listener.worker_changed()

    def detach(self, stream: WorkerStream) -> None:
        """Note the end of a stream. A worker without stream gets no orders, so its process is ended."""
        handle = self._roster.of_stream(stream)
        if handle is not None:
            handle.stream = None
            if handle.process is not None and not self._is_stopping:
                reason = "left the daemon's socket, and did not end"
                asyncio.get_running_loop().call_later(QUIT_TIMEOUT_S, self._end, handle, handle.process, reason)

    def _advance(self, handle: WorkerHandle, report: control_pb2.Report) -> None:
        status = handle.status
        match report.WhichOneof("report"):
            case "prepared":
                run_key = JobGeneration(report.prepared.job, report.prepared.generation)
                handle.status = status.did_prepare(run_key)
            case "started":
                run_key = JobGeneration(report.started.job, report.started.generation)
                handle.status = status.did_start(run_key)
                self._roster.want_spares()
            case "stop_chosen":
                run_key = JobGeneration(report.stop_chosen.job, report.stop_chosen.generation)
                handle.status = status.did_choose(Standstill(run_key, report.stop_chosen.boundary))
            case "at_boundary":
                run_key = JobGeneration(report.at_boundary.job, report.at_boundary.generation)
                best_batch = report.at_boundary.best_batch if report.at_boundary.HasField("best_batch") else None
                handle.status = status.did_stop(Standstill(run_key, report.at_boundary.boundary, best_batch))
            case "wrote":
                # a task, because the disk may hang
                taking = asyncio.get_running_loop().create_task(self._wrote(handle, report), name="files of a worker")
                self._taking.add(taking)
                taking.add_done_callback(self._taking.discard)
            case "released":
                handle.status = status.released()
            case "refused":
                self._refused(handle, report.refused)
            case other:
                log.warning("report_unknown", worker=handle.name, kind=other)
        log.info("worker_reported", worker=handle.name, report=report.WhichOneof("report"), job=handle.status.job)

    async def _wrote(self, handle: WorkerHandle, report: control_pb2.Report) -> None:
        """Take in files. An order to write is answered when they are held."""
        wrote, incarnation = report.wrote, handle.status.incarnation
        run_key = JobGeneration(wrote.job, wrote.generation)
        try:
            refused = await self._listener.worker_wrote(wrote)
        except Exception as error:
            self._not_taken(handle, report, error)
            return
        if handle.status.incarnation != incarnation:
            return  # the process has ended meanwhile
        if not wrote.is_snapshot:
            handle.status = handle.status.answered(OrderKind.WRITE, run_key)
            if refused:
                handle.status = handle.status.failed(Failure(refused), run_key=run_key)
        elif refused:
            missed = control_pb2.SnapshotMissed(
                job=run_key.job, generation=run_key.generation, boundary=wrote.boundary, reason=refused
            )
            self._listener.worker_missed_snapshot(missed)
        self._listener.worker_changed()

    def _refused(self, handle: WorkerHandle, refused: control_pb2.Refused) -> None:
        run_key = JobGeneration(refused.job, refused.generation)
        log.warning("order_refused", worker=handle.name, job=run_key.job, reason=refused.reason)
        if refused.damaged_path and handle.status.num_damaged < MAX_DAMAGED:
            self._listener.worker_refused_file(refused.damaged_path)
            handle.status = handle.status.refused_file(run_key)
            return
        if refused.fault and not refused.hopeless:  # its process is exiting with this error: the exit is the failure
            handle.last_words = refused
            reason = f"did not end within {DYING_S:g} s of its own error"
            asyncio.get_running_loop().call_later(DYING_S, self._end, handle, handle.process, reason)
            return
        batch = refused.batch or _last_batch(handle, run_key)
        text = f"{handle.name}: {refused.reason}"
        is_unanswered_release = (OrderKind.RELEASE, run_key) in handle.status.pending
        lost_peer = refused.lost_peer - 1
        failure = Failure(
            text,
            batch,
            refused.fault,
            refused.hopeless,
            lost_peer,
            refused.unreached,
            shortage=_shortage(refused.shortage) if refused.HasField("shortage") else None,
        )
        handle.status = handle.status.failed(failure, run_key=run_key)
        if is_unanswered_release:
            self._condemn(handle, f"refused to be released: {refused.reason}")

    def _end(self, handle: WorkerHandle, process: WorkerProcess | None, reason: str) -> None:
        if handle.process is process and not self._is_stopping:
            self._condemn(handle, reason)

    # --- Watching over them -----------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Kill workers that are dead although their process exists. Reports count only for the time when it
        was awake.
        """
        stalls = StallWatch(_now())
        while True:
            await asyncio.sleep(TICK_S)
            if stalled_s := stalls.tick(_now()):
                log.warning("daemon_was_stalled", seconds=round(stalled_s, 1))
            for handle in list(self._roster.everybody):
                # A judge that was stopped has missed reports: it gives every worker its full time again.
                if stalled_s:
                    handle.liveness.on_watchdog_stall(stalled_s, _now())
                elif complaint := handle.liveness.complaint(handle.status, _now()):
                    self._condemn(handle, complaint)

    async def _keep_socket(self) -> None:
        """Serve the workers' socket again when somebody has deleted it, as cleaners of /tmp do."""
        while True:
            await asyncio.sleep(SOCKET_CHECK_S)
            if self._server is not None and self.socket_path.is_socket():
                continue
            make_private(self.socket_path.parent)
            log.error("socket_of_workers_gone", path=str(self.socket_path))
            # The sockets at which links find these workers lay beside it: others would never reach them again.
            for handle in list(self._roster.everybody):
                self._condemn(handle, "was cut off: its node's folder of sockets was deleted", was_moved=True)
            if (server := self._server) is not None:
                self._server = None
                await server.stop(grace=None)  # first, because its end deletes whatever has the socket's name
            self._server = await serve_workers(self.socket_path, self)

    def _condemn(self, handle: WorkerHandle, reason: str, *, was_moved: bool = False) -> None:
        if handle.process is not None and not handle.verdict:
            log.error("worker_killed", worker=handle.name, reason=reason)
            handle.verdict = f"{handle.name} {reason}; it was killed\n"
            handle.was_moved = was_moved
            handle.process.kill()
            asyncio.get_running_loop().call_later(ENDING_S, self._give_up, handle, handle.process)

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
        self._died(handle, f"node {self._settings.node}: {handle.verdict}{what}", fault="")
        handle.start_failure, process.is_given_up = what, True
        self._changed()

    def _exited(self, handle: WorkerHandle, process: WorkerProcess) -> None:
        log.error("worker_exited", worker=handle.name, pid=process.pid, reason=process.exit_reason)
        if process.is_given_up:
            handle.start_failure = ""
        elif not handle.status.is_up:
            handle.start_failure = process.fault or process.exit_reason.partition("\n")[0]
        self._died(handle, self._obituary(handle, process), fault=process.fault)
        handle.verdict = ""
        asyncio.get_running_loop().call_soon(self._changed)  # by then a spare may have taken over

    def _died(self, handle: WorkerHandle, text: str, *, fault: str) -> None:
        words, handle.last_words = handle.last_words, control_pb2.Refused()
        batch = words.batch or (_last_batch(handle, handle.status.started) if handle.status.started else -1)
        was_moved, handle.was_moved = handle.was_moved, False
        handle.status = handle.status.died(Failure(text, batch, words.fault or fault, was_moved=was_moved))

    def _obituary(self, handle: WorkerHandle, process: WorkerProcess) -> str:
        """Return how the process ended, and the last lines that it wrote to its job's log."""
        parts = [f"node {self._settings.node}: {handle.verdict}{process.exit_reason}"]
        if handle.status.job:
            parts += last_lines(self.log_path(handle.status.job))
        return "\n".join(parts)[-MAX_ERROR_CHARACTERS:]

    def _changed(self) -> None:
        self._on_change()
        self._listener.worker_changed()


def _beat(heartbeat: control_pb2.Heartbeat, launched: LaunchedWork | None) -> Beat:
    return Beat(
        run_key=JobGeneration(heartbeat.job, heartbeat.generation),
        num_operations=heartbeat.operations,
        is_runnable=heartbeat.runnable,
        typical_s=heartbeat.typical_s,
        expected_s=heartbeat.expected_s,
        num_steps=heartbeat.steps,
        launched_s=None if launched is None else launched.seconds(heartbeat.layers),
        batch=heartbeat.batch,
    )


def _last_batch(handle: WorkerHandle, run_key: JobGeneration) -> int:
    beat = handle.liveness.beat
    return beat.batch if beat is not None and beat.run_key == run_key else -1


def _shortage(told: control_pb2.OutOfMemory) -> MemoryShortage:
    return MemoryShortage(
        wanted_bytes=told.wanted_bytes, allocated_bytes=told.allocated_bytes, allowed_bytes=told.allowed_bytes
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
