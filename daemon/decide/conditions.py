"""The conditions of the coordinator's table: each is a claim about one job at one moment. Pure.

A condition's name, with spaces for its underscores, is its text in docs/coordinator.md.
"""

from typing import Final

from headway.daemon.cluster.records import Desired, Phase, Save, WorkerState
from headway.daemon.decide.boundaries import due_checkpoint, parts_of
from headway.daemon.decide.failures import standing_pairs, was_killed
from headway.daemon.decide.job_view import Place
from headway.daemon.decide.sentences import waits_for
from headway.daemon.decide.situation import JobSituation, blocked_links, unproven
from headway.daemon.plan.planner import ClusterPlan, PlanRefused
from headway.daemon.plan.rebalance import is_news

TELL_AFTER_S: Final = 1.0
"""A job that waits longer than this for a plan says so."""


def cancel_requested(situation: JobSituation) -> bool:
    return situation.job.desired.state is Desired.CANCELLED


def pause_requested(situation: JobSituation) -> bool:
    return situation.job.desired.state is Desired.PAUSED


def run_requested(situation: JobSituation) -> bool:
    return situation.job.desired.state is Desired.RUNNING


def resume_requested(situation: JobSituation) -> bool:
    return run_requested(situation) and situation.job.desired.request > situation.job.phase.request


def records_missing(situation: JobSituation) -> bool:
    """Half of a transaction is missing, or someone deleted keys manually. Transactions compare missing keys, so they
    fail.
    """
    phase, job = situation.job.phase.phase, situation.job
    needs_plan = phase in (Phase.RUNNING, Phase.CHANGING, Phase.STOPPING, Phase.RECOVERING)
    needs_next = phase in (Phase.PREPARING, Phase.CHANGING) or (
        phase is Phase.STOPPING and job.stop is not None and job.stop.save is Save.MOVES
    )
    return (
        (needs_plan and job.plan is None)
        or (needs_next and job.next is None)
        or (phase is Phase.STOPPING and job.stop is None)
    )


def job_file_invalid(situation: JobSituation) -> bool:
    """`submit` refuses such a job, so another program wrote it into etcd. The view keeps the broken rule alone."""
    return bool(situation.job.refusal)


# --- Starting -------------------------------------------------------------------------------------------------------


def nodes_settled_and_plan_found(situation: JobSituation) -> bool:
    return situation.now >= situation.view.unrest.settled_at and isinstance(situation.plans.best, ClusterPlan)


def no_cluster_could_run_it(situation: JobSituation) -> bool:
    """Even nodes that may still join could not make the job possible."""
    return isinstance(situation.plans.best, PlanRefused) and situation.plans.best.is_final


def next_worker_failed(situation: JobSituation) -> bool:
    return situation.next.failed_worker is not None


def next_worker_reported_error(situation: JobSituation) -> bool:
    """The error did not come from outside, so another attempt would repeat it. One that ran out of memory gets less to
    do in the next plan.
    """
    failed = situation.next.failed_worker
    return failed is not None and not was_killed(failed[1].failure) and failed[1].failure.shortage is None


def checkpoint_damaged(situation: JobSituation) -> bool:
    """A node has read a file of the job's checkpoint that is not what was written."""
    return bool(damage_found(situation))


def next_workers_late(situation: JobSituation) -> bool:
    return situation.now >= situation.deadlines.prepare


def next_node_unusable(situation: JobSituation) -> bool:
    return situation.next.unusable is not None


def next_device_without_worker(situation: JobSituation) -> bool:
    """No worker can start on the device. A worker that died while it prepared is handled by a later row."""
    return situation.next.without_worker is not None


def all_next_workers_ready(situation: JobSituation) -> bool:
    """Each worker has also reached all its neighbours."""
    health = situation.next
    return health.plan is not None and not health.unready_workers(WorkerState.READY) and not unproven(health)


def stalled_between_nodes_that_cannot_connect(situation: JobSituation) -> bool:
    """The job would never reach the stop boundary."""
    plan = situation.job.plan
    if plan is None or not (ways := blocked_links(situation.current)):
        return False
    return not ways.pairs.isdisjoint(standing_pairs(situation.job, plan))


def next_nodes_cannot_connect(situation: JobSituation) -> bool:
    """The two nodes are neighbours or replicas. The plan is dropped; this counts against neither node."""
    return bool(blocked_links(situation.next))


# --- Running --------------------------------------------------------------------------------------------------------


def worker_failed(situation: JobSituation) -> bool:
    """The cause of the failure is known, or `CAUSE_GRACE_S` has passed."""
    return situation.current.failed_worker is not None and bool(situation.lost.found)


def node_lost(situation: JobSituation) -> bool:
    return situation.current.lost is not None


def failure_budget_spent(situation: JobSituation) -> bool:
    """Going back once more would not help: see failure_budget.py."""
    return bool(situation.lost.broken_rule)


def node_saw_later_plan(situation: JobSituation) -> bool:
    """etcd was restored from an older backup. Nodes do not obey plans that are older than one they saw."""
    return situation.known_generation > situation.job.phase.generation


def workers_late(situation: JobSituation) -> bool:
    """The workers are late to start, or late to reach the end after others reached it."""
    return bool(situation.lost.late)


def state_files_lost(situation: JobSituation) -> bool:
    return not situation.current.can_load(heard_at=situation.deadlines.heard)


def all_stopped_at_end(situation: JobSituation) -> bool:
    return situation.current.stopped_at(situation.end)


def no_node_left_after_drain(situation: JobSituation) -> bool:
    """A node of the plan drains, and no plan exists without the draining nodes."""
    return bool(situation.current.draining) and not isinstance(situation.plans.best, ClusterPlan)


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


def all_devices_owed_to_others(situation: JobSituation) -> bool:
    """The job has run for a time slice, and cannot continue on the remaining devices."""
    return (
        bool(situation.gives_way_to)
        and situation.now >= situation.left_alone_until
        and isinstance(situation.plans.best, PlanRefused)
    )


def better_plan_found(situation: JobSituation) -> bool:
    """The plan saves more than the change costs (planning/rebalance.py), nodes have settled, and no other job claims
    them.
    """
    return _may_change(situation) and (verdict := situation.plans.verdict) is not None and verdict.is_worth_it


def outlook_changed(situation: JobSituation) -> bool:
    """The text about a faster plan that is not worth a change now differs in words or clearly in numbers."""
    return _may_change(situation) and is_news(situation.job.phase.outlook, outlook_text(situation))


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


def workers_late_to_stop(situation: JobSituation) -> bool:
    """The workers are late to stop, or late to write the layers that move."""
    return bool(situation.lost.late)


def checkpoint_late(situation: JobSituation) -> bool:
    """All workers have stopped, and durable storage does not receive every file in time."""
    return _saves(situation, Save.CHECKPOINT) and situation.now >= situation.deadlines.stop and not situation.lost.late


def move_no_longer_possible(situation: JobSituation) -> bool:
    return _saves(situation, Save.MOVES) and (
        next_worker_failed(situation) or next_node_unusable(situation) or next_nodes_cannot_connect(situation)
    )


def pause_requested_during_move(situation: JobSituation) -> bool:
    return _saves(situation, Save.MOVES) and pause_requested(situation)


def move_ends_at_last_batch(situation: JobSituation) -> bool:
    stop = situation.job.stop
    return _saves(situation, Save.MOVES) and stop is not None and stop.boundary == situation.end


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
    return checkpoint_complete(situation) and pause_requested(situation)


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
    return (
        pause_requested(situation) and situation.job.next is None and isinstance(situation.plans.recovery, PlanRefused)
    )


def next_node_lost(situation: JobSituation) -> bool:
    return situation.next.lost is not None


def next_node_draining_and_others_left(situation: JobSituation) -> bool:
    return bool(situation.next.draining) and isinstance(situation.plans.best, ClusterPlan)


def next_node_stays_out(situation: JobSituation) -> bool:
    """The node does not act on a plan that it could not persist. If all workers are ready, the plan takes effect
    anyway.
    """
    if situation.next.staying_out is None:
        return False
    return not all_next_workers_ready(situation) or isinstance(situation.plans.recovery, ClusterPlan)


def next_state_files_lost(situation: JobSituation) -> bool:
    return not situation.next.can_load(heard_at=situation.deadlines.heard)


def next_missing_and_plan_found(situation: JobSituation) -> bool:
    return situation.job.next is None and recovery_is_possible(situation)


def recovery_is_possible(situation: JobSituation) -> bool:
    """A plan exists, and no newer state can be expected."""
    return isinstance(situation.plans.recovery, ClusterPlan) and situation.now >= situation.recovery_allowed_at


def recovery_wait_reason_changed(situation: JobSituation) -> bool:
    return situation.job.next is None and situation.job.phase.reason != waits_for(situation)


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


def wait_reason_changed(situation: JobSituation) -> bool:
    """The sentence is written only when it changes, so a queued job costs no writes while nothing happens."""
    return situation.job.phase.reason != waits_for(situation)


def damage_found(situation: JobSituation) -> str:
    """Return what a worker says of a damaged file of the job's checkpoint; empty: nothing."""
    checkpoint = situation.job.checkpoint
    if checkpoint is None:
        return ""
    workers = (*situation.current.workers.values(), *situation.next.workers.values())
    told = (worker.failure.text for worker in workers if worker.failure.damaged == checkpoint.url)
    return next(told, "").split("\n", 1)[0]
