"""Reports which node does not reach which: a line for each blocked way."""

from typing import Any

from headway.daemon.records.format import to_builtins
from headway.daemon.records.measurements import ReachFact
from headway.daemon.reports.moments import time_of_day
from headway.daemon.view.cluster_view import ClusterView


def facts_of(view: ClusterView, name: str) -> tuple[ReachFact, ...]:
    """Return what a node's present process found about the present processes of other nodes."""
    node, record = view.nodes.get(name), view.reach.get(name)
    if node is None or record is None or record.incarnation != node.incarnation:
        return ()
    return tuple(
        fact
        for fact in record.facts
        if fact.to in view.nodes and view.nodes[fact.to].incarnation == fact.to_incarnation
    )


def reach_lines(view: ClusterView, name: str) -> list[str]:
    """Return which ports a node does not reach, why, and since when."""
    return [
        f"cannot reach the {fact.port} port of {fact.to} at {fact.address}: {fact.reason} "
        f"(since {time_of_day(fact.measured_at)})"
        for fact in facts_of(view, name)
        if fact.reason
    ]


def reach_builtins(view: ClusterView, name: str) -> list[dict[str, Any]]:
    """Return the facts for `--json`, with dates: ports that do not answer."""
    return [to_builtins(fact) for fact in facts_of(view, name)]
