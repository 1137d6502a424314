"""The conditions of the coordinator's table: each is a claim about one job at one moment. Pure.

A condition's name, with spaces for its underscores, is its text in docs/coordinator.md. A claim that people ask the
reason of is a text: what is wrong, as a sentence without its capital letter and full stop. Events and reasons quote it.
"""

from typing import Final

from headway.daemon.cluster.records import Desired, Phase, Save, WorkerState
from headway.daemon.decide.boundaries import due_checkpoint, parts_of, unsaved
from headway.daemon.decide.failures import link_news, standing_pairs, was_killed
from headway.daemon.decide.job_view import Place
from headway.daemon.decide.sentences import (
    at_the_end,
    jobs_named,
    leaving,
    trouble,
    waits_for,
    what_was_lost,
    who_is_not_ready,
)
from headway.daemon.decide.situation import JobSituation, PlanHealth, blocked_links, unproven
from headway.daemon.plan.cluster_plan import worker_name
from headway.daemon.plan.plan_question import no_worker
from headway.daemon.plan.planner import ClusterPlan, PlanRefused
from headway.daemon.plan.rebalance import is_news

TELL_AFTER_S: Final = 1.0
"""A job that waits longer than this for a plan says so."""
Claim = bool | str
"""False or empty: the claim does not hold. A text: it holds, and this is what is wrong."""


def cancel_requested(situation: JobSituation) -> bool:
    return situation.job.desired.state is Desired.CANCELLED


def pause_requested(situation: JobSituation) -> Claim:
    return "pause requested" if situation.job.desired.state is Desired.PAUSED else ""


def run_requested(situation: JobSituation) -> bool:
    return situation.job.desired.state is Desired.RUNNING


def resume_requested(situation: JobSituation) -> bool:
    return run_requested(situation) and situation.job.desired.request > situation.job.phase.request


def records_missing(situation: JobSituation) -> Claim:
    """Half of a transaction is missing, or someone deleted keys manually. Transactions compare missing keys, so they
    fail.
    """
    phase, job = situation.job.phase.phase, situation.job
    needs_plan = phase in (Phase.RUNNING, Phase.CHANGING, Phase.STOPPING, Phase.RECOVERING)
    needs_next = phase in (Phase.PREPARING, Phase.CHANGING) or (
        phase is Phase.STOPPING and job.stop is not None and job.stop.save is Save.MOVES
    )
    is_missing = (
        (needs_plan and job.plan is None)
        or (needs_next and job.next is None)
        or (phase is Phase.STOPPING and job.stop is None)
    )
    return f"its records in etcd are incomplete while it is {phase}" if is_missing else ""


def job_file_invalid(situation: JobSituation) -> Claim:
    """`submit` refuses such a job, so another program wrote it into etcd. The view keeps the broken rule alone."""
    return situation.job.refusal and f"the submitted job breaks a rule: {situation.job.refusal}"


# --- Starting -------------------------------------------------------------------------------------------------------


def nodes_settled_and_plan_found(situation: JobSituation) -> bool:
    return situation.now >= situation.view.unrest.settled_at and isinstance(situation.plans.best, ClusterPlan)


def no_cluster_could_run_it(situation: JobSituation) -> Claim:
    """Even nodes that may still join could not make the job possible."""
    best = situation.plans.best
    return best.reason if isinstance(best, PlanRefused) and best.is_final else ""


def next_worker_failed(situation: JobSituation) -> Claim:
    failed = situation.next.failed_worker
    return f"the worker of {worker_name(situation.next.stages, failed[0])} failed" if failed is not None else ""


def next_worker_reported_error(situation: JobSituation) -> Claim:
    """The error did not come from outside, so another attempt would repeat it. The next plan gives less to a worker
    that ran out of memory, and nothing to a machine that cannot import the job's code.
    """
    failed = situation.next.failed_worker
    if failed is None or was_killed(failed[1].failure) or failed[1].failure.refuses_plugins:
        return ""
    if failed[1].failure.shortage is not None:
        return ""
    return what_was_lost(situation)


def checkpoint_damaged(situation: JobSituation) -> Claim:
    """A node has read a file of the job's checkpoint that is not what was written: a worker says which."""
    checkpoint = situation.job.checkpoint
    if checkpoint is None:
        return ""
    workers = (*situation.current.workers.values(), *situation.next.workers.values())
    told = (worker.failure.text for worker in workers if worker.failure.damaged == checkpoint.url)
    return next(told, "").split("\n", 1)[0]


def next_workers_late(situation: JobSituation) -> Claim:
    return who_is_not_ready(situation) if situation.now >= situation.deadlines.prepare else ""


def next_node_unusable(situation: JobSituation) -> Claim:
    stage = situation.next.unusable
    return trouble(situation, stage) if stage is not None else ""


def next_device_without_worker(situation: JobSituation) -> Claim:
    """No worker can start on the device. A worker that died while it prepared is handled by a later row."""
    stage = situation.next.without_worker
    return no_worker(situation.view.nodes[stage.node], (stage.device_index,)) if stage is not None else ""


def all_next_workers_ready(situation: JobSituation) -> bool:
    """Each worker has also reached all its neighbours."""
    health = situation.next
    return health.plan is not None and not health.unready_workers(WorkerState.READY) and not unproven(health)


def stalled_between_nodes_that_cannot_connect(situation: JobSituation) -> Claim:
    """The job would never reach the stop boundary."""
    plan = situation.job.plan
    if plan is None or not (ways := blocked_links(situation.current)):
        return ""
    return "" if ways.pairs.isdisjoint(standing_pairs(situation.job, plan)) else str(ways)


def next_nodes_cannot_connect(situation: JobSituation) -> Claim:
    """The two nodes are neighbours or replicas. The plan is dropped; this counts against neither node."""
    ways = blocked_links(situation.next)
    return str(ways) if ways else ""


# --- Running --------------------------------------------------------------------------------------------------------


def worker_failed(situation: JobSituation) -> Claim:
    """The cause of the failure is known, or `CAUSE_GRACE_S` has passed."""
    return what_was_lost(situation) if situation.current.failed_worker is not None else ""


def node_lost(situation: JobSituation) -> Claim:
    stage = situation.current.lost
    return what_was_lost(situation) or trouble(situation, stage) if stage is not None else ""


def failure_budget_spent(situation: JobSituation) -> Claim:
    """Going back once more would not help: see `broken_rule`."""
    rule = situation.lost.broken_rule
    return f"{what_was_lost(situation)}; {rule}" if rule else ""


def node_saw_later_plan(situation: JobSituation) -> Claim:
    """etcd was restored from an older backup. Nodes do not obey plans that are older than one they saw."""
    known = situation.known_generation
    return f"nodes know plan {known}, which etcd has forgotten" if known > situation.job.phase.generation else ""


def workers_late(situation: JobSituation) -> Claim:
    """The workers are late to start, or late to reach the end after others reached it."""
    return what_was_lost(situation) if situation.lost.late else ""


def state_files_lost(situation: JobSituation) -> Claim:
    return _files_lost(situation, situation.current)


def all_stopped_at_end(situation: JobSituation) -> Claim:
    return at_the_end(situation) if situation.current.stopped_at(situation.end) else ""


def no_node_left_after_drain(situation: JobSituation) -> Claim:
    """A node of the plan drains, and no plan exists without the draining nodes."""
    draining = situation.current.draining
    if not draining or isinstance(situation.plans.best, ClusterPlan):
        return ""
    return f"{leaving(draining)} and the job cannot continue on the other nodes"


def node_draining(situation: JobSituation) -> bool:
    """A node of the plan drains. A worker that still loads its layers must run before another plan is
    prepared for it.
    """
    return (
        bool(situation.current.draining)
        and situation.now >= situation.deadlines.change
        and not situation.current.unready_workers(WorkerState.RUNNING)
        and isinstance(situation.plans.best, ClusterPlan)
    )


def some_devices_owed_to_others(situation: JobSituation) -> bool:
    """The job can continue with the remaining devices: see allocate.py."""
    return (
        bool(situation.gives_way_to)
        and situation.now >= situation.deadlines.change
        and situation.job.plan is not None
        and not situation.current.unready_workers(WorkerState.RUNNING)
        and isinstance(situation.plans.best, ClusterPlan)
    )


def all_devices_owed_to_others(situation: JobSituation) -> Claim:
    """The job has run for a time slice, and cannot continue on the remaining devices."""
    is_due = bool(situation.gives_way_to) and situation.now >= situation.left_alone_until
    if not is_due or not isinstance(situation.plans.best, PlanRefused):
        return ""
    return f"gives way to {jobs_named(situation, situation.gives_way_to)}"


def better_plan_found(situation: JobSituation) -> bool:
    """The plan saves more than the change costs (daemon/plan/rebalance.py), nodes have settled, and no other job claims
    them.
    """
    return _may_change(situation) and (verdict := situation.plans.verdict) is not None and verdict.is_worth_it


def outlook_changed(situation: JobSituation) -> bool:
    """The text about a faster plan that is not worth a change now differs in words or clearly in numbers."""
    return _may_change(situation) and is_news(situation.job.phase.outlook, outlook_text(situation))


def link_cut_or_back(situation: JobSituation) -> bool:
    return bool(link_news(situation.job))


def checkpoints_fail_or_work_again(situation: JobSituation) -> bool:
    """The checkpoint folder refuses boundaries and no event has told it, or a newer checkpoint has ended that."""
    return (situation.job.phase.unsaved < 0) is not (unsaved(situation.job) < 0)


def outlook_text(situation: JobSituation) -> str:
    """Return why a clearly faster plan is not taken; empty: no faster plan exists, or it is taken."""
    verdict = situation.plans.verdict
    return verdict.reason if verdict is not None and verdict.is_close else ""


def _may_change(situation: JobSituation) -> bool:
    plan = situation.job.plan
    if plan is None or situation.now < max(situation.view.unrest.settled_at, situation.deadlines.better_plan):
        return False
    return not situation.current.unready_workers(WorkerState.RUNNING)


# --- Stopping -------------------------------------------------------------------------------------------------------


def workers_late_to_stop(situation: JobSituation) -> Claim:
    """The workers are late to stop, or late to write the layers that move."""
    return what_was_lost(situation) if situation.lost.late else ""


def checkpoint_late(situation: JobSituation) -> Claim:
    """All workers have stopped, and durable storage does not receive every file in time."""
    plan, stop = situation.job.plan, situation.job.stop
    is_late = situation.now >= situation.deadlines.stop and not situation.lost.late
    if plan is None or stop is None or stop.save is not Save.CHECKPOINT or not is_late:
        return ""
    records = situation.job.state.get((plan.timeline, stop.boundary or 0), {}).values()
    troubles = sorted({record.trouble for record in records} - {""})
    why = f": {'; '.join(troubles)}" if troubles else ""
    return f"the checkpoint before batch {stop.boundary} could not be written in time{why}"


def move_no_longer_possible(situation: JobSituation) -> Claim:
    why = next_worker_failed(situation) or next_node_unusable(situation) or next_nodes_cannot_connect(situation)
    return _saves(situation, Save.MOVES) and why and f"the new plan cannot come into force ({why})"


def pause_requested_during_move(situation: JobSituation) -> Claim:
    return _saves(situation, Save.MOVES) and pause_requested(situation)


def move_ends_at_last_batch(situation: JobSituation) -> Claim:
    stop = situation.job.stop
    is_at_end = stop is not None and stop.save is Save.MOVES and stop.boundary == situation.end
    return at_the_end(situation) if is_at_end else ""


def all_stopped_and_moves_held(situation: JobSituation) -> bool:
    stop, plan = situation.job.stop, situation.job.plan
    if stop is None or plan is None or stop.boundary is None or not _saves(situation, Save.MOVES):
        return False
    return situation.current.stopped_at(stop.boundary) and all(
        situation.job.holders(plan.timeline, stop.boundary, layer) for layer in situation.moving
    )


def checkpoint_complete_at_end(situation: JobSituation) -> bool:
    stop = situation.job.stop
    return checkpoint_complete(situation) and stop is not None and stop.boundary == situation.end


def checkpoint_complete_and_pause_requested(situation: JobSituation) -> bool:
    return checkpoint_complete(situation) and bool(pause_requested(situation))


def checkpoint_complete(situation: JobSituation) -> bool:
    """All workers have stopped, and durable storage has every layer and the journal."""
    stop, plan = situation.job.stop, situation.job.plan
    if stop is None or plan is None or stop.boundary is None or not _saves(situation, Save.CHECKPOINT):
        return False
    return situation.current.stopped_at(stop.boundary) and is_durable(situation, (plan.timeline, stop.boundary))


def periodic_checkpoint_complete(situation: JobSituation) -> bool:
    due = due_checkpoint(situation.job)
    return due is not None and is_durable(situation, due)


def old_checkpoints_to_delete(situation: JobSituation) -> bool:
    return situation.job.checkpoint is not None and bool(situation.job.checkpoint.dropped)


def is_durable(situation: JobSituation, place: Place) -> bool:
    """Return whether durable storage has every part of a boundary."""
    return all(
        any(file.is_durable for file in situation.job.holders(*place, part).values())
        for part in parts_of(situation.job)
    )


def _saves(situation: JobSituation, save: Save) -> bool:
    return situation.job.stop is not None and situation.job.stop.save is save


# --- Recovering -----------------------------------------------------------------------------------------------------


def pause_requested_and_no_plan_found(situation: JobSituation) -> bool:
    is_asked = bool(pause_requested(situation)) and situation.job.next is None
    return is_asked and isinstance(situation.plans.recovery, PlanRefused)


def next_node_lost(situation: JobSituation) -> Claim:
    stage = situation.next.lost
    return what_was_lost(situation) or trouble(situation, stage) if stage is not None else ""


def next_node_draining_and_others_left(situation: JobSituation) -> Claim:
    draining = situation.next.draining
    return leaving(draining) if draining and isinstance(situation.plans.best, ClusterPlan) else ""


def next_node_stays_out(situation: JobSituation) -> Claim:
    """The node does not act on a plan that it could not persist. If all workers are ready, the plan takes effect
    anyway.
    """
    stage = situation.next.staying_out
    if stage is None or (all_next_workers_ready(situation) and not isinstance(situation.plans.recovery, ClusterPlan)):
        return ""
    return trouble(situation, stage)


def next_state_files_lost(situation: JobSituation) -> Claim:
    return _files_lost(situation, situation.next)


def _files_lost(situation: JobSituation, health: PlanHealth) -> str:
    if health.plan is None or health.can_load(heard_at=situation.deadlines.heard):
        return ""
    return f"the nodes that held boundary {health.plan.boundary} are gone"


def next_missing_and_plan_found(situation: JobSituation) -> Claim:
    is_found = situation.job.next is None and recovery_is_possible(situation)
    return "a plan is possible again" if is_found else ""


def recovery_is_possible(situation: JobSituation) -> bool:
    """A plan exists, and no newer state can be expected."""
    return isinstance(situation.plans.recovery, ClusterPlan) and situation.now >= situation.recovery_allowed_at


def recovery_wait_reason_changed(situation: JobSituation) -> Claim:
    return situation.job.next is None and wait_reason_changed(situation)


# --- Planning -------------------------------------------------------------------------------------------------------


def planning_wait_changed(situation: JobSituation) -> bool:
    """A row above needs a plan that takes noticeably long to compute, or no longer needs one."""
    return (planning_since(situation) > 0) != (situation.job.phase.planning_since > 0)


def planning_since(situation: JobSituation) -> float:
    """Return since when the job waits for a plan, in seconds since the epoch; 0: it does not wait, or only briefly."""
    since = situation.plans.inquiry.waits_since
    is_long = since is not None and situation.now >= since + TELL_AFTER_S
    return situation.written_at - (situation.now - since) if since is not None and is_long else 0.0


# --- Waiting --------------------------------------------------------------------------------------------------------


def wait_reason_changed(situation: JobSituation) -> Claim:
    """The sentence is written only when it changes, so a queued job costs no writes while nothing happens."""
    reason = waits_for(situation)
    return reason if reason != situation.job.phase.reason else ""
