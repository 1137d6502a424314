"""The list of nodes: those that are up, and those that plans leave out after repeated failures."""

from typing import Any

from headway.daemon.records.format import to_builtins
from headway.daemon.records.measurements import ReachFact
from headway.daemon.records.records import NodeRecord
from headway.daemon.reports.set_aside import time_of_day
from headway.daemon.reports.watch_view import alike, fitted, node_notes
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.quarantine import QUARANTINE_AFTER, charged_by, num_counted


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
    """Return the facts for `--json`, with dates: ports that do not answer; of an earlier version, all."""
    return [to_builtins(fact) for fact in facts_of(view, name)]


def report_nodes(view: ClusterView) -> list[dict[str, Any]]:
    """Return each node's record with its recent `failures`; a node that failed and is gone has only failures."""
    return [
        (to_builtins(view.nodes[name]) if name in view.nodes else {"name": name})
        | {"reach": reach_builtins(view, name)}
        | {"failures": [to_builtins(found) for _, found in sorted(view.failures.get(name, {}).items())]}
        for name in sorted({*view.nodes, *view.failures})
    ]


def _site(node: NodeRecord) -> str:
    return f"site {node.site}" + (", private: its machines may have plain links" if node.site_is_private else "")


def plain_sites(view: ClusterView) -> str:
    """Return the sites inside which machines may have plain links, in words."""
    private = sorted({node.site for node in view.nodes.values() if node.site_is_private})
    return (
        f"plain links between machines of site {', '.join(private)}" if private else "no plain links between machines"
    )


def node_lines(view: ClusterView, *, width: int | None = None) -> list[str]:
    """Return a line for each node, and below it each of its failures. width: columns of the screen, if there is one."""
    lines = []
    leader = view.leader.node if view.leader else ""
    for name in sorted({*view.nodes, *view.failures}):
        failures = view.failures.get(name, {})
        if (node := view.nodes.get(name)) is not None:
            devices = alike([f"{device.kind} {device.model}".strip() for device in node.devices])
            notes = node_notes(node, leader, num_failures=len(failures))
            lines += fitted((name, node.address, _site(node), devices, f"({notes})" if notes else ""), width)
            for line in reach_lines(view, name):
                lines += fitted((f"    {line}",), width)
            lines += fitted((f"    {node.worker_trouble}",), width) if node.worker_trouble else []
            for what, text in sorted(node.ailments.items()):
                lines += fitted((f"    {what}: {text}",), width)
        else:
            lines.append(f"{name}  is not up")
        for _, failure in sorted(failures.items()):
            lines += fitted((f"    {time_of_day(failure.at)}  {failure.text}",), width)
        limit = view.leader.quarantine_after if view.leader else QUARANTINE_AFTER
        if 0 < limit <= num_counted(failures.values()):
            by = charged_by(failures.values())
            lines.append(f"    quarantined: plans leave it out while {limit} failures count; it has {by}")
        if failures:
            lines.append(f"    counted for 10 minutes each; `headway nodes release {name}` forgets them")
    return lines
