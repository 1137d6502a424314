"""Decides when a job moves from phase to phase: one table, and the function that reads it. Pure.

`decide` looks at the present state and at no event, so any daemon can take over at any moment: it reads etcd and
continues. Commands that are lost, late or overtaken are simply decided again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from headway.daemon.coordination.accounting import usage_due_at, write_usage
from headway.daemon.coordination.actions import (
    drop_next,
    enforce_change,
    enforce_first,
    explain_outlook,
    explain_planning,
    explain_wait,
    fail,
    offer_change,
    offer_first_plan,
    recover,
    requeue,
    retire,
    stop_for_checkpoint,
    stop_for_moves,
)
from headway.daemon.coordination.broken_jobs import broken, give_up
from headway.daemon.coordination.checkpoint_actions import (
    delete_checkpoints,
    write_checkpoint,
    write_periodic_checkpoint,
)
from headway.daemon.coordination.claims import settle_claims
from headway.daemon.coordination.commands import BrokenJob, Command, Decision
from headway.daemon.coordination.conditions import (
    a_better_plan_exists,
    a_checkpoint_is_complete,
    a_checkpoint_is_complete_and_pause_is_wanted,
    a_checkpoint_is_complete_at_the_end,
    a_device_of_next_has_no_worker,
    a_node_drains,
    a_node_is_lost,
    a_node_knows_a_later_plan,
    a_node_of_next_drains_and_others_are_left,
    a_node_of_next_is_gone_replaced_or_draining,
    a_node_of_next_is_lost,
    a_node_of_next_stays_out,
    a_periodic_checkpoint_is_complete,
    a_worker_failed,
    a_worker_of_next_failed,
    a_worker_of_next_told_an_error,
    all_stopped_at_the_end,
    all_workers_of_next_are_ready,
    cancel_is_wanted,
    it_breaks_a_rule,
    it_contradicts_itself,
    it_moves_all_stopped_and_all_moves_are_held,
    it_moves_and_next_is_no_longer_possible,
    it_moves_and_pause_is_wanted,
    it_moves_and_the_boundary_is_the_end,
    it_stands_still_between_nodes_that_cannot_talk,
    its_failure_budget_is_spent,
    its_records_are_missing,
    its_turn_has_come_nodes_are_settled_and_a_plan_exists,
    next_is_missing_and_a_plan_exists,
    no_node_would_be_left,
    old_checkpoints_are_left,
    others_are_owed_all_that_it_needs,
    others_are_owed_some_of_its_devices,
    pause_is_wanted,
    pause_is_wanted_and_no_plan_exists,
    running_is_requested_anew,
    running_is_wanted,
    since_when_it_waits_for_a_plan_is_another,
    the_checkpoint_is_late,
    two_nodes_of_next_cannot_talk,
    what_it_loads_is_gone,
    what_it_waits_for_is_another,
    what_next_loads_is_gone,
    what_recovery_waits_for_is_another,
    why_no_better_plan_is_taken_is_another,
    workers_are_late,
    workers_are_late_to_stop,
    workers_of_next_are_late,
)
from headway.daemon.coordination.queue_order import in_turn, is_queued
from headway.daemon.planning.plan_devices import devices
from headway.daemon.planning.planner import ClusterPlan
from headway.daemon.records.records import DeviceKey, Phase
from headway.daemon.situation.deadlines import LEASE_TTL_S
from headway.daemon.situation.plan_cache import PlanMissingError, PlanRequest, Plans, PlansAtOnce, urgency
from headway.daemon.situation.situation import TELL_AFTER_S, Case
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.quarantine import QUARANTINE_AFTER

QUEUED, PREPARING, RUNNING, CHANGING, STOPPING, RECOVERING = (
    Phase.QUEUED,
    Phase.PREPARING,
    Phase.RUNNING,
    Phase.CHANGING,
    Phase.STOPPING,
    Phase.RECOVERING,
)
PAUSED, FINISHED, FAILED, CANCELLED = Phase.PAUSED, Phase.FINISHED, Phase.FAILED, Phase.CANCELLED


@dataclass(frozen=True, slots=True)
class Row:
    """In `phase`, if `condition` is the first that holds: write the keys of `action`, and go to `next_phase`."""

    phase: Phase
    condition: Callable[[Case], bool]
    action: Callable[[Case, Phase], Command]
    next_phase: Phase


TABLE: Final = (
    Row(QUEUED, cancel_is_wanted, retire, CANCELLED),
    Row(QUEUED, pause_is_wanted, retire, PAUSED),
    Row(QUEUED, it_breaks_a_rule, fail, FAILED),
    Row(QUEUED, it_contradicts_itself, fail, FAILED),
    Row(QUEUED, its_turn_has_come_nodes_are_settled_and_a_plan_exists, offer_first_plan, PREPARING),
    Row(QUEUED, what_it_waits_for_is_another, explain_wait, QUEUED),
    Row(QUEUED, old_checkpoints_are_left, delete_checkpoints, QUEUED),
    Row(QUEUED, since_when_it_waits_for_a_plan_is_another, explain_planning, QUEUED),
    #
    Row(PREPARING, its_records_are_missing, fail, FAILED),
    Row(PREPARING, it_breaks_a_rule, fail, FAILED),
    Row(PREPARING, cancel_is_wanted, retire, CANCELLED),
    Row(PREPARING, pause_is_wanted, retire, PAUSED),
    Row(PREPARING, a_node_knows_a_later_plan, drop_next, QUEUED),
    Row(PREPARING, a_node_of_next_is_gone_replaced_or_draining, drop_next, QUEUED),
    Row(PREPARING, two_nodes_of_next_cannot_talk, drop_next, QUEUED),
    Row(PREPARING, a_device_of_next_has_no_worker, drop_next, QUEUED),
    Row(PREPARING, a_worker_of_next_told_an_error, fail, FAILED),
    Row(PREPARING, its_failure_budget_is_spent, fail, FAILED),
    Row(PREPARING, a_worker_of_next_failed, drop_next, QUEUED),
    Row(PREPARING, what_next_loads_is_gone, drop_next, QUEUED),
    Row(PREPARING, all_workers_of_next_are_ready, enforce_first, RUNNING),
    Row(PREPARING, workers_of_next_are_late, drop_next, QUEUED),
    #
    Row(RUNNING, its_records_are_missing, fail, FAILED),
    Row(RUNNING, it_breaks_a_rule, fail, FAILED),
    Row(RUNNING, cancel_is_wanted, retire, CANCELLED),
    Row(RUNNING, its_failure_budget_is_spent, fail, FAILED),
    Row(RUNNING, a_worker_failed, recover, RECOVERING),
    Row(RUNNING, a_node_is_lost, recover, RECOVERING),
    Row(RUNNING, a_node_knows_a_later_plan, recover, RECOVERING),
    Row(RUNNING, what_it_loads_is_gone, recover, RECOVERING),
    Row(RUNNING, all_stopped_at_the_end, stop_for_checkpoint, STOPPING),
    Row(RUNNING, workers_are_late, recover, RECOVERING),
    Row(RUNNING, pause_is_wanted, stop_for_checkpoint, STOPPING),
    Row(RUNNING, no_node_would_be_left, stop_for_checkpoint, STOPPING),
    Row(RUNNING, a_node_drains, offer_change, CHANGING),
    Row(RUNNING, others_are_owed_some_of_its_devices, offer_change, CHANGING),
    Row(RUNNING, others_are_owed_all_that_it_needs, stop_for_checkpoint, STOPPING),
    Row(RUNNING, a_better_plan_exists, offer_change, CHANGING),
    Row(RUNNING, why_no_better_plan_is_taken_is_another, explain_outlook, RUNNING),
    Row(RUNNING, a_periodic_checkpoint_is_complete, write_periodic_checkpoint, RUNNING),
    Row(RUNNING, old_checkpoints_are_left, delete_checkpoints, RUNNING),
    Row(RUNNING, since_when_it_waits_for_a_plan_is_another, explain_planning, RUNNING),
    #
    Row(CHANGING, its_records_are_missing, fail, FAILED),
    Row(CHANGING, it_breaks_a_rule, fail, FAILED),
    Row(CHANGING, cancel_is_wanted, retire, CANCELLED),
    Row(CHANGING, its_failure_budget_is_spent, fail, FAILED),
    Row(CHANGING, a_worker_failed, recover, RECOVERING),
    Row(CHANGING, a_node_is_lost, recover, RECOVERING),
    Row(CHANGING, a_node_knows_a_later_plan, recover, RECOVERING),
    Row(CHANGING, a_node_of_next_is_gone_replaced_or_draining, drop_next, RUNNING),
    Row(CHANGING, two_nodes_of_next_cannot_talk, drop_next, RUNNING),
    Row(CHANGING, a_device_of_next_has_no_worker, drop_next, RUNNING),
    Row(CHANGING, a_worker_of_next_failed, drop_next, RUNNING),
    Row(CHANGING, pause_is_wanted, drop_next, RUNNING),
    Row(CHANGING, all_stopped_at_the_end, drop_next, RUNNING),
    Row(CHANGING, all_workers_of_next_are_ready, stop_for_moves, STOPPING),
    Row(CHANGING, workers_of_next_are_late, drop_next, RUNNING),
    Row(CHANGING, a_periodic_checkpoint_is_complete, write_periodic_checkpoint, CHANGING),
    Row(CHANGING, old_checkpoints_are_left, delete_checkpoints, CHANGING),
    Row(CHANGING, since_when_it_waits_for_a_plan_is_another, explain_planning, CHANGING),
    #
    Row(STOPPING, its_records_are_missing, fail, FAILED),
    Row(STOPPING, it_breaks_a_rule, fail, FAILED),
    Row(STOPPING, cancel_is_wanted, retire, CANCELLED),
    Row(STOPPING, its_failure_budget_is_spent, fail, FAILED),
    Row(STOPPING, a_worker_failed, recover, RECOVERING),
    Row(STOPPING, a_node_is_lost, recover, RECOVERING),
    Row(STOPPING, a_node_knows_a_later_plan, recover, RECOVERING),
    Row(STOPPING, it_stands_still_between_nodes_that_cannot_talk, recover, RECOVERING),
    Row(STOPPING, it_moves_and_next_is_no_longer_possible, stop_for_checkpoint, STOPPING),
    Row(STOPPING, it_moves_and_pause_is_wanted, stop_for_checkpoint, STOPPING),
    Row(STOPPING, it_moves_and_the_boundary_is_the_end, stop_for_checkpoint, STOPPING),
    Row(STOPPING, it_moves_all_stopped_and_all_moves_are_held, enforce_change, RUNNING),
    Row(STOPPING, a_checkpoint_is_complete_at_the_end, write_checkpoint, FINISHED),
    Row(STOPPING, a_checkpoint_is_complete_and_pause_is_wanted, write_checkpoint, PAUSED),
    Row(STOPPING, a_checkpoint_is_complete, write_checkpoint, QUEUED),
    Row(STOPPING, workers_are_late_to_stop, recover, RECOVERING),
    Row(STOPPING, the_checkpoint_is_late, fail, FAILED),
    Row(STOPPING, since_when_it_waits_for_a_plan_is_another, explain_planning, STOPPING),
    #
    Row(RECOVERING, its_records_are_missing, fail, FAILED),
    Row(RECOVERING, it_breaks_a_rule, fail, FAILED),
    Row(RECOVERING, cancel_is_wanted, retire, CANCELLED),
    Row(RECOVERING, its_failure_budget_is_spent, fail, FAILED),
    Row(RECOVERING, a_node_knows_a_later_plan, recover, RECOVERING),
    Row(RECOVERING, a_worker_of_next_failed, recover, RECOVERING),
    Row(RECOVERING, a_node_of_next_is_lost, recover, RECOVERING),
    Row(RECOVERING, a_node_of_next_drains_and_others_are_left, recover, RECOVERING),
    Row(RECOVERING, a_device_of_next_has_no_worker, recover, RECOVERING),
    Row(RECOVERING, what_next_loads_is_gone, recover, RECOVERING),
    Row(RECOVERING, two_nodes_of_next_cannot_talk, recover, RECOVERING),
    Row(RECOVERING, a_node_of_next_stays_out, recover, RECOVERING),
    Row(RECOVERING, all_workers_of_next_are_ready, enforce_first, RUNNING),
    Row(RECOVERING, workers_of_next_are_late, recover, RECOVERING),
    Row(RECOVERING, pause_is_wanted_and_no_plan_exists, retire, PAUSED),
    Row(RECOVERING, next_is_missing_and_a_plan_exists, recover, RECOVERING),
    Row(RECOVERING, what_recovery_waits_for_is_another, explain_wait, RECOVERING),
    Row(RECOVERING, since_when_it_waits_for_a_plan_is_another, explain_planning, RECOVERING),
    #
    Row(PAUSED, cancel_is_wanted, retire, CANCELLED),
    Row(PAUSED, running_is_wanted, requeue, QUEUED),
    Row(PAUSED, old_checkpoints_are_left, delete_checkpoints, PAUSED),
    #
    Row(FAILED, cancel_is_wanted, retire, CANCELLED),
    Row(FAILED, running_is_requested_anew, requeue, QUEUED),
    #
    Row(FINISHED, old_checkpoints_are_left, delete_checkpoints, FINISHED),
)
"""The whole table. Conditions are tried from the top; no row leads out of finished and cancelled."""

OFFERS: Final = (offer_first_plan, offer_change, recover)
"""Actions that give devices away."""
ROWS: Final = {phase: tuple(row for row in TABLE if row.phase is phase) for phase in Phase}


def decide(
    view: ClusterView,
    *,
    now: float,
    written_at: float = 0.0,
    quarantine_after: int = QUARANTINE_AFTER,
    plans: Plans | None = None,
) -> Decision:
    """Decide about every job, first in first: at most one command each.

    now: seconds of the monotonic clock that `view` was fed with. written_at: seconds since the epoch, for records that
    people read; no decision depends on it. quarantine_after: failures of a node after which plans leave it out; 0:
    never.
    plans: the source of plans; None: they are computed at once.
    """
    if view.steady_since is None:
        return Decision()  # etcd is away: the view may be long out of date, and no write is possible
    if view.epoch and view.started_at is not None and now < view.started_at + LEASE_TTL_S:
        # etcd went back in time: first every node reports the generations that it has seen
        return Decision(wake_at=view.started_at + LEASE_TTL_S)
    commands: list[Command] = []
    deadlines: list[float] = []
    missing: list[PlanRequest] = []
    stale: list[PlanRequest] = []
    broken_jobs: list[BrokenJob] = []
    owned = {job.name: devices(job.plan) | devices(job.next) for job in view.jobs.values()}
    content: set[str] = set()
    cases = {
        job.name: Case(
            job=job,
            view=view,
            now=now,
            written_at=written_at,
            quarantine_after=quarantine_after,
            plans=plans or PlansAtOnce(),
        )
        for job in in_turn(view, now=now)
        if not view.why_set_aside(job.name)  # its devices stay its own
    }
    claims = settle_claims(cases, view, now=now)
    ahead: list[str] = []
    for job in (case.job for case in cases.values()):
        case = cases[job.name]
        busy = frozenset[DeviceKey]().union(*(owned[name] for name in owned if name != job.name))
        case.busy = busy | claims.against(job.name)
        case.standing = claims.standing(case, ahead=ahead)
        if is_queued(job):
            ahead.append(job.name)
        try:
            if (raised := claims.errors.get(job.name)) is not None:
                raise raised
            judged = _judge(case)
        except Exception as error:  # an error about one job: the others are decided about without it
            found = broken(job.name, error)
            judged = _Judged(command=give_up(case, found, error))
            broken_jobs.append(found)
            claims.of.pop(job.name, None)
        if judged.command is not None:
            commands.append(judged.command)
        owned[job.name] |= judged.takes
        deadlines += judged.deadlines
        missing += judged.missing
        if judged.missing and job.phase.phase in (RUNNING, CHANGING) and not case.draining(job.plan):
            content.add(job.name)
        stale += judged.stale
    if (usage := write_usage(view, now=now, written_at=written_at)) is not None:
        commands.append(usage)
    elif (due_at := usage_due_at(view)) is not None:
        deadlines.append(due_at)
    return Decision(
        commands=tuple(commands),
        wake_at=min(deadlines, default=None),
        missing=tuple(sorted(missing, key=lambda request: urgency(request, is_content=request.job in content))),
        stale=tuple(stale),
        broken=tuple(broken_jobs),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """The decision about one job, and its effect on the jobs after it."""

    command: Command | None
    takes: frozenset[DeviceKey] = frozenset()
    """Devices that the command gives to the job."""
    deadlines: tuple[float, ...] = ()
    missing: tuple[PlanRequest, ...] = ()
    stale: tuple[PlanRequest, ...] = ()


def _judge(case: Case) -> _Judged:
    row, now = first_row(case), case.now
    command = _command(case, row) if row is not None else None
    is_held_up = row is not None and command is None
    if is_held_up and since_when_it_waits_for_a_plan_is_another(case):
        command = explain_planning(case, case.job.phase.phase)
    takes = frozenset[DeviceKey]()
    if row is not None and row.action in OFFERS and not is_held_up:
        offered = case.recovery_plan if row.action is recover else case.best_plan
        takes = devices(offered) if isinstance(offered, ClusterPlan) else takes
    deadlines = [deadline for deadline in waits(case) if deadline > now]
    if case.inquiry.missing:
        since = case.inquiry.waits_since
        deadlines += [at for at in ((now if since is None else since) + TELL_AFTER_S,) if at > now]
    return _Judged(
        command=command,
        takes=takes,
        deadlines=tuple(deadlines),
        missing=tuple(case.inquiry.missing),
        stale=tuple(case.inquiry.stale),
    )


def first_row(case: Case) -> Row | None:
    """Return the first row of the table that holds, if any. A condition that needs a missing plan does not hold yet."""

    def holds(row: Row) -> bool:
        try:
            return row.condition(case)
        except PlanMissingError:
            return False

    return next((row for row in ROWS[case.job.phase.phase] if holds(row)), None)


def _command(case: Case, row: Row) -> Command | None:
    """Return the row's command; None: it needs a plan which is missing."""
    try:
        return row.action(case, row.next_phase)
    except PlanMissingError:
        return None


def waits(case: Case) -> tuple[float, ...]:
    """Return every moment at which time alone may make a condition of the present phase true."""
    phase = case.job.phase.phase
    members = case.job.next if phase is RECOVERING else case.job.plan
    stages = members.stages if members is not None else ()
    losses = tuple(at for stage in stages if (at := case.lost_at(stage)) is not None)
    match phase:
        case Phase.QUEUED:
            return (case.settled_at, _reconsidered_at(case))
        case Phase.PREPARING:
            return (case.deadlines.heard, case.deadlines.prepare)
        case Phase.RUNNING:
            begun = (case.deadlines.heard, case.cause_known_at, case.deadlines.start, case.deadlines.end)
            shared = (case.standing.left_alone_until, case.settled_at, case.change_allowed_at)
            return (*losses, *begun, *shared, _reconsidered_at(case))
        case Phase.CHANGING:
            return (*losses, case.cause_known_at, case.deadlines.prepare)
        case Phase.STOPPING:
            return (*losses, case.cause_known_at, case.deadlines.stop)
        case Phase.RECOVERING if case.job.next is not None:
            return (*losses, case.deadlines.heard, case.deadlines.prepare)
        case Phase.RECOVERING:
            return (case.recovery_allowed_at,)
        case _:
            return ()


def _reconsidered_at(case: Case) -> float:
    """Return the moment of `Case.reconsidered_at`; without the plan that it needs, never."""
    try:
        return case.reconsidered_at
    except PlanMissingError:
        return 0.0
