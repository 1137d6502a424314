"""Decides when a job moves from phase to phase: one table, and the function that evaluates it. Pure.

`decide` depends on the present state only, not on past events. So any daemon can take over at any moment: it reads
etcd and continues. A command that is lost, late or overtaken is simply decided again.
"""

import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from headway.daemon.base.errors import in_one_line
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import TERMINAL_PHASES, DeviceKey, Phase
from headway.daemon.decide import actions
from headway.daemon.decide import conditions as when
from headway.daemon.decide.allocate import NOTHING, Allocation, allocate
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.commands import BrokenJob, Command, Decision, Transaction, move
from headway.daemon.decide.deadlines import LEASE_TTL_S
from headway.daemon.decide.plans import PlanMissingError, Plans, PlansAtOnce, urgency
from headway.daemon.decide.quarantine import QUARANTINE_AFTER
from headway.daemon.decide.situation import JobSituation
from headway.daemon.decide.waiting import in_turn, is_queued
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
    condition: Callable[[JobSituation], when.Claim]
    action: Callable[[JobSituation, Phase], Command]
    next_phase: Phase


TABLE: Final = (
    Row(QUEUED, when.cancel_requested, actions.retire, CANCELLED),
    Row(QUEUED, when.pause_requested, actions.retire, PAUSED),
    Row(QUEUED, when.job_file_invalid, actions.fail, FAILED),
    Row(QUEUED, when.no_cluster_could_run_it, actions.fail, FAILED),
    Row(QUEUED, when.nodes_settled_and_plan_found, actions.offer_first_plan, PREPARING),
    Row(QUEUED, when.wait_reason_changed, actions.explain_wait, QUEUED),
    Row(QUEUED, when.old_checkpoints_to_delete, actions.delete_checkpoints, QUEUED),
    Row(QUEUED, when.planning_wait_changed, actions.explain_planning, QUEUED),
    #
    Row(PREPARING, when.records_missing, actions.fail, FAILED),
    Row(PREPARING, when.job_file_invalid, actions.fail, FAILED),
    Row(PREPARING, when.cancel_requested, actions.retire, CANCELLED),
    Row(PREPARING, when.pause_requested, actions.retire, PAUSED),
    Row(PREPARING, when.node_saw_later_plan, actions.drop_next, QUEUED),
    Row(PREPARING, when.next_node_unusable, actions.drop_next, QUEUED),
    Row(PREPARING, when.next_nodes_cannot_connect, actions.drop_next, QUEUED),
    Row(PREPARING, when.next_device_without_worker, actions.drop_next, QUEUED),
    Row(PREPARING, when.next_worker_reported_error, actions.fail, FAILED),
    Row(PREPARING, when.failure_budget_spent, actions.fail, FAILED),
    Row(PREPARING, when.next_worker_failed, actions.drop_next, QUEUED),
    Row(PREPARING, when.next_state_files_lost, actions.drop_next, QUEUED),
    Row(PREPARING, when.all_next_workers_ready, actions.enforce_first, RUNNING),
    Row(PREPARING, when.next_workers_late, actions.drop_next, QUEUED),
    #
    Row(RUNNING, when.records_missing, actions.fail, FAILED),
    Row(RUNNING, when.job_file_invalid, actions.fail, FAILED),
    Row(RUNNING, when.cancel_requested, actions.retire, CANCELLED),
    Row(RUNNING, when.checkpoint_damaged, actions.set_aside, RECOVERING),
    Row(RUNNING, when.failure_budget_spent, actions.fail, FAILED),
    Row(RUNNING, when.worker_failed, actions.recover, RECOVERING),
    Row(RUNNING, when.node_lost, actions.recover, RECOVERING),
    Row(RUNNING, when.node_saw_later_plan, actions.recover, RECOVERING),
    Row(RUNNING, when.state_files_lost, actions.recover, RECOVERING),
    Row(RUNNING, when.all_stopped_at_end, actions.stop_for_checkpoint, STOPPING),
    Row(RUNNING, when.workers_late, actions.recover, RECOVERING),
    Row(RUNNING, when.pause_requested, actions.stop_for_checkpoint, STOPPING),
    Row(RUNNING, when.no_node_left_after_drain, actions.stop_for_checkpoint, STOPPING),
    Row(RUNNING, when.node_draining, actions.offer_change, CHANGING),
    Row(RUNNING, when.some_devices_owed_to_others, actions.offer_change, CHANGING),
    Row(RUNNING, when.all_devices_owed_to_others, actions.stop_for_checkpoint, STOPPING),
    Row(RUNNING, when.better_plan_found, actions.offer_change, CHANGING),
    Row(RUNNING, when.link_cut_or_back, actions.tell_of_links, RUNNING),
    Row(RUNNING, when.outlook_changed, actions.explain_outlook, RUNNING),
    Row(RUNNING, when.periodic_checkpoint_complete, actions.write_periodic_checkpoint, RUNNING),
    Row(RUNNING, when.checkpoints_fail_or_work_again, actions.tell_of_checkpoints, RUNNING),
    Row(RUNNING, when.old_checkpoints_to_delete, actions.delete_checkpoints, RUNNING),
    Row(RUNNING, when.planning_wait_changed, actions.explain_planning, RUNNING),
    #
    Row(CHANGING, when.records_missing, actions.fail, FAILED),
    Row(CHANGING, when.job_file_invalid, actions.fail, FAILED),
    Row(CHANGING, when.cancel_requested, actions.retire, CANCELLED),
    Row(CHANGING, when.failure_budget_spent, actions.fail, FAILED),
    Row(CHANGING, when.worker_failed, actions.recover, RECOVERING),
    Row(CHANGING, when.node_lost, actions.recover, RECOVERING),
    Row(CHANGING, when.node_saw_later_plan, actions.recover, RECOVERING),
    Row(CHANGING, when.next_node_unusable, actions.drop_next, RUNNING),
    Row(CHANGING, when.next_nodes_cannot_connect, actions.drop_next, RUNNING),
    Row(CHANGING, when.next_device_without_worker, actions.drop_next, RUNNING),
    Row(CHANGING, when.next_worker_failed, actions.drop_next, RUNNING),
    Row(CHANGING, when.pause_requested, actions.drop_next, RUNNING),
    Row(CHANGING, when.all_stopped_at_end, actions.drop_next, RUNNING),
    Row(CHANGING, when.all_next_workers_ready, actions.stop_for_moves, STOPPING),
    Row(CHANGING, when.next_workers_late, actions.drop_next, RUNNING),
    Row(CHANGING, when.periodic_checkpoint_complete, actions.write_periodic_checkpoint, CHANGING),
    Row(CHANGING, when.checkpoints_fail_or_work_again, actions.tell_of_checkpoints, CHANGING),
    Row(CHANGING, when.old_checkpoints_to_delete, actions.delete_checkpoints, CHANGING),
    Row(CHANGING, when.planning_wait_changed, actions.explain_planning, CHANGING),
    #
    Row(STOPPING, when.records_missing, actions.fail, FAILED),
    Row(STOPPING, when.job_file_invalid, actions.fail, FAILED),
    Row(STOPPING, when.cancel_requested, actions.retire, CANCELLED),
    Row(STOPPING, when.failure_budget_spent, actions.fail, FAILED),
    Row(STOPPING, when.worker_failed, actions.recover, RECOVERING),
    Row(STOPPING, when.node_lost, actions.recover, RECOVERING),
    Row(STOPPING, when.node_saw_later_plan, actions.recover, RECOVERING),
    Row(STOPPING, when.stalled_between_nodes_that_cannot_connect, actions.recover, RECOVERING),
    Row(STOPPING, when.move_no_longer_possible, actions.stop_for_checkpoint, STOPPING),
    Row(STOPPING, when.pause_requested_during_move, actions.stop_for_checkpoint, STOPPING),
    Row(STOPPING, when.move_ends_at_last_batch, actions.stop_for_checkpoint, STOPPING),
    Row(STOPPING, when.all_stopped_and_moves_held, actions.enforce_change, RUNNING),
    Row(STOPPING, when.checkpoint_complete_at_end, actions.write_checkpoint, FINISHED),
    Row(STOPPING, when.checkpoint_complete_and_pause_requested, actions.write_checkpoint, PAUSED),
    Row(STOPPING, when.checkpoint_complete, actions.write_checkpoint, QUEUED),
    Row(STOPPING, when.workers_late_to_stop, actions.recover, RECOVERING),
    Row(STOPPING, when.checkpoint_late, actions.fail, FAILED),
    Row(STOPPING, when.checkpoints_fail_or_work_again, actions.tell_of_checkpoints, STOPPING),
    Row(STOPPING, when.planning_wait_changed, actions.explain_planning, STOPPING),
    #
    Row(RECOVERING, when.records_missing, actions.fail, FAILED),
    Row(RECOVERING, when.job_file_invalid, actions.fail, FAILED),
    Row(RECOVERING, when.cancel_requested, actions.retire, CANCELLED),
    Row(RECOVERING, when.checkpoint_damaged, actions.set_aside, RECOVERING),
    Row(RECOVERING, when.failure_budget_spent, actions.fail, FAILED),
    Row(RECOVERING, when.node_saw_later_plan, actions.recover, RECOVERING),
    Row(RECOVERING, when.next_worker_failed, actions.recover, RECOVERING),
    Row(RECOVERING, when.next_node_lost, actions.recover, RECOVERING),
    Row(RECOVERING, when.next_node_draining_and_others_left, actions.recover, RECOVERING),
    Row(RECOVERING, when.next_device_without_worker, actions.recover, RECOVERING),
    Row(RECOVERING, when.next_state_files_lost, actions.recover, RECOVERING),
    Row(RECOVERING, when.next_nodes_cannot_connect, actions.recover, RECOVERING),
    Row(RECOVERING, when.next_node_stays_out, actions.recover, RECOVERING),
    Row(RECOVERING, when.all_next_workers_ready, actions.enforce_first, RUNNING),
    Row(RECOVERING, when.next_workers_late, actions.recover, RECOVERING),
    Row(RECOVERING, when.pause_requested_and_no_plan_found, actions.retire, PAUSED),
    Row(RECOVERING, when.next_missing_and_plan_found, actions.recover, RECOVERING),
    Row(RECOVERING, when.recovery_wait_reason_changed, actions.explain_wait, RECOVERING),
    Row(RECOVERING, when.planning_wait_changed, actions.explain_planning, RECOVERING),
    #
    Row(PAUSED, when.cancel_requested, actions.retire, CANCELLED),
    Row(PAUSED, when.run_requested, actions.requeue, QUEUED),
    Row(PAUSED, when.old_checkpoints_to_delete, actions.delete_checkpoints, PAUSED),
    #
    Row(FAILED, when.cancel_requested, actions.retire, CANCELLED),
    Row(FAILED, when.resume_requested, actions.requeue, QUEUED),
    #
    Row(FINISHED, when.old_checkpoints_to_delete, actions.delete_checkpoints, FINISHED),
)
"""The whole table. Conditions are tried from top to bottom; no row leads out of finished and cancelled."""

OFFERS: Final = (actions.offer_first_plan, actions.offer_change, actions.recover)
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
    row, situation.why = first_row(situation)
    now = situation.now
    command = _command(situation, row) if row is not None else None
    is_held_up = row is not None and command is None
    if is_held_up and when.planning_wait_changed(situation):
        command = actions.explain_planning(situation, situation.job.phase.phase)
    takes = frozenset[DeviceKey]()
    if row is not None and row.action in OFFERS and not is_held_up:
        offered = situation.plans.recovery if row.action is actions.recover else situation.plans.best
        takes = devices(offered) if isinstance(offered, ClusterPlan) else takes
    deadlines = [deadline for deadline in waits(situation) if deadline > now]
    inquiry = situation.plans.inquiry
    if inquiry.missing:
        since = inquiry.waits_since
        deadlines += [at for at in ((now if since is None else since) + when.TELL_AFTER_S,) if at > now]
    return _Judged(command=command, takes=takes, deadlines=tuple(deadlines))


def first_row(situation: JobSituation) -> tuple[Row | None, str]:
    """Return the first row of the table whose condition holds, and what it says. A condition that needs a missing plan
    does not hold yet.
    """
    for row in ROWS[situation.job.phase.phase]:
        with suppress(PlanMissingError):
            if claim := row.condition(situation):
                return row, claim if isinstance(claim, str) else ""
    return None, ""


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
