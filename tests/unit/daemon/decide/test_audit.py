"""A view that lost an event is found out; one whose events are on their way is not listed again."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.daemon.cluster.client import Changes
from headway.daemon.decide.cluster_watch import HistoryMark, Verified, due, why_wrong

SEEN = HistoryMark(revision=20, cluster_id=1, raft_term=2)
FOUND = Changes(20, {"b": 15}, 2, 1, 2)
HELD = {"a": 5, "b": 15}
VERIFIED = Verified(10, 12)


def test_a_view_with_every_change_is_right() -> None:
    assert why_wrong(SEEN, FOUND, held=HELD) == ""


@pytest.mark.parametrize(
    ("held", "why"),
    [
        ({"a": 5, "b": 14}, "missed 1 changes, such as that of b"),
        ({"a": 5}, "missed 1 changes, such as that of b"),
        ({"a": 5, "b": 16}, "missed 1 changes, such as that of b"),
        ({"a": 5, "b": 15, "deleted": 3}, "it has 2 keys, and the view 3"),
        ({"b": 15}, "it has 2 keys, and the view 1"),
    ],
)
def test_a_lost_event_is_found_out(held: dict[str, int], why: str) -> None:
    """An older value, an absent key, a value that etcd no longer has, a deletion, and a key from long ago."""
    assert why in why_wrong(SEEN, FOUND, held=held)


def test_the_watch_must_have_shown_what_there_was_at_the_last_comparison() -> None:
    """What came since then may be on its way: etcd is asked as of the moment of the view."""
    assert due(VERIFIED, SEEN) == SEEN.revision
    assert due(Verified(20, 22), SEEN) == 22


@pytest.mark.parametrize("other", [{"cluster_id": 7}, {"revision": 19}, {"raft_term": 1}])
def test_another_history_is_found_out(other: dict[str, int]) -> None:
    assert why_wrong(SEEN, replace(FOUND, **other), held=HELD) == "its history is another one"  # type: ignore[arg-type]


KEYS = st.sampled_from("abcd")


@given(
    events=st.lists(st.tuples(KEYS, st.booleans()), min_size=1, max_size=12),
    lost=st.integers(0, 11),
    verified=st.integers(0, 12),
)
def test_any_single_lost_event_that_matters_is_found_out(
    events: list[tuple[str, bool]], lost: int, verified: int
) -> None:
    """etcd and the view apply the same changes, but for one since the last comparison. If they differ, it is seen."""

    def after(dropped: int) -> dict[str, int]:
        held: dict[str, int] = {}
        for revision, (key, is_set) in enumerate(events, start=1):
            if revision == dropped:
                continue
            if is_set:
                held[key] = revision
            else:
                held.pop(key, None)
        return held

    truth, last = after(0), len(events)
    verified = min(verified, lost)
    held = after(lost + 1)
    found = Changes(last, {key: revision for key, revision in truth.items() if revision > verified}, len(truth), 1, 2)
    why = why_wrong(HistoryMark(last, 1, 2), found, held=held)
    assert bool(why) is (held != truth)
