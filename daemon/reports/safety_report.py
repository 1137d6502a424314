"""Reports what a job would lose if something broke now, and what it has lost so far. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from headway.daemon.base.terminal import counted
from headway.daemon.cluster.measurements import ReadingRecord
from headway.daemon.cluster.records import TERMINAL_PHASES, NodeRecord
from headway.daemon.decide import boundaries
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import JobSpec
from headway.daemon.plan.copy_places import num_copies


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetyReport:
    """The safety of a job's state. Absent numbers are None."""

    restorable: tuple[int, ...] = ()
    """Boundaries that survive the loss of copies - 1 nodes, newest first."""
    copies: int = 0
    """Number of nodes that hold the rarest part of the newest restorable boundary."""
    lag: int | None = None
    """Batches since the newest restorable boundary or checkpoint: a failure now would recompute them."""
    unprotected: str = ""
    """Reason why the loss of one node would lose more than `lag`; empty: it would not."""
    readings: tuple[str, ...] = ()
    """Nodes that are reading the job's data, with their progress."""
    troubles: tuple[str, ...] = ()
    """Reasons why snapshots or checkpoints are not written."""
    checkpoint_lag: int | None = None
    """Batches since the newest checkpoint."""
    num_rollbacks: int = 0
    recovered_to: int | None = None
    """Boundary to which the last rollback went."""
    recovery_cause: str = ""
    num_again: int = 0
    """Number of batches that the last rollback made the job recompute."""


def report_safety(job: JobView, nodes: Mapping[str, NodeRecord], *, batch: int | None) -> SafetyReport:
    """Return the report of a job whose spec is known. batch: the last whose loss is known."""
    spec = job.spec
    assert spec is not None, "a job without its spec is not shown"
    done = 0 if batch is None else batch + 1
    safe = boundaries.restorable(job, nodes) if nodes else ()
    checkpointed = job.checkpoint.boundary if job.checkpoint is not None else None
    best = max([0 if checkpointed is None else checkpointed, *(boundary for _, boundary in safe)])
    lineage = boundaries.lineage_of(job)
    plan = job.plan
    went_back = plan is not None and bool(plan.ancestry) and plan.generation == plan.timeline
    return SafetyReport(
        restorable=tuple(boundary for _, boundary in safe),
        copies=boundaries.fewest_holders(job, safe[0], nodes) if safe else 0,
        lag=max(0, done - best) if plan is not None else None,
        unprotected=_unprotected(job, spec, nodes),
        readings=_readings(job),
        troubles=_troubles(job),
        checkpoint_lag=None if checkpointed is None else max(0, done - checkpointed),
        num_rollbacks=len(lineage.ancestry) if lineage is not None else 0,
        recovered_to=lineage.ancestry[-1][1] if lineage is not None and lineage.ancestry else None,
        recovery_cause=plan.reason if plan is not None and went_back else "",
        num_again=max(0, plan.furthest - plan.boundary) if plan is not None and went_back else 0,
    )


def why_unprotected(spec: JobSpec, nodes: Mapping[str, NodeRecord]) -> str:
    """Return why the loss of a node would lose all boundaries that nodes hold; empty: it would not."""
    if spec.fault.copies == 1:
        return "copies = 1: no other node holds the layers of a lost node"
    if not spec.fault.snapshot_every:
        return "snapshot_every = 0: nodes hold no boundaries"
    if num_copies(spec, nodes) < 2:
        return "one node: no other node could hold a copy" if nodes else "no node is up"
    return ""


def safety_lines(report: SafetyReport) -> list[str]:
    """Return the report for people; it leaves out everything that is as expected."""
    lines = []
    if report.restorable:
        number = ", ".join(map(str, report.restorable[:2]))
        ago = "" if report.lag is None else f", {counted(report.lag, 'batch')} ago"
        lines.append(f"restorable: boundary {number} ({report.copies} copies){ago}")
    elif report.lag:
        lines.append(f"restorable: nothing newer than {counted(report.lag, 'batch')} ago")
    if report.checkpoint_lag is not None:
        ago = f"{counted(report.checkpoint_lag, 'batch')} ago" if report.checkpoint_lag else "holds every batch"
        lines.append(f"checkpoint: {ago}")
    if report.unprotected:
        lines.append(f"unprotected: {report.unprotected}")
    if report.num_rollbacks:
        again = f", {counted(report.num_again, 'batch')} recomputed" if report.num_again else ""
        cause = f" ({report.recovery_cause})" if report.recovery_cause else ""
        lines.append(f"rollbacks: {report.num_rollbacks}; the last to boundary {report.recovered_to}{again}{cause}")
    return lines + list(report.readings) + [f"warning: {trouble}" for trouble in report.troubles]


def cost_of_loss(report: SafetyReport) -> str:
    """Return what the loss of one machine would cost now; empty: the job does not train."""
    if report.lag is None:
        return ""
    return f"losing one machine costs {counted(report.lag, 'batch')}" + (
        f": {report.unprotected}" if report.unprotected else ""
    )


def _unprotected(job: JobView, spec: JobSpec, nodes: Mapping[str, NodeRecord]) -> str:
    return "" if job.phase.phase in TERMINAL_PHASES else why_unprotected(spec, nodes)


def _readings(job: JobView) -> tuple[str, ...]:
    return tuple(_reading(node, reading) for node, reading in sorted(job.readings.items()))


def _reading(node: str, reading: ReadingRecord) -> str:
    what = f"its layers of {reading.url}" if reading.url else "data"
    silence = f", and nothing has come for {reading.silent_s:.0f} s" if reading.silent_s else ""
    return f"{node} reads {what}: {reading.num_bytes / 1e9:.1f} of {reading.total_bytes / 1e9:.1f} GB{silence}"


def _troubles(job: JobView) -> tuple[str, ...]:
    found = boundaries.refusals(job)
    for (generation, stage), goodput in sorted(job.goodput.items()):
        if goodput.trouble and job.plan is not None and generation == job.plan.generation:
            found.append(f"stage {stage} on {goodput.node}: {goodput.trouble}")
    return tuple(found)
