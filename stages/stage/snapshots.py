"""One generation's periodic snapshots: when they are due, their content, and how late they were."""

from collections.abc import Collection, Sequence
from pathlib import Path
from time import perf_counter

from headway.stages.ids import Boundary, LayerName
from headway.stages.stage.context import StageContext
from headway.stages.stage.snapshot_interval import SnapshotInterval
from headway.stages.state.journal import JOURNAL, Journal
from headway.stages.state.layer_state import LayerState
from headway.stages.state.snapshot_writer import SideStream, Snapshot, SnapshotEnded, SnapshotWriter
from headway.stages.state.state_file import StateHeader, to_host

PATIENCE_S = 60.0
"""Maximum wait of an update for a writer; then the snapshot is given up."""
LETTING_GO_S = 10.0
"""Time for a cancelled writer to release the tensors."""


class Snapshots:
    """The snapshots of one executor, in its thread; it holds its updates while `is_reading`."""

    def __init__(
        self,
        writer: SnapshotWriter,
        interval: SnapshotInterval,
        context: StageContext,
        *,
        folder: Path,
        live: Collection[LayerName] = (),
    ) -> None:
        """folder: files go to `<folder>/<boundary>/`. live: layers to write at the boundary of the start."""
        self.interval = interval
        self._writer = writer
        self._context = context
        self._folder = folder
        self._live = frozenset(live)
        self._reading: Boundary | None = None
        self._waited_s = 0.0
        self._last_began = self._began = perf_counter()

    @property
    def is_reading(self) -> bool:
        """Return whether a snapshot of this generation is being written, so that no update may run."""
        return self._reading is not None

    def started(self, layers: Sequence[LayerState], journal: Journal | None) -> None:
        """The run begins: what stayed live and was not written at the stop is written now."""
        if self._live:
            chosen = [layer for layer in layers if layer.name in self._live]
            self._begin(self._context.boundary, chosen, journal if JOURNAL in self._live else None)

    def reached(self, boundary: Boundary, layers: Sequence[LayerState], journal: Journal | None) -> None:
        """update(boundary-1) is applied, and the run goes on. journal: on the last stage; it may know later batches."""
        if self.interval.is_due(boundary):
            self._begin(boundary, layers, journal)

    def waited(self, seconds: float) -> None:
        """Note that an update could have run without the writer."""
        self._waited_s += seconds

    def give_up(self) -> None:
        """End a snapshot that takes too long: it leaves no files, and its end is reported."""
        assert self._reading is not None, "no snapshot is being written"
        self._writer.cancel(timeout_s=0.0)
        self._report_missed(self._reading, f"not written within {PATIENCE_S:g} s")

    def ended(self, item: SnapshotEnded) -> None:
        """Note a finished snapshot of any generation. The interval doubles when this generation's are too late."""
        if (item.generation, item.boundary) == (self._context.generation, self._reading):
            self._reading = None
            self.interval.ended(waited_s=self._waited_s, since_last_s=self._began - self._last_began)

    def _begin(self, boundary: Boundary, layers: Sequence[LayerState], journal: Journal | None) -> None:
        context = self._context
        tensors = {layer.name: layer.tensors() for layer in layers}
        if journal is not None:
            tensors[JOURNAL] = journal.tensors(below=boundary)
        headers = {
            name: StateHeader(
                job=context.job,
                layer=name,
                boundary=boundary,
                timeline=context.timeline,
                dtype=context.train.dtype,
            )
            for name in tensors
        }
        snapshot = Snapshot(
            folder=self._folder / str(boundary),
            headers=headers,
            tensors=tensors,
            job=context.job,
            generation=context.generation,
            timeline=context.timeline,
            boundary=boundary,
            fetch=SideStream(context.device) if context.device.type == "cuda" else to_host,
        )
        self._last_began, self._began = self._began, perf_counter()
        self._waited_s = 0.0
        if self._writer.begin(snapshot):
            self._reading = boundary
        else:
            self._report_missed(boundary, "the writer has not let go of an earlier snapshot")

    def _report_missed(self, boundary: Boundary, reason: str) -> None:
        context = self._context
        missed = SnapshotEnded(
            job=context.job,
            generation=context.generation,
            timeline=context.timeline,
            boundary=boundary,
            trouble=f"{self._folder / str(boundary)}: {reason}",
        )
        self._writer.report(missed)
