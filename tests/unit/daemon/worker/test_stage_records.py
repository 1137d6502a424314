"""Who hears of the moments of a worker's run."""

import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import pytest
import torch
from torch import Tensor

from headway.daemon.base.fault_points import PACE, FaultPoints
from headway.daemon.worker import stage_records
from headway.daemon.worker.stage_records import PacedGraph, RunObserver
from headway.stages.device.cpu import CpuDevice
from headway.stages.ids import Batch, Generation
from headway.stages.schedule.operations import Backward, Forward, Op, Update
from headway.stages.spec import TrainSpec
from headway.stages.stage.graph import StageGraph
from headway.stages.state.journal import JournalRow
from headway.stages.telemetry.goodput import IDLE, REPLAY, SNAPSHOT, USEFUL, Goodput, RecentOps
from headway.stages.telemetry.history import HistoryFile
from headway.stages.telemetry.layer_times import LayerTimes
from tests.rigs.pipeline import MODEL, TRAIN, CountingTokens, initial_layers, make_job


def test_every_listener_gets_each_moment_of_a_run(tmp_path: Path) -> None:
    """Three operations, a wait and a batch → goodput, memory, history, test and daemon know what is theirs."""
    goodput, recent, history = Goodput(now=0.0), RecentOps(), HistoryFile(tmp_path, "a")
    goodput.begin_generation(furthest=1)
    struck: list[Op] = []
    rows: list[JournalRow] = []
    observer = RunObserver(goodput, recent, history=history, on_operation=struck.append, on_batch=rows.append)
    ops: list[Op] = [Forward(0, 0), Backward(0, 0), Update(0)]
    for number, op in enumerate(ops):
        began = 1.0 + 10 * number
        observer.begins(op, began)
        assert observer.running is type(op)
        assert observer.expected_s == 0.0, "none of the kind was done"
        observer.ended(op, version=0, num_versions_live=1, started=began, ended=began + 1.0 + number)
    assert observer.running is None
    assert observer.expected_s == 2.0
    observer.waits(SNAPSHOT, 25.0)
    observer.begins(Forward(1, 0), 26.0)
    assert observer.expected_s == 1.0
    row = JournalRow(batch=Batch(0), microbatch_losses=(1.0,), tokens=1, seconds=0.0, generation=Generation(1))
    observer.batch_done(row)
    history.close()
    assert goodput.seconds(27.0) == {IDLE: 1.0, REPLAY: 24.0, SNAPSHOT: 1.0, USEFUL: 1.0}
    assert goodput.num_replayed == 1
    assert [op for op, _, _, _ in recent.newest] == struck == ops
    lines = [json.loads(line) for path in tmp_path.iterdir() for line in path.read_text().splitlines()]
    assert [(line["op"], line["ended"]) for line in lines] == [("forward", 2.0), ("backward", 13.0), ("update", 24.0)]
    assert rows == [row]


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
