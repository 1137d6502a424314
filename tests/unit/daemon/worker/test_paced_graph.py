"""A stage whose layers take a set time computes the same,."""

from collections.abc import Callable
from time import perf_counter

import pytest
import torch
from torch import Tensor

from headway.daemon.fault_points import PACE, FaultPoints
from headway.daemon.worker import stage_records
from headway.daemon.worker.stage_records import PacedGraph
from headway.stages.device.cpu import CpuDevice
from headway.stages.spec import TrainSpec
from headway.stages.stage.graph import StageGraph
from headway.stages.telemetry.layer_times import LayerTimes
from tests.unit.stages.stage.pipeline import MODEL, TRAIN, CountingTokens, initial_layers, make_job

FORWARD_S, BACKWARD_S = 0.02, 0.04


@pytest.fixture
def rest(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[float], None]]:
    """The actions that a paced graph registers."""
    points = FaultPoints()
    monkeypatch.setattr(stage_records, "register_action", points.actions.__setitem__)
    return points.actions


def one_batch(graph: StageGraph) -> list[Tensor]:
    """Output and gradients of a forward and a backward, with an update after."""
    rows = CountingTokens().microbatch(TRAIN, seed=1, batch=0, microbatch=0)
    output = graph.forward((0, 0), rows, version=0)
    gradients, _ = graph.backward((0, 0), None)
    kept = [output, *(gradient.clone() for gradient in gradients)]
    graph.update(0, gradients)
    return kept


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_a_paced_stage_computes_the_same_and_takes_its_time(
    recompute: str, rest: dict[str, Callable[[float], None]]
) -> None:
    """Equal bits. Each layer is measured at its pace, and the batch takes the sum of them."""
    job, seen = make_job(), list[tuple[str, str]]()
    train = TrainSpec(**{**{name: getattr(TRAIN, name) for name in TRAIN.__dataclass_fields__}, "recompute": recompute})
    times = LayerTimes(job.layers, CpuDevice())

    def on_layer(op: str, layer: str) -> None:
        seen.append((op, layer))
        rest[PACE](FORWARD_S if op == "forward" else BACKWARD_S)

    def build(make: Callable[..., StageGraph], **more: object) -> StageGraph:
        return make([*initial_layers(job).values()], MODEL, train, is_first=True, is_last=True, **more)

    expected = one_batch(build(StageGraph))
    paced = build(PacedGraph, on_layer=on_layer, times=times)
    began = perf_counter()
    kept = one_batch(paced)
    assert perf_counter() - began >= len(job.layers) * (FORWARD_S + BACKWARD_S)
    assert all(torch.equal(one, other) for one, other in zip(expected, kept, strict=True))
    assert [layer for op, layer in seen if op == "backward"] == [*reversed(job.layers)]
    assert [layer for op, layer in seen if op == "forward"][: len(job.layers)] == [*job.layers]
