"""Each row once an epoch, in an order that only seed and epoch decide."""

import random
import time

import pytest

from headway.stages.data.tokens import row_at

EXPECTED = [7, 4, 2, 1, 9, 0, 8, 3, 5, 6, 9, 0, 2, 1, 6, 5, 8, 3, 4, 7]


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 16, 17, 100, 257, 1000])
def test_each_row_comes_once_an_epoch(num_rows: int) -> None:
    """Two epochs, each a permutation."""
    for epoch in (0, 7):
        drawn = [row_at(epoch * num_rows + place, num_rows=num_rows, seed=3) for place in range(num_rows)]
        assert sorted(drawn) == list(range(num_rows))


def test_epochs_and_seeds_have_their_own_orders() -> None:
    """No two of eight orders of 50 rows are equal, and none is the order of the file."""
    orders = {
        tuple(row_at(epoch * 50 + place, num_rows=50, seed=seed) for place in range(50))
        for epoch in (0, 1)
        for seed in (0, 1, 2, 3)
    }
    assert len(orders) == 8
    assert tuple(range(50)) not in orders


def test_a_row_of_many_is_found_at_once() -> None:
    """A thousand draws of 10^12 rows: no table of them is made."""
    began = time.perf_counter()
    rows = {row_at(random.Random(0).randrange(10**12) + k, num_rows=10**12, seed=0) for k in range(1000)}
    assert len(rows) == 1000
    assert time.perf_counter() - began < 5


def test_the_order_never_changes() -> None:
    """Jobs that run, and docs/numerics.md, rely on it."""
    assert [row_at(number, num_rows=10, seed=0) for number in range(20)] == EXPECTED
