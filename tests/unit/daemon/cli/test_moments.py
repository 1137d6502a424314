"""Times come from records that anybody may have written: none of them ends a command."""

import pytest

from headway.daemon.records.measurements import Port, ReachFact, ReachRecord
from headway.daemon.records.records import NodeRecord
from headway.daemon.reports.node_list import reach_lines
from headway.daemon.reports.set_aside import date_and_time, time_of_day
from headway.daemon.view.cluster_view import ClusterView


def test_a_moment_is_a_date_and_a_time() -> None:
    """A moment is formatted by this machine's clock and zone."""
    assert date_and_time(0.0)[:4] in ("1969", "1970")
    assert date_and_time(0.0).endswith(time_of_day(0.0))


@pytest.mark.parametrize("at", [1e308, -1e308, 1e18, float("inf"), float("nan")])
def test_an_impossible_time_is_shown_as_a_question_mark(at: float) -> None:
    """No traceback in `nodes`, `jobs`, `events`, `watch` or `checkpoints`."""
    assert (date_and_time(at), time_of_day(at)) == ("?", "?")
    fact = ReachFact(to="a", to_incarnation="x", port=Port.DAEMON, address="a:1", reason="no", measured_at=at)
    node = NodeRecord(
        name="a", incarnation="x", address="", host="", site="", devices=(), memory_bytes=0, arithmetic_class=""
    )
    view = ClusterView(nodes={"a": node}, reach={"a": ReachRecord(incarnation="x", facts=(fact,))})
    assert reach_lines(view, "a") == ["cannot reach the daemon port of a at a:1: no (since ?)"]
