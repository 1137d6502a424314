"""Writes and reads a layer, or the journal, at a boundary as one file: for snapshot, migration, checkpoint
and export.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from headway.stages.errors import DamagedFileError
from headway.stages.ids import Boundary, LayerName, Timeline
from headway.stages.spec import ModelSpec, TrainSpec
from headway.stages.state.device_loading import DeviceLoading
from headway.stages.state.journal import JOURNAL, Journal
from headway.stages.state.layer_state import LayerState
from headway.stages.state.optimizer import OptimizerFactory
from headway.stages.state.state_file import StateHeader, WrittenFile, check_header, read_state, write_state

SUFFIX = ".safetensors"


def write_layer(
    path: Path,
    layer: LayerState,
    *,
    job: str,
    train: TrainSpec,
    timeline: Timeline,
) -> WrittenFile:
    """Write a layer that rests at a boundary. Raises OSError; no file is left behind then."""
    header = StateHeader(
        job=job,
        layer=layer.name,
        boundary=layer.boundary,
        timeline=timeline,
        dtype=train.dtype,
    )
    return write_state(path, layer.tensors(), header)


def read_layer(
    path: Path,
    name: LayerName,
    *,
    job: str,
    boundary: Boundary,
    model: ModelSpec,
    train: TrainSpec,
    device: torch.device | str,
    optimizer_factory: OptimizerFactory,
    timeline: Timeline | None = None,
    loading: DeviceLoading | None = None,
    frozen: Mapping[str, Tensor] | None = None,
) -> LayerState:
    """Read a layer and check that it is complete and the requested one; timeline None: of any.

    loading: brings it to the device while it is read; None: a copy follows, unless the device is the CPU. frozen: as
    for `LayerState.from_tensors`.

    Raises DamagedFileError, FileNotFoundError.
    """
    header, tensors = read_state(path, loading=loading)
    check_header(path, header, job=job, layer=name, boundary=boundary, dtype=train.dtype)
    if timeline is not None:
        check_header(path, header, timeline=timeline)
    try:
        return LayerState.from_tensors(
            name,
            tensors,
            model,
            train,
            boundary=boundary,
            device=device,
            optimizer_factory=optimizer_factory,
            frozen=frozen,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(str(path), str(error)) from error


def write_journal(
    path: Path,
    journal: Journal,
    *,
    job: str,
    boundary: Boundary,
    train: TrainSpec,
    timeline: Timeline,
) -> WrittenFile:
    """Write the rows below a boundary. Raises OSError; no file is left behind then."""
    header = StateHeader(job=job, layer=JOURNAL, boundary=boundary, timeline=timeline, dtype=train.dtype)
    return write_state(path, journal.tensors(below=boundary), header)


def read_journal(
    path: Path, *, boundary: Boundary, job: str | None = None, timeline: Timeline | None = None
) -> Journal:
    """Read a journal and check it as `read_layer` does; job None: of any.

    Raises DamagedFileError, FileNotFoundError.
    """
    header, tensors = read_state(path)
    check_header(path, header, layer=JOURNAL, boundary=boundary)
    if job is not None:
        check_header(path, header, job=job)
    if timeline is not None:
        check_header(path, header, timeline=timeline)
    try:
        journal = Journal.from_tensors(tensors)
    except Exception as error:  # the file may have columns of any kind and shape
        raise DamagedFileError(str(path), f"it holds no journal: {error}") from error
    if len(journal) and int(journal.next_batch or 0) != boundary:
        raise DamagedFileError(str(path), f"it ends before batch {journal.next_batch}, not {boundary}")
    return journal
