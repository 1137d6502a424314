"""Tells of nodes: those that are up, those that plans leave out; and of records and jobs that cannot be shown."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headway.daemon.base.terminal import counted, fitted, printable_name
from headway.daemon.cluster.cluster_records import NodeFailureRecord, RetiredRecord
from headway.daemon.cluster.format import to_builtins
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import ReachFact
from headway.daemon.cluster.records import VANISHED, NodeRecord
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.quarantine import QUARANTINE_AFTER, charged_by, num_counted


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


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """A node that is up or has failed. In JSON the fields of its record stand beside the others."""

    name: str
    record: NodeRecord | None
    """What its daemon says of itself; None: it has failed and is gone."""
    reach: tuple[ReachFact, ...]
    """What it found about ports of other nodes, with dates: those that do not answer."""
    failures: tuple[NodeFailureRecord, ...]
    """Recent ones, oldest first."""

    def as_dict(self) -> dict[str, Any]:
        """Return it for `--json`."""
        record = {} if self.record is None else to_builtins(self.record)
        facts = {"reach": to_builtins(self.reach), "failures": to_builtins(self.failures)}
        return {"name": self.name, **record, **facts}


def report_nodes(view: ClusterView) -> list[NodeReport]:
    """Return the nodes by name."""
    return [
        NodeReport(
            name=name,
            record=view.nodes.get(name),
            reach=facts_of(view, name),
            failures=tuple(found for _, found in sorted(view.failures.get(name, {}).items())),
        )
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
    are_mixed = len({_release(node) for node in view.nodes.values()}) > 1
    for name in sorted({*view.nodes, *view.failures}):
        if (node := view.nodes.get(name)) is not None:
            devices = alike([f"{device.kind} {device.model}".strip() for device in node.devices])
            notes = node_notes(node, leader, num_failures=len(view.failures.get(name, {})))
            notes = ", ".join(filter(None, [_release(node) if are_mixed else "", notes]))
            lines += fitted((name, node.address, _site(node), devices, f"({notes})" if notes else ""), width)
        else:
            lines.append(f"{name}  is not up")
        for line in (*node_ailments(view, name), *failure_lines(view, name)):
            lines += fitted((f"    {line}",), width)
    return lines


def _release(node: NodeRecord) -> str:
    """Return a node's release, `headway 1.2.3`, as its arithmetic class tells it."""
    parts = node.arithmetic_class.split(", ")
    return next((part for part in parts if part.startswith("headway ")), "")


def node_ailments(view: ClusterView, name: str) -> list[str]:
    """Return what ails a node that is up: ports that it does not reach, workers that do not start, its own ailments."""
    if (node := view.nodes.get(name)) is None:
        return []
    own = [f"{what}: {text}" for what, text in sorted(node.ailments.items())]
    leader = view.nodes.get(view.leader.node) if view.leader else None
    if leader is not None and node.protocol != leader.protocol:
        other = f"speaks protocol {node.protocol}, and {leader.name}, which leads, {leader.protocol}"
        own.append(f"{other}: no plan has it until both are of one release")
    return [*reach_lines(view, name), *filter(None, [node.worker_trouble]), *own]


def failure_lines(view: ClusterView, name: str) -> list[str]:
    """Return the recent failures of a node, whether plans leave it out for them, and the command that forgets them."""
    failures = view.failures.get(name, {})
    lines = [f"{time_of_day(failure.at)}  {failure.text}" for _, failure in sorted(failures.items())]
    limit = view.leader.quarantine_after if view.leader else QUARANTINE_AFTER
    if 0 < limit <= num_counted(failures.values()):
        by = charged_by(failures.values())
        lines.append(f"quarantined: plans leave it out while {limit} failures count; it has {by}")
    if failures:
        lines.append(f"counted for 10 minutes each; `headway nodes release {name}` forgets them")
    return lines


def alike(devices: Sequence[str]) -> str:
    """Return a node's devices, counted by kind: `8 × H200`."""
    counts = Counter(devices)
    return ", ".join(f"{number} × {device}" if number > 1 else device for device, number in counts.items())


def node_notes(node: NodeRecord, leader: str, *, num_failures: int = 0) -> str:
    """Return the notes on a node: `leads`, `draining`, `cpu:0 down`, `2 failures …`."""
    notes = (["leads"] if node.name == leader else []) + (["draining"] if node.is_draining else [])
    notes += [f"device {index} down" for index in node.down_devices]
    if num_failures:
        notes.append(f"{counted(num_failures, 'failure')} within 10 minutes")
    if node.ailments:
        notes.append(f"ails: {', '.join(node.ailments)}")
    return ", ".join(notes)


MAX_LINES = 20
NO_NODE = "no node is up; start one with `headway daemon`"


def vanished_jobs(view: ClusterView) -> dict[str, str]:
    """Return the jobs that etcd has lost, with what their nodes say of them."""
    told = [item for node in view.nodes.values() for item in node.ailments.items()]
    return {what.removeprefix(VANISHED): text for what, text in sorted(told) if what.startswith(VANISHED)}


def set_aside_lines(view: ClusterView, *, job: str = "") -> list[str]:
    """Return a line for each record that is set aside. job: only the records of this job."""
    prefix = Keys.job(job) if job else ""
    keys = sorted(key for key in view.unreadable if key.startswith(prefix))
    lines = [
        f"set aside: {printable_name(key)}: {printable_name(view.unreadable[key].reason)}" for key in keys[:MAX_LINES]
    ]
    return lines + ([f"set aside: {len(keys) - MAX_LINES} more"] if len(keys) > MAX_LINES else [])


def sentence_on(job: RetiredRecord) -> str:
    """Return what is known of a retired job, in one line."""
    progress = f" after batch {job.batch} with loss {job.loss:.4f}" if job.batch >= 0 else ""
    checkpoint = f"; its newest checkpoint stays at {job.checkpoint}" if job.checkpoint else ""
    ended, retired = date_and_time(job.since), date_and_time(job.retired_at)
    return f"is retired: {job.phase} at {ended}{progress}, its records were deleted at {retired}{checkpoint}"


def retired_line(num_jobs: int) -> str:
    """Return how many jobs are retired; empty: none is."""
    if not num_jobs:
        return ""
    jobs = "1 retired job is" if num_jobs == 1 else f"{num_jobs} retired jobs are"
    return f"{jobs} not listed; `headway status JOB` tells of one"


def date_and_time(at: float) -> str:
    """Return seconds since the epoch by this machine's clock, as `2026-11-22 17:25:03`; of an invalid date, `?`."""
    return _written(at, "%Y-%m-%d %H:%M:%S")


def time_of_day(at: float) -> str:
    """Return seconds since the epoch as `17:25:03`."""
    return _written(at, "%H:%M:%S")


def _written(at: float, form: str) -> str:
    try:
        return time.strftime(form, time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return "?"
