"""What benches share: the order of the sides."""

from functools import partial

from rigs.measure import alternate


def test_sides_run_forwards_and_backwards() -> None:
    """Three sides, two rounds → each round's values in the order given, whatever ran first."""
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return float(len(order))

    assert alternate(2, *(partial(side, name) for name in "abc")) == [(1, 2, 3), (6, 5, 4)]
    assert "".join(order) == "abccba"
