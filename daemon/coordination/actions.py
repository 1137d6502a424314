"""The actions of the coordinator's table: each makes the transaction that takes a job to its next phase. Pure.

Every transaction compares all that was read of the job, and writes the phase, a sentence among the events, and the
plan's records together. The first line of an action's docstring is its text in docs/coordinator.md.
"""

from dataclasses import replace

from headway.daemon.coordination.commands import Command
from headway.daemon.coordination.conditions import outlook_text, planning_since, recovery_is_possible
from headway.daemon.coordination.sentences import (
    shape_and_nodes,
    where_it_goes,
    why_changed,
    why_dropped,
    why_failed,
    why_recovering,
    why_stopped,
)
from headway.daemon.coordination.transactions import held_against_nodes, move, offer, sentence
from headway.daemon.coordination.waiting import waits_for
from headway.daemon.planning.planner import ClusterPlan
from headway.daemon.records.format import encode
from headway.daemon.records.records import FailureCount, Phase, Save, StopRecord
from headway.daemon.situation.origin import Origin
from headway.daemon.situation.situation import Case


def retire(case: Case, to: Phase) -> Command:
    """delete what is there of `plan`, `next`, `stop`"""
    return move(case, to, "cancelled" if to is Phase.CANCELLED else "paused", deletes=("plan", "next", "stop"))


def requeue(case: Case, to: Phase) -> Command:
    """nothing more"""
    origin = case.origin
    start = f"batch {origin.boundary}" if origin.source != "initial" else "the beginning"
    return move(case, to, f"resume requested: continues from {start}", failures=FailureCount())


def explain_wait(case: Case, to: Phase) -> Command:
    """the reason alone, no event"""
    return move(case, to, waits_for(case), is_event=False, error=case.job.phase.error)


def explain_outlook(case: Case, to: Phase) -> Command:
    """why no better plan is taken, no event"""
    before = case.job.phase
    return move(case, to, before.reason, is_event=False, error=before.error, outlook=outlook_text(case))


def explain_planning(case: Case, to: Phase) -> Command:
    """since when a plan is computed, no event"""
    before, since = case.job.phase, planning_since(case)
    return move(
        case,
        to,
        before.reason,
        is_event=False,
        error=before.error,
        outlook=before.outlook,
        planning_since=since,
    )


def offer_first_plan(case: Case, to: Phase) -> Command:
    """`next`"""
    plan = case.best_plan
    assert isinstance(plan, ClusterPlan)
    reason = shape_and_nodes(plan.stages)
    if plan.predicted_batch_seconds > 0:
        reason += f", predicted {plan.predicted_batch_seconds:.2g} s a batch"
    return offer(case, to, plan, reason=reason, origin=case.origin)


def offer_change(case: Case, to: Phase) -> Command:
    """`next`"""
    plan, before = case.best_plan, case.job.plan
    assert isinstance(plan, ClusterPlan)
    assert before is not None
    same_timeline = Origin(source="nodes", boundary=0, source_timeline=before.timeline, lineage=before.lineage)
    promised = case.outlook.factor if case.outlook is not None and not case.draining(before) else 0.0
    reason = why_changed(case, before, plan)
    return offer(case, to, plan, reason=reason, origin=same_timeline, promised=promised)


def recover(case: Case, to: Phase) -> Command:
    """delete `stop`; `next` on what lives if there can be one, else delete it; what failed is counted"""
    cause, plan = why_recovering(case), case.recovery_plan
    error = case.first_error or case.job.phase.error
    leased = held_against_nodes(case, case.losses)
    if isinstance(plan, ClusterPlan) and recovery_is_possible(case):
        reason = f"{cause}; {where_it_goes(case, plan)}"
        return offer(
            case,
            to,
            plan,
            reason=reason,
            event=sentence(reason),
            origin=case.origin,
            error=error,
            deletes=("stop",),
            failures=case.failures,
            leased=leased,
        )
    wait = waits_for(case)
    return move(
        case,
        to,
        wait,
        event=sentence(f"{cause}; {wait}"),
        error=error,
        deletes=("next", "stop"),
        generation=max(case.job.phase.generation, case.known_generation),
        failures=case.failures,
        leased=leased,
    )


def enforce_first(case: Case, to: Phase) -> Command:
    """`plan` ← `next`"""
    plan = case.job.next
    assert plan is not None
    again = case.job.phase.phase is Phase.RECOVERING
    on = shape_and_nodes(plan.stages)
    text = (
        f"Training resumes at batch {plan.boundary}: {on}"
        if again
        else (f"Training starts at batch {plan.boundary}: {plan.reason}")
    )
    return move(case, to, text, puts={"plan": encode(plan)}, deletes=("next", "stop"))


def enforce_change(case: Case, to: Phase) -> Command:
    """`plan` ← `next` at b; delete `next`, `stop`"""
    successor, stop = case.job.next, case.job.stop
    assert successor is not None
    assert stop is not None
    assert stop.boundary is not None
    plan = replace(successor, boundary=stop.boundary, furthest=max(successor.furthest, case.furthest))
    num_moved = len(case.moving()) - 1
    text = f"{successor.reason}; in force from batch {stop.boundary}, {num_moved} layer{'s' * (num_moved != 1)} moved"
    return move(case, to, text, puts={"plan": encode(plan)}, deletes=("next", "stop"))


def drop_next(case: Case, to: Phase) -> Command:
    """delete `next`"""
    if case.job.phase.phase is not Phase.PREPARING:
        return move(case, to, why_dropped(case), deletes=("next",))
    leased = held_against_nodes(case, tuple(loss for loss in case.losses if loss.worker is not None or loss.is_late))
    generation = max(case.job.phase.generation, case.known_generation)
    failures = case.failures
    return move(case, to, why_dropped(case), deletes=("next",), generation=generation, failures=failures, leased=leased)


def stop_for_moves(case: Case, to: Phase) -> Command:
    """`stop` {moves}"""
    assert case.job.plan is not None
    stop = StopRecord(generation=case.job.plan.generation, save=Save.MOVES)
    text = "All workers of the new plan are ready: the old plan's workers stop at a boundary"
    return move(case, to, text, puts={"stop": encode(stop)}, is_event=False)


def stop_for_checkpoint(case: Case, to: Phase) -> Command:
    """`stop` {checkpoint}, delete `next`"""
    plan, before = case.job.plan, case.job.stop
    assert plan is not None
    boundary = before.boundary if before is not None else None
    end = case.spec.train.batches
    if boundary is None and case.stopped_at(plan, end):
        boundary = end
    stop = StopRecord(generation=plan.generation, save=Save.CHECKPOINT, boundary=boundary)
    return move(case, to, why_stopped(case, boundary), puts={"stop": encode(stop)}, deletes=("next",))


def fail(case: Case, to: Phase) -> Command:
    """delete what is there of `plan`, `next`, `stop`; nodes keep the state"""
    reason, error = why_failed(case)
    return move(
        case,
        to,
        reason,
        error=error,
        deletes=("plan", "next", "stop"),
        event=f"Failed: {reason}",
        failures=case.failures,
        leased=held_against_nodes(case, case.losses),
    )
