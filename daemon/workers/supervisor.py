"""Keeps one worker process per device up, sends it orders, and reports its state."""

import asyncio
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import structlog

from headway.daemon.errors import in_one_line
from headway.daemon.records.records import Device, WorkerPort
from headway.daemon.runtime.activities import Activities
from headway.daemon.workers.endings import QUIT_TIMEOUT_S, Endings
from headway.daemon.workers.launched_work import LaunchedWork
from headway.daemon.workers.liveness import TICK_S, StallWatch
from headway.daemon.workers.recent_operations import RecentOperationsDesk
from headway.daemon.workers.reports import Listener, Reports
from headway.daemon.workers.roster import Roster, WorkerSettings
from headway.daemon.workers.service import WorkerStream
from headway.daemon.workers.status import Failure, JobGeneration, OrderKind, WorkerStatus
from headway.daemon.workers.workers_socket import WorkersSocket
from headway.proto import control_pb2
from headway.stages.errors import UnavailableError
from headway.stages.sockets.shared_port import shared_address
from headway.stages.stage.launched_ops import MOST_AHEAD

log = structlog.get_logger()


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
        self._endings = Endings(settings, self._changed)
        self._roster = Roster(devices, settings, on_exit=self._endings.exited, on_not_started=self._changed)
        self._recent = RecentOperationsDesk()
        self._reports = Reports(self._roster, listener, self._recent, self._endings, node=settings.node)
        self._socket = WorkersSocket(settings.socket_path, self, on_loss=self._cut_off)
        self._watching: tuple[asyncio.Task[None], ...] = ()

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
            await self._socket.serve()
        except Exception as error:
            self._roster.could_not_start(in_one_line(error))
            self._changed()
            raise
        self._roster.start()
        watches = {"watch over workers": self._watch, "socket of workers": self._socket.keep}
        self._watching = tuple(
            asyncio.create_task(self._activities.keep(name, watch), name=name) for name, watch in watches.items()
        )

    async def stop(self) -> None:
        """Order every worker to quit, kill those that do not, and stop serving."""
        self._roster.close()
        for watching in self._watching:
            watching.cancel()
        await self._endings.end_all(list(self._roster.everybody))
        await self._socket.stop()

    def move(self, host: str) -> None:
        """Let every worker listen at another host, because the machine has lost the address of the present ones."""
        self._settings = self._settings.at(host)
        self._roster.listen_at(host)
        for handle in list(self._roster.everybody):
            reason = f"listened at an address that this machine has lost; the next one is at {host}"
            self._endings.condemn(handle, reason, was_moved=True)

    def announce(self, shared_port: str) -> None:
        """Let others dial the workers behind another port from now on, without touching the processes."""
        self._settings = replace(self._settings, shared_port=shared_port)
        for handle in self._roster.everybody:
            if handle.status.is_up:
                address = shared_address(shared_port, handle.status.incarnation)
                handle.status = replace(handle.status, address=address)
        self._changed()

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

    def fail(self, device_index: int, run_key: JobGeneration, reason: str, *, damaged: str = "") -> None:
        """Note that a worker cannot do its part of a generation, for an outside reason. damaged: as in WorkerRecord."""
        handle = self._roster.workers[device_index]
        handle.status = handle.status.failed(Failure(reason, damaged=damaged), run_key=run_key)
        self._listener.worker_changed()

    def forget(self, is_over: Callable[[JobGeneration], bool]) -> None:
        """Drop the failures of generations that are over."""
        for handle in self._roster.workers:
            over = frozenset(run_key for run_key in handle.status.failures if is_over(run_key))
            if over:
                handle.status = handle.status.forgetting(over)

    def log_path(self, job: str) -> Path:
        """Return the log in which the workers of this node write about a job."""
        return self._settings.log_path(job)

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
        if handle is not None:  # else the process has been given up
            self._reports.take(handle, report, _now())

    def detach(self, stream: WorkerStream) -> None:
        """Note the end of a stream. A worker without stream gets no orders, so its process is ended."""
        handle = self._roster.of_stream(stream)
        if handle is not None:
            handle.stream = None
            self._endings.condemn_later(QUIT_TIMEOUT_S, handle, "left the daemon's socket, and did not end")

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
                    self._endings.condemn(handle, complaint)

    def _cut_off(self) -> None:
        """End all workers: the sockets at which links find them lay beside the workers' socket, and are gone too."""
        for handle in list(self._roster.everybody):
            self._endings.condemn(handle, "was cut off: its node's folder of sockets was deleted", was_moved=True)

    def _changed(self) -> None:
        self._on_change()
        self._listener.worker_changed()


def _now() -> float:
    return asyncio.get_running_loop().time()
