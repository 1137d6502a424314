"""The cells of the bench of seconds to equal loss, and its trainings."""

import pytest
from lines.wan_plan import advice
from rigs.loss_targets import DELAYED
from time_to_loss import BATCH_S, LINE, MODEL, UPDATE_SHARE, Cell, cells_of, job

from headway.stages.schedule.operations import Backward, Forward, Update


def test_all_cells_have_the_same_work_and_the_same_rows() -> None:
    cells = cells_of(is_quick=False)
    assert len(set(cells)) == 12
    for cell in cells:
        times, m = cell.times(6.4), cell.microbatches
        each = times.seconds(0, Forward(0, 0)) + times.seconds(0, Backward(0, 0))
        assert each * cell.num_stages * m == pytest.approx(6.4)
        assert times.seconds(0, Update(0)) * cell.num_stages == pytest.approx(6.4 * UPDATE_SHARE)
        train = job("2bw", m, total=400, batches=10).train
        assert train.tokens_per_batch == job("1f1b", 2, total=400, batches=600).train.tokens_per_batch


def test_a_short_run_has_the_rates_of_the_long_one() -> None:
    long, short = (job("2bw", 2, total=400, batches=batches).optim for batches in (600, 10))
    assert long == short
    assert long.warmup_batches == 40
    assert long.error_feedback == 1.0
    assert job("1f1b", 2, total=400, batches=400).optim.error_feedback == 0.0
    assert [job(name, 2, total=400, batches=600).train.sync_batches for name in DELAYED] == [0, 40]


def test_gpipe_is_timed_where_it_is_not_1f1b() -> None:
    assert Cell(2, 2, "one").schedules == ("1f1b", "2bw")
    assert Cell(2, 2, "two").schedules == ("1f1b", "2bw", "gpipe")


def test_the_line_is_in_the_middle_of_the_stages() -> None:
    """The planner gives stages before it the depth that hides it, and those after it what they have on one site."""
    train = job("2bw", 32, total=400, batches=10).train
    near, far = (advice(MODEL, train, Cell(8, 32, "two").times(BATCH_S), line, 8).depths for line in (None, LINE))
    assert near[4:] == far[4:]
    assert all(one < other for one, other in zip(near[:4], far[:4], strict=True))
