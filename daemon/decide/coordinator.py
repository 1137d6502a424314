"""Decides when a job moves from phase to phase: one table, and the function that evaluates it. Pure.

`decide` depends on the present state only, not on past events. So any daemon can take over at any moment: it reads
etcd and continues. A command that is lost, late or overtaken is simply decided again.
"""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from headway.daemon.base.errors import in_one_line
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import TERMINAL_PHASES, DeviceKey, Phase
from headway.daemon.decide.actions import (
    delete_checkpoints,
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
    set_aside,
    stop_for_checkpoint,
    stop_for_moves,
    write_checkpoint,
    write_periodic_checkpoint,
)
from headway.daemon.decide.allocate import NOTHING, Allocation, allocate, in_turn, is_queued
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.commands import BrokenJob, Command, Decision, Transaction, move
from headway.daemon.decide.conditions import (
    TELL_AFTER_S,
    all_devices_owed_to_others,
    all_next_workers_ready,
    all_stopped_and_moves_held,
    all_stopped_at_end,
    better_plan_found,
    cancel_requested,
    checkpoint_complete,
    checkpoint_complete_and_pause_requested,
    checkpoint_complete_at_end,
    checkpoint_damaged,
    checkpoint_late,
    failure_budget_spent,
    job_file_invalid,
    move_ends_at_last_batch,
    move_no_longer_possible,
    next_device_without_worker,
    next_missing_and_plan_found,
    next_node_draining_and_others_left,
    next_node_lost,
    next_node_stays_out,
    next_node_unusable,
    next_nodes_cannot_connect,
    next_state_files_lost,
    next_worker_failed,
    next_worker_reported_error,
    next_workers_late,
    no_cluster_could_run_it,
    no_node_left_after_drain,
    node_draining,
    node_lost,
    node_saw_later_plan,
    nodes_settled_and_plan_found,
    old_checkpoints_to_delete,
    outlook_changed,
    pause_requested,
    pause_requested_and_no_plan_found,
    pause_requested_during_move,
    periodic_checkpoint_complete,
    planning_wait_changed,
    records_missing,
    recovery_wait_reason_changed,
    resume_requested,
    run_requested,
    some_devices_owed_to_others,
    stalled_between_nodes_that_cannot_connect,
    state_files_lost,
    wait_reason_changed,
    worker_failed,
    workers_late,
    workers_late_to_stop,
)
from headway.daemon.decide.deadlines import LEASE_TTL_S
from headway.daemon.decide.plans import PlanMissingError, Plans, PlansAtOnce, urgency
from headway.daemon.decide.quarantine import QUARANTINE_AFTER
from headway.daemon.decide.situation import JobSituation
from headway.daemon.plan.cluster_plan import ClusterPlan, devices


def usage_due_at(view: ClusterView) -> float | None:
    """Return when the count must be written; None: no user has jobs, or a newer release counts."""
    garbage = view.unreadable.get(Keys.USAGE)
    return view.usage.due_at() if garbage is None or not garbage.is_newer else None


def write_usage(view: ClusterView, *, now: float, written_at: float) -> Transaction | None:
    """Write `usage` if the count is due, even over an unreadable record. The command belongs to no job."""
    due_at = usage_due_at(view)
    if due_at is None or now < due_at:
        return None
    return Transaction(
        job="",
        reason="what users have used",
        compare={Keys.USAGE: view.revisions.get(Keys.USAGE, 0)},
        puts={Keys.USAGE: encode(view.usage.record(now=now, written_at=written_at))},
    )


def broken(job: str, error: Exception) -> BrokenJob:
    """Return the report of the error."""
    return BrokenJob(job=job, reason=in_one_line(error), traceback="".join(traceback.format_exception(error)))


def give_up(situation: JobSituation, found: BrokenJob, error: Exception) -> Transaction | None:
    """Return the command that fails the job; nodes keep its state.

    None sets the job aside: it has already ended, its records allow no such command, or the daemon ran out of memory,
    which is not the job's fault.

    """
    if isinstance(error, MemoryError) or situation.job.phase.phase in TERMINAL_PHASES:
        return None
    reason = f"the coordinator cannot decide about this job: {found.reason}"
    try:
        return move(
            situation,
            Phase.FAILED,
            reason,
            error=found.traceback,
            deletes=("plan", "next", "stop"),
            event=f"Failed: {reason}",
        )
    except Exception:  # the error that broke the decision also breaks the command that would fail the job
        return None


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
    """One row: in `phase`, if `condition` is the first that holds, write the keys of `action` and go to
    `next_phase`.
    """

    phase: Phase
    condition: Callable[[JobSituation], bool]
    action: Callable[[JobSituation, Phase], Command]
    next_phase: Phase


TABLE: Final = (
    Row(QUEUED, cancel_requested, retire, CANCELLED),
    Row(QUEUED, pause_requested, retire, PAUSED),
    Row(QUEUED, job_file_invalid, fail, FAILED),
    Row(QUEUED, no_cluster_could_run_it, fail, FAILED),
    Row(QUEUED, nodes_settled_and_plan_found, offer_first_plan, PREPARING),
    Row(QUEUED, wait_reason_changed, explain_wait, QUEUED),
    Row(QUEUED, old_checkpoints_to_delete, delete_checkpoints, QUEUED),
    Row(QUEUED, planning_wait_changed, explain_planning, QUEUED),
    #
    Row(PREPARING, records_missing, fail, FAILED),
    Row(PREPARING, job_file_invalid, fail, FAILED),
    Row(PREPARING, cancel_requested, retire, CANCELLED),
    Row(PREPARING, pause_requested, retire, PAUSED),
    Row(PREPARING, node_saw_later_plan, drop_next, QUEUED),
    Row(PREPARING, next_node_unusable, drop_next, QUEUED),
    Row(PREPARING, next_nodes_cannot_connect, drop_next, QUEUED),
    Row(PREPARING, next_device_without_worker, drop_next, QUEUED),
    Row(PREPARING, next_worker_reported_error, fail, FAILED),
    Row(PREPARING, failure_budget_spent, fail, FAILED),
    Row(PREPARING, next_worker_failed, drop_next, QUEUED),
    Row(PREPARING, next_state_files_lost, drop_next, QUEUED),
    Row(PREPARING, all_next_workers_ready, enforce_first, RUNNING),
    Row(PREPARING, next_workers_late, drop_next, QUEUED),
    #
    Row(RUNNING, records_missing, fail, FAILED),
    Row(RUNNING, job_file_invalid, fail, FAILED),
    Row(RUNNING, cancel_requested, retire, CANCELLED),
    Row(RUNNING, checkpoint_damaged, set_aside, RECOVERING),
    Row(RUNNING, failure_budget_spent, fail, FAILED),
    Row(RUNNING, worker_failed, recover, RECOVERING),
    Row(RUNNING, node_lost, recover, RECOVERING),
    Row(RUNNING, node_saw_later_plan, recover, RECOVERING),
    Row(RUNNING, state_files_lost, recover, RECOVERING),
    Row(RUNNING, all_stopped_at_end, stop_for_checkpoint, STOPPING),
    Row(RUNNING, workers_late, recover, RECOVERING),
    Row(RUNNING, pause_requested, stop_for_checkpoint, STOPPING),
    Row(RUNNING, no_node_left_after_drain, stop_for_checkpoint, STOPPING),
    Row(RUNNING, node_draining, offer_change, CHANGING),
    Row(RUNNING, some_devices_owed_to_others, offer_change, CHANGING),
    Row(RUNNING, all_devices_owed_to_others, stop_for_checkpoint, STOPPING),
    Row(RUNNING, better_plan_found, offer_change, CHANGING),
    Row(RUNNING, outlook_changed, explain_outlook, RUNNING),
    Row(RUNNING, periodic_checkpoint_complete, write_periodic_checkpoint, RUNNING),
    Row(RUNNING, old_checkpoints_to_delete, delete_checkpoints, RUNNING),
    Row(RUNNING, planning_wait_changed, explain_planning, RUNNING),
    #
    Row(CHANGING, records_missing, fail, FAILED),
    Row(CHANGING, job_file_invalid, fail, FAILED),
    Row(CHANGING, cancel_requested, retire, CANCELLED),
    Row(CHANGING, failure_budget_spent, fail, FAILED),
    Row(CHANGING, worker_failed, recover, RECOVERING),
    Row(CHANGING, node_lost, recover, RECOVERING),
    Row(CHANGING, node_saw_later_plan, recover, RECOVERING),
    Row(CHANGING, next_node_unusable, drop_next, RUNNING),
    Row(CHANGING, next_nodes_cannot_connect, drop_next, RUNNING),
    Row(CHANGING, next_device_without_worker, drop_next, RUNNING),
    Row(CHANGING, next_worker_failed, drop_next, RUNNING),
    Row(CHANGING, pause_requested, drop_next, RUNNING),
    Row(CHANGING, all_stopped_at_end, drop_next, RUNNING),
    Row(CHANGING, all_next_workers_ready, stop_for_moves, STOPPING),
    Row(CHANGING, next_workers_late, drop_next, RUNNING),
    Row(CHANGING, periodic_checkpoint_complete, write_periodic_checkpoint, CHANGING),
    Row(CHANGING, old_checkpoints_to_delete, delete_checkpoints, CHANGING),
    Row(CHANGING, planning_wait_changed, explain_planning, CHANGING),
    #
    Row(STOPPING, records_missing, fail, FAILED),
    Row(STOPPING, job_file_invalid, fail, FAILED),
    Row(STOPPING, cancel_requested, retire, CANCELLED),
    Row(STOPPING, failure_budget_spent, fail, FAILED),
    Row(STOPPING, worker_failed, recover, RECOVERING),
    Row(STOPPING, node_lost, recover, RECOVERING),
    Row(STOPPING, node_saw_later_plan, recover, RECOVERING),
    Row(STOPPING, stalled_between_nodes_that_cannot_connect, recover, RECOVERING),
    Row(STOPPING, move_no_longer_possible, stop_for_checkpoint, STOPPING),
    Row(STOPPING, pause_requested_during_move, stop_for_checkpoint, STOPPING),
    Row(STOPPING, move_ends_at_last_batch, stop_for_checkpoint, STOPPING),
    Row(STOPPING, all_stopped_and_moves_held, enforce_change, RUNNING),
    Row(STOPPING, checkpoint_complete_at_end, write_checkpoint, FINISHED),
    Row(STOPPING, checkpoint_complete_and_pause_requested, write_checkpoint, PAUSED),
    Row(STOPPING, checkpoint_complete, write_checkpoint, QUEUED),
    Row(STOPPING, workers_late_to_stop, recover, RECOVERING),
    Row(STOPPING, checkpoint_late, fail, FAILED),
    Row(STOPPING, planning_wait_changed, explain_planning, STOPPING),
    #
    Row(RECOVERING, records_missing, fail, FAILED),
    Row(RECOVERING, job_file_invalid, fail, FAILED),
    Row(RECOVERING, cancel_requested, retire, CANCELLED),
    Row(RECOVERING, checkpoint_damaged, set_aside, RECOVERING),
    Row(RECOVERING, failure_budget_spent, fail, FAILED),
    Row(RECOVERING, node_saw_later_plan, recover, RECOVERING),
    Row(RECOVERING, next_worker_failed, recover, RECOVERING),
    Row(RECOVERING, next_node_lost, recover, RECOVERING),
    Row(RECOVERING, next_node_draining_and_others_left, recover, RECOVERING),
    Row(RECOVERING, next_device_without_worker, recover, RECOVERING),
    Row(RECOVERING, next_state_files_lost, recover, RECOVERING),
    Row(RECOVERING, next_nodes_cannot_connect, recover, RECOVERING),
    Row(RECOVERING, next_node_stays_out, recover, RECOVERING),
    Row(RECOVERING, all_next_workers_ready, enforce_first, RUNNING),
    Row(RECOVERING, next_workers_late, recover, RECOVERING),
    Row(RECOVERING, pause_requested_and_no_plan_found, retire, PAUSED),
    Row(RECOVERING, next_missing_and_plan_found, recover, RECOVERING),
    Row(RECOVERING, recovery_wait_reason_changed, explain_wait, RECOVERING),
    Row(RECOVERING, planning_wait_changed, explain_planning, RECOVERING),
    #
    Row(PAUSED, cancel_requested, retire, CANCELLED),
    Row(PAUSED, run_requested, requeue, QUEUED),
    Row(PAUSED, old_checkpoints_to_delete, delete_checkpoints, PAUSED),
    #
    Row(FAILED, cancel_requested, retire, CANCELLED),
    Row(FAILED, resume_requested, requeue, QUEUED),
    #
    Row(FINISHED, old_checkpoints_to_delete, delete_checkpoints, FINISHED),
)
"""The whole table. Conditions are tried from top to bottom; no row leads out of finished and cancelled."""

OFFERS: Final = (offer_first_plan, offer_change, recover)
"""Actions that assign devices to a job."""
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
        return Decision()  # etcd is unreachable: the view may be long out of date, and no write is possible
    if view.epoch and view.started_at is not None and now < view.started_at + LEASE_TTL_S:
        # etcd was restored from a backup: first every node reports the generations that it has seen
        return Decision(wake_at=view.started_at + LEASE_TTL_S)
    situations = {
        job.name: JobSituation(
            job=job,
            view=view,
            now=now,
            written_at=written_at,
            quarantine_after=quarantine_after,
            plan_source=plans or PlansAtOnce(),
        )
        for job in in_turn(view, now=now)
        if not view.why_set_aside(job.name)  # no decision about the job: its devices stay assigned to it
    }
    # Shares depend on all jobs together, so they are settled before any job is decided about.
    turn = _Turn(view, allocate(situations, view, now=now))
    judged = [turn.judged(situation) for situation in situations.values()]
    commands = [one.command for one in judged if one.command is not None]
    deadlines = [at for one in judged for at in one.deadlines]
    if (usage := write_usage(view, now=now, written_at=written_at)) is not None:
        commands.append(usage)
    elif (due_at := usage_due_at(view)) is not None:
        deadlines.append(due_at)
    broken_names = {one.job for one in turn.broken}
    missing = [
        request
        for name, situation in situations.items()
        if name not in broken_names
        for request in situation.plans.inquiry.missing
    ]
    # A job that already trains can wait for its plan: its requests are computed after others.
    content = {name for name in {request.job for request in missing} if _is_content(situations[name])}
    return Decision(
        commands=tuple(commands),
        wake_at=min(deadlines, default=None),
        missing=tuple(sorted(missing, key=lambda request: urgency(request, is_content=request.job in content))),
        stale=tuple(request for situation in situations.values() for request in situation.plans.inquiry.stale),
        broken=tuple(turn.broken),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """The decision about one job, and its effect on the jobs after it."""

    command: Command | None
    takes: frozenset[DeviceKey] = frozenset()
    """Devices that the command assigns to the job."""
    deadlines: tuple[float, ...] = ()


class _Turn:
    """One decision's way through the jobs, first in first."""

    def __init__(self, view: ClusterView, allocation: Allocation) -> None:
        self.broken: list[BrokenJob] = []
        self._allocation = allocation
        # Also of jobs that are set aside: their workers still run on these devices.
        self._owned = {job.name: job.devices for job in view.jobs.values()}
        self._ahead: list[str] = []

    def judged(self, situation: JobSituation) -> _Judged:
        """Decide about the next job."""
        name = situation.job.name
        situation.busy = NOTHING.union(*(self._owned[other] for other in self._owned if other != name))
        situation.busy |= self._allocation.against(name)
        situation.allocation, situation.ahead = self._allocation, tuple(self._ahead)
        if is_queued(situation.job):
            self._ahead.append(name)
        try:
            if (raised := self._allocation.errors.get(name)) is not None:
                raise raised
            found = _judge(situation)
        except Exception as error:  # an unexpected error concerns one job; the other jobs are still decided about
            self.broken.append(broken(name, error))
            # A job that fails now must not keep devices from the jobs after it.
            self._allocation.claims.pop(name, None)
            found = _Judged(command=give_up(situation, self.broken[-1], error))
        # The next jobs see devices that were assigned a moment ago, though etcd does not show it yet.
        self._owned[name] |= found.takes
        return found


def _is_content(situation: JobSituation) -> bool:
    """Return whether the job trains on a plan that it could go on with."""
    return situation.job.phase.phase in (RUNNING, CHANGING) and not situation.current.draining


def _judge(situation: JobSituation) -> _Judged:
    row, now = first_row(situation), situation.now
    command = _command(situation, row) if row is not None else None
    is_held_up = row is not None and command is None
    if is_held_up and planning_wait_changed(situation):
        command = explain_planning(situation, situation.job.phase.phase)
    takes = frozenset[DeviceKey]()
    if row is not None and row.action in OFFERS and not is_held_up:
        offered = situation.plans.recovery if row.action is recover else situation.plans.best
        takes = devices(offered) if isinstance(offered, ClusterPlan) else takes
    deadlines = [deadline for deadline in waits(situation) if deadline > now]
    inquiry = situation.plans.inquiry
    if inquiry.missing:
        since = inquiry.waits_since
        deadlines += [at for at in ((now if since is None else since) + TELL_AFTER_S,) if at > now]
    return _Judged(command=command, takes=takes, deadlines=tuple(deadlines))


def first_row(situation: JobSituation) -> Row | None:
    """Return the first row of the table whose condition holds. A condition that needs a missing plan does not
    hold yet.
    """

    def holds(row: Row) -> bool:
        try:
            return row.condition(situation)
        except PlanMissingError:
            return False

    return next((row for row in ROWS[situation.job.phase.phase] if holds(row)), None)


def _command(situation: JobSituation, row: Row) -> Command | None:
    """Return the row's command; None: its plan is still missing."""
    try:
        return row.action(situation, row.next_phase)
    except PlanMissingError:
        return None


def waits(situation: JobSituation) -> tuple[float, ...]:
    """Return every moment at which time alone may make a condition of the present phase true."""
    phase = situation.job.phase.phase
    health = situation.next if phase is RECOVERING else situation.current
    losses = tuple(at for at in health.losses if at is not None)
    match phase:
        case Phase.QUEUED:
            return (situation.view.unrest.settled_at, _reconsidered_at(situation))
        case Phase.PREPARING:
            return (situation.deadlines.heard, situation.deadlines.prepare)
        case Phase.RUNNING:
            begun = (
                situation.deadlines.heard,
                situation.lost.cause_known_at,
                situation.deadlines.start,
                situation.deadlines.end,
            )
            shared = (situation.left_alone_until, situation.view.unrest.settled_at)
            changes = (situation.deadlines.change, situation.deadlines.better_plan)
            return (*losses, *begun, *shared, *changes, _reconsidered_at(situation))
        case Phase.CHANGING:
            return (*losses, situation.lost.cause_known_at, situation.deadlines.prepare)
        case Phase.STOPPING:
            return (*losses, situation.lost.cause_known_at, situation.deadlines.stop)
        case Phase.RECOVERING if situation.job.next is not None:
            return (*losses, situation.deadlines.heard, situation.deadlines.prepare)
        case Phase.RECOVERING:
            return (situation.recovery_allowed_at,)
        case _:
            return ()


def _reconsidered_at(situation: JobSituation) -> float:
    """Return the time of `JobSituation.reconsidered_at`; never, if the plan that it needs is missing."""
    try:
        return situation.plans.reconsidered_at
    except PlanMissingError:
        return 0.0
