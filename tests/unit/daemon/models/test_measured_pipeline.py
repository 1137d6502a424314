"""What workers remember, put together: which batches are whole, how long one takes, who idles."""

import threading

import pytest

from headway.daemon.reports.pipeline_picture import figures, measured_pipeline
from headway.stages.schedule.operations import Backward, Forward, Op, Update
from headway.stages.schedule.simulator import StageTimes, TimedOp, simulate
from headway.stages.schedule.stage_schedule import StageSchedule
from headway.stages.telemetry.goodput import RecentOps

M = 4


def memories(*, num_batches: int = 12, num_stages: int = 3) -> dict[int, list[TimedOp]]:
    """What the workers of a simulated pipeline did: 4 microbatches of 1 + 2 s and an update of 1 s, a thousand s on."""
    schedules = [
        StageSchedule(
            delay=1,
            depth=num_stages - stage,
            num_microbatches=M,
            is_first=stage == 0,
            is_last=stage == num_stages - 1,
            num_batches=num_batches,
        )
        for stage in range(num_stages)
    ]
    run = simulate(schedules, [StageTimes(forward=1.0, backward=2.0, update=1.0)] * num_stages)
    found: dict[int, list[TimedOp]] = {stage: [] for stage in range(num_stages)}
    for done in run.timeline:
        later = TimedOp(done.stage, done.op, done.version, done.started + 1000, done.ended + 1000)
        found[done.stage].append(later)
    return {stage: sorted(ops, key=lambda op: op.started) for stage, ops in found.items()}


def test_the_newest_whole_batches_are_shown() -> None:
    """Of twelve batches the last four → they are whole on every worker, time 0 is where the first of them begins."""
    found = measured_pipeline(memories(), num_batches=4)
    assert found is not None
    assert found.last_batch - found.first_batch == 3
    assert found.step_seconds == pytest.approx(M * 3.0 + 1.0)
    assert found.window[0] == 0.0
    for stage in range(3):
        ops = [str(done.op) for done in found.timeline if done.stage == stage]
        for batch in range(found.first_batch, found.last_batch + 1):
            assert {f"F{batch}.{i}" for i in range(M)} | {f"B{batch}.{i}" for i in range(M)} | {f"U{batch}"} <= {*ops}
    times = figures(found.timeline, 0, found.window)
    assert (times.forward_s, times.backward_s, times.update_s) == pytest.approx((1.0, 2.0, 1.0))
    assert 0.0 <= times.idle < 0.2


def test_batches_that_one_worker_has_forgotten_are_not_shown() -> None:
    """One memory begins in the middle of batch 5, another was told before batch 9 was over: of 6 to 8."""
    told = memories()
    cut = next(k for k, done in enumerate(told[1]) if done.op == Backward(5, 1))
    told[1] = told[1][cut:]
    last = next(k for k, done in enumerate(told[2]) if done.op == Backward(9, 0))
    told[2] = told[2][: last + 1]
    found = measured_pipeline(told, num_batches=20)
    assert found is not None
    shown = range(found.first_batch, found.last_batch + 1)
    assert 6 <= shown[0] <= shown[-1] <= 8
    for done in (done for ops in told.values() for done in ops if done.op.batch in shown):
        assert done.started >= told[1][0].started, "nobody knows what worker 1 did then"
        assert done.ended <= told[2][-1].ended, "worker 2 was not asked later"


def test_before_the_first_whole_batch_there_is_nothing() -> None:
    """The last stage has only begun → None."""
    told = memories()
    told[2] = told[2][:2]
    assert measured_pipeline(told, num_batches=20) is None


def test_the_memory_keeps_the_newest() -> None:
    """Ten operations into room for four → the last four in order; all ten are counted."""
    recent = RecentOps(num_kept=4)
    for batch in range(10):
        recent.record(Update(batch), batch, float(batch), batch + 0.5)
    assert recent.newest == [(Update(batch), batch, float(batch), batch + 0.5) for batch in (6, 7, 8, 9)]
    assert recent.num_recorded == 10


def test_the_typical_operation_is_the_median_of_the_newest() -> None:
    """100 slow forwards, then 63 quick ones and a very slow update → quick; of updates alone, slow; of none, 0."""
    recent = RecentOps(num_kept=128)
    assert recent.typical_s() == 0.0
    ops: list[tuple[Op, float]] = [(Forward(0, i), 1.0) for i in range(100)]
    ops += [(Forward(1, i), 0.01) for i in range(63)]
    for op, seconds in [*ops, (Update(0), 9.0)]:
        recent.record(op, 0, 0.0, seconds)
    assert recent.typical_s() == 0.01
    assert recent.typical_s(Forward) == 0.01
    assert recent.typical_s(Update) == 9.0
    assert recent.typical_s(Backward) == 0.0


def test_a_reader_never_sees_half_an_operation() -> None:
    """A thread records until somebody has read fifty states: each record belongs together, and all in order."""
    recent, is_over = RecentOps(num_kept=64), threading.Event()

    def compute() -> None:
        batch = 0
        while not is_over.is_set():
            recent.record(Forward(batch, batch), batch, batch, batch)
            batch += 1

    thread = threading.Thread(target=compute)
    thread.start()
    num_read, newest = 0, -1.0
    while num_read < 50:
        records = recent.newest
        if not records or records[-1][2] == newest:
            continue
        num_read, newest = num_read + 1, records[-1][2]
        assert all(op == Forward(version, version) and version == started for op, version, started, _ in records)
        assert [record[2] for record in records] == sorted(record[2] for record in records)
    is_over.set()
    thread.join()
