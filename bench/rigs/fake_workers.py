"""Workers that reach every goal at once and compute nothing, so that a bench runs a thousand agents on one machine.

A fake supervisor has the interface of the product's, as far as an agent and a membership use it.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from headway.daemon.cluster.measurements import (
    DeviceSpeed,
    LayerTime,
)
from headway.daemon.cluster.records import (
    Device,
    Failure,
    WorkerPort,
)
from headway.daemon.worker.goal import (
    Action,
    Actual,
    BatchDone,
    Goal,
    Heartbeat,
    JobGeneration,
    Progress,
    WorkerStatus,
    next_action,
)
from headway.daemon.worker.roster import WorkerSettings
from headway.daemon.worker.supervisor import Listener
from headway.proto.control_pb2 import RecentOperations

BATCH_S = 1.0
"""Time in which a fake worker does one batch."""
NUM_OPERATIONS = 8
"""Operations of a fake worker in one batch."""


class FakeSupervisor:
    """One fake worker for each device of a node."""

    def __init__(
        self,
        devices: tuple[Device, ...],
        settings: WorkerSettings,
        listener: Listener,
        *,
        on_change: Callable[[], None] = lambda: None,
        activities: object = None,  # noqa: ARG002
    ) -> None:
        self._node = settings.node
        self._listener = listener
        self._on_change = on_change
        self.statuses = tuple(WorkerStatus(device_index=device.index) for device in devices)
        self._began: dict[int, tuple[JobGeneration, float, bool]] = {}
        """Device to what it computes, since when, and whether it writes the journal."""
        self.down_devices: tuple[int, ...] = ()
        self.trouble = ""
        self.socket_path = Path(settings.options.socket_path)

    @property
    def worker_ports(self) -> tuple[WorkerPort, ...]:
        """Return where its workers would listen."""
        return tuple(
            WorkerPort(device_index=status.device_index, address=status.address, incarnation=status.incarnation)
            for status in self.statuses
            if status.is_up
        )

    @property
    def heartbeats(self) -> Mapping[int, Heartbeat]:
        """Return a heartbeat of each worker that computes."""
        return {index: self._beat(index) for index in self._began} or {
            status.device_index: Heartbeat(speed=DeviceSpeed(float32=1.0, bfloat16=1.0)) for status in self.statuses
        }

    async def run(self) -> None:
        """Let the workers be there, and the journal's workers report batches, until cancelled."""
        self.statuses = tuple(
            status.attached(f"{self._node}-worker-{status.device_index}", pid=1, address=f"{self._node}:1")
            for status in self.statuses
        )
        self._on_change()
        self._listener.worker_changed()
        while True:
            await asyncio.sleep(BATCH_S)
            for run_key, since, has_journal in list(self._began.values()):
                if has_journal:
                    batch = int((time.monotonic() - since) / BATCH_S)
                    done = BatchDone(batch=batch, loss=2.0, tokens=1000, seconds=BATCH_S)
                    self._listener.worker_progressed(Progress(run_key.job, run_key.generation, done))

    async def stop(self) -> None:
        """Let all workers go."""
        self._began.clear()

    def set_goal(self, device_index: int, goal: Goal) -> bool:
        """Reach it soon."""
        self._set(replace(self.statuses[device_index], goal=goal))
        asyncio.get_running_loop().call_soon(self._act, device_index)
        return True

    def _act(self, device_index: int) -> None:
        status = self.statuses[device_index]
        goal, actual = status.goal, status.actual
        while action := next_action(goal, actual):
            actual = self._after(device_index, action, goal, actual)
        self._set(status.told(actual))
        self._listener.worker_changed()

    def _after(self, device_index: int, action: Action, goal: Goal, actual: Actual) -> Actual:
        """Return what a worker says after an action."""
        match action:
            case Action.PREPARE if goal.prepare is not None:
                return msgspec.structs.replace(actual, job=goal.job, prepared=goal.prepare.plan.generation)
            case Action.START if goal.start is not None:
                plan, position = goal.start.plan, goal.start.position
                run_key, has_journal = JobGeneration(goal.job, plan.generation), plan.has_journal(position)
                self._began[device_index] = run_key, time.monotonic(), has_journal
                return Actual(
                    job=goal.job,
                    prepared=actual.prepared,
                    generation=plan.generation,
                    layers=goal.start.layers,
                    has_journal=has_journal,
                )
            case Action.CHOOSE_STOP:
                chosen = self._beat(device_index).batch + 2
                return msgspec.structs.replace(actual, chosen=chosen, stop_at=chosen, boundary=chosen)
            case Action.STOP_AT:
                self._began.pop(device_index, None)
                return msgspec.structs.replace(actual, stop_at=goal.stop_at, boundary=goal.stop_at)
            case Action.RELEASE:
                self._began.pop(device_index, None)
                return Actual()
            case _:
                return msgspec.structs.replace(
                    actual, written=goal.write, spacing=goal.spacing, journal_from=goal.journal_from
                )

    def fail(self, device_index: int, run_key: JobGeneration, reason: str, *, is_hopeless: bool = False) -> None:
        """Note that a worker cannot do its part of a generation."""
        self._set(self.statuses[device_index].failed(Failure(reason, is_hopeless=is_hopeless), run_key=run_key))
        self._listener.worker_changed()

    def forget(self, is_over: Callable[[JobGeneration], bool]) -> None:
        """Drop the failures of generations that are over."""
        for status in self.statuses:
            over = frozenset(run_key for run_key in status.failures if is_over(run_key))
            if over:
                self._set(status.forgetting(over))

    def log_path(self, job: str) -> Path:
        """Return a log that nobody writes."""
        return Path(f"/dev/null/{job}")

    def move(self, host: str) -> None:
        """Take another host, where nothing listens either."""

    def announce(self, shared_port: str) -> None:
        """Take another port, where nothing listens either."""

    async def recent_operations(self, device_index: int) -> RecentOperations:
        """Return no operations."""
        return RecentOperations(worker=device_index)

    def _set(self, status: WorkerStatus) -> None:
        self.statuses = tuple(status if old.device_index == status.device_index else old for old in self.statuses)

    def _beat(self, device_index: int) -> Heartbeat:
        """Return what a worker of even pace would tell."""
        run_key, since, _ = self._began.get(device_index, (JobGeneration("", 0), time.monotonic(), False))
        spent_s = time.monotonic() - since
        times = LayerTime(forward_s=0.001, backward_s=0.002, update_s=0.001)
        return Heartbeat(
            job=run_key.job,
            generation=run_key.generation,
            operations=int(NUM_OPERATIONS * spent_s / BATCH_S),
            runnable=True,
            batch=int(spent_s / BATCH_S),
            typical_s=0.01,
            seconds={"computing": 0.8 * spent_s, "waiting": 0.2 * spent_s},
            layers={"block": times},
            num_samples=64,
            speed=DeviceSpeed(float32=1.0, bfloat16=1.0),
        )
