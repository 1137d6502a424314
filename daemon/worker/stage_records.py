"""A worker's traces for observers: goodput, the last operations, its history, its fault points."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from types import MappingProxyType
from typing import Any

import structlog
from torch import Tensor, nn

from headway.daemon.base.fault_points import LAYER_PLACE, PACE, fault_point, is_armed, register_action
from headway.daemon.worker.goal import Source, SourceKind, Start
from headway.proto.control_pb2 import RecentOperations
from headway.stages.data.microbatch import Microbatch
from headway.stages.ids import LayerName
from headway.stages.schedule.operations import BatchOp, Op, Update
from headway.stages.stage.graph import StageGraph
from headway.stages.state.journal import JournalRow
from headway.stages.state.snapshot_writer import Snapshot, SnapshotEnded
from headway.stages.telemetry.goodput import Goodput, RecentOps
from headway.stages.telemetry.history import HistoryFile

log = structlog.get_logger()
MAX_LOG_BYTES = 16 << 20
_STANDARD_FDS = (1, 2)


class RunObserver:
    """A `StageObserver` of one generation. Other threads may read `running` and `recent`."""

    def __init__(
        self,
        goodput: Goodput,
        recent: RecentOps,
        *,
        history: HistoryFile | None,
        on_operation: Callable[[Op], None] | None,
        on_batch: Callable[[JournalRow], None],
    ) -> None:
        """on_operation: is called after each operation, for tests; None: no test observes."""
        self.recent = recent
        self.running: type[Op] | None = None
        """Kind of the operation that runs now."""
        self._goodput = goodput
        self._history = history
        self._on_operation = on_operation
        self._on_batch = on_batch

    @property
    def expected_s(self) -> float:
        """Return the expected seconds of the running operation; between operations, of an operation of any kind."""
        return self.recent.typical_s(self.running)

    def waits(self, what: str, now: float) -> None:
        """See `StageObserver`."""
        self._goodput.waits(what, now)

    def begins(self, op: Op, now: float) -> None:
        """See `StageObserver`."""
        self.running = type(op)
        self._goodput.operates(op.batch, now)

    def ended(self, op: Op, *, version: int, num_versions_live: int, started: float, ended: float) -> None:
        """See `StageObserver`."""
        self.running = None
        self.recent.record(op, version, started, ended)
        if type(op) is Update:
            self._goodput.updated(op.batch)
        if self._history is not None:
            self._history.record(op, version=version, num_versions_live=num_versions_live, started=started, ended=ended)
        if self._on_operation is not None:
            self._on_operation(op)

    def batch_done(self, row: JournalRow) -> None:
        """See `StageObserver`."""
        self._on_batch(row)


@dataclass(frozen=True, slots=True)
class _Recent:
    """The last operations since a start."""

    job: str = ""
    generation: int = 0
    worker: int = 0
    ops: RecentOps = field(default_factory=lambda: RecentOps(num_kept=0))


class StageRecords:
    """The records of one process. Each record carries the facts of the current start."""

    def __init__(self, history_dir: Path | None, *, node: str, incarnation: str) -> None:
        """history_dir: None: no history is written."""
        self.history: HistoryFile | None = None
        self._recent = _Recent()
        self._history_dir = history_dir
        self._node = node
        self._incarnation = incarnation
        self._job = ""
        self._facts = MappingProxyType[str, object]({})
        self._source_timeline = 0
        self._boundary = 0

    def begin(self, job: str, start: Start) -> None:
        """Begin the records of a start. Raises OSError when the history cannot be written."""
        plan, worker = start.plan, start.position
        stage = plan.stage_index(worker)
        if job != self._job:
            self.release()
        if self.history is None and self._history_dir is not None:
            name = f"{job}-{self._incarnation[:12]}"
            self.history = HistoryFile(self._history_dir, name, node=self._node, incarnation=self._incarnation)
        if self.history is not None:
            self.history.begin(job=job, timeline=plan.timeline, generation=plan.generation, stage=stage, worker=worker)
        self._recent = _Recent(job, plan.generation, worker, RecentOps())
        self._job = job
        self._boundary = plan.boundary
        self._source_timeline = 0 if plan.source == "initial" else plan.source_timeline
        self._facts = MappingProxyType(
            {
                "stage": stage,
                "worker": worker,
                "generation": plan.generation,
                "timeline": plan.timeline,
                "node": self._node,
                "job": job,
            }
        )

    def release(self) -> None:
        """Record that the job has ended on this worker."""
        if self.history is not None:
            self.history.close()
        self.history, self._job = None, ""
        self._recent = _Recent()

    @property
    def typical_s(self) -> float:
        """Median seconds of the last operations since the current start. Any thread may call it."""
        return self._recent.ops.typical_s()

    def observer(self, goodput: Goodput, on_batch: Callable[[JournalRow], None]) -> RunObserver:
        """Return the observer of the current start's run."""
        on_operation = self._operated if is_armed() else None
        return RunObserver(
            goodput, self._recent.ops, history=self.history, on_operation=on_operation, on_batch=on_batch
        )

    def recent(self) -> RecentOperations:
        """Return the last operations. Any thread may call it."""
        recent = self._recent
        done = recent.ops.newest
        return RecentOperations(
            job=recent.job,
            generation=recent.generation,
            worker=recent.worker,
            kinds="".join(type(op).__name__[0] for op, _, _, _ in done).encode(),
            batches=[op.batch for op, _, _, _ in done],
            microbatches=[-1 if isinstance(op, BatchOp) else op.microbatch for op, _, _, _ in done],
            versions=[version for _, version, _, _ in done],
            started_s=[started for _, _, started, _ in done],
            ended_s=[ended for _, _, _, ended in done],
        )

    def event(self, name: str, **fields: object) -> None:
        """Write a line of the history."""
        if self.history is not None:
            self.history.event(name, **fields)

    def loading(self, source: Source) -> None:
        """Record that a layer is about to be loaded from its source."""
        kind = str(source.kind)
        fault_point("load", layer=source.layer, source=kind, path=source.path, boundary=self._boundary, **self._facts)
        is_file = source.kind is SourceKind.FILE
        timeline = self._source_timeline if is_file else self._facts["timeline"]
        self.event("loaded", layer=source.layer, boundary=self._boundary, source=kind, source_timeline=timeline)

    def layer_paced(self, op: str, layer: str) -> None:
        """Reach the fault point after a layer's forward or before its backward."""
        fault_point(LAYER_PLACE, op=op, layer=layer, kind=layer.partition(".")[0], **self._facts)

    def file_written(self, snapshot: Snapshot, layer: LayerName) -> None:
        """Record one file in place; in the snapshot writer's thread."""
        fault_point("snapshot.file_written", boundary=snapshot.boundary, layer=layer, **self._facts)

    def snapshot_done(self, snapshot: Snapshot) -> None:
        """Record that all files are in place, before this is reported; in the snapshot writer's thread."""
        fault_point("snapshot.done", boundary=snapshot.boundary, **self._facts)

    def snapshot_written(self, item: SnapshotEnded) -> None:
        """Record that all files of a boundary are in place."""
        log.info("snapshot_written", job=item.job, boundary=item.boundary, layers=list(item.files))
        self.event(
            "snapshot_written",
            boundary=item.boundary,
            layers=list(item.files),
            checksum=[file.checksum for file in item.files.values()],
        )

    def _operated(self, op: Op) -> None:
        """Record an operation that is done; its frames are on their way."""
        microbatch = None if isinstance(op, BatchOp) else op.microbatch
        kind = type(op).__name__.lower()
        fault_point("operation", op=kind, batch=op.batch, microbatch=microbatch, **self._facts)


class PacedGraph(StageGraph):
    """Computes the same bits as a StageGraph.

    The minimum time starts when the operation is called, and each layer adds its seconds. So other processes of this
    machine delay an operation only if they cost it more time than it would rest.

    """

    def __init__(self, *arguments: Any, on_layer: Callable[[str, str], None], **more: Any) -> None:
        """on_layer: receives `forward` or `backward` and the layer's name. The other arguments are StageGraph's."""
        super().__init__(*arguments, **more)
        self._due = 0.0
        register_action(PACE, self._rest)
        for modules in self._modules:
            for name, module in zip(self._names, modules, strict=True):
                module.register_forward_hook(partial(_computed, on_layer, name))

    def forward(self, key: tuple[int, int], rows: Microbatch, *, version: int) -> Tensor:
        """Compute the stage's forward, not faster than its layers' minimum times."""
        self._due = perf_counter()
        return super().forward(key, rows, version=version)

    def backward(self, key: tuple[int, int], gradient: Tensor | None) -> tuple[list[Tensor], Tensor | None]:
        """Compute the stage's backward, not faster than its layers' minimum times."""
        self._due = perf_counter()
        return super().backward(key, gradient)

    def _rest(self, seconds: float) -> None:
        self._due += seconds
        if (left := self._due - perf_counter()) > 0:
            sleep(left)


def _computed(
    on_layer: Callable[[str, str], None], layer: str, _module: nn.Module, _inputs: object, output: Tensor
) -> Tensor:
    """A forward hook. The view runs it after the hooks on the layer's output, because the layer above ends first."""
    on_layer("forward", layer)
    if output.requires_grad:
        output.register_hook(lambda _gradient: on_layer("backward", layer))  # type: ignore[no-untyped-call]
    return output.view_as(output)


class WorkerOutput:
    """The process's standard descriptors. One per process; `rotate` may be called from another thread."""

    def __init__(self) -> None:
        self._originals = tuple(os.dup(fd) for fd in _STANDARD_FDS)
        self._path: Path | None = None

    def redirect(self, path: Path) -> None:
        """Append to this file from now on. Raises OSError when it cannot be opened."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._point_at(path)
        self._path = path
        self.rotate()

    def restore(self) -> None:
        """Print to the process's first targets again."""
        self._path = None
        sys.stdout.flush()
        sys.stderr.flush()
        for original, fd in zip(self._originals, _STANDARD_FDS, strict=True):
            os.dup2(original, fd)

    def rotate(self) -> None:
        """Start a new file if this one is full, or if another worker has renamed it."""
        path = self._path
        if path is None:
            return
        ours = os.fstat(_STANDARD_FDS[0])
        try:
            is_current = path.stat().st_ino == ours.st_ino
        except FileNotFoundError:
            is_current = False
        if is_current and ours.st_size < MAX_LOG_BYTES:
            return
        if is_current:
            path.replace(path.with_name(path.name + ".1"))
        self._point_at(path)

    def _point_at(self, path: Path) -> None:
        opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        sys.stdout.flush()
        sys.stderr.flush()
        for fd in _STANDARD_FDS:
            os.dup2(opened, fd)
        os.close(opened)
