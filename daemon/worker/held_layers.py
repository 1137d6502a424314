"""What a worker holds of a job: loads its layers from their sources, writes them to files, takes snapshots.

Layers outlive a generation: they stay live at the boundary where the last run stopped, until a start names those to
keep, or the job is let go.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import torch
from torch import Tensor

from headway.daemon.base.owned_folders import make_folder
from headway.daemon.cluster.state_key import BASE_PREFIX
from headway.daemon.jobs.job import JobSpec
from headway.daemon.plan.layer_costs import layer_costs
from headway.daemon.worker.goal import (
    FromWorker,
    SnapshotMissed,
    Source,
    SourceKind,
    Spacing,
    Start,
    WrittenFile,
    Wrote,
)
from headway.daemon.worker.neighbours import WorkerInbox
from headway.daemon.worker.stage_records import StageRecords
from headway.optim.layer_optimizer import optimizer_factory
from headway.stages.data.tokens import TokenShards
from headway.stages.device.device import StageDevice
from headway.stages.early_stop import EvaluationTally
from headway.stages.errors import DamagedFileError
from headway.stages.ids import Boundary, LayerName, Timeline
from headway.stages.stage.context import StageContext
from headway.stages.stage.snapshots import LETTING_GO_S, Snapshots
from headway.stages.state.device_loading import DeviceLoading
from headway.stages.state.host_blocks import HostBlocks
from headway.stages.state.journal import JOURNAL, Journal
from headway.stages.state.layer_file import SUFFIX, read_journal, read_layer, write_journal, write_layer
from headway.stages.state.layer_state import LayerState, frozen_weights, given_adapters
from headway.stages.state.snapshot_interval import SnapshotInterval
from headway.stages.state.snapshot_writer import SnapshotEnded, SnapshotWriter
from headway.stages.state.state_file import check_header, read_state

log = structlog.get_logger()


@dataclass
class RefusedError(Exception):
    """The goal does not fit what the worker holds; the worker does not change."""

    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(slots=True)
class Held:
    """One job's part on this worker. Only its main thread may use it."""

    spec: JobSpec | None = None
    tokens: TokenShards | None = None
    """The open data, on a worker that was prepared as the first stage. It stays open for every generation."""
    layers: dict[str, LayerState] = field(default_factory=dict)
    journal: Journal | None = None
    """The journal, on the lead of the last stage."""
    timeline: int = 0
    """Timeline of the last start and of the layers; 0: nothing was started."""
    boundary: int | None = None
    """Boundary of the layers and of the journal; None while they are between boundaries."""

    def keep(self, parts: Sequence[str]) -> None:
        """Drop all layers and the journal, except these."""
        self.layers = {name: layer for name, layer in self.layers.items() if name in parts}
        self.journal = self.journal if JOURNAL in parts else None

    def layer(self, name: str, boundary: int) -> LayerState:
        """Return a layer at this boundary. Raises RefusedError if it is not held so."""
        if name not in self.layers:
            raise RefusedError(f"layer {name} is not held here")
        self._check(boundary)
        return self.layers[name]

    def journal_at(self, boundary: int) -> Journal:
        """Return the journal at this boundary. Raises RefusedError if it is not held so."""
        if self.journal is None:
            raise RefusedError("the journal is not held here")
        self._check(boundary)
        return self.journal

    def _check(self, boundary: int) -> None:
        if self.boundary != boundary:
            where = "between boundaries" if self.boundary is None else f"at boundary {self.boundary}"
            raise RefusedError(f"the live layers are {where}, not at {boundary}")


def live_parts(start: Start, held: Held) -> list[LayerName]:
    """Return the parts that the start takes from this process. It reads and drops nothing yet.

    Raises RefusedError when one is not held at the start's boundary and timeline, or a part cannot begin there.
    """
    plan = start.plan
    early = [source.layer for source in start.sources if source.kind is SourceKind.INITIAL]
    if plan.boundary and early:
        raise RefusedError(f"{', '.join(early)} cannot begin at boundary {plan.boundary}")
    live = [LayerName(source.layer) for source in start.sources if source.kind is SourceKind.LIVE]
    for part in live:
        if part == JOURNAL:
            held.journal_at(plan.boundary)
        else:
            held.layer(part, plan.boundary)
        if plan.timeline != held.timeline:
            raise RefusedError(f"layer {part} is held on timeline {held.timeline}, not on {plan.timeline}")
    return live


def load_stage(
    start: Start,
    spec: JobSpec,
    *,
    held: Held,
    device: StageDevice,
    on_layer: Callable[[Source], None] = lambda _: None,
) -> tuple[dict[str, LayerState], Journal | None]:
    """Return the stage's layers at the start's boundary, each from its source, and the journal if it is written here.

    on_layer: is called with each source, before it is used. Raises RefusedError when a part has no source, and
    DamagedFileError and OSError for a wrong file; `live_parts` has admitted the start.
    """
    sources = {source.layer: source for source in start.sources}
    has_journal = start.plan.has_journal(start.position)
    wanted = [*start.layers, *([JOURNAL] if has_journal and start.plan.boundary else [])]
    if missing := [part for part in wanted if part not in sources]:
        raise RefusedError(f"no source is named for {', '.join(missing)}")
    layers, loading = {}, DeviceLoading(device)
    for layer in start.layers:
        on_layer(sources[layer])
        layers[layer] = _load_layer(
            sources[layer],
            start,
            spec,
            held=held,
            device=device.torch_device,
            loading=loading,
            base=sources.get(BASE_PREFIX + layer),
        )
    if not has_journal:
        return layers, None
    if JOURNAL in sources:
        on_layer(sources[JOURNAL])
    journal = _load_journal(sources.get(JOURNAL), start, spec, held)
    if start.source_job:
        # The evaluations of the job that wrote the rows do not end this one.
        journal.tally = EvaluationTally(below=start.plan.boundary if spec.train.stops_early else 0)
    return layers, journal


def write_parts(start: Start, spec: JobSpec, held: Held, boundary: int, parts: Sequence[str]) -> Wrote:
    """Write parts at a boundary into the start's folder. Raises RefusedError and OSError."""
    job, at, timeline, train = spec.job.name, Boundary(boundary), Timeline(start.plan.timeline), spec.train
    directory = Path(start.state_dir) / str(boundary)
    make_folder(directory)
    files = []
    for name in parts:
        path = directory / f"{name}{SUFFIX}"
        if name == JOURNAL:
            journal = held.journal_at(boundary)
            written = write_journal(path, journal, job=job, boundary=at, train=train, timeline=timeline)
        else:
            written = write_layer(path, held.layer(name, boundary), job=job, train=train, timeline=timeline)
        files.append(WrittenFile(layer=name, path=str(path), size_bytes=written.size_bytes, checksum=written.checksum))
    return Wrote(job=job, generation=start.plan.generation, timeline=timeline, boundary=boundary, files=tuple(files))


def _source_timeline(start: Start) -> Timeline | None:
    """Return the timeline of the files among the sources.

    None: they are parts of a model's folder, which belong to no timeline.
    """
    timeline = start.plan.source_timeline if start.plan.source != "initial" else 0
    return Timeline(timeline) if timeline else None


def _load_layer(
    source: Source,
    start: Start,
    spec: JobSpec,
    *,
    held: Held,
    device: torch.device,
    loading: DeviceLoading,
    base: Source | None,
) -> LayerState:
    name = LayerName(source.layer)
    if source.kind is SourceKind.LIVE:
        return held.layer(name, start.plan.boundary)
    make_optimizer = optimizer_factory(spec.optim, **spec.train.of_optimizers)
    if base is None and spec.model.has_adapter and spec.origin.url:
        raise RefusedError(f"no source is named for the frozen weights of {name}")
    frozen, adapters = _load_frozen(base, name, spec, device=device, loading=loading)
    if source.kind is SourceKind.INITIAL:
        if spec.origin.url and not spec.model.has_adapter:
            raise RefusedError(f"{name} begins with the weights of {spec.origin.url}, not with random ones")
        return LayerState.initial(
            name,
            spec.model,
            spec.train,
            seed=spec.job.seed,
            device=device,
            optimizer_factory=make_optimizer,
            frozen=frozen,
            adapters=adapters,
        )
    return read_layer(
        Path(source.path),
        name,
        job=start.source_job or spec.job.name,
        boundary=Boundary(start.plan.boundary),
        model=spec.model,
        train=spec.train,
        device=device,
        loading=loading,
        optimizer_factory=make_optimizer,
        timeline=_source_timeline(start),
        frozen=frozen,
    )


def _load_frozen(
    base: Source | None, name: LayerName, spec: JobSpec, *, device: torch.device, loading: DeviceLoading
) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
    """Return the weights beside a layer's adapters: from its part of the model's folder, else from the seed. And the
    adapters with which it begins; None: the seed says them.
    """
    given = None
    if base is not None:
        header, given = read_state(Path(base.path), loading=loading)
        check_header(Path(base.path), header, job=spec.origin.job, layer=name, boundary=0)
    try:
        frozen = frozen_weights(name, spec.model, spec.train, seed=spec.job.seed, device=device, given=given)
        return frozen, given_adapters(given or {}, name, spec.model) if spec.origin.adapter else None
    except ValueError as error:
        raise DamagedFileError(base.path if base is not None else name, str(error)) from error


def _load_journal(source: Source | None, start: Start, spec: JobSpec, held: Held) -> Journal:
    if source is not None and source.kind is SourceKind.FILE:
        return read_journal(
            Path(source.path),
            job=start.source_job or spec.job.name,
            boundary=Boundary(start.plan.boundary),
            timeline=_source_timeline(start),
        )
    is_live = source is not None and source.kind is SourceKind.LIVE
    return held.journal_at(start.plan.boundary) if is_live else Journal()


class SnapshotReports:
    """The snapshots of one worker process. Only its main thread may use it."""

    def __init__(self, inbox: WorkerInbox, records: StageRecords, tell: Callable[[FromWorker], None]) -> None:
        self._writer = SnapshotWriter(inbox, on_file=records.file_written, on_done=records.snapshot_done)
        self._records = records
        self._tell = tell
        self._snapshots: Snapshots | None = None
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
        self._snapshots = None
        return self.let_go()

    def space(self, spacing: Spacing) -> None:
        """Write only every factor-th snapshot from now on. Raises ValueError unless it is a power of two."""
        if self._snapshots is not None:
            self._snapshots.interval.space(spacing.factor)

    def ended(self, item: SnapshotEnded, known: Spacing) -> Spacing:
        """Tell that a snapshot of the served job was written, was missed, or was late again.

        known: the interval as the daemon knows it. Returns the present one.
        """
        factor = self._snapshots.interval.factor if self._snapshots is not None else known.factor
        reason, event = item.trouble, "snapshot_missed"
        if not item.trouble:
            self._records.snapshot_written(item)
            self._tell(_wrote(item))
            if factor == known.factor:
                return known
            reason = f"updates waited for it twice in a row: only every {factor}. snapshot is written from now on"
            event = "snapshot_late"
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
        return known if factor == known.factor else Spacing(factor, item.boundary)


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
