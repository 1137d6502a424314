"""Simulates how long a pipeline takes: an event simulation of the very function that drives the stages.

A worker is known by its position among all of them. Replicas of a stage are adjacent and hold all groups together; a
worker that holds all groups is alone on its stage. Times are seconds of simulated time. Equal inputs give equal
outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from headway.stages.schedule.next_op import WAIT, next_op
from headway.stages.schedule.operations import Backward, Forward, Op, Orthogonalize, Update
from headway.stages.schedule.schedule_state import ScheduleState
from headway.stages.schedule.stage_schedule import StageSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """The seconds of a worker's operations."""

    forward: float
    backward: float
    update: float = 0.0
    """Without the own share, where replicas share it."""
    share: float = 0.0
    """Seconds of the own share of an update."""
    clip: float = 0.0
    """Seconds for the squares of a batch's gradient, after its last backward."""

    def batch_seconds(self, num_microbatches: int) -> float:
        """Return the seconds of a stage's work on one batch: the lower bound of every schedule."""
        return num_microbatches * (self.forward + self.backward) + self.update + self.share + self.clip


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """One link between workers of neighbouring stages, or between replicas; equal in both directions."""

    latency: float = 0.0
    """Latency one way."""
    bandwidth: float = inf
    """Bytes per second."""
    frame_bytes: int = 0
    """Bytes of an activation or a gradient, between replicas of a slice of the sums; norms count as zero."""
    share_bytes: int = 0
    """Bytes of a replica's share of an update."""


@dataclass(frozen=True, slots=True)
class TimedOp:
    """One operation of the timeline."""

    stage: int
    """Worker's position: the stage's own if no stage has replicas."""
    op: Op
    version: int
    """Weight version that the operation read."""
    started: float
    ended: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The result of the simulation."""

    step_seconds: float
    """Seconds per batch, over the middle half of the batches; over all of them when there are fewer than eight."""
    bubble: float
    """Share of that time in which the busiest worker was idle."""
    total_seconds: float
    peak_in_flight: tuple[int, ...]
    """Maximum number of microbatches in flight, per worker."""
    peak_versions: tuple[int, ...]
    """Maximum number of live versions, per worker."""
    boundaries: tuple[int, ...]
    """Final boundary per worker; less than the stop boundary means that it was stuck."""
    stop: int
    """Boundary at which all should end."""
    timeline: tuple[TimedOp, ...]

    @property
    def is_stuck(self) -> bool:
        """Return whether some worker could not reach the stop boundary."""
        return any(boundary != self.stop for boundary in self.boundaries)


def simulate(
    schedules: Sequence[StageSchedule],
    times: Sequence[StageTimes],
    *,
    links: Sequence[LinkTimes] = (),
    sibling_links: Sequence[LinkTimes] = (),
) -> Simulation:
    """Run a pipeline to its stop boundary, or until nothing moves. The arguments are those of `Pipeline`."""
    return Pipeline(schedules, times, links=links, sibling_links=sibling_links).run()


def stages_of(schedules: Sequence[StageSchedule]) -> list[list[int]]:
    """Return the positions of each stage's workers: adjacent, until they hold all groups."""
    stages: list[list[int]] = []
    held: set[int] = set()
    for worker, schedule in enumerate(schedules):
        if not held:
            stages.append([])
        stages[-1].append(worker)
        held |= set(schedule.held_groups)
        if len(held) == schedule.num_groups:
            held = set()
    return stages


class Pipeline:
    """The workers, their links, and the clock. Tests let more happen to one: they override the methods without `_`."""

    def __init__(
        self,
        schedules: Sequence[StageSchedule],
        times: Sequence[StageTimes],
        *,
        links: Sequence[LinkTimes] = (),
        sibling_links: Sequence[LinkTimes] = (),
    ) -> None:
        """schedules and times: one per worker. links: one per neighbouring pair of stages, sibling_links: one per
        stage, each for all of their workers; none means no latency.
        """
        self.states = [ScheduleState(schedule) for schedule in schedules]
        self.stages = stages_of(schedules)
        self.stage_of = [index for index, workers in enumerate(self.stages) for _ in workers]
        self.now = 0.0
        self._times = times
        self._links = links or (LinkTimes(),) * (len(self.stages) - 1)
        self._sibling_links = sibling_links or (LinkTimes(),) * len(self.stages)
        self._holders = [
            {group: worker for worker in workers for group in schedules[worker].held_groups} for workers in self.stages
        ]
        self._parts: dict[tuple[Callable[[int, int], None], int, int], int] = {}
        """How many parts a worker has of what it does next with a batch."""
        self._running: list[Op | None] = [None] * len(schedules)
        self._line_free: dict[tuple[int, int], float] = {}
        self._last_arrival: dict[tuple[int, int], float] = {}
        self._events: list[tuple[float, int, Callable[[], int | None]]] = []
        """(time, number, what happens); events of one moment happen in the order of scheduling."""
        self._num_events = 0
        self._timeline: list[TimedOp] = []
        self._peak_in_flight = [0] * len(schedules)
        self._peak_versions = [1] * len(schedules)

    def run(self) -> Simulation:
        """Let everything happen that can."""
        for worker in range(len(self.states)):
            self._start_next(worker)
        while self._events:
            self.now, _, happen = heappop(self._events)
            touched = happen()
            if touched is not None:
                self._start_next(touched)
        return self._result()

    def after(self, delay: float, happen: Callable[[], int | None]) -> None:
        """Schedule an event; it returns the worker that may have become runnable."""
        self._at(self.now + delay, happen)

    def stretch(self) -> float:
        """Return the factor of the next duration."""
        return 1.0

    def is_free(self, worker: int) -> None:
        """A worker is between two operations."""

    def ended_batch(self, worker: int, batch: int) -> None:
        """A worker has done its last backward of a batch, and sends its sums next."""

    def updated(self, worker: int) -> None:
        """A worker has applied an update."""

    def neighbour(self, worker: int, step: int, microbatch: int) -> int:
        """Return the worker of the next stage down (1) or up (-1) that computes a microbatch."""
        group = microbatch % self.states[worker].schedule.num_groups
        return self._holders[self.stage_of[worker] + step][group]

    def siblings(self, worker: int) -> list[int]:
        """Return the other workers of its stage."""
        return [other for other in self.stages[self.stage_of[worker]] if other != worker]

    def send(self, source: int, target: int, arrive: Callable[[], None], *, num_bytes: int | None = None) -> None:
        """Put a frame on the line: it waits for earlier ones, then takes its bytes' time and the latency.

        num_bytes: None: those of the link's frames.
        A link keeps its order under any stretch: a frame never arrives before an earlier one.
        """
        stages = self.stage_of[source], self.stage_of[target]
        link = self._sibling_links[stages[0]] if stages[0] == stages[1] else self._links[min(stages)]
        begins = max(self.now, self._line_free.get((source, target), 0.0))
        ends = begins + (link.frame_bytes if num_bytes is None else num_bytes) / link.bandwidth
        self._line_free[source, target] = ends

        def happen() -> int:
            arrive()
            return target

        arrives = max(ends + link.latency * self.stretch(), self._last_arrival.get((source, target), 0.0))
        self._last_arrival[source, target] = arrives
        self._at(arrives, happen)

    def has_part(self, worker: int, batch: int, act: Callable[[int, int], None], *, num_parts: int) -> None:
        """Count one more part of what a worker needs to `act` on a batch; the last one lets it."""
        key = (act, worker, batch)
        self._parts[key] = self._parts.get(key, 0) + 1
        if self._parts[key] == num_parts:
            del self._parts[key]
            act(worker, batch)

    def _at(self, moment: float, happen: Callable[[], int | None]) -> None:
        self._num_events += 1
        heappush(self._events, (moment, self._num_events, happen))

    def _start_next(self, worker: int) -> None:
        if self._running[worker] is not None:
            return
        self.is_free(worker)
        state = self.states[worker]
        op = next_op(state)
        if op is WAIT:
            return
        self._running[worker] = op
        times, version = self._times[worker], state.version
        match op:
            case Forward(batch, _):
                version = state.schedule.weight_version(batch) if batch < state.end else batch
                seconds = times.forward
            case Backward(batch, _):
                version = state.schedule.weight_version(batch)
                is_last = state.backwards.num_done + 1 == len(state.schedule.held_microbatches)
                seconds = times.backward + (times.clip if is_last else 0.0)
            case Orthogonalize():
                seconds = times.share
            case Update():
                seconds = times.update
        seconds *= self.stretch()
        self._timeline.append(TimedOp(worker, op, version, self.now, self.now + seconds))
        self.after(seconds, lambda: self._finish(worker, op))

    def _finish(self, worker: int, op: Op) -> int:
        state = self.states[worker]
        self._running[worker] = None
        match op:
            case Forward(batch, microbatch):
                state.forwarded(batch, microbatch)
                if not state.schedule.is_last:
                    below = self.neighbour(worker, 1, microbatch)
                    other = self.states[below]
                    arrived = other.input_arrived if batch < state.end else other.held_out_arrived
                    self.send(worker, below, lambda: arrived(batch, microbatch))
            case Backward(batch, microbatch):
                is_last_of_batch = state.backwarded(batch, microbatch)
                if not state.schedule.is_first:
                    above = self.neighbour(worker, -1, microbatch)
                    self.send(worker, above, lambda: self.states[above].gradient_arrived(batch, microbatch))
                if is_last_of_batch:
                    self.ended_batch(worker, batch)
                    self._hand_out(worker, batch, self._add_up_slice)
            case Orthogonalize(batch):
                state.orthogonalized(batch)
                num_bytes = self._sibling_links[self.stage_of[worker]].share_bytes
                self._hand_out(worker, batch, self._know_shares, num_bytes=num_bytes)
            case Update(batch):
                state.updated(batch)
                self.updated(worker)
        self._peak_in_flight[worker] = max(self._peak_in_flight[worker], state.in_flight)
        self._peak_versions[worker] = max(self._peak_versions[worker], state.num_versions_live)
        return worker

    def _hand_out(
        self, worker: int, batch: int, act: Callable[[int, int], None], *, num_bytes: int | None = None
    ) -> None:
        """Send a part to each worker of the stage; one that has the parts of all acts."""
        num_parts = len(self.stages[self.stage_of[worker]])
        for other in self.siblings(worker):

            def arrive(other: int = other) -> None:
                self.has_part(other, batch, act, num_parts=num_parts)

            self.send(worker, other, arrive, num_bytes=num_bytes)
        self.has_part(worker, batch, act, num_parts=num_parts)

    def _add_up_slice(self, owner: int, batch: int) -> None:
        """All sums of a slice are there: its owner adds them up, and the others get the result."""
        self._hand_out(owner, batch, self._reduce)

    def _reduce(self, worker: int, batch: int) -> None:
        """All slices are there. A lead has its squares now; those of the stages downstream may be there already."""
        state = self.states[worker]
        state.groups_reduced(batch)
        if state.schedule.is_lead:
            self._add_squares(worker, batch)

    def _add_squares(self, lead: int, batch: int) -> None:
        self.has_part(lead, batch, self._pass_squares, num_parts=1 if self.states[lead].schedule.is_last else 2)

    def _pass_squares(self, lead: int, batch: int) -> None:
        if self.states[lead].schedule.is_first:
            self._learn_total(lead, batch)
        else:
            above = self.neighbour(lead, -1, 0)
            self.send(lead, above, lambda: self._add_squares(above, batch), num_bytes=0)

    def _learn_total(self, worker: int, batch: int) -> None:
        schedule = self.states[worker].schedule
        self.states[worker].clip_total_known(batch)
        if not schedule.is_lead:
            return
        for listener in self.siblings(worker) + ([] if schedule.is_last else [self.neighbour(worker, 1, 0)]):
            self.send(worker, listener, lambda other=listener: self._learn_total(other, batch), num_bytes=0)  # type: ignore[misc]

    def _know_shares(self, worker: int, batch: int) -> None:
        self.states[worker].shares_known(batch)

    def _result(self) -> Simulation:
        ends = [done.ended for done in self._timeline if done.stage == 0 and isinstance(done.op, Update)]
        num_updates = len(ends)
        first, last = (num_updates // 4, num_updates * 3 // 4) if num_updates >= 8 else (0, num_updates)
        ends = [0.0, *ends]
        step_seconds = (ends[last] - ends[first]) / max(1, last - first)
        bound = max(
            times.batch_seconds(len(state.schedule.held_microbatches))
            for times, state in zip(self._times, self.states, strict=True)
        )
        return Simulation(
            step_seconds=step_seconds,
            bubble=1.0 - bound / step_seconds if step_seconds else 0.0,
            total_seconds=max((done.ended for done in self._timeline), default=0.0),
            peak_in_flight=tuple(self._peak_in_flight),
            peak_versions=tuple(self._peak_versions),
            boundaries=tuple(state.version if state.is_done else -1 for state in self.states),
            stop=self.states[0].stop,
            timeline=tuple(self._timeline),
        )
