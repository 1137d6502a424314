"""Where a stage's layers come from when it starts, and the files they become when a Write asks for them."""

from pathlib import Path

import torch

from headway.daemon.jobs.job import JobSpec
from headway.daemon.worker.session import OrderRefusedError, WorkerSession
from headway.optim.layer_optimizer import optimizer_factory
from headway.proto.control_pb2 import LayerSource, Start, Write, Wrote
from headway.stages.ids import Boundary, LayerName, Timeline
from headway.stages.journal import JOURNAL, Journal
from headway.stages.layer_file import SUFFIX, read_journal, read_layer, write_journal, write_layer
from headway.stages.layer_state import LayerState
from headway.stages.tokens import TokenShards

HeldSession = WorkerSession[LayerState, Journal, TokenShards]
"""A session that holds the real things."""


def load_stage(
    start: Start, spec: JobSpec, *, session: HeldSession, device: torch.device
) -> tuple[dict[str, LayerState], Journal | None]:
    """The stage's layers at the start's boundary, each from its source, and the journal on the last stage.

    Raises OrderRefusedError for a source that is missing or does not fit, DamagedFileError and OSError for its file.
    """
    sources = {source.layer: source for source in start.sources}
    missing = [layer for layer in start.stage.layers if layer not in sources]
    if missing:
        raise OrderRefusedError(f"no source is named for {', '.join(missing)}")
    layers = {
        layer: _load_layer(sources[layer], start, spec, session=session, device=device) for layer in start.stage.layers
    }
    is_last = start.stage.index + 1 == start.stage.num_stages
    return layers, _load_journal(sources.get(JOURNAL), start, session) if is_last else None


def write_layers(order: Write, session: HeldSession) -> Wrote:
    """Write what the order names, at its boundary, into its folder. Raises OrderRefusedError and OSError."""
    session.admit_write(order.job_name, order.generation, order.boundary, layers=order.layers)
    assert session.spec is not None
    job, boundary, timeline = order.job_name, Boundary(order.boundary), Timeline(order.timeline)
    train = session.spec.train
    directory = Path(order.directory)
    directory.mkdir(parents=True, exist_ok=True)
    wrote = Wrote(job=job, generation=order.generation, boundary=boundary)
    for name in order.layers:
        path = directory / f"{name}{SUFFIX}"
        if name == JOURNAL:
            journal = session.live_journal(boundary)
            written = write_journal(path, journal, job=job, boundary=boundary, train=train, timeline=timeline)
        else:
            layer = session.live_layer(name, boundary)
            written = write_layer(path, layer, job=job, train=train, timeline=timeline)
        wrote.files.add(layer=name, path=str(path), size_bytes=written.size_bytes, sha256=written.sha256)
    return wrote


def _load_layer(
    source: LayerSource, start: Start, spec: JobSpec, *, session: HeldSession, device: torch.device
) -> LayerState:
    name = LayerName(source.layer)
    make_optimizer = optimizer_factory(spec.optim, num_batches=spec.train.batches, delay=spec.train.delay)
    match source.WhichOneof("source"):
        case "live":
            return session.live_layer(name, start.boundary)
        case "initial":
            if start.boundary != 0:
                raise OrderRefusedError(f"layer {name} cannot begin at boundary {start.boundary}")
            return LayerState.initial(
                name, spec.model, spec.train, seed=spec.job.seed, device=device, optimizer_factory=make_optimizer
            )
        case "path":
            return read_layer(
                Path(source.path),
                name,
                job=start.job_name,
                boundary=Boundary(start.boundary),
                model=spec.model,
                train=spec.train,
                device=device,
                optimizer_factory=make_optimizer,
            )
        case _:
            raise OrderRefusedError(f"layer {name} has an empty source")


def _load_journal(source: LayerSource | None, start: Start, session: HeldSession) -> Journal:
    kind = None if source is None else source.WhichOneof("source")
    if source is not None and kind == "path":
        return read_journal(Path(source.path), job=start.job_name, boundary=Boundary(start.boundary))
    if kind == "live":
        return session.live_journal(start.boundary)
    if start.boundary != 0:
        raise OrderRefusedError(f"no journal is named for boundary {start.boundary}")
    return Journal()
