"""Simulates a plan's schedule: how long its batches take, and which workers are idle. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from headway.daemon.cluster.records import NodeRecord, WorkerPart, replicas_of
from headway.daemon.jobs.job import JobSpec
from headway.daemon.plan.connections import LinkAssumptions, Links
from headway.daemon.plan.devices import DeviceSlot
from headway.daemon.plan.layer_costs import (
    LayerCost,
    element_bytes,
    evaluation_bytes,
    layer_costs,
    num_hidden,
    position_bytes,
)
from headway.daemon.plan.link_choice import linked_nodes
from headway.daemon.plan.paths import RelayedWays
from headway.daemon.plan.profiles import DeviceClock, Profiles
from headway.daemon.plan.replica_shares import largest_share
from headway.stages.links.codec import codec_between, coded_bytes
from headway.stages.schedule.operations import Update
from headway.stages.schedule.simulator import LinkTimes, Simulation, StageTimes, TimedOp, simulate
from headway.stages.schedule.stage_schedule import StageSchedule
from headway.stages.spec import timed_kind

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
    stages: Sequence[WorkerPart],
    nodes: Iterable[NodeRecord],
    *,
    links: LinkAssumptions | None = None,
    profiles: Profiles | None = None,
    num_shown: int = 0,
) -> Forecast:
    """Simulate some batches of a plan. stages: its workers, on nodes that are all present.

    num_shown: batches of the full pipe, as far as MOST_OPERATIONS allows it; 0: enough for a step's time.
    """
    profiles = profiles or Profiles()
    nodes = tuple(nodes)
    slots = _slots(stages, nodes)
    relayed, by_grpc = RelayedWays.of(nodes, nodes), spec.train.link == "grpc"
    speeds = Links(links or LinkAssumptions(), profiles, relayed=relayed, by_grpc=by_grpc)
    speeds = speeds.shared_by(linked_nodes(stages, trains_tie=spec.model.trains_tie))
    by_stage = replicas_of(stages)
    num_batches = _num_batches(spec, len(by_stage), at_most=max(MOST_BATCHES, 2 * num_shown))
    train = replace(spec.train, batches=num_batches, eval_patience=0)
    schedules = [
        StageSchedule.of(
            train,
            stage_index=index,
            num_stages=len(by_stage),
            depth=stages[position].depth,
            groups=stages[position].groups or None,
            shares_update=stages[position].shares_update,
            group_by_group=len(by_stage) == len(stages),
        )
        for index, positions in enumerate(by_stage)
        for position in positions
    ]
    clock = _Clock(spec, profiles, slots)
    between = [
        _link(spec, speeds, [slots[p] for p in upper], [slots[p] for p in lower]) for upper, lower in pairwise(by_stage)
    ]
    siblings = [
        _sibling_link(spec, speeds, stages[positions[0]], [slots[p] for p in positions]) for positions in by_stage
    ]
    num_replicas = [len(positions) for positions in by_stage for _ in positions]
    times = list(map(clock.times, stages, slots, num_replicas))
    run = simulate(schedules, times, links=between, sibling_links=siblings)
    return _forecast(run, num_batches, len(stages))


class _Clock:
    """The seconds of a worker's operations."""

    def __init__(self, spec: JobSpec, profiles: Profiles, slots: Sequence[DeviceSlot]) -> None:
        self._spec = spec
        self._costs: Mapping[str, LayerCost] = {
            timed_kind(spec.model.kind_of(cost.name), recompute): cost
            for recompute in spec.train.recomputes
            for cost in layer_costs(spec, recompute)
        }
        devices = {(slot.node, slot.device.index): slot.device for slot in slots}
        self._clock = DeviceClock(self._costs, spec.train, profiles, devices)

    def times(self, worker: WorkerPart, slot: DeviceSlot, num_replicas: int) -> StageTimes:
        """Return the times of one microbatch each way, and of one update, of all layers of a worker."""
        recompute = worker.recompute or self._spec.train.recompute
        forward = backward = update = shareable = 0.0
        kinds = [timed_kind(self._spec.model.kind_of(layer), recompute) for layer in worker.layers]
        for kind in kinds:
            seconds = self._clock.seconds(slot.node, slot.device, kind)
            forward += seconds.forward_s
            backward += seconds.backward_s
            update += seconds.update_s
            shareable += seconds.shareable_s
        if not worker.shares_update:
            return StageTimes(forward=forward, backward=backward, update=update)
        costs = [self._costs[kind] for kind in kinds]
        largest = max(cost.largest_update_flops for cost in costs) / sum(cost.update_flops for cost in costs)
        share = shareable * largest_share(largest, num_replicas)
        return StageTimes(forward=forward, backward=backward, update=update - shareable, share=share)


def _slots(stages: Sequence[WorkerPart], nodes: Iterable[NodeRecord]) -> list[DeviceSlot]:
    records = {node.name: node for node in nodes}
    found = []
    for worker in stages:
        node = records[worker.node]
        places = [device.index for device in node.devices]
        found.append(DeviceSlot.of(node, places.index(worker.device_index)))
    return found


def _num_batches(spec: JobSpec, num_stages: int, *, at_most: int) -> int:
    of_one_batch = 2 * spec.train.microbatches * num_stages
    return max(LEAST_BATCHES, min(at_most, MOST_OPERATIONS // of_one_batch))


def _link(spec: JobSpec, links: Links, uppers: Sequence[DeviceSlot], lowers: Sequence[DeviceSlot]) -> LinkTimes:
    """Return the slowest link between each pair of workers of two stages."""
    codec = codec_between(spec.train, is_between_sites=len({slot.site for slot in (*uppers, *lowers)}) > 1)
    coded = coded_bytes(codec, num_hidden(spec), element_bytes(spec.train)) + position_bytes(spec.train)
    return LinkTimes(
        latency=links.longest_round_trip_s(uppers, lowers) / 2,
        bandwidth=links.slowest_bytes_per_s(uppers, lowers),
        # A gradient is smaller: none comes up for held-out text. The simulator has one size for both ways.
        frame_bytes=round(coded + evaluation_bytes(spec)),
    )


def _sibling_link(spec: JobSpec, links: Links, worker: WorkerPart, replicas: Sequence[DeviceSlot]) -> LinkTimes:
    """Return the slowest link between replicas; a frame has the average length of the sums and the reduced slices."""
    number = len(replicas)
    if number == 1:
        return LinkTimes()
    costs = [cost for cost in layer_costs(spec) if cost.name in worker.layers]
    slice_bytes = sum(cost.group_bytes for cost in costs) / number
    return LinkTimes(
        latency=links.longest_round_trip_s(replicas, replicas) / 2,
        bandwidth=links.slowest_sibling_bytes_per_s(replicas),
        frame_bytes=round(slice_bytes * (spec.train.reduction_groups / number + 1) / 2),
        share_bytes=round(sum(cost.shared_bytes for cost in costs) / number),
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
