"""A remembered answer is computed once for the same objects, and anew for others, equal as they may be."""

from headway.daemon.cluster.memo import remembered


def test_the_same_objects_are_asked_about_once() -> None:
    """An equal list is another one; names and numbers are compared as values."""
    asked: list[object] = []

    @remembered()
    def first(row: list[int], name: str) -> str:
        asked.append(row)
        return f"{name} {row[0]}"

    row = [1, 2]
    assert first(row, "a") == first(row, "".join("a")) == "a 1"
    assert len(asked) == 1
    assert first([1, 2], "a") == "a 1"
    assert first(row, "b") == "b 1"
    assert len(asked) == 3


def test_an_equal_answer_stays_the_same_object() -> None:
    """What follows from it is remembered too, though the question was about other objects."""

    @remembered(is_lasting=True)
    def even(row: list[int]) -> list[int]:
        return [each for each in row if each % 2 == 0]

    before = even([1, 2])
    assert even([2, 3]) is before
    assert even([4]) == [4]
