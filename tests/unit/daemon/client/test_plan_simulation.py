"""A plan on paper: the simulator's step time beside the planner's, who idles, and the trace of it."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from headway.daemon.client.plan_simulation import MOST_BATCHES, forecast
from headway.daemon.client.preview import equal_nodes, preview, worker_labels
from headway.daemon.cluster.records import NodeRecord
from headway.daemon.jobs.job import JobSection, JobSpec, PlacementSpec
from headway.daemon.plan.planner import ClusterPlan, make_plan
from headway.daemon.reports.pipeline_picture import Panel, trace_document
from headway.stages.spec import ModelSpec, TrainSpec

MODEL = ModelSpec(num_hidden_layers=16, vocab_size=256)


def job(**train: object) -> JobSpec:
    fields: dict[str, object] = {"microbatches": 16, "clip_norm": 0.0} | train
    return JobSpec(job=JobSection(name="paper"), model=MODEL, train=TrainSpec(**fields))  # type: ignore[arg-type]


def planned(spec: JobSpec, nodes: tuple[NodeRecord, ...]) -> ClusterPlan:
    plan = make_plan(spec, nodes)
    assert isinstance(plan, ClusterPlan)
    return plan


def test_without_a_bubble_the_simulation_agrees_with_the_prediction() -> None:
    """2bw on four equal nodes → within 3 % of the predicted step; the slowest stage has next to nothing to wait for."""
    spec, nodes = job(), equal_nodes(4)
    plan = planned(spec, nodes)
    run = forecast(spec, plan.workers, nodes)
    assert run == forecast(job(sync_batches=100), plan.workers, nodes), "what is shown is the steady phase"
    assert run.num_batches == MOST_BATCHES
    assert run.step_seconds == pytest.approx(plan.predicted_batch_seconds, rel=0.03)
    assert len(run.bubbles) == len(plan.workers) == 4
    assert run.bubbles[plan.bottleneck] < 0.03
    assert all(peak <= stage.depth for peak, stage in zip(run.peaks, plan.workers, strict=True))


def test_without_delay_every_stage_waits() -> None:
    """1f1b on four nodes with m = 8 → each stage idles for about (p − 1) / (m + p − 1) of the time, 2bw's does not."""
    nodes = equal_nodes(4)
    spec = job(schedule="1f1b", microbatches=8)
    run = forecast(spec, planned(spec, nodes).workers, nodes)
    assert min(run.bubbles) > 0.15
    fast = job(microbatches=8)
    assert forecast(fast, planned(fast, nodes).workers, nodes).step_seconds < run.step_seconds


@pytest.mark.parametrize("m", [1, 4, 16])
def test_a_batch_without_delay_takes_what_one_of_1f1b_takes(m: int) -> None:
    """2bw on four nodes, also with one microbatch → what is predicted of its first batches is the simulated step of
    1f1b. `plan` tells it, and the seconds of all epochs have it."""
    nodes = equal_nodes(4)
    spec, plain = job(microbatches=m, sync_batches=3), job(microbatches=m, schedule="1f1b")
    drained_s = planned(spec, nodes).distance.drained_batch_s
    assert drained_s == pytest.approx(forecast(plain, planned(plain, nodes).workers, nodes).step_seconds, rel=0.05)
    told = replace(preview(spec, nodes)[0], epochs=2, batches=10)
    all_s = 3 * drained_s + 7 * told.plan.predicted_batch_seconds
    assert f"Without delay at first: 3 batches, {drained_s:.3g} s each as predicted." in told.lines
    assert any(line.endswith(f" 10 batches, {all_s:.3g} s as predicted.") for line in told.lines)


def test_a_stage_that_is_shared_takes_its_share_of_the_time() -> None:
    """Two replicas of every stage → half of one's microbatches each, and the whole update; a row for each worker."""
    spec = job(reduction_groups=2)
    alone = replace(spec, placement=PlacementSpec(replicas=(1, 1)))
    shared = replace(spec, placement=PlacementSpec(replicas=(2, 2)))
    nodes = equal_nodes(4)
    one = forecast(alone, planned(alone, nodes).workers, nodes)
    two = forecast(shared, planned(shared, nodes).workers, nodes)
    assert (len(one.bubbles), len(two.bubbles)) == (2, 4)
    plan = planned(shared, nodes)
    names = worker_labels(plan.workers)
    assert [name.split()[0] for name in names] == ["0", "0", "1", "1"]
    assert two.step_seconds == pytest.approx(plan.predicted_batch_seconds, rel=0.05)
    assert two.step_seconds < 0.6 * one.step_seconds


def test_a_trace_has_every_operation_once_in_its_row() -> None:
    """Chrome's form: rows with names, complete events in microseconds that never overlap in a row."""
    spec, nodes = job(), equal_nodes(3)
    told, run = preview(spec, nodes, is_simulated=True)
    assert run is not None
    assert told.simulation is not None
    panel = Panel(timeline=run.timeline, window=run.shown, title="", x_label="")
    trace = trace_document([panel], ["0 node-1", "1 node-2", "2 node-3"])
    events = trace["traceEvents"]
    assert isinstance(events, list)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "0 node-1", 1: "1 node-2", 2: "2 node-3"}
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"]].append(event)
    m, batches = spec.train.microbatches, run.num_batches
    for row in rows.values():
        assert len(row) == batches * (2 * m + 1) == len({event["name"] for event in row})
        for one, other in pairwise(row):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-3
    last = max(event["ts"] + event["dur"] for event in rows[0])
    assert last == pytest.approx(1e6 * max(done.ended for done in run.timeline if done.stage == 0))


def test_a_picture_shows_some_batches_of_the_full_pipe() -> None:
    """Not the first batches, in which the pipe fills, and not more than can be seen."""
    spec, nodes = job(), equal_nodes(2)
    run = forecast(spec, planned(spec, nodes).workers, nodes)
    begin, end = run.shown
    assert begin >= 2 * run.step_seconds
    assert 2 * run.step_seconds < end - begin < 4 * run.step_seconds
