"""The rule that says what a stage does next, case by case."""

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.stages.schedule.next_op import WAIT, Awaited, awaited, next_op
from headway.stages.schedule.operations import Backward, Forward, Op, Update
from headway.stages.schedule.schedule_state import ScheduleState
from headway.stages.schedule.stage_schedule import StageSchedule, depths_with_slack, schedule_depth
from headway.stages.spec import ScheduleName, TrainSpec

MIDDLE = StageSchedule(delay=1, depth=2, num_microbatches=2, is_first=False, is_last=False, num_batches=3)
LAST = replace(MIDDLE, depth=1, is_last=True)
FIRST = replace(MIDDLE, is_first=True)
ALONE = replace(LAST, is_first=True)


def do(state: ScheduleState, op: Op) -> None:
    """Do what next_op says, which must be `op`."""
    assert next_op(state) == op
    match op:
        case Forward(batch, microbatch):
            state.forwarded(batch, microbatch)
        case Backward(batch, microbatch):
            if state.backwarded(batch, microbatch):
                state.groups_reduced(batch)
                if not state.schedule.has_clip:
                    state.clip_total_known(batch)
        case Update(batch):
            state.updated(batch)


def run_text(state: ScheduleState) -> str:
    """Everything that a stage which waits for nobody does."""
    ops = []
    while (op := next_op(state)) is not WAIT:
        do(state, op)
        ops.append(str(op))
    return " ".join(ops)


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        ("gpipe", "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2 U0 F1.0 F1.1 F1.2 B1.0 B1.1 B1.2 U1"),
        ("1f1b", "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 U0 F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 U1"),
        ("2bw", "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 U0 U1"),
    ],
)
def test_one_stage_alone_runs_in_the_order_of_its_schedule(schedule: ScheduleName, wanted: str) -> None:
    """Two batches of three microbatches on one stage → the whole order of operations, written out."""
    state = ScheduleState(
        StageSchedule(
            delay=1 if schedule == "2bw" else 0,
            depth=schedule_depth(schedule, 3, 1, 0),
            warmup=3 if schedule == "gpipe" else 1,
            num_microbatches=3,
            is_first=True,
            is_last=True,
            num_batches=2,
        )
    )
    assert run_text(state) == wanted
    assert state.is_done
    assert state.is_empty


def test_after_a_forward_it_is_a_backwards_turn() -> None:
    """A gradient and an activation are both there, and the last operation was a forward → the backward."""
    state = ScheduleState(MIDDLE)
    state.input_arrived(0, 0)
    do(state, Forward(0, 0))
    state.input_arrived(0, 1)
    state.gradient_arrived(0, 0)
    assert next_op(state) == Backward(0, 0)


def test_after_a_backward_it_is_a_forwards_turn() -> None:
    """Both are there, and the last operation was a backward → the forward, so that the stage below does not starve."""
    state = ScheduleState(replace(MIDDLE, depth=4, num_microbatches=4))
    for microbatch in (0, 1, 2):
        state.input_arrived(0, microbatch)
    do(state, Forward(0, 0))
    do(state, Forward(0, 1))
    state.gradient_arrived(0, 0)
    state.gradient_arrived(0, 1)
    do(state, Backward(0, 0))
    do(state, Forward(0, 2))
    do(state, Backward(0, 1))


def test_what_arrives_early_waits_for_its_turn() -> None:
    """Microbatch 1 is there before microbatch 0 → the stage waits for 0."""
    state = ScheduleState(MIDDLE)
    state.input_arrived(0, 1)
    assert next_op(state) is WAIT
    assert awaited(state) is Awaited.INPUT
    state.input_arrived(0, 0)
    assert next_op(state) == Forward(0, 0)


def test_groups_keep_their_order_but_do_not_wait_for_each_other() -> None:
    """With two reduction groups, microbatch 1 may go before microbatch 0; microbatch 3 may not go before 1."""
    state = ScheduleState(replace(MIDDLE, depth=4, num_microbatches=4, num_groups=2))
    state.input_arrived(0, 3)
    assert next_op(state) is WAIT
    state.input_arrived(0, 1)
    do(state, Forward(0, 1))
    do(state, Forward(0, 3))
    state.input_arrived(0, 0)
    do(state, Forward(0, 0))


def test_a_replica_computes_only_the_groups_it_holds() -> None:
    """Groups 0 and 2 of three, six microbatches → 0, 2, 3, 5, and nobody else's are expected."""
    state = ScheduleState(replace(ALONE, num_microbatches=6, num_groups=3, groups=(0, 2), num_batches=1))
    assert run_text(state) == "F0.0 B0.0 F0.2 B0.2 F0.3 B0.3 F0.5 B0.5 U0"
    assert not ScheduleState(replace(MIDDLE, num_microbatches=6, num_groups=3, groups=(0, 2))).expects_input(0, 1)


def test_depth_limits_what_is_in_flight() -> None:
    """Depth 2 and no gradient → a third forward waits for one."""
    state = ScheduleState(FIRST)
    do(state, Forward(0, 0))
    do(state, Forward(0, 1))
    assert next_op(state) is WAIT
    assert awaited(state) is Awaited.GRADIENT


def test_a_forward_waits_for_its_weight_version() -> None:
    """Delay 1: batch 2 needs W_1, so update(0) must be applied first; it is, as soon as nothing else can run."""
    state = ScheduleState(replace(ALONE, has_clip=True))
    for batch in (0, 1):
        for i in (0, 1):
            do(state, Forward(batch, i))
            do(state, Backward(batch, i))
    assert next_op(state) is WAIT
    assert awaited(state) is Awaited.CLIP_TOTAL
    state.clip_total_known(0)
    do(state, Update(0))
    assert next_op(state) == Forward(2, 0)
    assert state.num_versions_live == 1


def test_an_update_waits_for_the_groups_of_other_replicas() -> None:
    """The last backward is done but the sums are not added up → no update yet."""
    state = ScheduleState(replace(ALONE, num_batches=1))
    for i in (0, 1):
        state.forwarded(0, i)
        state.backwarded(0, i)
    assert next_op(state) is WAIT
    assert awaited(state) is Awaited.REDUCTION
    state.groups_reduced(0)
    assert next_op(state) == Update(0)


def test_a_stop_finishes_the_batch_that_has_begun() -> None:
    """The first stage has begun batch 1 when it is asked → it ends at boundary 2, again and again."""
    state = ScheduleState(ALONE)
    for op in (Forward(0, 0), Backward(0, 0), Forward(0, 1), Backward(0, 1), Forward(1, 0)):
        do(state, op)
    assert state.choose_stop() == 2
    assert run_text(state) == "B1.0 F1.1 B1.1 U0 U1"
    assert state.is_done
    assert state.choose_stop() == 2


def test_a_stop_between_batches_begins_no_other() -> None:
    """Nothing of batch 1 has begun → boundary 1; nothing at all → boundary 0, reached at once."""
    state = ScheduleState(ALONE)
    assert ScheduleState(ALONE).choose_stop() == 0
    for op in (Forward(0, 0), Backward(0, 0), Forward(0, 1), Backward(0, 1)):
        do(state, op)
    assert state.choose_stop() == 1
    assert run_text(state) == "U0"
    assert state.is_done


def test_a_stop_below_what_has_begun_is_refused() -> None:
    """An activation of batch 1 has arrived → boundary 1 is past, and so is one beyond the job's end."""
    state = ScheduleState(MIDDLE)
    state.input_arrived(1, 0)
    for boundary in (1, 4):
        with pytest.raises(ValueError, match="cannot stop"):
            state.stop_at(boundary)
    state.stop_at(2)
    assert not state.expects_input(2, 0)


@pytest.mark.parametrize(
    ("schedule", "k", "wanted"),
    [
        ("1f1b", 0, [0, 1, 2, 3, 4, 5]),
        ("2bw", 0, [0, 0, 1, 2, 3, 4]),
        ("2bw", 1, [0, 1, 1, 2, 3, 4]),
        ("2bw", 3, [0, 1, 2, 3, 3, 4]),
        ("2bw", 6, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_the_version_of_each_batch(schedule: ScheduleName, k: int, wanted: list[int]) -> None:
    """k batches on their own version, then one twice, then each one version late. Whoever has done the backwards below
    b knows which batch is the newest that anybody can have begun: the last one whose version needs no more."""
    train = TrainSpec(schedule=schedule, sync_batches=k, batches=6)
    assert [train.weight_version(b) for b in range(6)] == wanted
    state = ScheduleState(StageSchedule.of(train, stage_index=0, num_stages=2, depth=2))
    for done in range(5):
        state.backwards.batch = done
        assert state.newest_elsewhere == max(b for b in range(6) if wanted[b] <= done)


def test_a_batch_without_delay_waits_for_the_update_of_the_last_one() -> None:
    """Two of four batches without delay on one stage → the whole order: U0 and U1 come before the next forward."""
    state = ScheduleState(replace(ALONE, sync_batches=2, num_batches=4))
    assert run_text(state) == (
        "F0.0 B0.0 F0.1 B0.1 U0 F1.0 B1.0 F1.1 B1.1 U1 F2.0 B2.0 F2.1 B2.1 F3.0 B3.0 F3.1 B3.1 U2 U3"
    )


def test_at_the_seam_no_input_is_expected_of_a_batch_that_nobody_can_have_begun() -> None:
    """Two batches without delay: batch 1 is no news before the backwards of batch 0, and batch 3 none before those of
    batch 1. From then on a neighbour may be a batch ahead."""
    state = ScheduleState(replace(LAST, delay=1, sync_batches=2, num_batches=6))
    for batch, newest in ((0, 0), (1, 1), (2, 3), (3, 4)):
        assert state.expects_input(newest, 0)
        assert not state.expects_input(newest + 1, 0)
        for microbatch in (0, 1):
            state.input_arrived(batch, microbatch)
            do(state, Forward(batch, microbatch))
            do(state, Backward(batch, microbatch))
        while state.version <= batch:
            do(state, Update(state.version))


@pytest.mark.parametrize("delay", [0, 1])
def test_no_input_is_expected_of_a_batch_that_nobody_can_have_begun(delay: int) -> None:
    """Batch b begins upstream once this stage's backwards of batch b − 1 − d are done: what is sent from further ahead
    is refused, so that a neighbour cannot fill the memory with what it says is yet to come."""
    state = ScheduleState(replace(LAST, delay=delay, num_batches=4))
    assert state.expects_input(delay, 0)
    assert not state.expects_input(delay + 1, 0)
    for microbatch in (0, 1):
        state.input_arrived(0, microbatch)
        do(state, Forward(0, microbatch))
        assert not state.expects_input(delay + 1, 0)
        do(state, Backward(0, microbatch))
    assert state.expects_input(delay + 1, 0)
    assert not state.expects_input(delay + 2, 0)


def test_only_what_is_due_is_expected() -> None:
    """Second activations, activations of done microbatches and gradients without a forward are none of the plan."""
    state = ScheduleState(MIDDLE)
    assert not state.expects_gradient(0, 0)
    state.input_arrived(0, 0)
    assert not state.expects_input(0, 0)
    do(state, Forward(0, 0))
    assert not state.expects_input(0, 0)
    assert not state.expects_input(0, 2)
    assert state.expects_gradient(0, 0)
    state.gradient_arrived(0, 0)
    assert not state.expects_gradient(0, 0)
    do(state, Backward(0, 0))
    assert not state.expects_gradient(0, 0)


def test_depths_are_those_of_the_design() -> None:
    """gpipe: m; 1f1b: what lies downstream, at most m; 2bw: also the round trips, at most two batches."""
    assert [schedule_depth("gpipe", 8, 4, s) for s in range(4)] == [8, 8, 8, 8]
    assert [schedule_depth("1f1b", 3, 4, s) for s in range(4)] == [3, 3, 2, 1]
    assert [schedule_depth("2bw", 3, 8, s) for s in range(8)] == [6, 6, 6, 5, 4, 3, 2, 1]
    assert schedule_depth("2bw", 8, 4, 1, 2.25) == 6


def test_slack_is_one_more_for_each_stage_from_here_on() -> None:
    """p − s more on stage s of 2bw, as far as m leaves room; nothing on the last stage, and nothing where m is below
    what the first stage needs."""
    assert depths_with_slack("2bw", [4, 3, 2, 1], 16) == [8, 6, 4, 1]
    assert depths_with_slack("2bw", [4, 3, 2, 1], 5) == [6, 5, 4, 1]
    assert depths_with_slack("2bw", [4, 3, 2, 1], 4) == [5, 4, 3, 1]
    assert depths_with_slack("2bw", [4, 3, 2, 1], 3) == [4, 3, 2, 1]
    assert depths_with_slack("2bw", [9, 8, 2, 1], 10) == [11, 10, 4, 1]
    assert depths_with_slack("2bw", [2, 1], 2) == [3, 1]
    assert depths_with_slack("2bw", [1], 8) == [1]
    assert depths_with_slack("2bw", [9, 5, 4, 1], 32, [2, 1, 3, 2]) == [17, 11, 9, 1]
    assert depths_with_slack("2bw", [9, 5, 4, 1], 12, [2, 1, 3, 2]) == [13, 9, 8, 1]
    assert depths_with_slack("1f1b", [4, 3, 2, 1], 16) == [4, 3, 2, 1]
    assert depths_with_slack("gpipe", [8, 8], 8) == [8, 8]


@given(m=st.integers(1, 40), p=st.integers(1, 20), trips=st.floats(0, 50))
def test_no_depth_is_beyond_two_batches(m: int, p: int, trips: float) -> None:
    """Slack never takes a stage above m + 1, nor below what it needs."""
    needed = [schedule_depth("2bw", m, p, s, trips) for s in range(p)]
    depths = depths_with_slack("2bw", needed, m)
    assert all(need <= depth <= max(need, m + 1) <= 2 * m for need, depth in zip(needed, depths, strict=True))


def test_asking_is_cheap() -> None:
    """A whole run of next_op and its bookkeeping costs microseconds a call, at any scale of the machine's noise."""
    state = ScheduleState(replace(ALONE, num_microbatches=100, num_batches=20))
    started = time.process_time()
    num_ops = len(run_text(state).split())
    assert num_ops == 20 * 201
    assert (time.process_time() - started) / num_ops < 100e-6


def test_a_snapshot_holds_the_update_and_nothing_else() -> None:
    """A stage alone whose boundary 1 is being read: it computes batches 1 and 2, waits, and goes on when it is let."""
    state = ScheduleState(replace(ALONE, num_microbatches=1, num_batches=4))
    for op in (Forward(0, 0), Backward(0, 0), Forward(1, 0), Backward(1, 0), Update(0)):
        do(state, op)
    state.updates_held = True
    assert run_text(state) == "F2.0 B2.0"
    assert awaited(state) is Awaited.SNAPSHOT
    state.updates_held = False
    assert run_text(state) == "U1 F3.0 B3.0 U2 U3"
    assert state.is_done
