"""Losses that trainings end at, and the seconds until then."""

import math

import pytest
from rigs.loss_targets import Paced, Target, batches_until, over_seeds

from headway.stages.spec import ScheduleName


def ends(per_doubling: float, penalty: float = 0.0) -> dict[int, float]:
    """Losses that fall by as much with each doubling of 100 batches."""
    return {batches: 5 + penalty - per_doubling * math.log2(batches / 100) for batches in (100, 200, 400, 800)}


def test_a_run_goes_on_with_steady_batches() -> None:
    """The first two fill the pipeline."""
    run = Paced([3.0, 5.0, 6.0], 1.0)
    assert [run.until(number) for number in (0, 1, 2, 3, 4, 103)] == [0.0, 3.0, 5.0, 6.0, 7.0, 106.0]


def test_between_two_trainings_the_loss_falls_with_the_logarithm_of_the_batches() -> None:
    assert batches_until(ends(0.5), 4.5) == pytest.approx(200)
    assert batches_until(ends(0.5), 4.25) == pytest.approx(200 * math.sqrt(2))
    assert batches_until(ends(0.5), 3.4) == math.inf
    assert batches_until(ends(0.5), 5.1) == 100


def test_seeds_have_students_interval() -> None:
    figure = over_seeds([1.0, 2.0, 3.0])
    assert (figure.median, figure.num_samples) == (2.0, 3)
    assert figure.high - 2 == 2 - figure.low == pytest.approx(2.92 / math.sqrt(3))
    assert over_seeds([1.0]).high == 1.0


def test_a_target_is_what_1f1b_ends_at_and_each_seed_has_its_own() -> None:
    """A penalty of half of what a doubling brings costs √2 times the batches."""
    synced, delayed = [ends(0.5), ends(0.2)], [ends(0.5, 0.25), ends(0.2, 0.1)]
    target = Target.of(400, synced, delayed)
    assert target is not None
    assert target.losses == [4.0, 4.6]
    assert target.delayed == pytest.approx([400 * math.sqrt(2)] * 2)
    assert target.more_batches().median == pytest.approx(math.sqrt(2))
    assert Target.of(800, synced, delayed) is None


def test_the_first_tenth_of_2bw_takes_the_seconds_of_1f1b() -> None:
    target = Target(100, [4.0], [120.0])
    runs: dict[ScheduleName, Paced] = {"1f1b": Paced([3.0], 2.0), "2bw": Paced([1.5], 1.0), "gpipe": Paced([2.0], 2.0)}
    assert target.seconds(runs) == {"1f1b": [201.0], "gpipe": [200.0], "2bw": [25.0 + 108.5]}
    found = {pair: ratio.median for pair, ratio in target.ratios(runs).items()}
    assert found == {"1f1b over 2bw": 201 / 133.5, "gpipe over 2bw": 200 / 133.5}
