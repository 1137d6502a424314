"""A flood of events leaves few lines, and each line says how many events it is about."""

from headway.stages.links.sparse_log import PAUSE_S, SparseLog


def test_the_first_event_is_told_at_once_and_a_flood_is_counted() -> None:
    """The others follow together with the first event after the pause."""
    sparse = SparseLog()
    assert [sparse.due(5.0 + number / 1000) for number in range(1000)] == [1] + [0] * 999
    assert sparse.due(5.0 + PAUSE_S) == 1000
    assert sparse.due(5.1 + PAUSE_S) == 0
