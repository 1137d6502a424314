"""Simulates a plan's schedule: how long its batches take, and which workers are idle. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from headway.daemon.cluster.records import NodeRecord, WorkerPart, replicas_of
from headway.daemon.jobs.job import JobSpec
from headway.daemon.plan.connections import LinkAssumptions
from headway.daemon.plan.devices import DeviceSlot
from headway.daemon.plan.predicted_time import PlacedStage, placed_as
from headway.daemon.plan.profiles import Profiles
from headway.daemon.plan.replica_shares import largest_share
from headway.daemon.plan.stage_costs import StageCosts
from headway.stages.schedule.operations import Update
from headway.stages.schedule.simulator import LinkTimes, Simulation, StageTimes, TimedOp, simulate
from headway.stages.schedule.stage_schedule import StageSchedule

MOST_BATCHES: Final = 24
"""With half of them, the few batches that are measured may each be 2 % early."""
LEAST_BATCHES: Final = 4
BATCHES_SHOWN: Final = 3
MOST_OPERATIONS: Final = 400_000
"""Maximum number of simulated forwards and backwards, unless the fewest batches have more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A plan's simulated pipeline, some batches long."""

    num_batches: int
    step_seconds: float
    """Seconds per batch of the slowest worker, once the pipe is full: others may run ahead as far as their depth
    allows.
    """
    bubbles: tuple[float, ...]
    """Share of that time without an operation, for each worker."""
    peaks: tuple[int, ...]
    """Maximum number of microbatches in flight, for each worker."""
    window: tuple[float, float]
    """Interval in which the pipe was full."""
    timeline: tuple[TimedOp, ...]

    @property
    def shown(self) -> tuple[float, float]:
        """Return the part for a picture: a few batches of the full pipe."""
        begin, end = self.window
        return begin, min(end, begin + BATCHES_SHOWN * self.step_seconds)


def forecast(
    spec: JobSpec,
    workers: Sequence[WorkerPart],
    nodes: Iterable[NodeRecord],
    *,
    links: LinkAssumptions | None = None,
    profiles: Profiles | None = None,
    num_shown: int = 0,
) -> Forecast:
    """Simulate some batches of a plan. workers: its workers, on nodes that are all present.

    num_shown: batches of the full pipe, as far as MOST_OPERATIONS allows it; 0: enough for a step's time.
    """
    times = placed_as(spec, workers, nodes, profiles=profiles, links=links)
    assert times is not None, "a plan's node or device is gone"
    costs, stages = times.costs, times.stages
    num_batches = _num_batches(spec, len(stages), at_most=max(MOST_BATCHES, 2 * num_shown))
    train = replace(spec.train, batches=num_batches, eval_every=0, eval_patience=0, sync_batches=0)
    schedules = [
        StageSchedule.of(
            train,
            stage_index=index,
            num_stages=len(stages),
            depth=workers[position].depth,
            groups=workers[position].groups or None,
            shares_update=workers[position].shares_update,
            group_by_group=len(stages) == len(workers),
        )
        for index, positions in enumerate(replicas_of(workers))
        for position in positions
    ]
    run = simulate(
        schedules,
        [_times(costs, stage, slot) for stage in stages for slot in stage.slots],
        links=[_link(costs, *slots) for slots in pairwise(stage.slots for stage in stages)],
        sibling_links=[_sibling_link(costs, stage) for stage in stages],
    )
    return _forecast(run, num_batches, len(workers))


def _times(costs: StageCosts, stage: PlacedStage, slot: DeviceSlot) -> StageTimes:
    """Return the times of one microbatch each way, and of one update, of all layers of a worker."""
    index, number = costs.slices.slice_number(stage.span, stage.recompute), len(stage.workers)
    forward, backward, update, shareable = costs.operation_seconds(slot, index)
    if not stage.shares_update:
        return StageTimes(forward=forward, backward=backward, update=update)
    share = shareable * largest_share(float(costs.largest_part[index]), number)
    return StageTimes(forward=forward, backward=backward, update=update - shareable, share=share)


def _num_batches(spec: JobSpec, num_stages: int, *, at_most: int) -> int:
    of_one_batch = 2 * spec.train.microbatches * num_stages
    return max(LEAST_BATCHES, min(at_most, MOST_OPERATIONS // of_one_batch))


def _link(costs: StageCosts, uppers: Sequence[DeviceSlot], lowers: Sequence[DeviceSlot]) -> LinkTimes:
    """Return the slowest link between each pair of workers of two stages."""
    return LinkTimes(
        latency=costs.links.longest_round_trip_s(uppers, lowers) / 2,
        bandwidth=costs.links.slowest_bytes_per_s(uppers, lowers),
        # A gradient is smaller: none comes up for held-out text. The simulator has one size for both ways.
        frame_bytes=round(costs.cuts.downward_bytes(uppers, lowers)),
    )


def _sibling_link(costs: StageCosts, stage: PlacedStage) -> LinkTimes:
    """Return the slowest link between replicas; a frame has the average length of the sums and the reduced slices."""
    replicas, number = stage.slots, len(stage.slots)
    if number == 1:
        return LinkTimes()
    index = costs.slices.slice_number(stage.span, stage.recompute)
    return LinkTimes(
        latency=costs.links.longest_round_trip_s(replicas, replicas) / 2,
        bandwidth=costs.links.slowest_sibling_bytes_per_s(replicas),
        # To each sibling go sums, and then a reduced slice.
        frame_bytes=round(float(costs.reduction_bytes(number, is_shared=False)[index]) / (number - 1) / 2),
        share_bytes=round(float(costs.memory.shared_bytes[index]) / number),
    )


def _forecast(run: Simulation, num_batches: int, num_workers: int) -> Forecast:
    assert not run.is_stuck, "a plan's schedule got stuck"
    ends: list[list[float]] = [[0.0] for _ in range(num_workers)]
    for done in run.timeline:
        if isinstance(done.op, Update):
            ends[done.stage].append(done.ended)
    first, last = (num_batches // 4, num_batches * 3 // 4) if num_batches >= 8 else (0, num_batches)
    begin, end = ends[0][first], ends[0][last]
    busy = [0.0] * num_workers
    for done in run.timeline:
        busy[done.stage] += max(0.0, min(done.ended, end) - max(done.started, begin))
    return Forecast(
        num_batches=num_batches,
        step_seconds=max(own[last] - own[first] for own in ends) / (last - first),
        bubbles=tuple(max(0.0, 1.0 - seconds / (end - begin)) for seconds in busy),
        peaks=run.peak_in_flight,
        window=(begin, end),
        timeline=run.timeline,
    )
