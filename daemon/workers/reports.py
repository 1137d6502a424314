"""Takes the reports of workers: each makes the worker's next status, and the agent hears of it."""

import asyncio
from typing import Protocol

import structlog

from headway.daemon.errors import in_one_line
from headway.daemon.records.shortages import MemoryShortage
from headway.daemon.workers.endings import Endings
from headway.daemon.workers.launched_work import LaunchedWork
from headway.daemon.workers.liveness import Beat
from headway.daemon.workers.recent_operations import RecentOperationsDesk
from headway.daemon.workers.roster import Roster, WorkerHandle
from headway.daemon.workers.status import Failure, JobGeneration, OrderKind, Standstill
from headway.proto import control_pb2

log = structlog.get_logger()

MAX_DAMAGED = 8
"""Files that a worker may refuse before its generation is given up."""
DYING_S = 5.0
"""Grace period for a worker to exit after it reported a fatal error."""


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


class Reports:
    """The reports of a node's workers. Lives in the event loop of the main thread."""

    def __init__(
        self, roster: Roster, listener: Listener, recent: RecentOperationsDesk, endings: Endings, *, node: str
    ) -> None:
        self._roster = roster
        self._listener = listener
        self._recent = recent
        self._endings = endings
        self._node = node
        self._taking: set[asyncio.Task[None]] = set()
        """Files of workers that are being taken in."""

    def take(self, handle: WorkerHandle, report: control_pb2.Report, now: float) -> None:
        """Turn a report into the worker's next status, and tell the listener."""
        handle.liveness.heard(now)
        try:
            self._take(handle, report, now)
        except Exception as error:  # an error costs the report's generation, not the worker's stream
            self._not_taken(handle, report, error)

    def _not_taken(self, handle: WorkerHandle, report: control_pb2.Report, error: Exception) -> None:
        run_key = handle.status.started or handle.status.prepared
        kind = report.WhichOneof("report")
        log.error("report_not_taken", worker=handle.name, kind=kind, job=handle.status.job, exc_info=error)
        if run_key is not None:
            reason = f"node {self._node}: the daemon could not take {kind!r}: {in_one_line(error)}"
            handle.status = handle.status.failed(Failure(reason), run_key=run_key)
            self._listener.worker_changed()

    def _take(self, handle: WorkerHandle, report: control_pb2.Report, now: float) -> None:
        match report.WhichOneof("report"):
            case "progress":
                self._listener.worker_progressed(report.progress)
            case "heartbeat":
                handle.heartbeat = report.heartbeat
                handle.liveness.on_heartbeat(_beat(report.heartbeat, handle.launched), now)
            case "snapshot_missed":
                self._listener.worker_missed_snapshot(report.snapshot_missed)
            case "recent_operations":
                self._recent.answered(report.recent_operations)
            case _:
                self._advance(handle, report)
                self._listener.worker_changed()

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
            self._endings.condemn_later(DYING_S, handle, f"did not end within {DYING_S:g} s of its own error")
            return
        is_unanswered_release = handle.status.awaits(OrderKind.RELEASE, run_key)
        failure = Failure(
            f"{handle.name}: {refused.reason}",
            refused.batch or handle.last_batch(run_key),
            refused.fault,
            refused.hopeless,
            lost_peer=refused.lost_peer - 1,
            was_unreached=refused.unreached,
            shortage=_shortage(refused.shortage) if refused.HasField("shortage") else None,
        )
        handle.status = handle.status.failed(failure, run_key=run_key)
        if is_unanswered_release:
            self._endings.condemn(handle, f"refused to be released: {refused.reason}")


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


def _shortage(told: control_pb2.OutOfMemory) -> MemoryShortage:
    return MemoryShortage(
        wanted_bytes=told.wanted_bytes, allocated_bytes=told.allocated_bytes, allowed_bytes=told.allowed_bytes
    )
