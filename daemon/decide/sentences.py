"""Writes the sentences about the coordinator's decisions: reasons, events, errors. Pure."""

from collections.abc import Sequence
from typing import Final

from headway.daemon.base.terminal import counted
from headway.daemon.cluster.measurements import LinkCuts, MemoryShortage
from headway.daemon.cluster.records import Failure, Phase, PlanRecord, WorkerPart, WorkerState
from headway.daemon.decide.allocate import left_alone_s
from headway.daemon.decide.failures import STARTED, LostWorker, repetition
from headway.daemon.decide.job_view import JobView
from headway.daemon.decide.quarantine import listed
from headway.daemon.decide.situation import JobSituation, unproven
from headway.daemon.jobs.job import preparation_s
from headway.daemon.plan.cluster_plan import ClusterPlan, replica_note, sentence, shape, size, stage_name, worker_name
from headway.daemon.plan.rebalance import is_depth_alone

MOST_NAMED: Final = 3
"""Links that a sentence names."""
MAX_ERROR: Final = 300
"""Maximum number of characters quoted from a worker's error."""


def why_changed(situation: JobSituation, before: PlanRecord, after: ClusterPlan) -> str:
    """Return the reason of a planned change."""
    added = {stage.node for stage in after.workers} - {stage.node for stage in before.workers}
    newcomers = situation.view.newcomers(situation.job, added)
    causes = []
    if draining := situation.current.draining:
        causes.append(leaving(draining))
    if joined := sorted(added & newcomers):
        causes.append(f"node{'s' * (len(joined) > 1)} {listed(joined)} joined")
    if idle := sorted(added - newcomers):
        causes.append(f"node{'s' * (len(idle) > 1)} {listed(idle)}, idle until now, can be used")
    if situation.gives_way_to:
        causes.append(f"gives devices to {jobs_named(situation, situation.gives_way_to)}")
    cause = sentence(" and ".join(causes)) if causes else _better(situation, before, after)
    form, former = shape(after.workers), shape(before.workers)
    if form != former:
        form += f" instead of {former.removesuffix(' stages').removesuffix(' stage')}"
    factor = before.predicted_batch_seconds / max(after.predicted_batch_seconds, 1e-12)
    if (outlook := situation.plans.outlook) is not None:
        factor = outlook.factor
    speed = f"{factor:.2g}× faster" if factor > 1.005 else f"{1 / max(factor, 1e-12):.2g}× the time of a batch"
    return f"{cause}: {form}, predicted {speed}"


def _better(situation: JobSituation, before: PlanRecord, after: ClusterPlan) -> str:
    """Return why the plan changes although no node comes or goes."""
    if is_depth_alone(before.workers, after.workers):
        deeper = sum(stage.depth for stage in after.workers) > sum(stage.depth for stage in before.workers)
        return f"Measured links need {'more' if deeper else 'fewer'} microbatches in flight"
    return "Other layers by measured times" if situation.plans.profiles.layers else "Other layers"


def link_sentence(situation: JobSituation, news: Sequence[LinkCuts]) -> str:
    """Return what befell links of the plan in force, and what it costs."""
    workers, told = situation.current.stages, []
    for is_back in (True, False):
        those = [cuts for cuts in news if (cuts.num_back >= cuts.num_cut) is is_back]
        if not those:
            continue
        ends = [" and ".join(worker_name(workers, position) for position in cuts.ends) for cuts in those]
        more = [f"{len(ends) - MOST_NAMED} other pairs"] if len(ends) > MOST_NAMED else []
        one = len(ends) == 1
        which = f"The link{'s' * (not one)} between {', and between '.join((*ends[:MOST_NAMED], *more))}"
        if is_back:
            cut_s, num = max(cuts.cut_s for cuts in those), max(cuts.num_cut for cuts in those)
            times = f" (cut {num} times under this plan)" if num > 1 else ""
            told.append(f"{which} {'was' if one else 'were'} cut for {cut_s:.1f} s, back now: no batch again{times}")
        else:
            limit = f"after {situation.spec.fault.link_timeout_s:g} s without it the training goes back to a boundary"
            told.append(f"{which} {'is' if one else 'are'} cut: both ends dial, and {limit}")
    return ". ".join(told)


def who_is_not_ready(situation: JobSituation) -> str:
    """Return why the workers of `next` are late: storage, a worker that is not ready, or a neighbour out of reach."""
    if away := next((loss for loss in situation.lost.found if loss.storage_trouble), None):
        return _loss(situation, away)
    if late := situation.next.unready(WorkerState.READY):
        return f"{listed(late)} {_not_ready(situation)}"
    pairs = unproven(situation.next)
    if not pairs:
        return "its workers were not ready in time"
    place, other = (worker_name(situation.next.stages, position) for position in pairs[0])
    return f"{place} has not reached {other} in time"


def at_the_end(situation: JobSituation) -> str:
    """Return why no further batch is trained."""
    return early_end_text(situation) or "all batches are done"


def early_end_text(situation: JobSituation) -> str:
    """Return why the job ends before its last batch; empty: it does not."""
    if situation.early_end is None:
        return ""
    boundary, best_batch = situation.early_end
    return f"stopped early at batch {boundary}: the held-out loss has not fallen since batch {best_batch}"


def what_was_lost(situation: JobSituation) -> str:
    """Return the losses of workers that explain the others; empty: none, or their cause may still become known."""
    return listed(list(dict.fromkeys(_loss(situation, loss) for loss in situation.lost.causes)))


def where_it_goes(situation: JobSituation, plan: ClusterPlan) -> str:
    """Return `goes back to boundary 40 (2 batches again), 3 stages on a, b and c`."""
    origin = situation.origin
    again = max(situation.furthest - origin.boundary, 0)
    what = "the beginning" if origin.source == "initial" else f"boundary {origin.boundary}"
    of = " of its checkpoint" if origin.source == "checkpoint" else ""
    return f"goes back to {what}{of} ({counted(again, 'batch')} again), {shape_and_nodes(plan.workers)}"


def trouble(situation: JobSituation, stage: WorkerPart) -> str:
    """Return what is wrong with the node of a plan's part."""
    name = stage.node
    node = situation.view.nodes.get(name)
    if node is None:
        why = "its certificate is revoked" if situation.view.is_revoked(name) else "its lease expired"
        return f"node {name} was lost ({why})"
    if node.incarnation != stage.node_incarnation:
        return f"node {name} was lost (its daemon restarted)"
    if node.is_draining:
        return f"node {name} is draining"
    return f"node {name} stays out of new plans: {node.stays_out}"


def shape_and_nodes(workers: Sequence[WorkerPart]) -> str:
    """Return `3 stages on a, b and c`; each node is named once."""
    return f"{shape(workers)} on {listed(list(dict.fromkeys(worker.node for worker in workers)))}"


def jobs_named(situation: JobSituation, names: Sequence[str]) -> str:
    """Return `job b of bob (priority 5) and job c of carol`."""
    told = []
    for name in names:
        job = situation.view.jobs[name]
        of = f" of {job.user}" if job.user else ""
        told.append(
            f"job {name}{of}" + (f" (priority {job.priority})" if job.priority != situation.job.priority else "")
        )
    return listed(told)


def leaving(draining: tuple[str, ...]) -> str:
    """Return `node b leaves`."""
    return f"node {draining[0]} leaves" if len(draining) == 1 else f"nodes {listed(draining)} leave"


def _loss(situation: JobSituation, loss: LostWorker) -> str:
    workers, position = loss.plan.workers, loss.position
    who = f"the worker of {stage_name(workers, position)} on node {loss.stage.node}{replica_note(workers, position)}"
    if (failure := loss.failure) is not None:
        if 0 <= failure.lost_peer < len(workers):
            return f"{who} {_which_link(failure, worker_name(workers, failure.lost_peer))}"
        if loss.is_out_of_memory and failure.shortage is not None:
            return f"{who} ran out of memory{_of_what(failure.shortage)}"
        return f"{who} {_how_it_failed(failure)}"
    if loss.storage_trouble:
        return f"node {loss.stage.node} cannot read the job's starting state or data: {loss.storage_trouble}"
    if not loss.is_late:
        return trouble(situation, loss.stage)
    job = situation.job
    boundary = job.stop.boundary if job.stop is not None else None
    match job.phase.phase:
        case Phase.PREPARING | Phase.RECOVERING:
            return f"{who} was {_not_ready(situation)}"
        case Phase.STOPPING if boundary is None:
            return f"{who} did not choose a stop boundary in time"
        case Phase.STOPPING if situation.current.unready(WorkerState.STOPPED):
            return f"{who} did not stop at boundary {boundary} in time"
        case Phase.STOPPING:
            return f"{who} did not write boundary {boundary} in time"
    is_due = job.plan is not None and situation.now >= situation.deadlines.start
    if is_due and position in situation.current.unready_workers(*STARTED):
        return f"{who} did not start in time"
    return f"{who} did not reach the end in time"


def _which_link(failure: Failure, peer: str) -> str:
    """Return `did not reach stage 1 on b (… the connection was refused)`."""
    what = "did not reach" if failure.was_unreached else "lost its link to"
    return f"{what} {peer} ({failure.text.split(chr(10), 1)[0]})"


def _of_what(shortage: MemoryShortage) -> str:
    """Return ` (it wanted 2 GiB beside 70 GiB, of 79 GiB)`, as far as it is known."""
    parts = [f"it wanted {size(shortage.wanted_bytes)}"] if shortage.wanted_bytes else []
    parts += [f"beside {size(shortage.allocated_bytes)}"] if parts and shortage.allocated_bytes else []
    told = " ".join(parts) + (f", of {size(shortage.allowed_bytes)}" if parts and shortage.allowed_bytes else "")
    return f" ({told})" if told else ""


def _not_ready(situation: JobSituation) -> str:
    train = situation.spec.train
    compiled = ", with its layers compiled" if train.compile else ""
    return f"not ready within {preparation_s(train):g} s{compiled}"


def _how_it_failed(failure: Failure) -> str:
    """Return `was killed by SIGKILL`, `failed (ValueError: no such thing)`, `failed (worker cpu:0: …)` or `failed`."""
    head = "\n".join(failure.text.split("\n", 2)[:2])
    if failure.fault:
        return f"failed ({failure.fault})"
    for line in head.split("\n"):
        if "ended by signal " in line:
            return f"was killed by {line.rpartition('ended by signal ')[2][:MAX_ERROR]}"
        if line.endswith("; it was killed"):
            return f"was killed ({line.removesuffix('; it was killed').partition(': ')[2] or line})"
    first = head.partition("\n")[0]
    return f"failed ({first[:MAX_ERROR]})" if first else "failed"


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
    allocation, name = situation.allocation, situation.job.name
    if not is_recovering and (rival := allocation.rival(name, situation.ahead)):
        return f"waits for its turn after job {rival}"
    if isinstance(situation.plans.on_everything, ClusterPlan):
        owners = sorted(set(allocation.in_the_way(name)) or _owners(situation))
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
