"""A simulated pipeline to which more happens: times that vary, a stop, snapshots, evaluations that end the job."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from headway.stages.schedule.simulator import Pipeline, Simulation, StageTimes
from headway.stages.schedule.stage_schedule import StageSchedule


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
    seconds: float


class EventfulPipeline(Pipeline):
    """Every duration is stretched by a factor between 1 and 1 + jitter, drawn from the seed.

    end_after: the job's last boundary, as known after the evaluation of a batch.
    """

    def __init__(
        self,
        schedules: Sequence[StageSchedule],
        times: Sequence[StageTimes],
        *,
        jitter: float = 0.0,
        seed: int = 0,
        stop: StopRequest | None = None,
        snapshots: SnapshotTimes | None = None,
        end_after: Callable[[int], int] = lambda _: 0,
        **links: Any,
    ) -> None:
        super().__init__(schedules, times, **links)
        self._jitter, self._random = jitter, Random(seed)
        self._stop, self._is_stop_due = stop, False
        self._snapshots = snapshots
        self._end_after = end_after
        self._last_lead = self.stages[-1][0]
        self.states[self._last_lead].awaits_losses = bool(schedules[-1].judged_every)
        self._evaluates = {
            w for w in self.stages[-1] if min(schedules[w].held_microbatches) < schedules[w].num_held_out
        }
        """Workers of the last stage that have not told yet what the last weights lose on held-out text."""
        self._num_evaluating = len(self._evaluates)

    def run(self) -> Simulation:
        if self._stop is not None:
            self.after(self._stop.at, self._ask_for_stop)
        # What the journal has said before the run.
        state = self.states[self._last_lead]
        every = state.schedule.judged_every
        newest = (state.schedule.first_batch - 1) // every * every if every else -1
        if newest >= state.first_unjudged:
            self._learn_end(self._last_lead, newest, self._end_after(newest))
        return super().run()

    def stretch(self) -> float:
        return 1.0 + self._jitter * self._random.random()

    def is_free(self, worker: int) -> None:
        """The first stage chooses between two operations, as the executor does. Losses of the last weights are told."""
        self._tell_end_losses(worker)
        if worker or not self._is_stop_due:
            return
        assert self._stop is not None
        self._is_stop_due = False
        boundary = self.states[0].choose_stop()
        for sibling in self.siblings(0):  # ahead of the sums that would let it begin the next batch
            self.send(0, sibling, lambda other=sibling: self.states[other].stop_at(boundary), num_bytes=0)  # type: ignore[misc]
        delays = (*self._stop.delays, *(0.0,) * len(self.states))
        for other in range(1, len(self.states)):
            self.after(delays[other], lambda other=other: self.states[other].stop_at(boundary))  # type: ignore[misc]

    def ended_batch(self, worker: int, batch: int) -> None:
        """The lead of the last stage hears of the losses, ahead of the sums."""
        lead, num_parts = self._last_lead, len(self.stages[-1])
        if worker not in self.stages[-1] or not self.states[lead].awaits_losses:
            return
        if worker == lead:
            self.has_part(lead, batch, self._know_losses, num_parts=num_parts)
        else:
            arrive = lambda: self.has_part(lead, batch, self._know_losses, num_parts=num_parts)  # noqa: E731
            self.send(worker, lead, arrive, num_bytes=0)

    def updated(self, worker: int) -> None:
        state, snapshots = self.states[worker], self._snapshots
        if snapshots is None or state.version % snapshots.every or state.version >= state.stop:
            return
        state.updates_held = True

        def end() -> int:
            state.updates_held = False
            return worker

        self.after(snapshots.seconds * self.stretch(), end)

    def _ask_for_stop(self) -> int:
        self._is_stop_due = True
        return 0

    def _tell_end_losses(self, worker: int) -> None:
        lead, state = self._last_lead, self.states[worker]
        if worker not in self._evaluates or not state.num_held_out or state.next_held_out >= 0:
            return
        self._evaluates.remove(worker)
        if not self.states[lead].awaits_losses:
            return

        def arrive() -> None:
            self.has_part(lead, state.end, self._know_end, num_parts=self._num_evaluating)

        arrive() if worker == lead else self.send(worker, lead, arrive, num_bytes=0)

    def _know_end(self, lead: int, end: int) -> None:
        self.states[lead].losses_known(end)

    def _know_losses(self, lead: int, batch: int) -> None:
        self.states[lead].losses_known(batch)
        if self.states[lead].expects_judgement(batch):
            self._learn_end(lead, batch, self._end_after(batch))

    def _learn_end(self, worker: int, batch: int, end: int) -> None:
        """A lead tells its siblings and the lead of the stage before."""
        schedule = self.states[worker].schedule
        self.states[worker].judged(batch, end)
        if not schedule.is_lead:
            return
        for listener in self.siblings(worker) + ([] if schedule.is_first else [self.neighbour(worker, -1, 0)]):
            self.send(worker, listener, lambda other=listener: self._learn_end(other, batch, end), num_bytes=0)  # type: ignore[misc]
