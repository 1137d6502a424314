"""The cells of the bench of seconds to equal loss, and its trainings."""

import pytest
from lines.wan_plan import advice
from time_to_loss import BATCH_S, LINE, MODEL, UPDATE_SHARE, Cell, cells_of, job, paced_job

from headway.stages.schedule.operations import Backward, Forward, Update


def test_all_cells_have_the_same_work_and_the_same_rows() -> None:
    cells = cells_of(is_quick=False)
    assert len(set(cells)) == 12
    for cell in cells:
        times, m = cell.times(6.4), cell.microbatches
        each = times.seconds(0, Forward(0, 0)) + times.seconds(0, Backward(0, 0))
        assert each * cell.num_stages * m == pytest.approx(6.4)
        assert times.seconds(0, Update(0)) * cell.num_stages == pytest.approx(6.4 * UPDATE_SHARE)
        assert paced_job("2bw", m).train.tokens_per_batch == job("1f1b", 2, batches=600).train.tokens_per_batch


def test_a_training_has_a_whole_schedule_and_2bw_a_jobs_defaults() -> None:
    synced, delayed = (job(schedule, 2, batches=400, factor=2.0) for schedule in ("1f1b", "2bw"))
    assert [each.optim.warmup_batches for each in (synced, delayed)] == [40, 40]
    assert [each.optim.error_feedback for each in (synced, delayed)] == [0.0, 1.0]
    assert [each.train.sync_batches for each in (synced, delayed)] == [0, 40]
    assert synced.optim.matrices.lr == 2 * job("1f1b", 2, batches=400).optim.matrices.lr


def test_the_batches_of_a_paced_run_are_all_delayed() -> None:
    assert paced_job("2bw", 8).train.sync_batches == 0


def test_gpipe_is_timed_where_it_is_not_1f1b() -> None:
    assert Cell(2, 2, "one").schedules == ("1f1b", "2bw")
    assert Cell(2, 2, "two").schedules == ("1f1b", "2bw", "gpipe")


def test_the_line_is_in_the_middle_of_the_stages() -> None:
    """The planner gives stages before it the depth that hides it, and those after it what they have on one site."""
    train = paced_job("2bw", 32).train
    near, far = (advice(MODEL, train, Cell(8, 32, "two").times(BATCH_S), line, 8).depths for line in (None, LINE))
    assert near[4:] == far[4:]
    assert all(one < other for one, other in zip(near[:4], far[:4], strict=True))
