"""Reports on jobs from a daemon alone, even while etcd is unreachable: its last view, and what waits for etcd."""

from collections.abc import Iterable

from headway.daemon.records.format import encode
from headway.daemon.records.records import Phase
from headway.daemon.reports.job_report import reports_in
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.job_view import JobView
from headway.proto import control_pb2

_IN_BETWEEN = {
    Phase.QUEUED: "its start",
    Phase.PREPARING: "its start",
    Phase.CHANGING: "its change of plan",
    Phase.STOPPING: "its checkpoint",
    Phase.RECOVERING: "its recovery",
}


def status_reply(view: ClusterView, *, node: str, away_s: float | None, job: str = "") -> control_pb2.StatusReply:
    """Return the answer to Status. away_s: how long etcd has been away; None: it is there. job: empty for every one."""
    jobs = [found for found in view.jobs_in_order() if job in ("", found.name)]
    return control_pb2.StatusReply(
        node=node,
        etcd_reachable=away_s is None,
        etcd_away_s=away_s or 0.0,
        jobs=encode({report.name: report for report in reports_in(view, jobs)}),
        waits_for="" if away_s is None else waits_for(jobs),
    )


def waits_for(jobs: Iterable[JobView]) -> str:
    """Return what cannot continue without etcd; each job amid a transition is named."""
    named = [f"{job.name}: {what}" for job in jobs if (what := _IN_BETWEEN.get(job.phase.phase)) is not None]
    return "; ".join([*named, "changes of plan, recovery from failures, and users' requests"])
