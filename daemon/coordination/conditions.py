"""The conditions of the coordinator's table: each is a claim about one job at one moment. Pure.

A condition's name, with its underscores read as spaces, is its text in docs/coordinator.md; commas stand in diagram.py.
"""

from headway.daemon.coordination.link_proofs import blocked_links, unproven
from headway.daemon.coordination.waiting import waits_for
from headway.daemon.planning.planner import ClusterPlan, PlanRefused
from headway.daemon.planning.rebalance import is_news
from headway.daemon.records.records import Desired, Phase, Save, WorkerState
from headway.daemon.situation.boundaries import due_checkpoint, parts_of
from headway.daemon.situation.failure_budget import was_killed
from headway.daemon.situation.situation import TELL_AFTER_S, Case
from headway.daemon.situation.standstill import standing_pairs
from headway.daemon.view.cluster_view import Place


def cancel_is_wanted(case: Case) -> bool:
    return case.job.desired.state is Desired.CANCELLED


def pause_is_wanted(case: Case) -> bool:
    return case.job.desired.state is Desired.PAUSED


def running_is_wanted(case: Case) -> bool:
    return case.job.desired.state is Desired.RUNNING


def running_is_requested_anew(case: Case) -> bool:
    return running_is_wanted(case) and case.job.desired.request > case.job.phase.request


def its_records_are_missing(case: Case) -> bool:
    """Half a transaction is missing (the write then fails, as it compares missing keys), or somebody deleted keys by
    hand.
    """
    phase, job = case.job.phase.phase, case.job
    needs_plan = phase in (Phase.RUNNING, Phase.CHANGING, Phase.STOPPING, Phase.RECOVERING)
    needs_next = phase in (Phase.PREPARING, Phase.CHANGING) or (
        phase is Phase.STOPPING and job.stop is not None and job.stop.save is Save.MOVES
    )
    return (
        (needs_plan and job.plan is None)
        or (needs_next and job.next is None)
        or (phase is Phase.STOPPING and job.stop is None)
    )


def it_breaks_a_rule(case: Case) -> bool:
    """`submit` refuses such a job; another program wrote it into etcd. The view has only the broken rule's sentence."""
    return bool(case.job.refusal)


# --- Starting -------------------------------------------------------------------------------------------------------


def its_turn_has_come_nodes_are_settled_and_a_plan_exists(case: Case) -> bool:
    return case.now >= case.settled_at and isinstance(case.best_plan, ClusterPlan)


def it_contradicts_itself(case: Case) -> bool:
    """No node that could join would make the job possible."""
    return isinstance(case.best_plan, PlanRefused) and case.best_plan.is_final


def a_worker_of_next_failed(case: Case) -> bool:
    return case.failed_worker(case.job.next) is not None


def a_worker_of_next_told_an_error(case: Case) -> bool:
    """The error did not come from outside, so it would come again."""
    failed = case.failed_worker(case.job.next)
    return failed is not None and not was_killed(failed[1])


def workers_of_next_are_late(case: Case) -> bool:
    return case.now >= case.deadlines.prepare


def a_node_of_next_is_gone_replaced_or_draining(case: Case) -> bool:
    return case.unusable(case.job.next) is not None


def a_device_of_next_has_no_worker(case: Case) -> bool:
    """No worker can start there. If a worker died while it prepared, its own record decides, which comes later."""
    return case.without_worker(case.job.next) is not None


def all_workers_of_next_are_ready(case: Case) -> bool:
    """Each worker has also reached all its neighbours."""
    plan = case.job.next
    return plan is not None and not case.unready(plan, WorkerState.READY) and not unproven(case, plan)


def it_stands_still_between_nodes_that_cannot_talk(case: Case) -> bool:
    """The job would never reach the stop boundary."""
    plan = case.job.plan
    if plan is None or not (ways := blocked_links(case, plan)):
        return False
    return not ways.pairs.isdisjoint(standing_pairs(case.job, plan))


def two_nodes_of_next_cannot_talk(case: Case) -> bool:
    """The pair are neighbours or replicas. The plan is dropped; this counts against neither node."""
    return bool(blocked_links(case, case.job.next))


# --- Running --------------------------------------------------------------------------------------------------------


def a_worker_failed(case: Case) -> bool:
    """The cause of the failure is known, or `CAUSE_GRACE_S` has passed."""
    return case.failed_worker(case.job.plan) is not None and bool(case.losses)


def a_node_is_lost(case: Case) -> bool:
    return case.lost(case.job.plan) is not None


def its_failure_budget_is_spent(case: Case) -> bool:
    """Going back once more would not help: see failure_budget.py."""
    return bool(case.broken_rule)


def a_node_knows_a_later_plan(case: Case) -> bool:
    """etcd was restored from an older copy of itself: nodes do not obey earlier plans."""
    return case.known_generation > case.job.phase.generation


def workers_are_late(case: Case) -> bool:
    """The workers are late to start, or late to reach the end after others have."""
    return bool(case.late_workers)


def what_it_loads_is_gone(case: Case) -> bool:
    return not case.can_load(case.job.plan)


def all_stopped_at_the_end(case: Case) -> bool:
    return case.stopped_at(case.job.plan, case.spec.train.batches)


def no_node_would_be_left(case: Case) -> bool:
    """A node of the plan drains, and no plan exists without the draining nodes."""
    return bool(case.draining(case.job.plan)) and not isinstance(case.best_plan, ClusterPlan)


def a_node_drains(case: Case) -> bool:
    """A worker that is still loading its layers is not prepared for another plan: it runs first."""
    return (
        bool(case.draining(case.job.plan))
        and case.now >= case.change_allowed_at
        and not case.unready(case.job.plan, WorkerState.RUNNING)
        and isinstance(case.best_plan, ClusterPlan)
    )


def others_are_owed_some_of_its_devices(case: Case) -> bool:
    """The job can continue with the remaining devices: see claims.py."""
    return (
        bool(case.standing.gives_way_to)
        and case.now >= case.change_allowed_at
        and case.job.plan is not None
        and not case.unready(case.job.plan, WorkerState.RUNNING)
        and isinstance(case.best_plan, ClusterPlan)
    )


def others_are_owed_all_that_it_needs(case: Case) -> bool:
    """The job has run for a time slice, and cannot continue on the remaining devices."""
    return (
        bool(case.standing.gives_way_to)
        and case.now >= case.standing.left_alone_until
        and isinstance(case.best_plan, PlanRefused)
    )


def a_better_plan_exists(case: Case) -> bool:
    """The plan saves more than the change costs (planning/rebalance.py), nodes have settled, and no other job claims
    them.
    """
    return _may_change(case) and case.verdict is not None and case.verdict.is_worth_it


def why_no_better_plan_is_taken_is_another(case: Case) -> bool:
    """The text about a faster plan that is not worth a change has other words, or clearly different numbers."""
    return _may_change(case) and is_news(case.job.phase.outlook, outlook_text(case))


def outlook_text(case: Case) -> str:
    """Return why a clearly faster plan is not taken; empty: no such plan exists, or it is taken."""
    return case.verdict.reason if case.verdict is not None and case.verdict.is_close else ""


def _may_change(case: Case) -> bool:
    plan = case.job.plan
    if plan is None or case.now < max(case.settled_at, case.change_allowed_at):
        return False
    return not case.unready(plan, WorkerState.RUNNING)


# --- Stopping -------------------------------------------------------------------------------------------------------


def workers_are_late_to_stop(case: Case) -> bool:
    """The workers are late to stop, or late to write the layers that move."""
    return bool(case.late_workers)


def the_checkpoint_is_late(case: Case) -> bool:
    """All workers have stopped, and durable storage does not take every file in time."""
    return _saves(case, Save.CHECKPOINT) and case.now >= case.deadlines.stop and not case.late_workers


def it_moves_and_next_is_no_longer_possible(case: Case) -> bool:
    return _saves(case, Save.MOVES) and (
        a_worker_of_next_failed(case)
        or a_node_of_next_is_gone_replaced_or_draining(case)
        or two_nodes_of_next_cannot_talk(case)
    )


def it_moves_and_pause_is_wanted(case: Case) -> bool:
    return _saves(case, Save.MOVES) and pause_is_wanted(case)


def it_moves_and_the_boundary_is_the_end(case: Case) -> bool:
    stop = case.job.stop
    return _saves(case, Save.MOVES) and stop is not None and stop.boundary == case.spec.train.batches


def it_moves_all_stopped_and_all_moves_are_held(case: Case) -> bool:
    stop, plan = case.job.stop, case.job.plan
    if stop is None or plan is None or stop.boundary is None or not _saves(case, Save.MOVES):
        return False
    return case.stopped_at(plan, stop.boundary) and all(
        case.job.holders(plan.timeline, stop.boundary, layer) for layer in case.moving()
    )


def a_checkpoint_is_complete_at_the_end(case: Case) -> bool:
    stop = case.job.stop
    return a_checkpoint_is_complete(case) and stop is not None and stop.boundary == case.spec.train.batches


def a_checkpoint_is_complete_and_pause_is_wanted(case: Case) -> bool:
    return a_checkpoint_is_complete(case) and pause_is_wanted(case)


def a_checkpoint_is_complete(case: Case) -> bool:
    """All workers have stopped, and durable storage has every layer and the journal."""
    stop, plan = case.job.stop, case.job.plan
    if stop is None or plan is None or stop.boundary is None or not _saves(case, Save.CHECKPOINT):
        return False
    return case.stopped_at(plan, stop.boundary) and is_durable(case, (plan.timeline, stop.boundary))


def a_periodic_checkpoint_is_complete(case: Case) -> bool:
    due = due_checkpoint(case.job)
    return due is not None and is_durable(case, due)


def old_checkpoints_are_left(case: Case) -> bool:
    return case.job.checkpoint is not None and bool(case.job.checkpoint.dropped)


def is_durable(case: Case, place: Place) -> bool:
    """Return whether durable storage has every part of a boundary."""
    return all(any(file.is_durable for file in case.job.holders(*place, part).values()) for part in parts_of(case.job))


def _saves(case: Case, save: Save) -> bool:
    return case.job.stop is not None and case.job.stop.save is save


# --- Recovering -----------------------------------------------------------------------------------------------------


def pause_is_wanted_and_no_plan_exists(case: Case) -> bool:
    return pause_is_wanted(case) and case.job.next is None and isinstance(case.recovery_plan, PlanRefused)


def a_node_of_next_is_lost(case: Case) -> bool:
    return case.lost(case.job.next) is not None


def a_node_of_next_drains_and_others_are_left(case: Case) -> bool:
    return bool(case.draining(case.job.next)) and isinstance(case.best_plan, ClusterPlan)


def a_node_of_next_stays_out(case: Case) -> bool:
    """The node does not act on a plan that it has not written down. If all are ready, the plan comes into force."""
    if case.staying_out(case.job.next) is None:
        return False
    return not all_workers_of_next_are_ready(case) or isinstance(case.recovery_plan, ClusterPlan)


def what_next_loads_is_gone(case: Case) -> bool:
    return not case.can_load(case.job.next)


def next_is_missing_and_a_plan_exists(case: Case) -> bool:
    return case.job.next is None and recovery_is_possible(case)


def recovery_is_possible(case: Case) -> bool:
    """A plan exists, and no newer state can be expected."""
    return isinstance(case.recovery_plan, ClusterPlan) and case.now >= case.recovery_allowed_at


def what_recovery_waits_for_is_another(case: Case) -> bool:
    return case.job.next is None and case.job.phase.reason != waits_for(case)


# --- Planning -------------------------------------------------------------------------------------------------------


def since_when_it_waits_for_a_plan_is_another(case: Case) -> bool:
    """The rows above need a plan whose computation takes long enough to be noticed; or they no longer do."""
    return (planning_since(case) > 0) != (case.job.phase.planning_since > 0)


def planning_since(case: Case) -> float:
    """Return since when the job waits for a plan, in seconds since the epoch; 0: it does not wait, or not for long."""
    since = case.inquiry.waits_since
    is_long = since is not None and case.now >= since + TELL_AFTER_S
    return case.written_at - (case.now - since) if since is not None and is_long else 0.0


# --- Waiting --------------------------------------------------------------------------------------------------------


def what_it_waits_for_is_another(case: Case) -> bool:
    """The sentence is written only when it changes, so a queued job costs no writes while nothing happens."""
    return case.job.phase.reason != waits_for(case)
