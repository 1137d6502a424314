"""Loads once what torch would load at first use: its compiler's modules, the optimizers' modules, kernels.

An attached process is then ready in milliseconds, which is the purpose of a spare.
"""

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Final

import torch

from headway.daemon.jobs.job import JobSpec
from headway.daemon.runtime.own_process import keep_what_stays
from headway.optim.layer_optimizer import optimizer_factory
from headway.optim.spec import OptimSpec
from headway.stages.data.microbatch import Microbatch
from headway.stages.device.device import StageDevice
from headway.stages.ids import LayerName
from headway.stages.model.decoder import frozen_shapes, trained_shapes
from headway.stages.model.determinism import configure
from headway.stages.model.quantized import is_plain
from headway.stages.spec import ModelSpec, TrainSpec, layer_names
from headway.stages.stage.graph import StageGraph
from headway.stages.state.layer_state import LayerState
from headway.stages.state.weight_versions import WeightVersions

_MODEL = ModelSpec(
    num_hidden_layers=1, hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1, vocab_size=8
)
_TRAIN = TrainSpec(batches=1, microbatches=1, microbatch_size=1, sequence_length=4, attention_backend="math")


def warm_up() -> None:
    """Train one batch of the smallest model on the CPU: only the loaded modules stay.

    Modules live as long as the process: the collector is told to skip them, because it runs between two generations.
    """
    cpu = torch.device("cpu")
    configure(_TRAIN, cpu)
    make_optimizer = optimizer_factory(OptimSpec(), num_batches=1, delay=_TRAIN.delay)
    layers = [
        LayerState.initial(LayerName(name), _MODEL, _TRAIN, seed=0, device=cpu, optimizer_factory=make_optimizer)
        for name in layer_names(_MODEL)
    ]
    graph = StageGraph(layers, _MODEL, _TRAIN, is_first=True, is_last=True)
    tokens = torch.zeros((1, _TRAIN.sequence_length), dtype=torch.int64)
    graph.forward((0, 0), Microbatch(tokens, tokens), version=0)
    gradients, _ = graph.backward((0, 0), None)
    graph.update(0, list(gradients))
    del graph, layers, gradients
    keep_what_stays()


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
