"""Decides when a worker counts as dead although its process exists: it is silent, stands still, or is late. Pure.

A worker is late when it has not reached its goal in the goal's time. All times are seconds of one clock that the caller
reads. The judge must have been awake: when the daemon itself was stopped for a while, every clock here restarts.
"""

import re
from collections.abc import Mapping
from typing import Final

from headway.daemon.cluster.measurements import LayerTime
from headway.daemon.worker.goal import (
    Action,
    Goal,
    Heartbeat,
    JobGeneration,
    Start,
    WorkerStatus,
    next_action,
    time_for,
)
from headway.stages.spec import TrainSpec, computed_layers, timed_kind

TICK_S: Final = 0.5
"""Interval of the daemon's judgements."""
STALL_S: Final = 2.0
"""A judge that comes later than this was itself stopped."""
HELLO_TIMEOUT_S: Final = 120.0
"""Time for a new process to import the model and to attach."""
SERVING_SILENCE_S: Final = 5.0
"""Maximum silence while it serves a generation; a living worker reports every second."""
BUSY_SILENCE_S: Final = 15.0
"""Maximum silence while it does what has its own time: reading and importing may block its other thread."""
IDLE_SILENCE_S: Final = 30.0
MIN_STANDSTILL_S: Final = 5.0
STANDSTILL_FACTOR: Final = 20.0
"""Multiple of the typical seconds of an operation that one operation may take."""
LAUNCHED_FACTOR: Final = 4.0
"""Multiple of the seconds of all launched work that one operation may take on a device that works later."""
PREPARING_STANDSTILL_S: Final = 20.0
"""The limit while it is also to prepare, which it does between two operations."""
FIRST_OPERATION_S: Final = 120.0
"""Time for the first operation of its kind in a generation, which may have to compile and to allocate, …"""
FIRST_OPERATION_BATCHES: Final = 4.0
"""… plus this multiple of a batch's predicted time."""
_TYPE: Final = re.compile(r" \w+")
"""What a kind of layer says of a block's type."""


class StallWatch:
    """Notices that its own process was stopped."""

    def __init__(self, now: float) -> None:
        self._ticked_at = now

    def tick(self, now: float) -> float:
        """Return for how long the process was stopped since the last tick; 0 when it was not."""
        late_s = now - self._ticked_at - TICK_S
        self._ticked_at = now
        return late_s if late_s > STALL_S else 0.0


class Liveness:
    """The life of one worker process, from its start to its end."""

    def __init__(self, now: float, *, num_ahead: int = 0) -> None:
        """num_ahead: operations that it may launch ahead of its device; 0: the device computes at once."""
        self._num_ahead = num_ahead
        self._heard_at = now
        self._felt_at = now
        """Time of the newest heartbeat."""
        self._moved_at = now
        """Time of the newest heartbeat that showed progress, or of a reason for none."""
        self._owed: tuple[Action | None, str, int] = (None, "", 0)
        """What the worker is to do next, with the job and the generation, …"""
        self._owed_since = now
        """… and since when. Nothing else has been owed meanwhile."""
        self._within_s: float | None = None
        """The time for that; None: as long as it takes."""
        self.beat: Heartbeat | None = None
        """The newest heartbeat of this process's present generation."""

    def heard(self, now: float) -> None:
        """Note that a message arrived."""
        self._heard_at = now

    def on_heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Note that a heartbeat arrived."""
        self._heard_at = self._felt_at = now
        before = self.beat
        is_same = before is not None and _progress(before) == _progress(beat)
        if not (is_same and before is not None and before.runnable and beat.runnable):
            self._moved_at = now
        self.beat = beat

    def on_watchdog_stall(self, stalled_s: float, now: float) -> None:
        """Restart all times, because the judge was stopped: missing messages prove nothing."""
        self._heard_at = self._felt_at = self._moved_at = now
        self._owed_since += stalled_s

    def complaint(self, status: WorkerStatus, now: float) -> str:
        """Return why the process is to be killed; an empty text while it is well."""
        self._look_at_goal(status, now)
        if not status.is_up:
            return self._overdue(HELLO_TIMEOUT_S, now, "did not say hello within")
        action, within_s = self._owed[0], self._within_s
        if action is not None and within_s is not None and now - self._owed_since >= within_s:
            return f"did not {action} within {within_s:g} s"
        is_busy = within_s is not None
        if is_busy and action is not Action.PREPARE:
            self._moved_at = now
        silence_s = BUSY_SILENCE_S if is_busy else self._serving_silence(status) if status.job else IDLE_SILENCE_S
        least_s = PREPARING_STANDSTILL_S if is_busy else MIN_STANDSTILL_S
        return self._overdue(silence_s, now, "said nothing for") or self._stands_still(status, least_s)

    def _look_at_goal(self, status: WorkerStatus, now: float) -> None:
        """Note since when the worker owes its next action."""
        goal = status.goal
        action = next_action(goal, status.actual) if status.is_up else None
        part = goal.prepare if action is Action.PREPARE else goal.start
        owed = (action, goal.job, part.plan.generation if part is not None else 0)
        if owed != self._owed:
            self._owed, self._owed_since, self._within_s = owed, now, time_for(action, goal)

    def _overdue(self, limit_s: float, now: float, what: str) -> str:
        return f"{what} {limit_s:g} s" if now - self._heard_at >= limit_s else ""

    def _launched_s(self, goal: Goal) -> float | None:
        """Return the seconds of work that the device may have before it; 0: its layers are not timed yet. None: the
        device computes at once.
        """
        if not self._num_ahead or goal.start is None or goal.spec is None:
            return None
        return launched_s(goal.start, goal.spec.train, self.beat.layers if self.beat else {}, num_ahead=self._num_ahead)

    def _serving_silence(self, status: WorkerStatus) -> float:
        """Return the maximum silence while it serves a generation.

        A call into a card's driver may wait for everything that was launched, and keep the interpreter until then. So a
        heartbeat may come only when that is done.
        """
        before_it_s = self._launched_s(status.goal)
        if before_it_s is None:
            return SERVING_SILENCE_S
        return max(SERVING_SILENCE_S, LAUNCHED_FACTOR * before_it_s) if before_it_s else BUSY_SILENCE_S

    def _standstill_limit(self, beat: Heartbeat, goal: Goal, least_s: float) -> float:
        """Return the most seconds without progress.

        Times of launches do not limit a device that works later: all that was launched does, once it was timed.
        """
        before_it_s = self._launched_s(goal)
        if not beat.expected_s or before_it_s == 0.0:
            batch_s = goal.start.plan.predicted_batch_seconds if goal.start is not None else 0.0
            return FIRST_OPERATION_S + FIRST_OPERATION_BATCHES * batch_s
        usual_s = max(beat.typical_s, beat.expected_s)
        return max(least_s, STANDSTILL_FACTOR * usual_s, LAUNCHED_FACTOR * (before_it_s or 0.0))

    def _stands_still(self, status: WorkerStatus, least_s: float) -> str:
        """Return whether heartbeats show a standstill; missing heartbeats prove nothing."""
        beat = self.beat
        if beat is None or not beat.runnable or not status.has_started(JobGeneration(beat.job, beat.generation)):
            return ""
        limit_s = self._standstill_limit(beat, status.goal, least_s)
        if self._felt_at - self._moved_at < limit_s:
            return ""
        return f"stood still for {limit_s:.3g} s in batch {beat.batch}, {beat.operations} operations after its start"


def _progress(beat: Heartbeat) -> tuple[str, int, int, int]:
    """Return a value that changes with any progress."""
    return beat.job, beat.generation, beat.operations, beat.steps


def launched_s(start: Start, train: TrainSpec, timed: Mapping[str, LayerTime], *, num_ahead: int) -> float:
    """Return how long a device may need for work that its worker has launched; 0: a layer is not timed yet.

    Operations on a CUDA device are launched and run later, a few ahead of it. A worker that waits for the device, for
    example to free memory, waits for all of them: at most `num_ahead` microbatches and an update.
    """
    recompute = start.plan.workers[start.position].recompute or train.recompute
    kinds = [timed_kind(layer, recompute) for layer in computed_layers(start.layers)]
    seconds: dict[str, float] = {}
    for kind, layer in timed.items():
        # Of blocks of several types, the slowest counts for each: a plan's stage does not say which are which.
        plain = _TYPE.sub("", kind)
        most = num_ahead * (layer.forward_s + layer.backward_s) + layer.update_s
        seconds[plain] = max(seconds.get(plain, 0.0), most)
    return sum(seconds[kind] for kind in kinds) if seconds.keys() >= set(kinds) else 0.0
