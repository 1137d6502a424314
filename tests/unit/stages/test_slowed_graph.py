"""A stage that is slowed for a test computes the same, and takes as many times as long."""

from time import perf_counter, thread_time

import torch
from torch import Tensor

from headway.stages.slowed_graph import Pace, SlowedGraph
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


def test_what_an_operation_loses_to_other_processes_is_not_multiplied() -> None:
    """Operations of a second at a third of the speed, and one that took two: each ends after three. One that takes
    four has no rest, and once all take two, each ends after six."""
    pace = Pace(3.0)
    assert [taken_s + pace.rest_s(taken_s) for taken_s in (1.0, 1.0, 1.0, 2.0, 4.0, 1.0)] == [3, 3, 3, 3, 4, 3]
    assert [2.0 + pace.rest_s(2.0) for _ in range(16)][-1] == 6.0
