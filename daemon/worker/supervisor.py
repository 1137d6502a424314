"""Keeps one worker process per device up, tells it its goal, takes what it says of itself, and ends it."""

import asyncio
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

import msgspec
import structlog

from headway.daemon.base.activities import Activities
from headway.daemon.base.errors import in_one_line
from headway.daemon.cluster.records import (
    Device,
    Failure,
    WorkerPort,
)
from headway.daemon.worker.goal import (
    Actual,
    Answer,
    FromWorker,
    Goal,
    Heartbeat,
    JobGeneration,
    Progress,
    Question,
    SnapshotMissed,
    WorkerStatus,
    Wrote,
    next_action,
)
from headway.daemon.worker.liveness import TICK_S, StallWatch
from headway.daemon.worker.roster import QUIT_TIMEOUT_S, Roster, WorkerHandle, WorkerSettings
from headway.daemon.worker.socket import WorkersSocket, WorkerStream
from headway.proto.control_pb2 import RecentOperations
from headway.stages.errors import UnavailableError
from headway.stages.sockets.shared_port import shared_address

log = structlog.get_logger()

ANSWER_TIMEOUT_S: Final = 5.0
"""Time for the answer to a question."""
DYING_S: Final = 5.0
"""Time for a worker to exit after it told a fatal error."""


class Listener(Protocol):
    """The listener of the supervisor: the agent."""

    def worker_changed(self) -> None:
        """Note that a worker's status has changed."""
        ...

    async def worker_wrote(self, wrote: Wrote) -> str:
        """Note layer files that a worker wrote. Returns why they cannot be kept, or an empty text."""
        ...

    def worker_progressed(self, progress: Progress) -> None:
        """Note a batch that the last stage's worker finished."""
        ...

    def worker_refused_file(self, path: str) -> None:
        """Note a damaged file that a worker was to load; it starts once there is another."""
        ...

    def worker_missed_snapshot(self, missed: SnapshotMissed) -> None:
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
        self._roster = Roster(devices, settings, on_change=self._changed)
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        """Questions under way."""
        self._num_asked = 0
        self._taking: set[asyncio.Task[None]] = set()
        """Files of workers that are being taken in."""
        self._socket = WorkersSocket(self.socket_path, self, on_loss=self._cut_off)
        self._watching: tuple[asyncio.Task[None], ...] = ()

    @property
    def socket_path(self) -> Path:
        """Return the socket where workers attach."""
        return Path(self._settings.options.socket_path)

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
    def heartbeats(self) -> Mapping[int, Heartbeat]:
        """Return the newest heartbeat of each running worker, by device index."""
        return {handle.index: handle.status.actual.heartbeat for handle in self._roster.workers if handle.status.is_up}

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
        """Let every worker end, kill those that do not, and stop serving."""
        for watching in self._watching:
            watching.cancel()
        await self._roster.end_all()
        await self._socket.stop()

    def move(self, host: str) -> None:
        """Let every worker listen at another host, because the machine has lost the address of the present ones."""
        self._settings = self._settings.at(host)
        self._roster.listen_at(host)
        for handle in list(self._roster.everybody):
            reason = f"listened at an address that this machine has lost; the next one is at {host}"
            self._roster.condemn(handle, reason, was_moved=True)

    def announce(self, shared_port: str) -> None:
        """Let others dial the workers behind another port from now on, without touching the processes."""
        self._settings = self._settings.behind(shared_port)
        for handle in self._roster.everybody:
            if handle.status.is_up:
                address = shared_address(shared_port, handle.status.incarnation)
                handle.status = replace(handle.status, address=address)
        self._changed()

    def set_goal(self, device_index: int, goal: Goal) -> bool:
        """Tell a worker its goal. Returns False when the worker is about to exit."""
        handle = self._roster.workers[device_index]
        if handle.stream is None:
            return False
        handle.status = replace(handle.status, goal=goal)
        handle.stream.send(goal)
        action = next_action(goal, handle.status.actual)
        wanted = [part.plan.generation for part in (goal.start, goal.prepare) if part is not None]
        generation = max(wanted, default=0)
        kind = action.name.lower() if action is not None else ""
        log.info("goal_set", worker=handle.name, job=goal.job, generation=generation, action=kind)
        return True

    async def recent_operations(self, device_index: int) -> RecentOperations:
        """Return the last operations of a device's worker. Raises UnavailableError, naming it."""
        handle = self._roster.workers[device_index]
        if handle.stream is None:
            raise UnavailableError(handle.name, "is not up")
        self._num_asked += 1
        number, answer = self._num_asked, asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            handle.stream.send(Question(number))
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return RecentOperations.FromString(await answer)
        except TimeoutError as error:
            raise UnavailableError(handle.name, f"did not answer within {ANSWER_TIMEOUT_S:g} s") from error
        finally:
            del self._asked[number]

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

    def report(self, stream: WorkerStream, message: FromWorker) -> None:
        """Take what a worker says, and tell the listener."""
        handle = self._roster.of_stream(stream)
        if handle is None:
            return  # the process has been given up
        handle.liveness.heard(_now())
        try:
            self._take(handle, message)
        except Exception as error:  # an error costs the worker's generation, not its stream
            self._not_taken(handle, message, error)

    def detach(self, stream: WorkerStream) -> None:
        """Note the end of a stream. A worker without stream gets no goals, so its process is ended."""
        handle = self._roster.of_stream(stream)
        if handle is not None:
            handle.stream = None
            self._roster.condemn_later(QUIT_TIMEOUT_S, handle, "left the daemon's socket, and did not end")

    # --- What workers say ---------------------------------------------------------------------------------------------

    def _take(self, handle: WorkerHandle, message: FromWorker) -> None:
        match message:
            case Actual():
                self._take_actual(handle, message)
            case Progress():
                self._listener.worker_progressed(message)
            case SnapshotMissed():
                self._listener.worker_missed_snapshot(message)
            case Wrote():
                # a task, because the disk may hang
                taking = asyncio.get_running_loop().create_task(self._wrote(handle, message), name="files of a worker")
                self._taking.add(taking)
                taking.add_done_callback(self._taking.discard)
            case Answer():
                answer = self._asked.get(message.number)  # one that nobody waits for is dropped
                if answer is not None and not answer.done():
                    answer.set_result(message.operations)

    def _take_actual(self, handle: WorkerHandle, actual: Actual) -> None:
        before = handle.status.actual
        named = {
            number: replace(failure, text=f"{handle.name}: {failure.text}")
            for number, failure in actual.failures.items()
        }
        actual = msgspec.structs.replace(actual, failures=named)
        handle.status = handle.status.told(actual)
        handle.liveness.on_heartbeat(actual.heartbeat, _now())
        if msgspec.structs.replace(before, heartbeat=actual.heartbeat) == actual:
            return
        if actual.num_damaged > before.num_damaged:
            self._listener.worker_refused_file(actual.damaged_path)
        if actual.dies_of is not None and before.dies_of is None:
            # Its process is exiting with this error: the exit is the failure.
            self._roster.condemn_later(DYING_S, handle, f"did not end within {DYING_S:g} s of its own error")
        if actual.generation > before.generation:
            self._roster.want_spares()
        log.info(
            "worker_changed",
            worker=handle.name,
            job=actual.job,
            prepared=actual.prepared,
            generation=actual.generation,
            boundary=actual.boundary,
            failed=sorted(actual.failures),
        )
        self._listener.worker_changed()

    async def _wrote(self, handle: WorkerHandle, wrote: Wrote) -> None:
        """Take in files."""
        incarnation, run_key = handle.status.incarnation, JobGeneration(wrote.job, wrote.generation)
        try:
            refused = await self._listener.worker_wrote(wrote)
        except Exception as error:
            self._not_taken(handle, wrote, error)
            return
        if handle.status.incarnation != incarnation:
            return  # the process has ended meanwhile
        if refused and wrote.is_snapshot:
            missed = SnapshotMissed(job=wrote.job, generation=wrote.generation, boundary=wrote.boundary, reason=refused)
            self._listener.worker_missed_snapshot(missed)
        elif refused:
            handle.status = handle.status.failed(Failure(refused), run_key=run_key)
        self._listener.worker_changed()

    def _not_taken(self, handle: WorkerHandle, message: FromWorker, error: Exception) -> None:
        kind, actual = type(message).__name__, handle.status.actual
        log.error("message_not_taken", worker=handle.name, kind=kind, job=actual.job, exc_info=error)
        generation = actual.generation or actual.prepared
        if generation:
            reason = f"node {self._settings.node}: the daemon could not take {kind!r}: {in_one_line(error)}"
            run_key = JobGeneration(actual.job, generation)
            handle.status = handle.status.failed(Failure(reason), run_key=run_key)
            self._listener.worker_changed()

    # --- Watching over them -----------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Kill workers that are dead although their process exists. Messages count only for the time when it
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
                    self._roster.condemn(handle, complaint)

    def _cut_off(self) -> None:
        """End all workers: the sockets at which links find them lay beside the workers' socket, and are gone too."""
        for handle in list(self._roster.everybody):
            self._roster.condemn(handle, "was cut off: its node's folder of sockets was deleted", was_moved=True)

    def _changed(self) -> None:
        self._on_change()
        self._listener.worker_changed()


def _now() -> float:
    return asyncio.get_running_loop().time()
