"""Loads a stage's layers from their sources at its start, and writes them to files for a Write."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from headway.daemon.jobs.job import JobSpec
from headway.daemon.storage.folders import make_folder
from headway.daemon.storage.state_key import BASE_PREFIX
from headway.daemon.worker.session import OrderRefusedError, WorkerSession
from headway.daemon.worker.start_order import leads
from headway.optim.layer_optimizer import optimizer_factory
from headway.proto.control_pb2 import LayerSource, Start, Write, Wrote
from headway.stages.data.tokens import TokenShards
from headway.stages.device.device import StageDevice
from headway.stages.early_stop import EvaluationTally
from headway.stages.errors import DamagedFileError
from headway.stages.ids import Boundary, LayerName, Timeline
from headway.stages.state.device_loading import DeviceLoading
from headway.stages.state.journal import JOURNAL, Journal
from headway.stages.state.layer_file import SUFFIX, read_journal, read_layer, write_journal, write_layer
from headway.stages.state.layer_state import LayerState, frozen_weights, given_adapters
from headway.stages.state.state_file import check_header, read_state

HeldSession = WorkerSession[LayerState, Journal, TokenShards]
"""A session that holds tensors."""


def has_journal(start: Start) -> bool:
    """Return whether the worker writes the journal: it leads the last stage."""
    return start.stage.index + 1 == start.stage.num_stages and leads(start)


def live_sources(start: Start, *, session: HeldSession) -> list[LayerName]:
    """Return the parts that the start takes from this process. It reads and drops nothing yet.

    Raises OrderRefusedError when a layer has no source, an impossible source, or is not held as the start requires.

    """
    sources = {source.layer: source.WhichOneof("source") for source in start.sources}
    needed = [*start.stage.layers]
    if has_journal(start) and (start.boundary or JOURNAL in sources):
        needed.append(JOURNAL)
    missing = [layer for layer in needed if sources.get(layer) is None]
    if missing:
        raise OrderRefusedError(f"no source is named for {', '.join(missing)}")
    if start.boundary and (early := [layer for layer in needed if sources[layer] == "initial"]):
        raise OrderRefusedError(f"{', '.join(early)} cannot begin at boundary {start.boundary}")
    coming = [layer for layer in start.stage.layers if sources[layer] != "live"] if needs_base(session.spec) else []
    if bare := [layer for layer in coming if BASE_PREFIX + layer not in sources]:
        raise OrderRefusedError(f"no source is named for the frozen weights of {', '.join(bare)}")
    live = [LayerName(layer) for layer in needed if sources[layer] == "live"]
    session.admit_live(live, timeline=start.timeline, boundary=start.boundary)
    return live


def load_stage(
    start: Start,
    spec: JobSpec,
    *,
    session: HeldSession,
    device: StageDevice,
    on_layer: Callable[[LayerSource], None] = lambda _: None,
) -> tuple[dict[str, LayerState], Journal | None]:
    """Return the stage's layers at the start's boundary, each from its source, and the journal if it is written here.

    on_layer: is called with each source, before it is used. Raises DamagedFileError and OSError for a wrong file;
    `live_sources` has admitted the start.
    """
    sources = {source.layer: source for source in start.sources}
    layers, loading = {}, DeviceLoading(device)
    for layer in start.stage.layers:
        on_layer(sources[layer])
        layers[layer] = _load_layer(
            sources[layer],
            start,
            spec,
            session=session,
            device=device.torch_device,
            loading=loading,
            base=sources.get(BASE_PREFIX + layer),
        )
    if not has_journal(start):
        return layers, None
    if JOURNAL in sources:
        on_layer(sources[JOURNAL])
    journal = _load_journal(sources.get(JOURNAL), start, session)
    if start.source_job:
        # The evaluations of the job that wrote the rows do not end this one.
        journal.tally = EvaluationTally(below=start.boundary if spec.train.stops_early else 0)
    return layers, journal


def write_layers(order: Write, session: HeldSession) -> Wrote:
    """Write the order's parts, at its boundary, into its folder. Raises OrderRefusedError and OSError."""
    session.admit_write(order.job_name, order.generation, order.boundary, layers=order.layers)
    assert session.spec is not None
    job, boundary, timeline = order.job_name, Boundary(order.boundary), Timeline(order.timeline)
    train = session.spec.train
    directory = Path(order.directory)
    make_folder(directory)
    wrote = Wrote(job=job, generation=order.generation, boundary=boundary, timeline=timeline)
    for name in order.layers:
        path = directory / f"{name}{SUFFIX}"
        if name == JOURNAL:
            journal = session.live_journal(boundary)
            written = write_journal(path, journal, job=job, boundary=boundary, train=train, timeline=timeline)
        else:
            layer = session.live_layer(name, boundary)
            written = write_layer(path, layer, job=job, train=train, timeline=timeline)
        wrote.files.add(layer=name, path=str(path), size_bytes=written.size_bytes, checksum=written.checksum)
    return wrote


def _source_timeline(start: Start) -> Timeline | None:
    """Return the timeline of the files among the sources; None when the start does not name it."""
    return Timeline(start.source_timeline) if start.source_timeline else None


def _load_layer(
    source: LayerSource,
    start: Start,
    spec: JobSpec,
    *,
    session: HeldSession,
    device: torch.device,
    loading: DeviceLoading,
    base: LayerSource | None,
) -> LayerState:
    name = LayerName(source.layer)
    kind = source.WhichOneof("source")
    if kind == "live":
        return session.live_layer(name, start.boundary)
    make_optimizer = optimizer_factory(spec.optim, num_batches=spec.train.batches, delay=spec.train.delay)
    frozen, adapters = _load_frozen(base, name, spec, device=device, loading=loading)
    if kind == "initial":
        if spec.origin.url and not spec.model.has_adapter:
            raise OrderRefusedError(f"{name} begins with the weights of {spec.origin.url}, not with random ones")
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
        job=start.source_job or start.job_name,
        boundary=Boundary(start.boundary),
        model=spec.model,
        train=spec.train,
        device=device,
        loading=loading,
        optimizer_factory=make_optimizer,
        timeline=_source_timeline(start),
        frozen=frozen,
    )


def needs_base(spec: JobSpec | None) -> bool:
    """Return whether a layer that comes to a worker needs its part of the model's folder, at any boundary."""
    return spec is not None and spec.model.has_adapter and bool(spec.origin.url)


def _load_frozen(
    base: LayerSource | None, name: LayerName, spec: JobSpec, *, device: torch.device, loading: DeviceLoading
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


def _load_journal(source: LayerSource | None, start: Start, session: HeldSession) -> Journal:
    kind = None if source is None else source.WhichOneof("source")
    if source is not None and kind == "path":
        return read_journal(
            Path(source.path),
            job=start.source_job or start.job_name,
            boundary=Boundary(start.boundary),
            timeline=_source_timeline(start),
        )
    return session.live_journal(start.boundary) if kind == "live" else Journal()
