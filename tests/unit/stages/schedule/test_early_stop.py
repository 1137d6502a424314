"""Evaluations that end a job: the rule, and pipelines in which every worker stops where it says."""

from dataclasses import replace
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.stages.early_stop import EvaluationTally, StopRule, stop_lag
from headway.stages.schedule.next_op import Awaited, awaited, next_op
from headway.stages.schedule.operations import Forward
from headway.stages.schedule.schedule_state import ScheduleState
from headway.stages.schedule.stage_schedule import StageSchedule
from headway.stages.spec import TrainSpec
from tests.rigs.strategies import Case, format_grid, judged_cases, violation

TRAIN = TrainSpec(schedule="1f1b", batches=100, eval_every=10, eval_patience=3)


def end_of(losses: list[float], **changes: object) -> tuple[int, int]:
    """The last boundary and the best batch of a job whose evaluations have these losses."""
    train = replace(TRAIN, **changes)  # type: ignore[arg-type]
    rule = StopRule.of(train)
    assert rule is not None
    evaluations = [(number * train.eval_every, loss) for number, loss in enumerate(losses)]
    tally = rule.judge_all(EvaluationTally(), evaluations)
    return tally.end, tally.best_batch


@pytest.mark.parametrize(
    ("losses", "changes", "wanted"),
    [
        ([3.0, 2.0, 1.0], {}, (0, 20)),
        ([3.0, 2.0, 2.0, 2.5, 1.9, 2.0, 2.0], {}, (0, 40)),
        ([3.0, 2.0, 2.0, 2.5, 2.1], {}, (42, 10)),
        ([3.0, 2.0, 2.0, 2.5, 2.1], {"schedule": "2bw"}, (43, 10)),
        ([3.0, 2.0, 2.0, 2.5, 2.1], {"batches": 41}, (41, 10)),
        ([3.0, 2.0, 2.0, 2.5, 2.1, 1.0, 0.5], {}, (42, 10)),
        ([3.0, 3.1], {"eval_patience": 1}, (12, 0)),
        ([3.0, 2.9, 2.8, 2.7], {"eval_min_delta": 0.5}, (32, 0)),
        ([3.0, 2.9, 2.6, 2.4, 2.3, 2.2], {"eval_min_delta": 0.5}, (0, 30)),
        ([nan, inf, nan], {}, (22, 0)),
        ([nan, 5.0, nan, nan], {}, (0, 10)),
    ],
)
def test_patience_runs_out_after_failures_in_a_row(
    losses: list[float], changes: dict[str, object], wanted: tuple[int, int]
) -> None:
    """Held-out losses → where the job ends (0: not early), and the last evaluation that lowered the best one."""
    assert end_of(losses, **changes) == wanted


def test_without_patience_or_evaluations_there_is_no_rule() -> None:
    """Either key is 0 → no evaluation ends the job."""
    assert StopRule.of(replace(TRAIN, eval_patience=0)) is None
    assert StopRule.of(replace(TRAIN, eval_every=0)) is None


@given(st.lists(st.floats(), max_size=12), st.integers(0, 12))
def test_the_tally_of_a_prefix_is_enough(losses: list[float], at: int) -> None:
    """Evaluations whose rows are gone, and the rest → the same end as all of them."""
    rule = StopRule.of(TRAIN)
    assert rule is not None
    evaluations = [(10 * number, loss) for number, loss in enumerate(losses)]
    before = rule.judge_all(EvaluationTally(), evaluations[:at])
    assert rule.judge_all(before, evaluations) == rule.judge_all(EvaluationTally(), evaluations)


@settings(max_examples=300, deadline=None)
@given(case=judged_cases())
def test_every_worker_stops_where_the_evaluations_say(case: Case) -> None:
    """Random stages, replicas, times, latencies, other stops and first batches: no deadlock, and nothing is computed
    of a batch behind the end."""
    simulation = case.simulate()
    broken, cell = violation(case, simulation)
    assert not broken, f"{broken}\n{format_grid(simulation.timeline, bad=cell)}"
    assert simulation.stop <= case.end
    assert simulation.stop == case.end or case.stop is not None


@settings(max_examples=100, deadline=None)
@given(case=judged_cases())
def test_no_pipeline_waits_for_a_judgement_while_it_runs(case: Case) -> None:
    """Stages of one worker, from the first batch on, whatever the times: the same timeline as without judgements."""
    case = replace(case, jitter=0.0, stop=None, decided_at=None)
    if len(case.links) + 1 == len(case.schedules) and case.schedules[0].first_batch == 0:
        plain = replace(case, schedules=tuple(replace(each, judged_every=0) for each in case.schedules))
        assert case.simulate().timeline == plain.simulate().timeline


def test_a_batch_waits_for_the_judgement_that_could_forbid_it() -> None:
    """A run that begins at boundary 7, an evaluation with batch 5: batch 7 begins, batch 8 waits and does not come, and
    the weights of boundary 8 are evaluated."""
    train = TrainSpec(schedule="2bw", batches=20, microbatches=1, eval_every=5, eval_patience=1, clip_norm=0.0)
    state = ScheduleState(StageSchedule.of(train, stage_index=0, num_stages=2, depth=2, first_batch=7))
    assert stop_lag(train.delay) == 3
    state.forwarded(7, 0)
    assert awaited(state) is Awaited.GRADIENT
    state.gradient_arrived(7, 0)
    state.backwarded(7, 0)
    state.groups_reduced(7)
    state.clip_total_known(7)
    state.updated(7)
    assert awaited(state) is Awaited.JUDGEMENT
    assert state.expects_judgement(5)
    state.judged(5, 8)
    assert (state.is_done, next_op(state)) == (False, Forward(8, 0))
    state.forwarded(8, 0)
    assert state.is_done


def test_a_judgement_behind_which_a_stage_is_is_refused() -> None:
    """The job cannot end in the middle of what has begun, nor after its last batch."""
    train = TrainSpec(schedule="1f1b", batches=20, microbatches=1, eval_every=1, eval_patience=1, clip_norm=0.0)
    for end in (4, 21):
        state = ScheduleState(StageSchedule.of(train, stage_index=0, num_stages=1, depth=1, first_batch=5))
        with pytest.raises(ValueError, match=f"cannot end at {end}: batches below 5 have begun"):
            state.judged(4, end)
