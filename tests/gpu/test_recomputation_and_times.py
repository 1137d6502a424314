"""On a card: recomputed blocks give equal bits in less memory, and layers are timed by events."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headway.stages.data.microbatch import Microbatch
from headway.stages.device.opening import open_device
from headway.stages.ids import LayerName
from headway.stages.model.determinism import configure
from headway.stages.spec import ModelSpec, TrainSpec, layer_names, whole_layer
from headway.stages.stage.graph import StageGraph
from headway.stages.state.layer_state import LayerState
from headway.stages.telemetry.layer_times import NUM_EARLY, LayerTimes
from tests.rigs.pipeline import factory_of, make_job

pytestmark = pytest.mark.gpu

MODEL = ModelSpec(num_hidden_layers=8, hidden_size=512, intermediate_size=1376)
SMALL = replace(MODEL, hidden_size=64, intermediate_size=128)
"""For a CPU."""
NUM_IN_FLIGHT = 4


def trained(device: torch.device, dtype: str, recompute: str) -> tuple[list[Tensor], LayerTimes]:
    """Losses and gradients of some batches on the device, with some microbatches in flight at once."""
    model, length = (MODEL, 256) if device.type == "cuda" else (SMALL, 32)
    train = TrainSpec(
        batches=NUM_EARLY + 2,
        microbatch_size=4,
        sequence_length=length,
        dtype=dtype,  # type: ignore[arg-type]
        recompute=recompute,  # type: ignore[arg-type]
        attention_backend="flash" if dtype == "bfloat16" or device.type == "cpu" else "efficient",
    )
    job = replace(make_job(train), model=model)
    configure(train, device)
    layers = [
        LayerState.initial(LayerName(name), model, train, seed=7, device=device, optimizer_factory=factory_of(job))
        for name in layer_names(model)
    ]
    times = LayerTimes(layer_names(model), open_device(device, on_failure=lambda _: None))
    graph = StageGraph(layers, model, train, is_first=True, is_last=True, times=times)
    seen: list[Tensor] = []
    for batch in range(train.batches):
        for i in range(NUM_IN_FLIGHT):
            tokens = torch.randint(
                model.vocab_size, (4, length + 1), generator=torch.Generator().manual_seed(batch * 10 + i)
            )
            inputs, targets = tokens[:, :-1].contiguous().to(device), tokens[:, 1:].contiguous().to(device)
            seen.append(graph.forward((batch, i), Microbatch(inputs, targets), version=batch))
        for i in range(NUM_IN_FLIGHT):
            gradients, _ = graph.backward((batch, i), None)
            seen += [gradient.cpu() for gradient in gradients]
        graph.update(batch, [gradient.float() for gradient in gradients])
    if device.type == "cuda":
        torch.cuda.synchronize()
    times.microbatch()  # what the device has passed is taken in
    return [tensor.cpu() for tensor in seen], times


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_computed_again_give_the_same_bits_in_less_memory(card: torch.device, dtype: str) -> None:
    """Four microbatches in flight through eight blocks, with and without recomputation."""
    plain, kept = trained(card, dtype, "none")
    again, recomputed = trained(card, dtype, "block")
    for one, other in zip(plain, again, strict=True):
        assert torch.equal(one, other)
    # The second run's peak counts from what is left of the first: nothing but its results on the CPU.
    if card.type == "cuda":  # nobody counts the CPU's allocations
        assert 0 < recomputed.measured.peak_bytes < 0.7 * kept.measured.peak_bytes


def in_stages(
    device: torch.device, dtype: str, cuts: Sequence[Sequence[str]]
) -> tuple[Tensor, dict[tuple[str, str], Tensor]]:
    """The loss and the gradients of a microbatch by whole layer and parameter, through stages of these layers."""
    model, length = (MODEL, 256) if device.type == "cuda" else (SMALL, 32)
    train = TrainSpec(
        microbatch_size=4,
        sequence_length=length,
        dtype=dtype,  # type: ignore[arg-type]
        attention_backend="flash" if dtype == "bfloat16" or device.type == "cpu" else "efficient",
    )
    factory = factory_of(replace(make_job(train), model=model))
    configure(train, device)
    stages = [
        [
            LayerState.initial(LayerName(name), model, train, seed=7, device=device, optimizer_factory=factory)
            for name in names
        ]
        for names in cuts
    ]
    last = len(stages) - 1
    graphs = [StageGraph(each, model, train, is_first=k == 0, is_last=k == last) for k, each in enumerate(stages)]
    tokens = torch.randint(model.vocab_size, (4, length + 1), generator=torch.Generator().manual_seed(5)).to(device)
    hidden, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    for graph in graphs:
        hidden = graph.forward((0, 0), Microbatch(hidden, targets), version=0)
    gradient, found = None, dict[tuple[str, str], Tensor]()
    for graph, layers in zip(graphs[::-1], stages[::-1], strict=True):
        of_stage, gradient = graph.backward((0, 0), gradient)
        places = [(whole_layer(layer.name), name) for layer in layers for name in layer.weights()]
        found |= dict(zip(places, (tensor.cpu() for tensor in of_stage), strict=True))
    return hidden.cpu(), found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cut_inside_a_block_gives_the_same_bits(card: torch.device, dtype: str) -> None:
    """Whole blocks in one stage; three stages, of which the second has the MLP of a block and attention of another."""
    model = MODEL if card.type == "cuda" else SMALL
    names = layer_names(model, are_split=True)
    assert (names[4], names[7]) == ("block.1.mlp", "block.3.attention")
    loss, whole = in_stages(card, dtype, [layer_names(model)])
    other_loss, halves = in_stages(card, dtype, [names[:4], names[4:8], names[8:]])
    assert torch.equal(loss, other_loss)
    assert whole.keys() == halves.keys()
    assert all(torch.equal(tensor, halves[place]) for place, tensor in whole.items())


def test_events_time_every_kind_of_layer(card: torch.device) -> None:
    """After some batches each kind has its seconds; a block's forward is neither nothing nor a second."""
    _, times = trained(card, "bfloat16", "none")
    measured = times.measured
    assert measured.num_samples >= NUM_EARLY  # more where half a second went by
    assert set(measured.layers) == {"embed", "block", "head"}
    assert 1e-6 < measured.layers["block"].forward_s < 1.0
    assert 1e-6 < measured.layers["block"].backward_s < 1.0
