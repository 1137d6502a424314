"""Says why a queued job does not start, or a recovering one does not continue, in one sentence without full
stop. Pure.
"""

from headway.daemon.coordination.claims import left_alone_s
from headway.daemon.planning.cluster_plan import ClusterPlan
from headway.daemon.records.records import Phase
from headway.daemon.situation.failure_budget import repetition
from headway.daemon.situation.situation import JobSituation
from headway.daemon.view.job_view import JobView


def waits_for(situation: JobSituation) -> str:
    """Return the wait reason for the phase record. It contains no passing seconds, so it changes only when its cause
    does.
    """
    is_recovering = situation.job.plan is not None
    best = situation.plans.recovery if is_recovering else situation.plans.best
    if isinstance(best, ClusterPlan):
        if is_recovering:
            again = repetition(situation.job.phase.failures)
            return f"waits for nodes that may hold state newer than boundary {situation.origin.boundary}{again}"
        return "waits for the nodes to settle"
    if situation.standing.after and not is_recovering:
        return f"waits for its turn after job {situation.standing.after}"
    if isinstance(situation.plans.on_everything, ClusterPlan):
        owners = sorted(set(situation.standing.in_the_way) or _owners(situation))
        return f"waits for devices of job {' and '.join(owners) or 'another'}{_what_has_to_happen(situation, owners)}"
    return "; ".join(filter(None, [best.reason, situation.plans.why_quarantined]))


def _owners(situation: JobSituation) -> set[str]:
    """Return the owners of all devices in use."""
    return {other.name for other in situation.view.jobs.values() if other is not situation.job and other.devices}


def _what_has_to_happen(situation: JobSituation, owners: list[str]) -> str:
    """Return one clause for each cause; empty if jobs are simply served one after the other."""
    causes: dict[str, list[str]] = {}
    for name in owners:
        if cause := _cause(situation, situation.view.jobs[name]):
            causes.setdefault(cause, []).append(name)
    of_all = len(causes) == 1 and len(next(iter(causes.values()))) == len(owners)
    clauses = [cause if of_all else f"{' and '.join(names)} {cause}" for cause, names in causes.items()]
    return f": {'; '.join(clauses)}" if clauses else ""


def _cause(situation: JobSituation, owner: JobView) -> str:
    if owner.phase.phase in (Phase.CHANGING, Phase.STOPPING):
        return "gives way"
    if owner.priority > situation.job.priority:
        return f"has priority {owner.priority}"
    if owner.priority == situation.job.priority and owner.user == situation.job.user:
        return ""
    kept_s = left_alone_s(owner, situation.view)
    if situation.now < owner.started_at + kept_s:
        return f"keeps its devices until it has run for {kept_s:g} s"
    if owner.priority < situation.job.priority:
        return "gives way"
    user = situation.job.user or "this user"
    return f"gives way when {owner.user or 'its user'} has used more of the cluster than {user}"
