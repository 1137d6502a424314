"""Where a worker's seconds go: each of them into exactly one class."""

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.stages.ids import LayerName
from headway.stages.spec import ScheduleName
from headway.stages.state.journal import Journal
from headway.stages.state.snapshot_writer import Snapshot
from headway.stages.telemetry.goodput import (
    BUBBLE,
    IDLE,
    RECOVERY,
    REPLAN,
    REPLAY,
    SNAPSHOT,
    USEFUL,
    Goodput,
    waiting_for,
)
from tests.rigs.pipeline import EF, Pipeline, SnapshotPlan, initial_layers, make_job, timed, with_train


def test_a_day_of_a_worker() -> None:
    """Idle, computing, waiting, a rollback with replay, a planned change → each class has its seconds."""
    goodput = Goodput(now=0.0)
    goodput.operates(0, 1.0)
    goodput.operates(0, 2.0)
    goodput.waits(waiting_for("stage 1 at host:7"), 3.0)
    goodput.operates(1, 5.0)
    goodput.waits(waiting_for("stage 1 at host:9"), 6.0)  # stage 1 has died
    goodput.recovers(9.0)
    goodput.begin_generation(furthest=2)
    goodput.operates(1, 10.0)
    goodput.updated(1)
    goodput.operates(2, 12.0)
    goodput.updated(2)
    goodput.waits(SNAPSHOT, 13.0)
    goodput.operates(3, 13.5)
    goodput.waits(REPLAN, 14.0)
    assert goodput.seconds(15.0) == {
        IDLE: 1.0,
        USEFUL: 2.0 + 1.0 + 1.0 + 0.5,
        "waiting:stage 1": 2.0,
        RECOVERY: 3.0 + 1.0,
        REPLAY: 2.0,
        SNAPSHOT: 0.5,
        REPLAN: 1.0,
    }
    assert goodput.num_replayed == 1


steps = st.lists(
    st.tuples(st.sampled_from(["operate", "wait", "recover", "replan"]), st.floats(0.0, 10.0), st.integers(0, 5))
)


@given(steps=steps)
def test_no_second_is_lost_or_counted_twice(steps: list[tuple[str, float, int]]) -> None:
    """Any order of operations, waits, rollbacks and changes → the classes add up to the time that has passed."""
    goodput, now = Goodput(now=0.0), 0.0
    for what, seconds, number in steps:
        now += seconds
        match what:
            case "operate":
                goodput.operates(number, now)
            case "wait":
                goodput.waits(waiting_for(f"stage {number}"), now)
            case "recover":
                goodput.recovers(now)
                goodput.begin_generation(furthest=number)
            case _:
                goodput.waits(REPLAN, now)
        assert sum(goodput.seconds(now + 1.0).values()) == pytest.approx(now + 1.0)
        assert all(spent >= 0.0 for spent in goodput.seconds(now).values())


def test_the_last_planned_change_is_timed_to_the_next_operation() -> None:
    """From the boundary, over the wait for the neighbours, to the first operation; the first start is none."""
    goodput = Goodput(now=0.0)
    goodput.waits(REPLAN, 1.0)
    goodput.operates(0, 5.0)
    assert goodput.replan_s == 0.0
    goodput.waits(REPLAN, 6.0)
    goodput.waits(waiting_for("stage 1"), 7.0)
    assert goodput.replan_s == 0.0
    goodput.operates(1, 8.5)
    assert goodput.replan_s == 2.5
    goodput.waits(REPLAN, 9.0)
    goodput.recovers(9.5)
    goodput.operates(1, 11.0)
    assert goodput.replan_s == 2.5, "that was a recovery"


@pytest.mark.parametrize("schedule", ["gpipe", "2bw"])
def test_the_classes_of_a_real_run_add_up(tmp_path: Path, schedule: ScheduleName) -> None:
    """Two stages with a slow writer: the sum is the wall time; bubbles only where the delay is 0."""
    job = make_job(with_train(schedule=schedule, batches=6), EF)

    def hold(_snapshot: Snapshot, _layer: LayerName) -> None:
        until = time.monotonic() + 20
        while not held and any(each.waiting_for != "the snapshot writer" for each in pipeline.loops):
            assert time.monotonic() < until, "not all stages wait for the writer"
            time.sleep(0.001)
        held.append(True)

    held: list[bool] = []
    plan = SnapshotPlan(tmp_path, every=3, on_file=hold)
    began = time.perf_counter()
    goodputs = [Goodput(now=began), Goodput(now=began)]
    pipeline = Pipeline(
        job, initial_layers(job), Journal(), num_stages=2, snapshots=plan, observers=[*map(timed, goodputs)]
    )
    pipeline.run()
    ended = time.perf_counter()
    for goodput in goodputs:
        seconds = goodput.seconds(ended)
        assert sum(seconds.values()) == pytest.approx(ended - began)
        assert seconds[SNAPSHOT] > 0.0
        assert (BUBBLE in seconds) == (schedule == "gpipe")
    assert goodputs[0].seconds(ended).keys() >= {USEFUL, SNAPSHOT}
