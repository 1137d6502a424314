"""Keeps one worker process per device up, carries orders to it, and says what each of them is doing."""

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc.aio
import structlog

from headway.daemon.records import Device
from headway.daemon.supervision.worker_process import WorkerProcess, last_lines
from headway.daemon.supervision.worker_service import WorkerStream, serve_workers
from headway.daemon.supervision.worker_status import Failure, JobGeneration, OrderKind, Standstill, WorkerStatus
from headway.proto import control_pb2

log = structlog.get_logger()

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
HEALTHY_AFTER_S = 60.0
"""A worker that lived so long is respawned without delay."""
QUIT_TIMEOUT_S = 5.0
HELLO_TIMEOUT_S = 120.0
"""For a new worker to import the model and to attach."""
SILENCE_S = 30.0
"""A worker says every second that it lives; after such a silence it is killed."""
MAX_ERROR_CHARACTERS = 200_000
"""Of a failure's text; etcd refuses values beyond 1.5 MB."""
ANSWER_TIMEOUT_S = {
    OrderKind.PREPARE: 120.0,
    OrderKind.START: 300.0,
    OrderKind.WRITE: 300.0,
    OrderKind.RELEASE: 60.0,
}
"""A worker that has not answered by then is killed. A stop takes as long as its batch; the coordinator watches that."""


class Listener(Protocol):
    """Whom the supervisor tells: the agent."""

    def worker_changed(self) -> None:
        """Some worker's status is another."""
        ...

    def worker_wrote(self, wrote: control_pb2.Wrote) -> str:
        """A worker wrote layer files. Returns why they cannot be kept, or nothing."""
        ...

    def worker_progressed(self, progress: control_pb2.Progress) -> None:
        """The last stage's worker finished batches."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What every worker of a node is started with."""

    node: str
    host: str
    """Where it listens for its neighbours."""
    certificates: Path
    runtime_dir: Path
    """Private folder for the socket."""
    output_dir: Path
    """What workers print goes here."""
    logs_dir: Path
    history_dir: Path | None = None


class WorkerHandle:
    """One device's worker: the process that is there now, its stream, and its status."""

    def __init__(self, device: Device, index: int) -> None:
        self.device = device
        self.index = index
        self.status = WorkerStatus(device_index=index)
        self.process: WorkerProcess | None = None
        self.stream: WorkerStream | None = None
        self.num_quick_deaths = 0
        self.deadlines: dict[tuple[OrderKind, JobGeneration], asyncio.TimerHandle] = {}
        self.silence: asyncio.TimerHandle | None = None
        self.verdict = ""
        """Why we killed it, if we did."""

    @property
    def name(self) -> str:
        """For people: `worker cpu:0`."""
        return f"worker {self.device.kind}:{self.index}"


class Supervisor:
    """All workers of a node. Lives in the event loop of the main thread."""

    def __init__(self, devices: tuple[Device, ...], settings: WorkerSettings, listener: Listener) -> None:
        self._settings = settings
        self._listener = listener
        self._handles = [WorkerHandle(device, index) for index, device in enumerate(devices)]
        self._server: grpc.aio.Server | None = None
        self._respawns: set[asyncio.TimerHandle] = set()
        self._is_stopping = False

    @property
    def socket_path(self) -> Path:
        """Where workers attach."""
        return self._settings.runtime_dir / "workers.sock"

    @property
    def statuses(self) -> tuple[WorkerStatus, ...]:
        """One per device, by index."""
        return tuple(handle.status for handle in self._handles)

    async def start(self) -> None:
        """Serve the socket and start every worker. Returns before they have said hello."""
        shutil.rmtree(self._settings.output_dir, ignore_errors=True)
        self._settings.output_dir.mkdir(parents=True)
        self._settings.logs_dir.mkdir(parents=True, exist_ok=True)
        self._server = await serve_workers(self.socket_path, self)
        for handle in self._handles:
            self._spawn(handle)

    async def stop(self) -> None:
        """Order every worker to quit, kill those that do not, and stop serving."""
        self._is_stopping = True
        for respawn in self._respawns:
            respawn.cancel()
        for handle in self._handles:
            if handle.stream is not None:
                handle.stream.send(control_pb2.Order(quit=control_pb2.Quit()))
            elif handle.process is not None:
                handle.process.kill()
        processes = [handle.process for handle in self._handles if handle.process is not None]
        await asyncio.gather(*(process.stop(timeout_s=QUIT_TIMEOUT_S) for process in processes))
        if self._server is not None:
            await self._server.stop(grace=0.5)
        self.socket_path.unlink(missing_ok=True)

    def kill(self) -> None:
        """End every worker at once."""
        self._is_stopping = True
        for handle in self._handles:
            if handle.process is not None:
                handle.process.kill()

    def order(self, device_index: int, kind: OrderKind, of: JobGeneration, order: control_pb2.Order) -> bool:
        """Send an order to a worker and expect its answer. Returns False when the worker is just going."""
        handle = self._handles[device_index]
        if handle.stream is None:
            log.warning("order_not_sent", worker=handle.name, order=kind, job=of.job, generation=of.generation)
            return False
        handle.status = handle.status.ordered(kind, of)
        if kind is OrderKind.START:
            start = order.start
            handle.status = handle.status.starting(
                tuple(start.stage.layers), is_last=start.stage.index + 1 == start.stage.num_stages
            )
        if (timeout_s := ANSWER_TIMEOUT_S.get(kind)) is not None:
            loop = asyncio.get_running_loop()
            handle.deadlines[kind, of] = loop.call_later(timeout_s, self._overdue, handle, kind, of)
        handle.stream.send(order)
        log.info("order_sent", worker=handle.name, order=kind, job=of.job, generation=of.generation)
        return True

    def fail(self, device_index: int, of: JobGeneration, reason: str) -> None:
        """Note that a worker cannot do its part of a generation, for a reason outside of it."""
        handle = self._handles[device_index]
        handle.status = handle.status.failed(Failure(reason), of=of)
        self._listener.worker_changed()

    def forget(self, is_over: Callable[[JobGeneration], bool]) -> None:
        """Drop the failures of generations that are over."""
        for handle in self._handles:
            over = frozenset(of for of in handle.status.failures if is_over(of))
            if over:
                handle.status = handle.status.forgetting(over)

    # --- Attachments: the socket's side -----------------------------------------------------------------------------

    def attach(self, stream: WorkerStream) -> str:
        """A worker said hello: it must be a process of ours that has not attached before."""
        hello = stream.hello
        handle = next((handle for handle in self._handles if handle.process and handle.process.pid == hello.pid), None)
        if handle is None or handle.index != hello.device_index:
            return f"pid {hello.pid} is no worker of this daemon for device {hello.device_index}"
        if handle.stream is not None:
            return f"pid {hello.pid} is attached already"
        handle.stream = stream
        handle.status = WorkerStatus(
            device_index=handle.index,
            incarnation=hello.incarnation,
            pid=hello.pid,
            address=f"{_bracketed(self._settings.host)}:{hello.link_port}",
            failures=handle.status.failures,
        )
        self._heard_of(handle)
        log.info("worker_attached", worker=handle.name, pid=hello.pid, address=handle.status.address)
        self._listener.worker_changed()
        return ""

    def report(self, stream: WorkerStream, report: control_pb2.Report) -> None:
        """Turn a report into the worker's next status, and tell the listener."""
        handle = next((handle for handle in self._handles if handle.stream is stream), None)
        if handle is None:
            return  # from a process that has been given up
        self._heard_of(handle)
        kind = report.WhichOneof("report")
        if kind == "progress":
            self._listener.worker_progressed(report.progress)
        elif kind != "heartbeat":
            self._advance(handle, report)
            self._listener.worker_changed()

    def detach(self, stream: WorkerStream) -> None:
        """A stream ended. A worker without one has no orders and no purpose: its process follows."""
        for handle in self._handles:
            if handle.stream is stream:
                handle.stream = None
                if handle.process is not None and not self._is_stopping:
                    asyncio.get_running_loop().call_later(QUIT_TIMEOUT_S, handle.process.kill)

    def _advance(self, handle: WorkerHandle, report: control_pb2.Report) -> None:
        status = handle.status
        match report.WhichOneof("report"):
            case "prepared":
                of = JobGeneration(report.prepared.job, report.prepared.generation)
                handle.status = status.did_prepare(of)
            case "started":
                of = JobGeneration(report.started.job, report.started.generation)
                handle.status = status.did_start(of)
            case "stop_chosen":
                of = JobGeneration(report.stop_chosen.job, report.stop_chosen.generation)
                handle.status = status.did_choose(Standstill(of, report.stop_chosen.boundary))
            case "at_boundary":
                of = JobGeneration(report.at_boundary.job, report.at_boundary.generation)
                handle.status = status.did_stop(Standstill(of, report.at_boundary.boundary))
            case "wrote":
                of = JobGeneration(report.wrote.job, report.wrote.generation)
                handle.status = status.answered(OrderKind.WRITE, of)
                if refused := self._listener.worker_wrote(report.wrote):
                    handle.status = handle.status.failed(Failure(refused), of=of)
            case "released":
                handle.status = status.released()
            case "refused":
                of = JobGeneration(report.refused.job, report.refused.generation)
                log.warning("order_refused", worker=handle.name, job=of.job, reason=report.refused.reason)
                handle.status = status.failed(_failure(handle, report.refused), of=of)
                if (OrderKind.RELEASE, of) in status.pending:
                    self._condemn(handle, f"it refused to be released: {report.refused.reason}")
            case other:
                log.warning("report_unknown", worker=handle.name, kind=other)
        answered = [entry for entry in handle.deadlines if entry not in handle.status.pending]
        for entry in answered:
            handle.deadlines.pop(entry).cancel()
        log.info("worker_reported", worker=handle.name, report=report.WhichOneof("report"), job=handle.status.job)

    def _overdue(self, handle: WorkerHandle, kind: OrderKind, of: JobGeneration) -> None:
        handle.deadlines.pop((kind, of), None)
        if (kind, of) not in handle.status.pending or handle.process is None:
            return
        reason = f"{handle.name} did not answer the order {kind} within {ANSWER_TIMEOUT_S[kind]:g} s"
        log.error("order_overdue", worker=handle.name, order=kind, job=of.job, generation=of.generation)
        self._condemn(handle, reason)

    def _heard_of(self, handle: WorkerHandle) -> None:
        if handle.silence is not None:
            handle.silence.cancel()
        reason = f"{handle.name} said nothing for {SILENCE_S:g} s"
        handle.silence = asyncio.get_running_loop().call_later(SILENCE_S, self._condemn, handle, reason)

    def _condemn(self, handle: WorkerHandle, reason: str) -> None:
        if handle.process is not None:
            log.error("worker_killed", worker=handle.name, reason=reason)
            handle.verdict = f"{reason}; it was killed\n"
            handle.process.kill()

    # --- Processes --------------------------------------------------------------------------------------------------

    def _spawn(self, handle: WorkerHandle) -> None:
        settings = self._settings
        arguments = [
            "-m",
            "headway.daemon.worker",
            "--socket",
            str(self.socket_path),
            "--node",
            settings.node,
            "--host",
            settings.host,
        ]
        arguments += ["--certificates", str(settings.certificates)]
        arguments += ["--device-index", str(handle.index), "--device", handle.device.kind]
        if settings.history_dir is not None:
            arguments += ["--history-dir", str(settings.history_dir)]
        handle.process = WorkerProcess(
            handle.name.replace(" ", "-").replace(":", "-"),
            arguments,
            environment={},
            output_dir=settings.output_dir,
            on_exit=lambda process: self._exited(handle, process),
        )
        reason = f"{handle.name} did not say hello within {HELLO_TIMEOUT_S:g} s"
        handle.silence = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, self._condemn, handle, reason)
        log.info("worker_started", worker=handle.name, pid=handle.process.pid)

    def _exited(self, handle: WorkerHandle, process: WorkerProcess) -> None:
        for deadline in handle.deadlines.values():
            deadline.cancel()
        handle.deadlines.clear()
        if handle.silence is not None:
            handle.silence.cancel()
        stream, handle.stream, handle.process = handle.stream, None, None
        if stream is not None:
            stream.close()
        if self._is_stopping:
            return
        log.error("worker_exited", worker=handle.name, pid=process.pid, reason=process.exit_reason)
        handle.status = handle.status.died(Failure(self._obituary(handle, process)))
        lived_s = asyncio.get_running_loop().time() - process.started_at
        handle.num_quick_deaths = 0 if lived_s > HEALTHY_AFTER_S else handle.num_quick_deaths + 1
        backoff_s = (
            min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (handle.num_quick_deaths - 1)) if handle.num_quick_deaths else 0
        )
        self._respawn_later(handle, backoff_s)
        self._listener.worker_changed()

    def _obituary(self, handle: WorkerHandle, process: WorkerProcess) -> str:
        """What ended it, and the last lines that it wrote to its job's log."""
        parts = [f"node {self._settings.node}: {handle.verdict}{process.exit_reason}"]
        handle.verdict = ""
        if handle.status.job:
            parts += last_lines(self.log_path(handle.status.job))
        return "\n".join(parts)[-MAX_ERROR_CHARACTERS:]

    def log_path(self, job: str) -> Path:
        """Where the workers of this node write what they say about a job."""
        return self._settings.logs_dir / f"{job}.log"

    def _respawn_later(self, handle: WorkerHandle, delay_s: float) -> None:
        def respawn() -> None:
            self._respawns.discard(timer)
            if not self._is_stopping:
                self._spawn(handle)

        timer = asyncio.get_running_loop().call_later(delay_s, respawn)
        self._respawns.add(timer)


def _failure(handle: WorkerHandle, refused: control_pb2.Refused) -> Failure:
    return Failure(f"{handle.name}: {refused.reason}", refused.batch, refused.fault, refused.hopeless)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
