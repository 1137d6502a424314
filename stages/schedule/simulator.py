"""Simulates how long a pipeline takes: an event simulation of the very function that drives the stages.

A worker is known by its position among all of them. Replicas of a stage are adjacent and hold all groups together; a
worker that holds all groups is alone on its stage. Times are seconds of simulated time. Equal inputs give equal
outputs:
jitter comes from a seed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from headway.stages.schedule.next_op import WAIT, next_op
from headway.stages.schedule.operations import Backward, Forward, Op, Orthogonalize, Update
from headway.stages.schedule.schedule_state import ScheduleState
from headway.stages.schedule.stage_schedule import StageSchedule
from headway.stages.spec import weight_version


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """A request to the first stage to stop; the others hear its answer some time later."""

    at: float
    delays: tuple[float, ...] = ()
    """Delay per worker; missing ones are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotTimes:
    """Each worker writes a boundary while it computes, and runs no update until that is done."""

    every: int
    """Interval in batches."""
    seconds: float
    """Seconds of one snapshot."""


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
    jitter: float = 0.0,
    seed: int = 0,
    stop: StopRequest | None = None,
    snapshots: SnapshotTimes | None = None,
    end_after: Callable[[int], int] | None = None,
) -> Simulation:
    """Run a pipeline to its stop boundary, or until nothing moves.

    schedules and times: one per worker. links: one per neighbouring pair of stages, sibling_links: one per stage, each
    for all of their workers; none means no latency. Every duration is stretched by a factor between 1 and 1 + jitter,
    drawn from the seed. end_after: the job's last boundary, as known after the evaluation of a batch.
    """
    num_stages = len(stages_of(schedules))
    links = links or (LinkTimes(),) * (num_stages - 1)
    sibling_links = sibling_links or (LinkTimes(),) * num_stages
    pipeline = _Pipeline(schedules, times, links, sibling_links, _stretch(jitter, seed), snapshots)
    pipeline.end_after = end_after
    return pipeline.run(stop)


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


class _Pipeline:
    """The workers, their links, and the clock."""

    def __init__(
        self,
        schedules: Sequence[StageSchedule],
        times: Sequence[StageTimes],
        links: Sequence[LinkTimes],
        sibling_links: Sequence[LinkTimes],
        stretch: Callable[[], float],
        snapshots: SnapshotTimes | None,
    ) -> None:
        self.snapshots = snapshots
        self.end_after: Callable[[int], int] | None = None
        self.states = [ScheduleState(schedule) for schedule in schedules]
        self.times = times
        self.links = links
        self.sibling_links = sibling_links
        self.stages = stages_of(schedules)
        self.stage_of = [index for index, workers in enumerate(self.stages) for _ in workers]
        self.holders = [
            {group: worker for worker in workers for group in schedules[worker].held_groups} for workers in self.stages
        ]
        self.sums = [dict[int, int]() for _ in schedules]
        """Per worker and batch: how many workers of its stage have handed over the sums of its slice."""
        self.slices = [dict[int, int]() for _ in schedules]
        """Per worker and batch: how many reduced slices are there."""
        self.shares = [dict[int, int]() for _ in schedules]
        """Per worker and batch: how many shares of its update are there."""
        self.losses: dict[int, int] = {}
        """Per batch: how many workers of the last stage have told the lead its losses."""
        self.last_lead = self.stages[-1][0]
        if schedules[-1].judged_every:
            self.states[self.last_lead].awaits_losses = True
        self.stretch = stretch
        self.now = 0.0
        self.running: list[Op | None] = [None] * len(schedules)
        self.line_free: dict[tuple[int, int], float] = {}
        self.last_arrival: dict[tuple[int, int], float] = {}
        self.pending_stop: StopRequest | None = None
        self.squares = [[-1, -1] for _ in schedules]  # for a lead: last batch of its own stage, and of those downstream
        self.events: list[tuple[float, int, Callable[[], int | None]]] = []
        self.num_events = 0
        self.timeline: list[TimedOp] = []
        self.peak_in_flight = [0] * len(schedules)
        self.peak_versions = [1] * len(schedules)

    def run(self, stop: StopRequest | None) -> Simulation:
        if stop is not None:
            self._after(stop.at, lambda: self._ask_for_stop(stop))
        self._begin_judging()
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
        """Schedule an event at a time; events of one moment happen in the order of scheduling."""
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
            case Orthogonalize():
                seconds = times.share
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
                    below = self._neighbour(stage, 1, microbatch)
                    self._send(stage, below, lambda: self.states[below].input_arrived(batch, microbatch))
            case Backward(batch, microbatch):
                is_last_of_batch = state.backwarded(batch, microbatch)
                if not state.schedule.is_first:
                    above = self._neighbour(stage, -1, microbatch)
                    self._send(stage, above, lambda: self.states[above].gradient_arrived(batch, microbatch))
                if is_last_of_batch:
                    self._tell_losses(stage, batch)
                    for sibling in self._siblings(stage):
                        self._send(stage, sibling, lambda owner=sibling: self._sums_arrived(owner, batch))  # type: ignore[misc]
                    self._sums_arrived(stage, batch)
            case Orthogonalize(batch):
                state.orthogonalized(batch)
                for sibling in self._siblings(stage):
                    self._send(
                        stage,
                        sibling,
                        lambda other=sibling: self._share_arrived(other, batch),  # type: ignore[misc]
                        num_bytes=self.sibling_links[self.stage_of[stage]].share_bytes,
                    )
                self._share_arrived(stage, batch)
            case Update(batch):
                state.updated(batch)
                self._begin_snapshot(stage)
        self.peak_in_flight[stage] = max(self.peak_in_flight[stage], state.in_flight)
        self.peak_versions[stage] = max(self.peak_versions[stage], state.num_versions_live)
        return stage

    def _neighbour(self, worker: int, step: int, microbatch: int) -> int:
        """Return the worker of the next stage down (1) or up (-1) that computes a microbatch."""
        group = microbatch % self.states[worker].schedule.num_groups
        return self.holders[self.stage_of[worker] + step][group]

    def _siblings(self, worker: int) -> list[int]:
        return [other for other in self.stages[self.stage_of[worker]] if other != worker]

    def _sums_arrived(self, owner: int, batch: int) -> None:
        """Note sums of a slice; once all workers of a stage have sent theirs, the owner adds and distributes it."""
        num_workers = len(self.stages[self.stage_of[owner]])
        if not _is_complete(self.sums[owner], batch, num_workers):
            return
        for sibling in self._siblings(owner):
            self._send(owner, sibling, lambda other=sibling: self._slice_arrived(other, batch))  # type: ignore[misc]
        self._slice_arrived(owner, batch)

    def _slice_arrived(self, worker: int, batch: int) -> None:
        state = self.states[worker]
        if not _is_complete(self.slices[worker], batch, len(self.stages[self.stage_of[worker]])):
            return
        state.groups_reduced(batch)
        if state.schedule.is_lead:
            self.squares[worker][0] = batch
            self._pass_squares(worker, batch)

    def _begin_judging(self) -> None:
        """Tell the newest judgement of the batches before the run."""
        state = self.states[self.last_lead]
        every = state.schedule.judged_every
        newest = (state.schedule.first_batch - 1) // every * every if every else -1
        if newest >= state.first_unjudged:
            self._judge(newest)

    def _tell_losses(self, worker: int, batch: int) -> None:
        """The last backward of a batch is done: the lead of the last stage hears of its losses, ahead of the sums."""
        if not self.states[worker].schedule.is_last or not self.states[self.last_lead].awaits_losses:
            return
        if worker == self.last_lead:
            self._losses_arrived(batch)
        else:
            self._send(worker, self.last_lead, lambda: self._losses_arrived(batch), num_bytes=0)

    def _losses_arrived(self, batch: int) -> None:
        if _is_complete(self.losses, batch, len(self.stages[-1])):
            state = self.states[self.last_lead]
            state.losses_known(batch)
            if state.expects_judgement(batch):
                self._judge(batch)

    def _judge(self, batch: int) -> None:
        assert self.end_after is not None, "the schedule waits for judgements"
        self._learn_end(self.last_lead, batch, self.end_after(batch))

    def _learn_end(self, worker: int, batch: int, end: int) -> None:
        """Note a judgement. A lead tells its siblings and the lead of the stage before."""
        schedule = self.states[worker].schedule
        self.states[worker].judged(batch, end)
        if not schedule.is_lead:
            return
        listeners = self._siblings(worker)
        if not schedule.is_first:
            listeners.append(self._neighbour(worker, -1, 0))
        for listener in listeners:
            self._send(worker, listener, lambda other=listener: self._learn_end(other, batch, end), num_bytes=0)  # type: ignore[misc]

    def _share_arrived(self, worker: int, batch: int) -> None:
        if _is_complete(self.shares[worker], batch, len(self.stages[self.stage_of[worker]])):
            self.states[worker].shares_known(batch)

    def _begin_snapshot(self, stage: int) -> None:
        state, snapshots = self.states[stage], self.snapshots
        if snapshots is None or state.version % snapshots.every or state.version >= state.stop:
            return
        state.updates_held = True

        def end() -> int:
            state.updates_held = False
            return stage

        self._after(snapshots.seconds * self.stretch(), end)

    def _send(self, source: int, target: int, arrive: Callable[[], None], *, num_bytes: int | None = None) -> None:
        """Put a frame on the line: it waits for earlier ones, then takes its bytes' time and the latency.

        num_bytes: None: those of the link's frames.
        A link keeps its order under any jitter: a frame never arrives before an earlier one.
        """
        stages = self.stage_of[source], self.stage_of[target]
        link = self.sibling_links[stages[0]] if stages[0] == stages[1] else self.links[min(stages)]
        begins = max(self.now, self.line_free.get((source, target), 0.0))
        ends = begins + (link.frame_bytes if num_bytes is None else num_bytes) / link.bandwidth
        self.line_free[source, target] = ends

        def happen() -> int:
            arrive()
            return target

        arrives = max(ends + link.latency * self.stretch(), self.last_arrival.get((source, target), 0.0))
        self.last_arrival[source, target] = arrives
        self._at(arrives, happen)

    def _pass_squares(self, stage: int, batch: int) -> None:
        """Send squares upstream when a stage has its own and those of all stages downstream."""
        state = self.states[stage]
        own, downstream = self.squares[stage]
        if not state.schedule.has_clip or own < batch or (downstream < batch and not state.schedule.is_last):
            return
        if state.schedule.is_first:
            self._learn_total(stage, batch)
        else:
            above = self._neighbour(stage, -1, 0)
            self._send(stage, above, lambda: self._squares_arrived(above, batch), num_bytes=0)

    def _squares_arrived(self, stage: int, batch: int) -> None:
        self.squares[stage][1] = batch
        self._pass_squares(stage, batch)

    def _learn_total(self, stage: int, batch: int) -> None:
        schedule = self.states[stage].schedule
        self.states[stage].clip_total_known(batch)
        if not schedule.is_lead:
            return
        listeners = self._siblings(stage)
        if not schedule.is_last:
            listeners.append(self._neighbour(stage, 1, 0))
        for listener in listeners:
            self._send(stage, listener, lambda other=listener: self._learn_total(other, batch), num_bytes=0)  # type: ignore[misc]

    def _ask_for_stop(self, stop: StopRequest) -> int:
        self.pending_stop = stop
        return 0

    def _choose_stop(self, stop: StopRequest) -> None:
        """Choose the stop; the first stage answers between two operations, as the executor does."""
        boundary = self.states[0].choose_stop()
        for sibling in self._siblings(0):
            # Sent ahead of the sums that would let it begin the next batch.
            self._send(0, sibling, lambda other=sibling: self.states[other].stop_at(boundary), num_bytes=0)  # type: ignore[misc]
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
        bound = max(
            times.batch_seconds(len(state.schedule.held_microbatches))
            for times, state in zip(self.times, self.states, strict=True)
        )
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


def _is_complete(counts: dict[int, int], batch: int, num_workers: int) -> bool:
    """Count one more of a batch; return whether it was the last one."""
    counts[batch] = counts.get(batch, 0) + 1
    if counts[batch] < num_workers:
        return False
    del counts[batch]
    return True


def _stretch(jitter: float, seed: int) -> Callable[[], float]:
    """Return a source of factors between 1 and 1 + jitter, from splitmix64 (Steele, Lea and Flood 2014) of the seed."""
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
