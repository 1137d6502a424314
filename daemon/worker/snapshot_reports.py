"""A worker's snapshots: opens them with each run, spaces them as wanted, and tells the daemon of each result."""

from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from headway.daemon.costs.layer_costs import layer_costs
from headway.daemon.jobs.job import JobSpec
from headway.daemon.worker.neighbours import WorkerInbox
from headway.daemon.worker.stage_records import StageRecords
from headway.daemon.workers.goal import FromWorker, SnapshotMissed, Spacing, Start, WrittenFile, Wrote
from headway.stages.device.device import StageDevice
from headway.stages.ids import LayerName
from headway.stages.stage.context import StageContext
from headway.stages.stage.snapshots import LETTING_GO_S, Snapshots
from headway.stages.state.host_blocks import HostBlocks
from headway.stages.state.snapshot_interval import SnapshotInterval
from headway.stages.state.snapshot_writer import SnapshotEnded, SnapshotWriter

log = structlog.get_logger()


class SnapshotReports:
    """The snapshots of one worker process. Only its main thread may use it."""

    def __init__(self, inbox: WorkerInbox, records: StageRecords, tell: Callable[[FromWorker], None]) -> None:
        self._writer = SnapshotWriter(inbox, on_file=records.file_written, on_done=records.snapshot_done)
        self._records = records
        self._tell = tell
        self._snapshots: Snapshots | None = None
        self.spacing = Spacing()
        """The interval, as the daemon knows it."""
        self._blocks: HostBlocks | None = None

    def open(
        self, start: Start, spec: JobSpec, context: StageContext, live: Sequence[LayerName], device: StageDevice
    ) -> Snapshots | None:
        """Open the snapshots of the run that begins. live: layers for which this boundary needs no file."""
        if not start.takes_snapshots or not start.state_dir:
            return None
        interval = SnapshotInterval(spec.fault.snapshot_every, spec.fault.checkpoint_every)
        is_over = start.plan.boundary == spec.train.batches  # one that ends early writes files that nobody needs
        self._snapshots = Snapshots(
            self._writer,
            interval,
            context,
            folder=Path(start.state_dir),
            live=live if start.has_live_sources and not is_over else (),
            blocks=self._reserved(device, spec, context),
        )
        return self._snapshots

    def _reserved(self, device: StageDevice, spec: JobSpec, context: StageContext) -> HostBlocks | None:
        """Return host memory for a copy of the stage, kept from run to run; None: the stage is in host memory."""
        if device.is_immediate:
            return None
        if self._blocks is None:
            self._blocks = HostBlocks(device)
        self._blocks.reserve(sum(cost.state_bytes for cost in layer_costs(spec) if cost.name in context.layers))
        return self._blocks

    def let_go(self) -> bool:
        """Cancel the snapshot in progress. False: the writer still reads the tensors."""
        return self._writer.cancel(timeout_s=LETTING_GO_S)

    def close(self) -> bool:
        """Close the snapshots, because the run's layers are about to be freed. Returns as `let_go`."""
        self._snapshots, self.spacing = None, Spacing()
        return self.let_go()

    def space(self, spacing: Spacing) -> None:
        """Write only every factor-th snapshot from now on. Raises ValueError unless it is a power of two."""
        if self._snapshots is not None:
            self._snapshots.interval.space(spacing.factor)
        self.spacing = spacing

    def ended(self, item: SnapshotEnded) -> None:
        """Tell that a snapshot of the served job was written, was missed, or was late again."""
        factor = self._snapshots.interval.factor if self._snapshots is not None else 1
        reason, event = item.trouble, "snapshot_missed"
        if not item.trouble:
            self._records.snapshot_written(item)
            self._tell(_wrote(item))
            if factor == self.spacing.factor:
                return
            reason = f"updates waited for it twice in a row: only every {factor}. snapshot is written from now on"
            event = "snapshot_late"
        if factor != self.spacing.factor:
            self.spacing = Spacing(factor, item.boundary)
        log.warning(event, job=item.job, boundary=item.boundary, reason=reason, factor=factor)
        self._records.event(event, boundary=item.boundary, reason=reason, factor=factor)
        self._tell(
            SnapshotMissed(
                job=item.job,
                generation=item.generation,
                boundary=item.boundary,
                reason=reason,
                factor=factor,
                written=not item.trouble,
            )
        )


def _wrote(item: SnapshotEnded) -> Wrote:
    files = tuple(
        WrittenFile(layer=layer, path=str(file.path), size_bytes=file.size_bytes, checksum=file.checksum)
        for layer, file in item.files.items()
    )
    return Wrote(
        job=item.job,
        generation=item.generation,
        timeline=item.timeline,
        boundary=item.boundary,
        files=files,
        is_snapshot=True,
    )
