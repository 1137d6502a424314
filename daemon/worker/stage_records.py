"""What a worker leaves for those who look on: its history's lines, and the places where a test may let it fail."""

from pathlib import Path
from types import MappingProxyType

import structlog

from headway.daemon.fault_points import fault_point
from headway.proto.control_pb2 import LayerSource, Start
from headway.stages.history import HistoryFile
from headway.stages.ids import LayerName
from headway.stages.schedule import Op, Update
from headway.stages.snapshot_writer import Snapshot, SnapshotEnded

log = structlog.get_logger()


class StageRecords:
    """One per process. Facts about the Start in force are added to everything."""

    def __init__(self, history_dir: Path | None, *, node: str, incarnation: str) -> None:
        """history_dir: None: no history is written."""
        self.history: HistoryFile | None = None
        self._history_dir = history_dir
        self._node = node
        self._incarnation = incarnation
        self._job = ""
        self._facts = MappingProxyType[str, object]({})
        self._source_timeline = 0
        self._boundary = 0

    def begin(self, start: Start) -> None:
        """What follows is about this start. Raises OSError when the history has no place to go."""
        if start.job_name != self._job:
            self.release()
        if self.history is None and self._history_dir is not None:
            name = f"{start.job_name}-{self._incarnation[:12]}"
            self.history = HistoryFile(self._history_dir, name, node=self._node, incarnation=self._incarnation)
        if self.history is not None:
            self.history.begin(
                job=start.job_name,
                timeline=start.timeline,
                generation=start.generation,
                stage=start.stage.index,
                worker=start.stage.worker,
            )
        self._job = start.job_name
        self._boundary, self._source_timeline = start.boundary, start.source_timeline
        self._facts = MappingProxyType(
            {
                "stage": start.stage.index,
                "worker": start.stage.worker,
                "generation": start.generation,
                "timeline": start.timeline,
                "node": self._node,
                "job": start.job_name,
            }
        )

    def release(self) -> None:
        """The job is over here."""
        if self.history is not None:
            self.history.close()
        self.history, self._job = None, ""

    def event(self, name: str, **fields: object) -> None:
        """A line of the history."""
        if self.history is not None:
            self.history.event(name, **fields)

    def loading(self, source: LayerSource) -> None:
        """A layer is about to be taken from its source."""
        kind = source.WhichOneof("source") or ""
        fault_point("load", layer=source.layer, source=kind, path=source.path, boundary=self._boundary, **self._facts)
        self.event(
            "loaded",
            layer=source.layer,
            boundary=self._boundary,
            source=kind,
            source_timeline=self._source_timeline if kind == "path" else self._facts["timeline"],
        )

    def operated(self, op: Op) -> None:
        """An operation is done; its frames are on their way."""
        microbatch = None if isinstance(op, Update) else op.microbatch
        kind = type(op).__name__.lower()
        fault_point("operation", op=kind, batch=op.batch, microbatch=microbatch, **self._facts)

    def file_written(self, snapshot: Snapshot, layer: LayerName) -> None:
        """In the snapshot writer's thread: one file is in place."""
        fault_point("snapshot.file_written", boundary=snapshot.boundary, layer=layer, **self._facts)

    def snapshot_done(self, snapshot: Snapshot) -> None:
        """In the snapshot writer's thread: all files are in place, and nobody knows of them yet."""
        fault_point("snapshot.done", boundary=snapshot.boundary, **self._facts)

    def snapshot_written(self, item: SnapshotEnded) -> None:
        """All files of a boundary are in place."""
        log.info("snapshot_written", job=item.job, boundary=item.boundary, layers=list(item.files))
        self.event(
            "snapshot_written",
            boundary=item.boundary,
            layers=list(item.files),
            checksum=[file.checksum for file in item.files.values()],
        )
