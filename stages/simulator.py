"""How long a pipeline would take: an event simulation of the very function that drives the stages.

Times are seconds of simulated time. The same numbers in give the same numbers out: jitter comes from a seed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from headway.stages.schedule import (
    WAIT,
    Backward,
    Forward,
    Op,
    ScheduleState,
    StageSchedule,
    Update,
    next_op,
)
from headway.stages.spec import weight_version


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds that a stage's operations take."""

    forward: float
    backward: float
    update: float = 0.0
    clip: float = 0.0
    """The squares of a batch's gradient, after its last backward."""

    def batch_seconds(self, num_microbatches: int) -> float:
        """What a stage works on one batch: the bound that no schedule beats."""
        return num_microbatches * (self.forward + self.backward) + self.update + self.clip


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """One link between neighbouring stages, the same in both directions."""

    latency: float = 0.0
    """One way."""
    bandwidth: float = inf
    """Bytes per second."""
    frame_bytes: int = 0
    """Of an activation or a gradient; norms weigh nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """Somebody asks the first stage to stop; the others hear of its answer some time later."""

    at: float
    delays: tuple[float, ...] = ()
    """Per stage; missing ones are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotTimes:
    """Each stage writes a boundary while it computes, and runs no update until that is done."""

    every: int
    """Batches."""
    seconds: float
    """Of one snapshot."""


@dataclass(frozen=True, slots=True)
class TimedOp:
    """One operation of the timeline."""

    stage: int
    op: Op
    version: int
    """The weight version that it read."""
    started: float
    ended: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What the simulation saw."""

    step_seconds: float
    """Per batch, over the middle half of the batches; over all of them when there are fewer than eight."""
    bubble: float
    """The share of that time in which the busiest stage had nothing to do."""
    total_seconds: float
    peak_in_flight: tuple[int, ...]
    """Per stage."""
    peak_versions: tuple[int, ...]
    """Per stage."""
    boundaries: tuple[int, ...]
    """Per stage, where it ended; less than the stop boundary means that it was stuck."""
    stop: int
    """The boundary at which all should end."""
    timeline: tuple[TimedOp, ...]

    @property
    def is_stuck(self) -> bool:
        """Whether some stage could not reach the stop boundary."""
        return any(boundary != self.stop for boundary in self.boundaries)


def simulate(
    schedules: Sequence[StageSchedule],
    times: Sequence[StageTimes],
    *,
    links: Sequence[LinkTimes] = (),
    jitter: float = 0.0,
    seed: int = 0,
    stop: StopRequest | None = None,
    snapshots: SnapshotTimes | None = None,
) -> Simulation:
    """Run a pipeline without replicas to its stop boundary, or until nothing moves.

    schedules and times: one per stage. links: one per neighbouring pair; none means no latency at all. Every duration
    is stretched by a factor between 1 and 1 + jitter, drawn from the seed.
    """
    links = links or (LinkTimes(),) * (len(schedules) - 1)
    return _Pipeline(schedules, times, links, _stretch(jitter, seed), snapshots).run(stop)


class _Pipeline:
    """The stages, their links, and the clock."""

    def __init__(
        self,
        schedules: Sequence[StageSchedule],
        times: Sequence[StageTimes],
        links: Sequence[LinkTimes],
        stretch: Callable[[], float],
        snapshots: SnapshotTimes | None,
    ) -> None:
        self.snapshots = snapshots
        self.states = [ScheduleState(schedule) for schedule in schedules]
        self.times = times
        self.links = links
        self.stretch = stretch
        self.now = 0.0
        self.running: list[Op | None] = [None] * len(schedules)
        self.line_free: dict[tuple[int, int], float] = {}
        self.last_arrival: dict[tuple[int, int], float] = {}
        self.pending_stop: StopRequest | None = None
        self.squares = [[-1, -1] for _ in schedules]  # per stage: last batch of its own, and of the stages downstream
        self.events: list[tuple[float, int, Callable[[], int | None]]] = []
        self.num_events = 0
        self.timeline: list[TimedOp] = []
        self.peak_in_flight = [0] * len(schedules)
        self.peak_versions = [1] * len(schedules)

    def run(self, stop: StopRequest | None) -> Simulation:
        if stop is not None:
            self._after(stop.at, lambda: self._ask_for_stop(stop))
        for stage in range(len(self.states)):
            self._start_next(stage)
        while self.events:
            self.now, _, happen = heappop(self.events)
            touched = happen()
            if touched is not None:
                self._start_next(touched)
        return self._result()

    def _after(self, delay: float, happen: Callable[[], int | None]) -> None:
        """Schedule an event; it returns the stage that may have become runnable."""
        self._at(self.now + delay, happen)

    def _at(self, moment: float, happen: Callable[[], int | None]) -> None:
        """Events of the same moment happen in the order in which they were scheduled."""
        self.num_events += 1
        heappush(self.events, (moment, self.num_events, happen))

    def _start_next(self, stage: int) -> None:
        if self.running[stage] is not None:
            return
        if stage == 0 and self.pending_stop is not None:
            self._choose_stop(self.pending_stop)
            self.pending_stop = None
        state = self.states[stage]
        op = next_op(state)
        if op is WAIT:
            return
        self.running[stage] = op
        times = self.times[stage]
        version = state.version
        match op:
            case Forward(batch, _):
                version = weight_version(batch, state.schedule.delay)
                seconds = times.forward
            case Backward(batch, _):
                version = weight_version(batch, state.schedule.delay)
                is_last = state.backwards.num_done + 1 == len(state.schedule.held_microbatches)
                seconds = times.backward + (times.clip if is_last and state.schedule.has_clip else 0.0)
            case Update():
                seconds = times.update
        seconds *= self.stretch()
        self.timeline.append(TimedOp(stage, op, version, self.now, self.now + seconds))
        self._after(seconds, lambda: self._finish(stage, op))

    def _finish(self, stage: int, op: Op) -> int:
        state = self.states[stage]
        self.running[stage] = None
        match op:
            case Forward(batch, microbatch):
                state.forwarded(batch, microbatch)
                if not state.schedule.is_last:
                    self._send(stage, stage + 1, lambda: self.states[stage + 1].input_arrived(batch, microbatch))
            case Backward(batch, microbatch):
                is_last_of_batch = state.backwarded(batch, microbatch)
                if not state.schedule.is_first:
                    self._send(stage, stage - 1, lambda: self.states[stage - 1].gradient_arrived(batch, microbatch))
                if is_last_of_batch:
                    state.groups_reduced(batch)
                    self.squares[stage][0] = batch
                    self._pass_squares(stage, batch)
            case Update(batch):
                state.updated(batch)
                self._begin_snapshot(stage)
        self.peak_in_flight[stage] = max(self.peak_in_flight[stage], state.in_flight)
        self.peak_versions[stage] = max(self.peak_versions[stage], state.num_versions_live)
        return stage

    def _begin_snapshot(self, stage: int) -> None:
        state, snapshots = self.states[stage], self.snapshots
        if snapshots is None or state.version % snapshots.every or state.version >= state.stop:
            return
        state.updates_held = True

        def end() -> int:
            state.updates_held = False
            return stage

        self._after(snapshots.seconds * self.stretch(), end)

    def _send(self, source: int, target: int, arrive: Callable[[], None], *, is_heavy: bool = True) -> None:
        """Put a frame on the line: it waits for those before it, then takes its bytes' time and the latency.

        A link keeps its order, whatever the jitter: a frame never arrives before the one that was sent before it.
        """
        link = self.links[min(source, target)]
        begins = max(self.now, self.line_free.get((source, target), 0.0))
        ends = begins + (link.frame_bytes / link.bandwidth if is_heavy else 0.0)
        self.line_free[source, target] = ends

        def happen() -> int:
            arrive()
            return target

        arrives = max(ends + link.latency * self.stretch(), self.last_arrival.get((source, target), 0.0))
        self.last_arrival[source, target] = arrives
        self._at(arrives, happen)

    def _pass_squares(self, stage: int, batch: int) -> None:
        """Squares go upstream when a stage has its own and those of all stages downstream."""
        state = self.states[stage]
        own, downstream = self.squares[stage]
        if not state.schedule.has_clip or own < batch or (downstream < batch and not state.schedule.is_last):
            return
        if state.schedule.is_first:
            self._learn_total(stage, batch)
        else:
            self._send(stage, stage - 1, lambda: self._squares_arrived(stage - 1, batch), is_heavy=False)

    def _squares_arrived(self, stage: int, batch: int) -> None:
        self.squares[stage][1] = batch
        self._pass_squares(stage, batch)

    def _learn_total(self, stage: int, batch: int) -> None:
        self.states[stage].clip_total_known(batch)
        if not self.states[stage].schedule.is_last:
            self._send(stage, stage + 1, lambda: self._learn_total(stage + 1, batch), is_heavy=False)

    def _ask_for_stop(self, stop: StopRequest) -> int:
        self.pending_stop = stop
        return 0

    def _choose_stop(self, stop: StopRequest) -> None:
        """The first stage answers between two operations, as the executor does."""
        boundary = self.states[0].choose_stop()
        delays = (*stop.delays, *(0.0,) * len(self.states))
        for stage in range(1, len(self.states)):
            self._after(delays[stage], lambda stage=stage: self.states[stage].stop_at(boundary))  # type: ignore[misc]

    def _result(self) -> Simulation:
        stop = self.states[0].stop
        ends = [done.ended for done in self.timeline if done.stage == 0 and isinstance(done.op, Update)]
        num_updates = len(ends)
        first, last = (num_updates // 4, num_updates * 3 // 4) if num_updates >= 8 else (0, num_updates)
        ends = [0.0, *ends]
        step_seconds = (ends[last] - ends[first]) / max(1, last - first)
        num_held = len(self.states[0].schedule.held_microbatches)
        bound = max(times.batch_seconds(num_held) for times in self.times)
        return Simulation(
            step_seconds=step_seconds,
            bubble=1.0 - bound / step_seconds if step_seconds else 0.0,
            total_seconds=max((done.ended for done in self.timeline), default=0.0),
            peak_in_flight=tuple(self.peak_in_flight),
            peak_versions=tuple(self.peak_versions),
            boundaries=tuple(state.version if state.is_done else -1 for state in self.states),
            stop=stop,
            timeline=tuple(self.timeline),
        )


def _stretch(jitter: float, seed: int) -> Callable[[], float]:
    """Factors between 1 and 1 + jitter, from splitmix64 (Steele, Lea and Flood 2014) of the seed."""
    state = seed & _MASK

    def draw() -> float:
        nonlocal state
        if jitter == 0.0:
            return 1.0
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return 1.0 + jitter * ((mixed ^ (mixed >> 31)) / (_MASK + 1))

    return draw


_MASK = (1 << 64) - 1


def format_grid(timeline: Sequence[TimedOp], *, bad: TimedOp | None = None) -> str:
    """The timeline as a grid for people: a row per stage, a column per start time; the bad cell is marked >so<."""
    columns = {time: column for column, time in enumerate(sorted({done.started for done in timeline}))}
    num_stages = 1 + max((done.stage for done in timeline), default=-1)
    cells = [[""] * len(columns) for _ in range(num_stages)]
    for done in timeline:
        text = f">{done.op}<" if done == bad else str(done.op)
        cell = cells[done.stage][columns[done.started]]
        cells[done.stage][columns[done.started]] = f"{cell},{text}" if cell else text
    widths = [max((len(row[column]) for row in cells), default=0) for column in range(len(columns))]
    return "\n".join(
        f"stage {stage}: " + " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for stage, row in enumerate(cells)
    )
