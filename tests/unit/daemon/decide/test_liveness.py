"""A view knows absences: since when, whether etcd was in sight; and it forgets a history that went back."""

from dataclasses import replace

import pytest

from headway.daemon.cluster.cluster_records import LeaderRecord, NodeFailureRecord
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import DesiredRecord, NodeRecord
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.cluster_watch import HistoryMark, went_back

NODE = NodeRecord(
    name="a", incarnation="a-1", address="", host="", site="x", devices=(), memory_bytes=0, arithmetic_class=""
)
SEEN = HistoryMark(revision=100, cluster_id=7, raft_term=3)


def put(view: ClusterView, key: str, value: bytes, revision: int, *, now: float = 0.0) -> None:
    """One key as a listing or a watch brings it."""
    view.apply(key, value, mod_revision=revision, create_revision=revision, now=now)


def test_sight_is_steady_from_the_first_answer_after_a_break() -> None:
    """Unseen, seen twice, lost, seen again: steady since the first of each, and never while it is lost."""
    view = ClusterView()
    assert view.steady_since is None
    view.set_in_sight(True, now=1.0)
    view.set_in_sight(True, now=2.0)
    assert view.steady_since == 1.0
    view.set_in_sight(False, now=3.0)
    assert view.steady_since is None
    view.set_in_sight(True, now=4.0)
    assert view.steady_since == 4.0


def test_an_absent_node_that_comes_back_is_absent_no_more() -> None:
    """Gone at 2, back at 3, gone again at 4: absent since 4."""
    view = ClusterView()
    put(view, Keys.node("a"), encode(NODE), 1, now=1.0)
    view.apply(Keys.node("a"), None, mod_revision=2, create_revision=0, now=2.0)
    assert view.absent_since == {"a": 2.0}
    put(view, Keys.node("a"), encode(NODE), 3, now=3.0)
    assert view.absent_since == {}
    view.apply(Keys.node("a"), None, mod_revision=4, create_revision=0, now=4.0)
    assert view.absent_since == {"a": 4.0}


def test_a_view_that_starts_anew_takes_older_revisions() -> None:
    """Everything of revision 100 is forgotten; keys of revision 10 count; what is not there is gone."""
    view = ClusterView()
    put(view, Keys.node("a"), encode(NODE), 100)
    put(view, Keys.node("b"), encode(replace(NODE, name="b")), 100)
    put(view, Keys.LEADER, encode(LeaderRecord(node="a", incarnation="a-1")), 100)
    put(view, Keys.of("j", "desired"), encode(DesiredRecord()), 100)
    put(view, "/headway/what", b"", 100)
    put(view, Keys.failure("a", 1), encode(NodeFailureRecord(at=1.0, text="")), 100)
    view.apply(Keys.node("c"), None, mod_revision=101, create_revision=0)
    view.start_anew(now=5.0)
    assert (view.leader, view.nodes, view.jobs, view.failures, view.revisions, view.unreadable) == (
        None,
        {},
        {},
        {},
        {},
        {},
    )
    assert (view.epoch, view.nodes_changed_at, view.started_at) == (1, 5.0, 5.0)
    assert view.absent_since == {"a": 5.0, "b": 5.0}
    put(view, Keys.node("a"), encode(NODE), 10, now=5.0)
    put(view, Keys.node("c"), encode(replace(NODE, name="c")), 10, now=5.0)
    assert set(view.nodes) == {"a", "c"}
    assert view.absent_since == {"b": 5.0}
    view.start_anew(now=6.0)
    assert (view.epoch, view.absent_since) == (2, {"a": 6.0, "b": 6.0, "c": 6.0})


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (HistoryMark(99, 7, 3), "revision 99 after 100"),
        (HistoryMark(1, 7, 2), "revision 1 after 100"),
        (HistoryMark(500, 7, 2), "raft term 2 after 3"),
        (HistoryMark(500, 8, 9), "cluster 8 answers in place of 7"),
    ],
)
def test_a_history_that_went_back_is_told_by_its_mark(found: HistoryMark, expected: str) -> None:
    """A lower revision or term, or another cluster: a reason that names both."""
    assert went_back(SEEN, found, known={}, listed={}) == expected


@pytest.mark.parametrize(
    ("known", "listed", "is_back"),
    [
        ({"k": 90}, {"k": 90}, False),
        ({"k": 90}, {"k": 105}, False),
        ({"k": 90}, {}, False),
        ({}, {"k": 40}, False),
        ({"k": 90}, {"k": 40}, True),
    ],
)
def test_a_key_older_than_we_know_it_betrays_another_history(
    known: dict[str, int], listed: dict[str, int], is_back: bool
) -> None:
    """The revision has overtaken ours since, but a key has an older change than the one that we saw."""
    reason = went_back(SEEN, HistoryMark(110, 7, 3), known=known, listed=listed)
    assert (reason is not None) is is_back
    assert reason is None or "k is of revision 40 after 90" in reason


def test_nothing_is_older_than_nothing() -> None:
    """The first listing of all is no step back."""
    assert went_back(HistoryMark(), HistoryMark(1, 7, 2), known={}, listed={"k": 1}) is None
