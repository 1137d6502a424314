"""Writes a job's newest boundary as a model folder: layer by layer through any daemon, each file verified."""

import asyncio
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from headway.daemon.base.errors import ConfigError, RecoveryError, StoreError, UnwritableError
from headway.daemon.blobs.data_source import tokenizer_at
from headway.daemon.blobs.fetch import PartialFile, fetch
from headway.daemon.blobs.peer_client import NodeClient, holder
from headway.daemon.client.cluster_access import ClusterSession, node_client
from headway.daemon.client.job_watch import write_history
from headway.daemon.cluster.records import NodeRecord
from headway.daemon.cluster.state_key import CARRIED_PART, ORIGIN_PLACE, StateKey
from headway.daemon.decide.boundaries import holders, newest_complete
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import JobSpec
from headway.daemon.jobs.resolve import default_cache_dir
from headway.daemon.models.adapter_folder import AdapterFolderWriter, add_last_batch
from headway.daemon.models.model_folder import ExportDtype, ModelFolderWriter
from headway.daemon.models.model_place import replaced
from headway.daemon.models.origin_parts import Carried, carried_in
from headway.daemon.reports.metrics_file import METRICS_NAME
from headway.daemon.text.data_tokenizer import DataTokenizer, tokenizer_json
from headway.stages.data.source_choice import BUILT_IN_SOURCES
from headway.stages.errors import DamagedFileError, DataError, PeerError, UnavailableError
from headway.stages.model.adapters import is_of_adapter, merged
from headway.stages.model.decoder import frozen_shapes, parameter_shapes
from headway.stages.model.initial_weights import initial_parameters
from headway.stages.model.quantized import dequantized, quantized
from headway.stages.state.file_digest import FileDigest
from headway.stages.state.layer_state import INITIAL
from headway.stages.state.state_file import check_header, read_state


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """A model that was written."""

    job: str
    boundary: int
    """Number of batches that it is the model of."""
    out: str
    """Its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """A boundary that can be exported."""

    timeline: int
    number: int
    files: dict[str, FileDigest]
    """Of each part."""
    job: str = ""
    """The job that wrote the boundary, if it is another job."""


def newest_boundary(job: JobView, nodes: Mapping[str, NodeRecord]) -> Boundary:
    """Return the newest boundary in the job's own past of which nodes or a checkpoint have every layer.

    Raises ConfigError when no boundary was written.

    """
    assert job.spec is not None
    found: list[Boundary] = []
    if job.checkpoint is not None:
        found.append(
            Boundary(
                timeline=job.checkpoint.timeline,
                number=job.checkpoint.boundary,
                files={layer: file.digest for layer, file in job.checkpoint.files.items()},
                job=job.checkpoint.origin_job,
            )
        )
    place = newest_complete(job, nodes)
    if place is not None:
        living = holders(job, place, nodes)
        files = {layer: job.holders(*place, layer)[min(living[layer])].digest for layer in job.spec.layers}
        found.append(Boundary(timeline=place[0], number=place[1], files=files))
    if not found:
        raise ConfigError(
            f"nothing to export yet: no boundary was written; `headway pause {job.name}` writes one", f"job {job.name}"
        )
    return max(found, key=lambda boundary: (boundary.number, boundary.timeline))


async def export_with_history(
    session: ClusterSession,
    job: str,
    out: Path,
    *,
    on_warning: Callable[[str], None],
    **options: Any,
) -> Boundary:
    """Export a model, and write the rows of the batches that made it beside it; options and errors are those of export.

    on_warning: is also told why there are no rows: the model is complete all the same.
    """
    boundary = await export(session, job, out, on_warning=on_warning, **options)
    try:
        last = await write_history(session, job, out / METRICS_NAME, below=boundary.number)
        if last is not None and last.batch + 1 == boundary.number:  # else the newest rows are lost
            add_last_batch(out, last.as_json())
    except (ConfigError, PeerError, RecoveryError, StoreError, OSError) as error:
        on_warning(f"the history of {job} is not beside its model: {error}")
    return boundary


async def export(
    session: ClusterSession,
    job: str,
    out: Path,
    *,
    force: bool = False,
    dtype: ExportDtype | None = None,
    merge: bool = False,
    on_warning: Callable[[str], None] = lambda _: None,
    on_layer: Callable[[int, int], None] | None = None,
) -> Boundary:
    """Write a job's model into the folder `out`; return the model's boundary.

    The folder's old content stays until the model is complete. force: replace a model that was not exported.

    dtype: None: that of the folder from which the job started, else float32. on_warning: is told if that folder's
    tokenizer and config cannot be read any more, and of a model that is replaced. merge: adapters are added to the
    weights beside them; otherwise the folder has the adapters alone. on_layer(done, total) reports progress.

    Raises ConfigError, RecoveryError (a file is missing or differs from its registration), UnavailableError (no node).
    """
    from headway.daemon.client.job_requests import job_of

    view = await session.view()
    found = job_of(view, job)
    spec = found.spec
    assert spec is not None
    boundary = newest_boundary(found, view.nodes)
    async with node_client(session.identity) as client:
        carried = await _carried(client, view, job, spec, on_warning)
        with (
            _writer(out, spec, carried, dtype=dtype, merge=merge, force=force) as writer,
            tempfile.TemporaryDirectory(dir=writer.draft) as folder,
        ):
            if writer.is_replacing:
                on_warning(replaced(out))
            for done, layer in enumerate(spec.layers):
                if on_layer is not None:
                    on_layer(done, len(spec.layers))
                key = StateKey(job, boundary.timeline, boundary.number, layer)
                path = Path(folder) / "layer.safetensors"
                await _fetch(client, view, key, path, boundary.files[layer])
                weights = _weights(path, replace(key, job=boundary.job or job))
                if merge:
                    base = await _base(client, view, job, layer, path)
                    weights = merged(base, weights, spec.model.adapter)
                writer.add(layer, weights)
            if on_layer is not None:
                on_layer(len(spec.layers), len(spec.layers))
    return boundary


def _writer(
    out: Path, spec: JobSpec, carried: Carried | None, *, dtype: ExportDtype | None, merge: bool, force: bool
) -> ModelFolderWriter | AdapterFolderWriter:
    """Return the writer of a model, or of adapters alone. Raises ConfigError for options that do not fit the job."""
    tokenizer = _tokenizer(spec)
    if merge and not spec.model.has_adapter:
        raise ConfigError("the job has no [adapter], so its export is the whole model; leave the option out", "--merge")
    if spec.model.has_adapter and not merge:
        if dtype == "bfloat16":
            raise ConfigError("adapters are written in float32; add --merge, or leave the option out", "--dtype")
        return AdapterFolderWriter(
            out, spec.model, base=spec.origin.url, tokenizer=tokenizer, carried=carried, force=force
        )
    length = spec.train.sequence_length
    return ModelFolderWriter(
        out, spec.model.base, sequence_length=length, tokenizer=tokenizer, carried=carried, dtype=dtype, force=force
    )


async def _base(client: NodeClient, view: ClusterView, job: str, layer: str, path: Path) -> dict[str, Tensor]:
    """Return the frozen weights of a layer, dequantized: through a node from the model's folder, else from the seed."""
    spec = view.jobs[job].spec
    assert spec is not None
    expected = spec.origin.digest_of(layer)
    if expected is None:
        drawn = initial_parameters(layer, spec.model, seed=spec.job.seed)
        weights = quantized(drawn, frozen_shapes(layer, spec.model), spec.model.adapter.quantize)
    else:
        await _fetch(client, view, StateKey(job, *ORIGIN_PLACE, layer), path, expected)
        weights = {name.removeprefix(f"{INITIAL}/"): tensor for name, tensor in read_state(path)[1].items()}
        weights = {name: tensor for name, tensor in weights.items() if not is_of_adapter(name)}
    return dequantized(weights, parameter_shapes(layer, spec.model), spec.model.adapter.quantize)


async def _carried(
    client: NodeClient, view: ClusterView, job: str, spec: JobSpec, on_warning: Callable[[str], None]
) -> Carried | None:
    """Return what the export carries over from the folder with the initial weights, from any node that has it."""
    expected = spec.origin.digest_of(CARRIED_PART)
    if expected is None:
        return None
    key = StateKey(job, *ORIGIN_PLACE, CARRIED_PART)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "origin.safetensors"
        try:
            await _fetch(client, view, key, path, expected)
            return carried_in(path)
        except RecoveryError as error:
            on_warning(
                f"the tokenizer and config of {spec.origin.url} cannot be read, and are left out: {error.reason}"
            )
            return None


async def _fetch(client: NodeClient, view: ClusterView, key: StateKey, path: Path, expected: FileDigest) -> None:
    """Fetch one file, from a holder or through the first node that can read it."""
    holders = view.jobs[key.job].holders(key.timeline, key.boundary, key.layer)
    # Holders first; any other node can still fetch the file from the checkpoint folder.
    nodes = sorted(view.nodes.values(), key=lambda node: node.name not in holders)
    if not nodes:
        raise UnavailableError("the cluster", "no node is up; start one, or wait for it")
    sources = [holder(client, node.endpoint, key, expected, is_forwarded=True, unhurried=True) for node in nodes]
    file = PartialFile(path, expected, what=str(key))
    try:
        await fetch(file, lambda: sources, in_thread=lambda act: asyncio.to_thread(act, lambda: None))
    except UnwritableError as error:
        raise ConfigError(f"cannot be written to: {error.reason}", error.item) from error


def _weights(path: Path, key: StateKey) -> dict[str, Tensor]:
    """Return W_b in fp32 by parameter name, from a layer's file."""
    try:
        header, tensors = read_state(path)
        check_header(path, header, job=key.job, layer=key.layer, boundary=key.boundary)
    except DamagedFileError as error:
        raise RecoveryError(str(key), str(error)) from error
    newest = "master/" if any(name.startswith("master/") for name in tensors) else "current/"
    return {name.removeprefix(newest): tensor for name, tensor in tensors.items() if name.startswith(newest)}


def _tokenizer(spec: JobSpec) -> DataTokenizer | None:
    """Return the data's tokenizer, if this machine has the data."""
    source = spec.data.parts[0].source  # all sources have one tokenizer
    if source in BUILT_IN_SOURCES:
        return DataTokenizer(text=tokenizer_json())
    try:
        return tokenizer_at(source, default_cache_dir())
    except (ConfigError, DataError, OSError):
        return None  # without its tokenizer, the folder still holds a usable model
