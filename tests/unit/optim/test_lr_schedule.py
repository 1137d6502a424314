"""The learning rate's factor, update by update."""

import math
from typing import Literal

import pytest

from headway.optim.spec import AfterEnd, lr_schedule


def factors(kind: Literal["constant", "cosine", "wsd"], num_batches: int, warmup_batches: int) -> list[float]:
    """All factors of a job."""
    schedule = lr_schedule(kind, num_batches=num_batches, warmup_batches=warmup_batches)
    return [schedule(b) for b in range(num_batches)]


@pytest.mark.parametrize("kind", ["constant", "cosine", "wsd"])
def test_warmup_is_linear_and_ends_at_one(kind: Literal["constant", "cosine", "wsd"]) -> None:
    """w = 4 → ¼, ½, ¾, 1, whatever comes afterwards; update w itself starts the schedule at 1."""
    assert factors(kind, 50, 4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_constant_stays_at_one() -> None:
    """No warm-up → all ones."""
    assert factors("constant", 5, 0) == [1.0] * 5


def test_cosine_falls_by_half_a_period() -> None:
    """B = 10, w = 2 → ½(1 + cos(π(b−2)/8)), one half in the middle, small but not zero in the last update."""
    falling = factors("cosine", 10, 2)
    assert falling[2:] == [0.5 * (1 + math.cos(math.pi * (b - 2) / 8)) for b in range(2, 10)]
    assert falling[6] == pytest.approx(0.5)
    assert 0 < falling[9] < 0.05


def test_wsd_falls_linearly_over_the_last_fifth() -> None:
    """B = 11 → n = 3: 1 until update 8 inclusive, then ⅔ and ⅓."""
    assert factors("wsd", 11, 0) == [1.0] * 9 + [2 / 3, 1 / 3]


def test_warmup_has_precedence_over_decay() -> None:
    """A job shorter than its warm-up → it never stops rising."""
    assert factors("wsd", 5, 10) == [(b + 1) / 10 for b in range(5)]
    assert factors("cosine", 5, 10) == [(b + 1) / 10 for b in range(5)]


@pytest.mark.parametrize("update_index", [-1, 5])
def test_updates_outside_the_job_are_refused(update_index: int) -> None:
    """Before the first or after the last update → ValueError."""
    with pytest.raises(ValueError, match=str(update_index)):
        lr_schedule("constant", num_batches=5, warmup_batches=0)(update_index)


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_a_rate_falls_to_its_floor(kind: Literal["cosine", "wsd"]) -> None:
    """It begins at 1, never rises after the warm-up, and the next update after the last would have the floor."""
    schedule = lr_schedule(kind, num_batches=100, warmup_batches=10, floor=0.1)
    factors = [schedule(b) for b in range(10, 100)]
    assert factors[0] == 1.0
    assert factors == sorted(factors, reverse=True)
    assert 0.1 < factors[-1] < 0.15


def test_after_its_end_a_schedule_stays_at_the_floor_or_begins_again() -> None:
    """10 of 16 batches, w = 2: the first ten are those of a job of ten; then 0.1, or those of a job of six."""
    alone = lr_schedule("cosine", num_batches=10, warmup_batches=2, floor=0.1)
    short = lr_schedule("cosine", num_batches=6, warmup_batches=2, floor=0.1)
    ends: dict[AfterEnd, list[float]] = {"floor": [0.1] * 6, "warm_up_again": [short(b) for b in range(6)]}
    for after_end, rest in ends.items():
        long = lr_schedule(
            "cosine", num_batches=16, warmup_batches=2, floor=0.1, schedule_batches=10, after_end=after_end
        )
        assert [long(b) for b in range(16)] == [*(alone(b) for b in range(10)), *rest]
