"""Under an adapter the embedding is frozen: nobody computes the gradient of its output, and no bit is another one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headway.daemon.local.reference_loop import reference
from headway.daemon.plan.layer_costs import layer_costs
from headway.stages.data.microbatch import Microbatch
from headway.stages.ids import LayerName
from headway.stages.links.codec import Codec
from headway.stages.spec import RECOMPUTES, AdapterSpec, ModelSpec, Quantizer
from headway.stages.stage.graph import StageGraph
from headway.stages.state.journal import Journal
from headway.stages.state.layer_state import LayerState
from tests.rigs.pipeline import (
    EF,
    MODEL,
    CountingTokens,
    Pipeline,
    factory_of,
    initial_layers,
    make_job,
    with_train,
)

ADAPTED = replace(MODEL, adapter=AdapterSpec(rank=2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantizer", ["none", "nf4", "int8"])
def test_frozen_weights_take_the_memory_that_is_planned(quantizer: Quantizer, dtype: str) -> None:
    """To the byte: codes, scales, and what stays in the job's dtype."""
    job = make_job(with_train(dtype=dtype), EF, model=quantized_by(quantizer))
    layers = initial_layers(job)
    for cost in layer_costs(job):
        assert cost.frozen_bytes == sum(tensor.nbytes for tensor in layers[cost.name].frozen.values()), cost.name


def quantized_by(quantizer: Quantizer) -> ModelSpec:
    """The model, with adapters beside a base that is kept in so many bits."""
    return replace(MODEL, adapter=AdapterSpec(rank=2, quantize=quantizer))


def test_a_coded_cut_above_it_changes_nothing_that_is_trained() -> None:
    """int8 with feedback on the first cut: hidden states are rounded there, and no gradient is left to round."""
    job = make_job(with_train(wire="int8", wire_between="stages"), EF, model=ADAPTED)
    layers, journal = initial_layers(job), Journal()
    pipeline = Pipeline(job, layers, journal, num_stages=5, codecs=[Codec.INT8])
    pipeline.run()
    losses: list[float] = []
    tokens: Any = CountingTokens()
    weights = reference(job, tokens, on_batch=lambda done: losses.append(done.loss), coded_cuts=("block.0",))
    assert [row.loss for row in journal.rows] == losses
    for name, layer in layers.items():
        assert all(torch.equal(layer.weights()[key], tensor) for key, tensor in weights[name].items())


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        self.number += "mm" in str(func)
        return func(*args, **(kwargs or {}))  # type: ignore[arg-type]


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_the_lowest_block_computes_no_gradient_of_its_input(recompute: str) -> None:
    """Block 0 as a stage takes fewer products than block 1, and its adapters' gradients are those of a whole graph."""
    products, found = [], list[list[Tensor]]()
    for names in (("block.0",), ("block.1",), ("embed", "block.0")):
        job = make_job(with_train(recompute=recompute), EF, model=ADAPTED)
        layers = [
            LayerState.initial(
                LayerName(name), job.model, job.train, seed=7, device="cpu", optimizer_factory=factory_of(job)
            )
            for name in names
        ]
        tokens = torch.arange(job.train.microbatch_size * job.train.sequence_length).view(job.train.microbatch_size, -1)
        tokens %= job.model.vocab_size
        embedded = initial_layers(job)["embed"].frozen["weight"][tokens]
        is_first = names[0] == "embed"
        graph = StageGraph(layers, job.model, job.train, is_first=is_first, is_last=False)
        output = graph.forward((0, 0), Microbatch(tokens if is_first else embedded, tokens), version=0)
        with Products() as counted:
            gradients, of_input = graph.backward((0, 0), torch.ones_like(output))
        assert (of_input is None) == ("block.0" in names)
        products.append(counted.number)
        found.append([output, *gradients])
    assert products[0] < products[1]
    assert all(torch.equal(one, other) for one, other in zip(found[0], found[2], strict=True))
