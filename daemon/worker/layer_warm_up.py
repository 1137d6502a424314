"""Pays for a device's first operations before a stage counts as running: forward, backward and update of each kind.

On a card the first allocation, cuBLAS, the kernel of attention and Newton–Schulz at a block's shapes take seconds, once
a process. The layers are zeros with a job's shapes, one kind at a time, and nothing of them stays.
"""

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Final

import torch

from headway.daemon.jobs.job import JobSpec
from headway.optim.layer_optimizer import optimizer_factory
from headway.stages.data.microbatch import Microbatch
from headway.stages.device.device import StageDevice
from headway.stages.ids import LayerName
from headway.stages.model.decoder import frozen_shapes, trained_shapes
from headway.stages.model.quantized import is_plain
from headway.stages.stage.graph import StageGraph
from headway.stages.state.layer_state import LayerState
from headway.stages.state.weight_versions import WeightVersions

PATIENCE_S: Final = 60.0
"""Time for one layer. The order to prepare has its own deadline."""


def warm_up_layers(layers: Sequence[str], spec: JobSpec, device: StageDevice) -> Iterator[tuple[str, float]]:
    """Yield each kind of these layers with its seconds, once it is done. Draws no random number.

    Raises torch.OutOfMemoryError when the device has no room for one layer, and DeviceLateError.
    """
    by_kind = {spec.model.kind_of(name): name for name in reversed(layers)}
    for kind, name in by_kind.items():
        began = perf_counter()
        _train_once(LayerName(name), spec, device, is_first=kind == "embed", is_last=kind == "head")
        yield kind, perf_counter() - began


def _train_once(name: LayerName, spec: JobSpec, opened: StageDevice, *, is_first: bool, is_last: bool) -> None:
    model, train, device = spec.model, spec.train, opened.torch_device
    dtype: torch.dtype = getattr(torch, train.dtype)
    weights = {key: torch.zeros(shape, device=device) for key, shape in trained_shapes(name, model).items()}
    frozen = {}
    if model.has_adapter:
        frozen = {
            key: torch.zeros(shape, dtype=dtype if is_plain(key, own) else own, device=device)
            for key, (shape, own) in frozen_shapes(name, model).items()
        }
    optimizer = optimizer_factory(spec.optim, num_batches=train.batches, delay=train.delay)(name, weights)
    versions = WeightVersions(weights, version=0, dtype=dtype)
    layer = LayerState(name, versions, optimizer, delay=train.delay, frozen=frozen)
    graph = StageGraph([layer], model, train, is_first=is_first, is_last=is_last)
    tokens = torch.zeros((train.microbatch_size, train.sequence_length), dtype=torch.int64, device=device)
    shape = (train.hidden_rows, train.sequence_length, model.hidden_size)
    hidden = torch.zeros(shape, dtype=dtype, device=device)
    positions = tokens.to(torch.int32) if train.separates_documents else None
    mean_tokens = torch.ones((), device=device) if train.has_mask else None
    rows = Microbatch(tokens if is_first else hidden, tokens, positions, mean_tokens)
    graph.forward((0, 0), rows, version=0)
    gradients, _ = graph.backward((0, 0), None if is_last else hidden)
    graph.update(0, [gradient.float() for gradient in gradients])
    opened.mark().wait(PATIENCE_S)
