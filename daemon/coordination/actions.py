"""The actions of the coordinator's table: each returns the transaction that takes a job to its next phase. Pure.

Every transaction compares every record that was read of the job, and writes the phase, an event and the plan's
records together. The first line of an action's docstring is its text in docs/coordinator.md.
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
from headway.daemon.situation.failure_budget import repetition
from headway.daemon.situation.origin import Origin
from headway.daemon.situation.situation import JobSituation


def retire(situation: JobSituation, to: Phase) -> Command:
    """delete `plan`, `next` and `stop` if present"""
    return move(situation, to, "cancelled" if to is Phase.CANCELLED else "paused", deletes=("plan", "next", "stop"))


def requeue(situation: JobSituation, to: Phase) -> Command:
    """the phase only; the failure count returns to 0, and shortages of memory are forgotten"""
    origin = situation.origin
    start = f"batch {origin.boundary}" if origin.source != "initial" else "the beginning"
    return move(situation, to, f"resume requested: continues from {start}", failures=FailureCount(), shortages=())


def explain_wait(situation: JobSituation, to: Phase) -> Command:
    """the reason only, without an event"""
    return move(situation, to, waits_for(situation), is_event=False, error=situation.job.phase.error)


def explain_outlook(situation: JobSituation, to: Phase) -> Command:
    """why no better plan is taken, without an event"""
    before = situation.job.phase
    return move(situation, to, before.reason, is_event=False, error=before.error, outlook=outlook_text(situation))


def explain_planning(situation: JobSituation, to: Phase) -> Command:
    """when planning began, without an event"""
    before, since = situation.job.phase, planning_since(situation)
    return move(
        situation,
        to,
        before.reason,
        is_event=False,
        error=before.error,
        outlook=before.outlook,
        planning_since=since,
    )


def offer_first_plan(situation: JobSituation, to: Phase) -> Command:
    """`next`"""
    plan = situation.plans.best
    assert isinstance(plan, ClusterPlan)
    reason = shape_and_nodes(plan.workers)
    if plan.predicted_batch_seconds > 0:
        reason += f", predicted {plan.predicted_batch_seconds:.2g} s a batch"
    return offer(situation, to, plan, reason=reason, origin=situation.origin)


def offer_change(situation: JobSituation, to: Phase) -> Command:
    """`next`"""
    plan, before = situation.plans.best, situation.job.plan
    assert isinstance(plan, ClusterPlan)
    assert before is not None
    same_timeline = Origin(source="nodes", boundary=0, source_timeline=before.timeline, lineage=before.lineage)
    outlook = situation.plans.outlook
    promised = outlook.factor if outlook is not None and not situation.current.draining else 0.0
    reason = why_changed(situation, before, plan)
    return offer(situation, to, plan, reason=reason, origin=same_timeline, promised=promised)


def recover(situation: JobSituation, to: Phase) -> Command:
    """delete `stop`; `next` on the surviving nodes if a plan exists, else delete `next`; count losses"""
    cause, plan = why_recovering(situation), situation.plans.recovery
    error = situation.lost.first_error or situation.job.phase.error
    leased = held_against_nodes(situation, situation.lost.found)
    failures = situation.lost.failures
    again = repetition(replace(failures, cause="") if situation.lost.deaths else failures)
    if situation.lost.deaths:
        failures = replace(failures, cause=cause)
    if isinstance(plan, ClusterPlan) and recovery_is_possible(situation):
        reason = f"{cause}; {where_it_goes(situation, plan)}{again}"
        return offer(
            situation,
            to,
            plan,
            reason=reason,
            event=sentence(reason),
            origin=situation.origin,
            error=error,
            deletes=("stop",),
            failures=failures,
            leased=leased,
        )
    wait = waits_for(situation)
    return move(
        situation,
        to,
        wait,
        event=sentence(f"{cause}; {wait}{again}"),
        error=error,
        deletes=("next", "stop"),
        generation=max(situation.job.phase.generation, situation.known_generation),
        failures=failures,
        leased=leased,
    )


def enforce_first(situation: JobSituation, to: Phase) -> Command:
    """`plan` ← `next`"""
    plan = situation.job.next
    assert plan is not None
    again = situation.job.phase.phase is Phase.RECOVERING
    on = shape_and_nodes(plan.workers)
    text = (
        f"Training resumes at batch {plan.boundary}: {on}{repetition(situation.job.phase.failures)}"
        if again
        else (f"Training starts at batch {plan.boundary}: {plan.reason}")
    )
    return move(situation, to, text, puts={"plan": encode(plan)}, deletes=("next", "stop"))


def enforce_change(situation: JobSituation, to: Phase) -> Command:
    """`plan` ← `next`, from the stop boundary on; delete `next` and `stop`"""
    successor, stop = situation.job.next, situation.job.stop
    assert successor is not None
    assert stop is not None
    assert stop.boundary is not None
    plan = replace(successor, boundary=stop.boundary, furthest=max(successor.furthest, situation.furthest))
    num_moved = len(situation.moving) - 1
    text = f"{successor.reason}; takes effect at batch {stop.boundary}, {num_moved} layer{'s' * (num_moved != 1)} moved"
    return move(situation, to, text, puts={"plan": encode(plan)}, deletes=("next", "stop"))


def drop_next(situation: JobSituation, to: Phase) -> Command:
    """delete `next`"""
    if situation.job.phase.phase is not Phase.PREPARING:
        return move(situation, to, why_dropped(situation), deletes=("next",))
    leased = held_against_nodes(
        situation, tuple(loss for loss in situation.lost.found if loss.worker is not None or loss.is_late)
    )
    generation = max(situation.job.phase.generation, situation.known_generation)
    failures = situation.lost.failures
    return move(
        situation,
        to,
        why_dropped(situation),
        deletes=("next",),
        generation=generation,
        failures=failures,
        leased=leased,
    )


def stop_for_moves(situation: JobSituation, to: Phase) -> Command:
    """`stop` {moves}"""
    assert situation.job.plan is not None
    stop = StopRecord(generation=situation.job.plan.generation, save=Save.MOVES)
    text = "All workers of the new plan are ready: the old plan's workers stop at a boundary"
    return move(situation, to, text, puts={"stop": encode(stop)}, is_event=False)


def stop_for_checkpoint(situation: JobSituation, to: Phase) -> Command:
    """`stop` {checkpoint}; delete `next`"""
    plan, before = situation.job.plan, situation.job.stop
    assert plan is not None
    boundary = before.boundary if before is not None else None
    end = situation.end
    if boundary is None and situation.current.stopped_at(end):
        boundary = end
    stop = StopRecord(generation=plan.generation, save=Save.CHECKPOINT, boundary=boundary)
    return move(situation, to, why_stopped(situation, boundary), puts={"stop": encode(stop)}, deletes=("next",))


def fail(situation: JobSituation, to: Phase) -> Command:
    """delete `plan`, `next` and `stop` if present; nodes keep their state files"""
    reason, error = why_failed(situation)
    return move(
        situation,
        to,
        reason,
        error=error,
        deletes=("plan", "next", "stop"),
        event=f"Failed: {reason}",
        failures=situation.lost.failures,
        leased=held_against_nodes(situation, situation.lost.found),
    )
