"""What a page shows of a cluster, in the sentences of the commands: troubles, nodes, links, jobs."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Final

from headway.daemon.cluster.measurements import LinkProbe
from headway.daemon.cluster.records import Phase
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.plan.cluster_plan import layer_range
from headway.daemon.plan.link_choice import linked_pairs
from headway.daemon.plan.paths import MOST_NAMED, Pair, pair_of
from headway.daemon.reports.job_report import JobReport, progress_text, queue_note, time_left, why_now
from headway.daemon.reports.node_list import (
    NO_NODE,
    alike,
    failure_lines,
    node_ailments,
    node_notes,
    set_aside_lines,
    vanished_jobs,
)

MOST_TROUBLES: Final = 50
"""Maximum number of troubles that are told; the rest is counted."""
MOST_NODES_DRAWN: Final = 16
"""Links are told by node in a cluster of so many nodes, and by site in a larger one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What is wrong, in the words of the command that also tells it."""

    about: str
    """`etcd at …`, `node gpu-3`, `job first`."""
    sentence: str
    advice: str = ""
    """What to do next, with commands in backquotes; empty: the sentence says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """A node that is up, or that has failed and is gone."""

    name: str
    site: str
    is_up: bool
    devices: str = ""
    device_bytes: int = 0
    """Memory of its devices; 0: not known, not limited."""
    planned_bytes: int = 0
    """Part of it that the plans in force count on."""
    holds: tuple[str, ...] = ()
    """`job: layers`, for each worker."""
    notes: str = ""
    troubles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRow:
    """The ways between two nodes or, of a large cluster, between or inside sites. The smaller name comes first."""

    ends: tuple[str, str]
    num_measured: int = 0
    """Number of measured directions; of several, the numbers below are their median."""
    round_trip_s: float = 0.0
    bytes_per_s: tuple[float, float] = (0.0, 0.0)
    """To the second end, and to the first; 0: not measured."""
    loss: float = 0.0
    """Largest share of packets that is lost in a direction."""
    via: str = ""
    """A relay through which one was measured."""
    jobs: tuple[str, ...] = ()
    """Jobs whose plan in force has workers that talk this way."""
    blocked: tuple[str, ...] = ()
    """Sentences on the directions that are blocked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """A job, as a line of `headway jobs` tells it."""

    name: str
    user: str
    priority: int
    phase: str
    batch: int | None
    batches: int
    progress: str
    loss: float | None
    tokens_per_second: float | None
    left: str
    queue_position: int | None
    why: str


def job_row(report: JobReport) -> JobRow:
    """Return the row of a job by its report."""
    return JobRow(
        name=report.name,
        user=report.user,
        priority=report.priority,
        phase=report.phase,
        batch=report.batch,
        batches=report.batches,
        progress=progress_text(report),
        loss=report.loss,
        tokens_per_second=report.tokens_per_second,
        left=time_left(report) if report.seconds_left else "",
        queue_position=report.queue_position,
        why=" · ".join(filter(None, (queue_note(report), *why_now(report)))),
    )


def node_rows(view: ClusterView) -> tuple[NodeRow, ...]:
    """Return a row for each node, by name; of a node that has failed and is gone, its failures."""
    leader = view.leader.node if view.leader else ""
    holds: dict[str, list[str]] = {}
    planned: Counter[str] = Counter()
    for job in view.jobs_in_order():
        for worker in job.plan.workers if job.plan is not None else ():
            holds.setdefault(worker.node, []).append(f"{job.name}: {layer_range(worker.layers)}")
            planned[worker.node] += worker.device_bytes
    rows = []
    for name in sorted({*view.nodes, *view.failures}):
        troubles = (*node_ailments(view, name), *failure_lines(view, name))
        if (node := view.nodes.get(name)) is None:
            rows.append(NodeRow(name=name, site="", is_up=False, notes="is not up", troubles=troubles))
            continue
        rows.append(
            NodeRow(
                name=name,
                site=node.site,
                is_up=True,
                devices=alike([f"{device.kind} {device.model}".strip() for device in node.devices]),
                device_bytes=sum(device.memory_bytes for device in node.devices),
                planned_bytes=planned[name],
                holds=tuple(holds.get(name, ())),
                notes=node_notes(node, leader, num_failures=len(view.failures.get(name, {}))),
                troubles=troubles,
            )
        )
    return tuple(rows)


def link_rows(view: ClusterView) -> tuple[LinkRow, ...]:
    """Return a row for each pair of nodes, or of sites, whose way is measured, used by a plan, or blocked."""
    nodes = view.nodes
    is_large = len(nodes) > MOST_NODES_DRAWN
    ends = {name: node.site if is_large else name for name, node in nodes.items()}
    gathered: dict[Pair, _Ways] = {}

    def way(source: str, target: str) -> "_Ways":
        return gathered.setdefault(pair_of(ends[source], ends[target]), _Ways())

    for target, record in view.probes.items():
        if target in nodes and record.incarnation == nodes[target].incarnation:
            for source, probe in record.peers.items():
                if source in nodes:
                    way(source, target).add(probe, is_back=ends[source] > ends[target])
    for job in view.jobs_in_order():
        plan = job.plan
        for one, other in linked_pairs(plan.workers, trains_tie=job.trains_tie) if plan is not None else ():
            if one in nodes and other in nodes and one != other:
                way(one, other).jobs.add(job.name)
    for blocked in view.blocked.ways:
        way(blocked.source, blocked.target).blocked.append(str(blocked))
    return tuple(ways.row(pair) for pair, ways in sorted(gathered.items()))


@dataclass(slots=True)
class _Ways:
    """What is known of the ways between two ends."""

    there: list[LinkProbe] = field(default_factory=list)
    back: list[LinkProbe] = field(default_factory=list)
    jobs: set[str] = field(default_factory=set)
    blocked: list[str] = field(default_factory=list)

    def add(self, probe: LinkProbe, *, is_back: bool) -> None:
        """Add a measurement. is_back: of the direction to the first end."""
        (self.back if is_back else self.there).append(probe)

    def row(self, ends: Pair) -> LinkRow:
        """Return the row."""
        probes = [*self.there, *self.back]
        return LinkRow(
            ends=ends,
            num_measured=len(probes),
            round_trip_s=median_low(probe.round_trip_s for probe in probes) if probes else 0.0,
            bytes_per_s=(_rate(self.there), _rate(self.back)),
            loss=max((probe.loss for probe in probes), default=0.0),
            via=next((probe.via for probe in probes if probe.via), ""),
            jobs=tuple(sorted(self.jobs)),
            blocked=tuple(self.blocked[:MOST_NAMED]),
        )


def _rate(probes: Sequence[LinkProbe]) -> float:
    return median_low(probe.bytes_per_s for probe in probes) if probes else 0.0


def troubles(view: ClusterView, reports: Iterable[JobReport]) -> list[Trouble]:
    """Return what is wrong in the cluster's records, the widest first: records, nodes, jobs."""
    found = [
        Trouble(about="records", sentence=line, advice="`headway doctor` tells more") for line in set_aside_lines(view)
    ]
    found += [Trouble(about=f"job {name}", sentence=text) for name, text in vanished_jobs(view).items()]
    if not view.nodes:
        found.append(Trouble(about="nodes", sentence=NO_NODE))
    elif view.leader is None:
        found.append(Trouble(about="nodes", sentence="nobody leads", advice="`headway doctor` tells more"))
    for name in sorted({*view.nodes, *view.failures}):
        node, advice = f"node {name}", "`headway doctor` tells more"
        found += [Trouble(about=node, sentence=line, advice=advice) for line in node_ailments(view, name)]
        if failures := failure_lines(view, name):
            found.append(Trouble(about=node, sentence=failures[-2], advice=failures[-1]))
    for report in reports:
        found += _of_job(report)
    return found


def _of_job(report: JobReport) -> list[Trouble]:
    job, last = f"job {report.name}", report.error.strip().splitlines()[-1:]
    if report.phase == Phase.FAILED:
        sentence = ": ".join(filter(None, ["failed", report.reason, *last]))
        return [Trouble(about=job, sentence=sentence, advice=f"`headway logs {report.name}` tells more")]
    own = [line for line in report.ailments if not line.startswith("node ")]
    lines = [*own, *report.waits, *report.safety.troubles]
    return [Trouble(about=job, sentence=line, advice=f"`headway status {report.name}` tells more") for line in lines]
