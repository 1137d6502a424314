"""A row's source is a function of its key and the weights alone, in the shares that the weights say."""

from collections import Counter
from hashlib import sha256
from itertools import islice

import pytest

from headway.stages.data.source_choice import held_out_rows, mixture_sha256, source_of


def test_the_choices_are_these() -> None:
    """Golden values: whoever changes them changes every run of several sources that was ever made."""
    assert [source_of(f"7/5/1/{row}", (1.0, 2.0, 0.5)) for row in range(12)] == [1, 0, 0, 0, 1, 1, 2, 1, 2, 1, 1, 1]
    assert list(islice(held_out_rows((1.0, 2.0), (9, 9)), 8)) == [
        (0, 0),
        (1, 0),
        (1, 1),
        (1, 2),
        (0, 1),
        (1, 3),
        (1, 4),
        (0, 2),
    ]


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (0.1, 0.2, 0.7), (1e-6, 1.0), (1e6, 1e6, 1e6)])
def test_shares_are_those_of_the_weights(weights: tuple[float, ...]) -> None:
    """20000 rows: each share is within five standard deviations of its weight's."""
    number = 20000
    found = Counter(source_of(f"3/{row}/0/0", weights) for row in range(number))
    for index, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs(found[index] - number * share) <= 5 * (number * share * (1 - share)) ** 0.5


def test_only_the_ratio_of_weights_counts() -> None:
    """Weights times a power of two: equal choices."""
    keys = [f"1/{row}/0/0" for row in range(500)]
    assert [source_of(key, (1.0, 3.0)) for key in keys] == [source_of(key, (0.25, 0.75)) for key in keys]


def test_held_out_rows_end_with_a_source() -> None:
    """Each source gives its rows in turn; the rows end where the chosen source has no more of them."""
    rows = list(held_out_rows((1.0, 1.0), (3, 100)))
    of_first, of_second = ([row for source, row in rows if source == wanted] for wanted in (0, 1))
    assert of_first == [0, 1, 2]
    assert of_second == list(range(len(of_second)))
    assert rows == list(islice(held_out_rows((1.0, 1.0), (1000, 1000)), len(rows)))
    assert next(islice(held_out_rows((1.0, 1.0), (1000, 1000)), len(rows), None)) == (0, 3)


def test_the_name_of_several_sources_has_their_order() -> None:
    """Two names in another order are other data."""
    assert mixture_sha256(["a", "b"]) == sha256(b"sources\na\nb\n").hexdigest()
    assert mixture_sha256(["b", "a"]) != mixture_sha256(["a", "b"])
