"""Losses that several trainings reach, and the seconds until then."""

import pytest
from rigs.loss_targets import WINDOW, Paced, Target, batches_until, smoothed


def falling(num_batches: int, per_batch: float) -> list[float]:
    return [10 - per_batch * batch for batch in range(num_batches)]


def test_a_run_goes_on_with_steady_batches() -> None:
    """The first two fill the pipeline."""
    run = Paced([3.0, 5.0, 6.0], 1.0)
    assert [run.until(number) for number in (1, 2, 3, 4, 103)] == [3.0, 5.0, 6.0, 7.0, 106.0]


def test_a_start_without_delay_takes_the_seconds_of_1f1b() -> None:
    run = Paced([1.5, 2.5], 1.0).after(Paced([3.0], 2.0), 4)
    assert [run.until(number) for number in (1, 2, 4, 5, 6, 16)] == [3.0, 5.0, 9.0, 10.5, 11.5, 21.5]


def test_a_target_is_reached_by_a_whole_window() -> None:
    losses = [*[5.0] * WINDOW, *[1.0] * WINDOW]
    assert smoothed(losses)[WINDOW - 1] == 5.0
    assert smoothed(losses)[WINDOW + 4] == pytest.approx(4.0)
    assert batches_until(losses, 5.0) == WINDOW
    assert batches_until(losses, 4.0 + 1e-9) == WINDOW + 5
    assert batches_until(losses, 0.9) is None
    assert batches_until([0.0, *losses], 4.9) == WINDOW  # earlier means have too few batches


def test_a_target_is_what_1f1b_has_and_each_seed_has_its_own() -> None:
    """2bw falls at 0.8 of the rate of 1f1b, from the same loss."""
    curves = [{"1f1b": falling(100, rate), "2bw": falling(150, 0.8 * rate)} for rate in (0.05, 0.02)]
    target = Target.of(curves, 1.0)
    assert target is not None
    assert target.losses == [smoothed(each["1f1b"])[-1] for each in curves]
    assert target.batches["1f1b"] == [100, 100]
    assert target.more_batches()["2bw"].median == pytest.approx(1 / 0.8, abs=0.05)
    runs = {"1f1b": Paced([2.0], 2.0), "2bw": Paced([1.0], 1.0)}
    assert target.ratios(runs)["1f1b over 2bw"].median == pytest.approx(2 * 0.8, abs=0.05)


def test_gpipe_has_the_batches_of_1f1b() -> None:
    target = Target([2.0], {"1f1b": [100], "2bw": [120]})
    one, two = Paced([1.0], 1.0), Paced([2.0], 2.0)
    ratios = target.ratios({"1f1b": two, "2bw": one, "gpipe": one})
    found = {pair: ratio.median for pair, ratio in ratios.items()}
    assert found == {"1f1b over 2bw": 200 / 120, "gpipe over 2bw": 100 / 120}


def test_a_target_that_one_seed_does_not_reach_is_none() -> None:
    slow = {"1f1b": falling(100, 0.05), "2bw": falling(150, 0.02)}
    reaching = {"1f1b": falling(100, 0.05), "2bw": falling(150, 0.05)}
    assert Target.of([reaching, slow], 1.0) is None
    assert Target.of([reaching, slow], 0.25) is not None
