"""Decides what a stage does next: one pure function of what it has done and what has arrived.

Work runs when it is ready, not when a table says so; because backwards are added in order, readiness never changes a
result.
"""

from enum import Enum

from headway.stages.schedule.operations import Backward, Forward, Op, Orthogonalize, Update
from headway.stages.schedule.schedule_state import ScheduleState


class Wait(Enum):
    """Wait until something arrives: nothing is runnable."""

    WAIT = "wait"


WAIT = Wait.WAIT


class Awaited(Enum):
    """The event for which an idle stage waits; it names the neighbour."""

    NOTHING = "nothing"  # runnable, or done
    INPUT = "input"  # an activation, from upstream
    GRADIENT = "gradient"  # from downstream
    REDUCTION = "reduction"  # of the groups that other replicas hold
    SHARES = "share of the update"  # of the other replicas
    SNAPSHOT = "snapshot"  # the writer that still reads what the next update would change
    LOSSES = "losses"  # of the last stage: from the own device, or from its other replicas
    CLIP_TOTAL = "clip_total"  # squares from downstream on the first stage, the total from upstream on the others
    JUDGEMENT = "judgement of an evaluation"  # from downstream


def next_op(state: ScheduleState) -> Op | Wait:
    """Return the operation to run now.

    This is a backward if its gradient has arrived; a forward if its input has arrived, its weight version is applied
    and depth allows; an update when it is ready and nothing else is. If both a forward and a backward could run, they
    alternate, so that the stages below and above both have work. An update comes last because the other stages wait for
    forwards and backwards, not for it. They do not run out, because the forwards that need the update wait too.

    A share of an update comes first: it has to reach the other replicas, which takes time beside the next batch's work.
    """
    if state.is_share_ready:
        return Orthogonalize(state.version)
    if state.is_forwards_turn:
        op = _forward(state) or _backward(state)
    else:
        op = _backward(state) or _forward(state)
    if op is not None:
        return op
    return Update(state.version) if state.is_update_ready and not state.updates_held else WAIT


def _backward(state: ScheduleState) -> Backward | None:
    """Return the backward that could run now."""
    cursor, forwards = state.backwards, state.forwards
    batch = cursor.batch
    if state.gradients and (cursor.num_done or forwards.batch > batch or forwards.num_done >= state.warmup):
        microbatch = cursor.first_of(state.gradients)
        if microbatch >= 0:
            return Backward(batch, microbatch)
    return None


def _forward(state: ScheduleState) -> Forward | None:
    """Return the forward that could run now."""
    schedule, cursor = state.schedule, state.forwards
    batch = cursor.batch
    if state.in_flight < schedule.depth and batch < state.stop and _may_begin(state, batch):
        microbatch = cursor.lowest_next if schedule.is_first else cursor.first_of(state.inputs)
        if microbatch >= 0:
            return Forward(batch, microbatch)
    last = state.next_held_out
    is_here = last >= 0 and (schedule.is_first or (state.end, last) in state.held_out)
    return Forward(state.end, last) if is_here else None


def _may_begin(state: ScheduleState, batch: int) -> bool:
    """Return whether a batch's weights are there, and no evaluation can end the job before that batch any more."""
    return state.schedule.weight_version(batch) <= state.version and batch - state.lag < state.first_unjudged


def awaited(state: ScheduleState) -> Awaited:
    """Return the event for which a waiting stage waits."""
    if state.is_done or next_op(state) is not WAIT:
        return Awaited.NOTHING
    if state.is_update_ready:
        return Awaited.SNAPSHOT
    schedule = state.schedule
    batch = state.forwards.batch
    if batch < state.stop and _may_begin(state, batch) and state.in_flight < schedule.depth:
        return Awaited.INPUT
    if state.in_flight:
        return Awaited.GRADIENT
    if state.version < state.backwards.batch:
        if state.reduced_below <= state.version:
            return Awaited.REDUCTION
        if state.schedule.has_clip and state.totals_below <= state.version:
            return Awaited.CLIP_TOTAL
        is_short = state.schedule.shares_update and state.shares_below <= state.version
        return Awaited.SHARES if is_short else Awaited.LOSSES
    is_at_stop = state.version >= state.stop
    if (state.stop if is_at_stop else min(batch - state.lag + 1, state.stop)) > state.first_unjudged:
        return Awaited.JUDGEMENT
    if not is_at_stop or state.next_held_out >= 0:
        return Awaited.INPUT
    return Awaited.CLIP_TOTAL if state.stop > state.totals_below else Awaited.LOSSES
