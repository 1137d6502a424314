"""What `recompute = "block"` saves, and that what is computed twice is computed on the same weights."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from headway.daemon.jobs.job import JobSpec
from headway.daemon.plan.layer_costs import layer_costs
from headway.stages.data.microbatch import Microbatch
from headway.stages.ids import LayerName
from headway.stages.stage.graph import StageGraph
from headway.stages.state.layer_state import LayerState
from tests.rigs.middle_stage import MODEL, NUM_IN_FLIGHT, TRAIN, LiveBytes, hidden, middle_stage
from tests.rigs.pipeline import EF, factory_of, make_job


def job_with(recompute: str) -> JobSpec:
    return replace(make_job(replace(TRAIN, recompute=recompute), EF), model=MODEL)  # type: ignore[arg-type]


def measured(recompute: str) -> tuple[int, int, int]:
    """(bytes in flight after the forwards of some microbatches, peak of them and one backward, planner's estimate)"""
    job = job_with(recompute)
    graph, layers = middle_stage(job)
    inputs = [hidden(k) for k in range(NUM_IN_FLIGHT)]
    estimate = sum(cost.activation_bytes for cost in layer_costs(job)[1:-1])
    graph.forward((9, 0), Microbatch(hidden(), hidden()), version=0)
    graph.backward((9, 0), hidden())  # what is made once and kept, the rotary table, is no part of a microbatch
    weights = [tensor for layer in layers for held in layer.versions.sets for tensor in held.values()]
    with LiveBytes([*inputs, *weights]) as live:
        for k, tensor in enumerate(inputs):
            graph.forward((0, k), Microbatch(tensor, tensor), version=0)
        in_flight = live.now
        gradients = graph.backward((0, 0), hidden())
        peak = live.peak
    del gradients
    return in_flight, peak, NUM_IN_FLIGHT * estimate


def test_only_the_inputs_of_blocks_are_kept() -> None:
    """Three microbatches through four blocks → twelve inputs are alive, as the planner counts them; else far more."""
    kept, peak, estimate = measured("block")
    plain, plain_peak, plain_estimate = measured("none")
    one_hidden = hidden().nbytes
    # The first block's inputs are the caller's own; the other blocks' were made here.
    assert kept == NUM_IN_FLIGHT * (MODEL.num_hidden_layers - 1) * one_hidden
    assert kept <= estimate
    assert plain > 5 * kept
    assert plain <= plain_estimate * 1.25
    # At its peak one block of one microbatch has its graph, and that block's gradients.
    block_graph = plain / NUM_IN_FLIGHT / MODEL.num_hidden_layers
    gradients = sum(t.nbytes for layer in middle_stage(job_with("block"))[1] for t in layer.weights().values())
    assert peak < kept + 2.5 * block_graph + gradients
    assert peak < plain_peak / 2


def test_a_block_is_computed_again_on_the_weights_of_its_forward() -> None:
    """A forward on W_0, the update to W_1, then the backward → the gradients of W_0, to the bit."""
    gradients = {}
    for recompute in ("none", "block"):
        graph, _ = middle_stage(job_with(recompute))
        graph.forward((0, 0), Microbatch(hidden(0), hidden(0)), version=0)
        first, _ = graph.backward((0, 0), hidden(9))
        graph.forward((1, 0), Microbatch(hidden(1), hidden(1)), version=0)
        graph.update(0, first)
        gradients[recompute], by_input = graph.backward((1, 0), hidden(9))
        assert by_input is not None
        gradients[recompute].append(by_input)
    for one, other in zip(gradients["none"], gradients["block"], strict=True):
        assert torch.equal(one, other)


def test_a_block_is_never_computed_again_on_other_weights() -> None:
    """The weights of a forward are overwritten before its backward → refused, not computed on what is there."""
    graph, layers = middle_stage(job_with("block"))
    graph.forward((0, 0), Microbatch(hidden(0), hidden(0)), version=0)
    gradients, _ = graph.backward((0, 0), hidden(9))
    graph.forward((1, 0), Microbatch(hidden(1), hidden(1)), version=0)
    for batch in (0, 1):  # past the graph, which would refuse the second one
        numbered = iter(gradients)
        for layer in layers:
            layer.update(batch, {name: next(numbered) for name in layer.versions.sets[0]})
    with pytest.raises(AssertionError, match="W_0 is not live"):
        graph.backward((1, 0), hidden(9))


def test_each_piece_of_a_stage_differentiates_alone() -> None:
    """Stages of every cut with an embedding or a head → the outputs and gradients of the stage as one graph."""
    edges = [0, 1, 3, MODEL.num_hidden_layers + 2]
    for first, end in [*pairwise(edges), (0, edges[-1])]:
        results = []
        for recompute in ("none", "block"):
            job = job_with(recompute)
            layers = [
                LayerState.initial(
                    LayerName(name), job.model, job.train, seed=7, device="cpu", optimizer_factory=factory_of(job)
                )
                for name in job.layers[first:end]
            ]
            is_first, is_last = first == 0, end == len(job.layers)
            graph = StageGraph(layers, job.model, job.train, is_first=is_first, is_last=is_last)
            tokens = torch.arange(TRAIN.microbatch_size * TRAIN.sequence_length).view(TRAIN.microbatch_size, -1)
            output = graph.forward((0, 0), Microbatch(tokens if is_first else hidden(), tokens), version=0)
            gradients, by_input = graph.backward((0, 0), None if is_last else hidden(3))
            assert (by_input is None) == is_first
            assert graph.is_empty
            results.append([output, *gradients, *([] if by_input is None else [by_input])])
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernel", ["math", "flash"])
def test_attention_computed_again_gives_the_same_bits(dtype: str, kernel: str) -> None:
    """Outputs, the weights' gradients and the input's, of three microbatches in flight, as without recomputation."""

    def all_bits(recompute: str) -> list[Tensor]:
        job = job_with(recompute)
        train = replace(job.train, dtype=dtype, attention_backend=kernel)  # type: ignore[arg-type]
        job = replace(job, train=train)
        graph, _ = middle_stage(job)
        inputs = [hidden(k).to(getattr(torch, dtype)) for k in range(NUM_IN_FLIGHT)]
        seen = [graph.forward((0, k), Microbatch(tensor, tensor), version=0) for k, tensor in enumerate(inputs)]
        for k, tensor in enumerate(inputs):
            gradients, below = graph.backward((0, k), tensor)
            assert below is not None
            seen += [*gradients, below]
        return seen

    for one, other in zip(all_bits("none"), all_bits("attention"), strict=True):
        assert torch.equal(one, other)


def test_attention_computed_again_is_not_kept() -> None:
    """In flight: less than without, more than with whole blocks, and what the planner counts."""
    kept, peak, estimate = measured("attention")
    plain, plain_peak, _ = measured("none")
    blocks, _, _ = measured("block")
    assert blocks < kept < 0.8 * plain
    assert peak < plain_peak
    assert 0.9 * estimate <= kept <= 1.1 * estimate


def test_attention_is_never_computed_again_on_other_weights() -> None:
    """An update has overwritten the version of a microbatch in flight: its backward is refused."""
    graph, layers = middle_stage(job_with("attention"))
    graph.forward((0, 0), Microbatch(hidden(), hidden()), version=0)
    for layer in layers:
        layer.versions._held[0] = 2
    with pytest.raises(AssertionError, match="W_0 is not live"):
        graph.backward((0, 0), hidden())
