"""One generation's periodic snapshots: when they are due, their content, and how late they were."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from headway.stages.device.device import HostCopy
from headway.stages.device.run_events import RunEvents
from headway.stages.ids import Boundary, LayerName
from headway.stages.stage.context import StageContext
from headway.stages.state.host_blocks import HostBlocks, HostMemoryError
from headway.stages.state.journal import JOURNAL, Journal
from headway.stages.state.layer_state import LayerState
from headway.stages.state.snapshot_interval import SnapshotInterval
from headway.stages.state.snapshot_writer import Snapshot, SnapshotEnded, SnapshotWriter
from headway.stages.state.state_file import StateHeader, to_host

PATIENCE_S = 60.0
"""Maximum wait of an update for a writer of few bytes; then the snapshot is given up."""
LEAST_BYTES_PER_S = 50e6
"""Lowest rate at which a writer of many bytes is waited for: about half of a hard disk's."""
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
        blocks: HostBlocks | None = None,
    ) -> None:
        """folder: files go to `<folder>/<boundary>/`. live: layers to write at the boundary of the start.

        blocks: host memory to which the device copies the layers; None: they are there, and are read in place.
        """
        self.interval = interval
        self._writer = writer
        self._context = context
        self._folder = folder
        self._live = frozenset(live)
        self._blocks = blocks
        self._events: RunEvents | None = None
        self._on_copied: Callable[[], None] = lambda: None
        self._reading: Boundary | None = None
        """Boundary whose tensors must not change."""
        self._writing: Boundary | None = None
        self._next: tuple[Boundary, Sequence[LayerState], Journal | None] | None = None
        """What to write when the blocks are free: its boundary is being read, too."""
        self._num_bytes = 0
        """Of the snapshot that began last."""
        self._waited_s = 0.0
        self._last_began = self._began = perf_counter()

    @property
    def is_reading(self) -> bool:
        """Return whether tensors of this generation are being read, so that no update may run."""
        return self._reading is not None

    @property
    def patience_s(self) -> float:
        """Return how long an update waits for the writer, below the time after which a neighbour gives up."""
        return min(PATIENCE_S + self._num_bytes / LEAST_BYTES_PER_S, self._context.patience_s / 2)

    def attach(self, events: RunEvents, on_copied: Callable[[], None]) -> None:
        """Connect to a run, before `started`. on_copied: is called when `is_reading` may have changed."""
        self._events, self._on_copied = events, on_copied

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
        self._next = None
        for boundary in sorted({self._reading, self._writing} - {None}):  # type: ignore[type-var]
            self._report_missed(boundary, f"not written within {self.patience_s:.0f} s")  # type: ignore[arg-type]

    def ended(self, item: SnapshotEnded) -> None:
        """Note a finished snapshot of any generation. The interval doubles when this generation's are too late."""
        if item.generation != self._context.generation:
            return
        if item.boundary == self._reading:
            self._reading = None
        if item.boundary == self._writing:
            self._writing = None
            self.interval.ended(waited_s=self._waited_s, since_last_s=self._began - self._last_began)
        if self._next is not None and self._writing is None:
            waiting, self._next, self._reading = self._next, None, None
            self._begin(*waiting)

    def _begin(self, boundary: Boundary, layers: Sequence[LayerState], journal: Journal | None) -> None:
        if self._writing is not None:  # its copy is still being hashed: the next one would overwrite it
            self._reading, self._next = boundary, (boundary, layers, journal)
            return
        self._last_began, self._began = self._began, perf_counter()
        self._waited_s = 0.0
        if not self._writer.is_free:
            self._report_missed(boundary, "the writer has not let go of an earlier snapshot")
            return
        try:
            snapshot = self._snapshot(boundary, {layer.name: layer.tensors() for layer in layers}, journal)
        except HostMemoryError as error:
            self._report_missed(boundary, str(error))
            return
        self._num_bytes = sum(tensor.nbytes for of_layer in snapshot.tensors.values() for tensor in of_layer.values())
        self._reading = self._writing = boundary
        self._writer.begin(snapshot)
        if snapshot.copy is not None:
            self._tell_when_copied(boundary, snapshot.copy)

    def _snapshot(
        self, boundary: Boundary, tensors: dict[LayerName, dict[str, Tensor]], journal: Journal | None
    ) -> Snapshot:
        copy, pieces = None, dict[int, Sequence[Tensor]]()
        if self._blocks is not None:
            copy, pieces, tensors = _copied(self._blocks, tensors)
        if journal is not None:
            tensors[JOURNAL] = journal.tensors(below=boundary)
        context = self._context
        return Snapshot(
            folder=self._folder / str(boundary),
            headers={
                name: StateHeader(
                    job=context.job,
                    layer=name,
                    boundary=boundary,
                    timeline=context.timeline,
                    dtype=context.train.dtype,
                )
                for name in tensors
            },
            tensors=tensors,
            job=context.job,
            generation=context.generation,
            timeline=context.timeline,
            boundary=boundary,
            fetch=lambda tensor: pieces.get(id(tensor)) or to_host(tensor),
            copy=copy,
        )

    def _tell_when_copied(self, boundary: Boundary, copy: HostCopy) -> None:
        def copied(_: tuple[Tensor, ...]) -> None:
            if self._reading == boundary:
                self._reading = None
                self._on_copied()

        assert self._events is not None
        self._events.when_done(copy, copied)

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


def _copied(
    blocks: HostBlocks, tensors: Mapping[LayerName, Mapping[str, Tensor]]
) -> tuple[HostCopy, dict[int, Sequence[Tensor]], dict[LayerName, dict[str, Tensor]]]:
    """Begin to copy. Return the copy, the pieces by the id of a description, and the descriptions of all tensors.

    The descriptions have no content, so that nothing holds the device's tensors after the copy.
    """
    state = blocks.begin_copy([tensor for of_layer in tensors.values() for tensor in of_layer.values()])
    numbered = iter(state.pieces)
    pieces: dict[int, Sequence[Tensor]] = {}
    described: dict[LayerName, dict[str, Tensor]] = {}
    for layer, of_layer in tensors.items():
        described[layer] = {name: torch.empty_like(tensor, device="meta") for name, tensor in of_layer.items()}
        pieces |= {id(tensor): next(numbered) for tensor in described[layer].values()}
    return state.copy, pieces, described
