"""A stage that is slowed for a test computes the same, and takes as many times as long."""

from time import perf_counter, thread_time

import torch
from torch import Tensor

from headway.stages.slowed_graph import SlowedGraph
from headway.stages.stage_graph import StageGraph
from tests.unit.stages.pipeline import MODEL, TRAIN, CountingTokens, initial_layers, make_job

SLOWDOWN = 20.0


def one_batch(graph: StageGraph) -> tuple[list[Tensor], float, float]:
    """Output and gradients of a forward and a backward, with an update after; wall and processor seconds of it."""
    inputs, targets = CountingTokens().microbatch(
        seed=1, batch=0, microbatch=0, size=TRAIN.microbatch_size, length=TRAIN.sequence_length
    )
    wall, processor = perf_counter(), thread_time()
    output = graph.forward((0, 0), inputs, targets, version=0)
    gradients, _ = graph.backward((0, 0), None)
    kept = [output, *(gradient.clone() for gradient in gradients)]
    graph.update(0, gradients)
    return kept, perf_counter() - wall, thread_time() - processor


def test_a_slowed_stage_computes_the_same_and_takes_longer() -> None:
    """One batch on either: equal bits, and the slowed one has slept for what it has not computed."""
    job, cpu = make_job(), torch.device("cpu")
    plain = StageGraph([*initial_layers(job).values()], MODEL, TRAIN, is_first=True, is_last=True)
    layers = [*initial_layers(job).values()]
    slowed = SlowedGraph(layers, MODEL, TRAIN, is_first=True, is_last=True, slowdown=SLOWDOWN, device=cpu)
    expected, _, _ = one_batch(plain)
    kept, wall_s, processor_s = one_batch(slowed)
    assert all(torch.equal(one, other) for one, other in zip(expected, kept, strict=True))
    assert wall_s >= processor_s * SLOWDOWN * 0.8
