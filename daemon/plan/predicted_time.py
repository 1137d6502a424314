"""Predicts a batch's time under a placement: each worker, each link, each reduction, and which of them count. Pure.

Stages work in parallel, so the slowest stage or link sets the pace. Without delay the pipe also fills and drains with
every batch, and waits for each link once there and once back. With delay, distance costs nothing while there are enough
microbatches in flight. A microbatch that leaves stage s is back, as a gradient, after

    way(s) = Σ stages from s on: forward and backward
           + Σ links from s on: round trip + 2 × frame bytes / bandwidth + 2 × lateness

Lateness is for lines that lose packets: later frames wait until a lost packet is sent again, a round trip later, and
meanwhile the sender holds back about a frame. Both the activation and its gradient may wait. If that happens often,
the way to hide includes both waits.

A stage that may have D in flight therefore begins at most D microbatches in way(s). With delay 1 the first microbatch
of a batch also waits for the update of the batch before the last, whose last microbatch is under way for way(0): two
batches take at least one batch of work and way(0). Both vanish behind computation while D and m are at least
way(s) / (seconds between two microbatches).
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise, product
from math import ceil
from typing import Final

from headway.daemon.cluster.records import NodeRecord, WorkerPart, replicas_of
from headway.daemon.jobs.job import JobSpec
from headway.daemon.plan.connections import (
    ConnectionEstimate,
    LinkAssumptions,
    Links,
    ReductionEstimate,
    TieEstimate,
)
from headway.daemon.plan.devices import DeviceSlot, is_wanted, place_names, sharers_of_hosts
from headway.daemon.plan.paths import RelayedWays
from headway.daemon.plan.profiles import Profiles
from headway.daemon.plan.replica_shares import interleaved
from headway.daemon.plan.stage_costs import StageCosts
from headway.stages.schedule.stage_schedule import depths_with_slack

SEGMENT_BYTES: Final = 1448
"""Payload of a packet of 1500 bytes."""
OFTEN: Final = 0.05
"""A link counts as late if more than this share of its frames waits for a lost packet."""
ROUNDING: Final = 1e-3
"""Microbatches: a smaller remainder puts no further microbatch in flight."""
FAR: Final = 0.1
"""Links are mentioned if frames are under way for more than this part of the seconds between two microbatches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """A pipeline's ways, and their effect on its batches."""

    stage_seconds: tuple[float, ...]
    """Seconds of forward and backward of one microbatch on each stage: the mean over its workers' shares."""
    link_seconds: tuple[float, ...]
    """Seconds of each link between stages for one microbatch: its activation there and its gradient back."""
    lateness_s: float = 0.0
    """Delay of a frame beyond round trip and bandwidth, over all links one way."""
    pace_s: float
    """Seconds between two microbatches: on the slowest stage, or on the slowest link."""
    hidden_batch_s: float
    """Seconds of a batch if distance cost nothing."""
    num_microbatches: int
    delay: int
    depths: tuple[int, ...]
    """Maximum number of microbatches in flight on each stage, over all its workers."""
    is_cut_short: bool = False
    """True if memory allows less depth than the ways need."""

    @property
    def on_links_s(self) -> float:
        """Return the seconds that one microbatch spends on all links, both ways."""
        return sum(self.link_seconds)

    @property
    def on_links(self) -> float:
        """Return one microbatch's time on all links, in microbatches."""
        return self.on_links_s / self.pace_s

    @property
    def is_far(self) -> bool:
        """Return whether frames are under way for a considerable time."""
        return self.on_links > FAR

    @property
    def least_microbatches(self) -> int:
        """Return the m that hides all ways under 2bw."""
        return microbatches_on_the_way(self.stage_seconds, self.link_seconds, self.pace_s)

    @property
    def is_hidden(self) -> bool:
        """Return whether a batch takes no longer than it would on one site."""
        return bool(self.delay) and self.num_microbatches >= self.least_microbatches and not self.is_cut_short

    @property
    def batch_s(self) -> float:
        """Return a batch's seconds with these depths and this m."""
        seconds = self.hidden_batch_s
        for stage, depth in enumerate(self.depths):
            seconds = max(seconds, self.num_microbatches * self._way_s(stage) / depth)
        return max(seconds, (self.hidden_batch_s + self._way_s(0)) / 2) if self.delay else seconds

    @property
    def drained_batch_s(self) -> float:
        """Return the seconds of a batch behind which the pipe drains, as it does up to `sync_batches`."""
        drained_s = self.hidden_batch_s + self._way_s(0) - self.pace_s if self.delay else 0.0
        return max(self.batch_s, drained_s)

    def sentences(self, schedule: str) -> tuple[str, ...]:
        """Return sentences for people; none if no link is long."""
        if not self.is_far:
            return ()
        away = (
            f"Distance: a microbatch is on the links for {_milliseconds(self.on_links_s)} there and back, "
            f"{self.on_links:.3g} microbatches' time"
        )
        if self.lateness_s:
            away += f" (packets are lost, and frames arrive up to {_milliseconds(self.lateness_s)} late)"
        least, m = self.least_microbatches, self.num_microbatches
        if not self.delay:
            return (f"{away}: {schedule} waits for it in every batch, 2bw would not with m ≥ {least}.",)
        took, would = f"{self.batch_s:.3g} s", f"{self.hidden_batch_s:.3g} s"
        if took == would:
            return (f"{away}: hidden.",)
        cost = f"{took} a batch instead of {would}"
        if m < least:
            return (f"{away}: m = {m} is too small to hide it, {cost}; m ≥ {least} would.",)
        if self.is_cut_short:
            return (f"{away}: memory allows depth {self.depths[0]}, and {least} would hide it, {cost}.",)
        return (f"{away}: hidden, m = {m}, and {least} would suffice.",)

    def _way_s(self, stage: int) -> float:
        return sum(self.stage_seconds[stage:]) + sum(self.link_seconds[stage:])


def lateness_s(*, loss: float, round_trip_s: float, frame_bytes: float, pace_s: float) -> float:
    """Return the additional delay of a link's frames where packets are lost; 0 if losses are rare.

    loss: share of the packets. A frame waits for each of its own lost packets. It also waits for earlier lost packets
    that are not resent yet: those sent within the last round trip. Each wait takes a round trip, or more if the resent
    packet is lost too. While TCP repairs, it sends no more than arrives, so the frame before this one may still be at
    the sender.
    """
    num_before = frame_bytes * (1 + round_trip_s / pace_s) / SEGMENT_BYTES
    return round_trip_s + pace_s if 1 - (1 - loss) ** num_before > OFTEN else 0.0


def microbatches_on_the_way(stage_seconds: Sequence[float], link_seconds: Sequence[float], pace_s: float) -> int:
    """Return how many microbatches a stage must have in flight so that no stage waits for long, and this one never.

    stage_seconds: of this stage and of each later one; link_seconds: of the links between them. This stage counts as
    one microbatch: its replicas may each have one more than their share. A later stage that is faster than the slowest
    counts as one too, because its microbatches come at the slowest one's pace.

    """
    of_later_stages = sum(max(1.0, seconds / pace_s) for seconds in stage_seconds[1:])
    return ceil(1 + of_later_stages + sum(link_seconds) / pace_s - ROUNDING)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A pipeline along an order: per stage, its devices and its layers."""

    runs: tuple[tuple[DeviceSlot, ...], ...]
    spans: tuple[tuple[int, int], ...]
    """(first layer, end)"""

    @property
    def slots(self) -> tuple[DeviceSlot, ...]:
        """Return all devices, in their order."""
        return tuple(slot for run in self.runs for slot in run)


def fill_factor(num_stages: int, num_microbatches: int, delay: int) -> float:
    """Return a batch's time in units of the slowest stage's: without delay the pipe fills and drains with
    each batch.
    """
    return 1.0 if delay else 1.0 + (num_stages - 1) / num_microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One seat's part of a stage."""

    slot: DeviceSlot
    groups: tuple[int, ...]
    """The groups that it computes, rising."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStage:
    """One stage of a placement: its layers (first, end) and its workers."""

    span: tuple[int, int]
    workers: tuple[Worker, ...]
    recompute: str = ""
    """The plan's choice of what the stage computes again; empty: the job's own."""
    shares_update: bool = False
    """Whether its workers share Newton–Schulz."""

    @property
    def slots(self) -> tuple[DeviceSlot, ...]:
        """Return the seats of its workers."""
        return tuple(worker.slot for worker in self.workers)


class PredictedTime:
    """The predicted times of a placement, by its parts."""

    def __init__(self, costs: StageCosts, stages: Sequence[PlacedStage]) -> None:
        costs = costs.on(costs.links.shared_by(_linked_nodes(stages, is_tied=bool(costs.cuts.tied_bytes))))
        self.costs = costs
        self.stages = stages
        self._slices = [costs.slices.slice_number(stage.span, stage.recompute) for stage in stages]
        self.worker_seconds = [
            [self._worker(index, worker, stage) for worker in stage.workers]
            for index, stage in zip(self._slices, stages, strict=True)
        ]
        """Per stage and worker: forward, backward and update of one batch."""
        self.stage_seconds = [self._stage(index) for index in range(len(stages))]
        """Per stage: seconds with the reduction, as far as it counts."""
        self.boundary_seconds = [
            costs.cuts.boundary_seconds(upper.slots, lower.slots) for upper, lower in pairwise(stages)
        ]
        self.round_trips_s = [
            costs.links.longest_round_trip_s(upper.slots, lower.slots) for upper, lower in pairwise(stages)
        ]
        self.tie_seconds = costs.cuts.tie_seconds(stages[0].slots, stages[-1].slots) if len(stages) > 1 else 0.0
        """Seconds in which the ends of a tied embedding exchange a batch's sums: beside the next batch with delay."""
        train = costs.spec.train
        slowest = max([*self.stage_seconds, *self.boundary_seconds, self.tie_seconds * train.delay])
        self.pace_s = (
            max(
                self.num_microbatches(worker.groups) * self._per_microbatch(index, worker)
                for index, stage in zip(self._slices, stages, strict=True)
                for worker in stage.workers
            )
            / costs.num_microbatches
        )
        """Seconds between two microbatches on the slowest worker, without its update."""
        self.microbatch_seconds = [
            sum(self.num_microbatches(worker.groups) * self._per_microbatch(index, worker) for worker in stage.workers)
            / costs.num_microbatches
            for index, stage in zip(self._slices, stages, strict=True)
        ]
        """Per stage: forward and backward of one microbatch, the mean over those of a batch."""
        self.lateness_s = [
            self._lateness_s(upper, lower, round_trip_s)
            for round_trip_s, (upper, lower) in zip(self.round_trips_s, pairwise(stages), strict=True)
        ]
        """Per pair of neighbouring stages: additional delay of a frame where packets are lost."""
        self.link_seconds = [
            round_trip_s
            + 2
            * costs.cuts.carried_bytes(upper.slots, lower.slots)
            / costs.links.slowest_bytes_per_s(upper.slots, lower.slots)
            + 2 * late_s
            for round_trip_s, late_s, (upper, lower) in zip(
                self.round_trips_s, self.lateness_s, pairwise(stages), strict=True
            )
        ]
        """Per pair of neighbouring stages: a microbatch's frames there and back, both of them late."""
        self.batch_seconds = slowest * fill_factor(len(stages), train.microbatches, train.delay)
        # Without delay the pipeline drains in every batch, so each round trip is paid once a batch.
        if not train.delay:
            self.batch_seconds += sum(self.round_trips_s) + self.tie_seconds

    def depth(self, stage: int) -> int:
        """Return a stage's depth, as `replica_depth` takes it: its need, and the schedule's slack for times
        that vary.
        """
        return self._depths[stage]

    @cached_property
    def _depths(self) -> list[int]:
        train, num_replicas = self.costs.spec.train, [len(stage.workers) for stage in self.stages]
        return depths_with_slack(train.schedule, self._needed_depths, train.microbatches, num_replicas)

    @cached_property
    def _needed_depths(self) -> list[int]:
        """Return the schedule's own depths, or with delay those that hide the distance below."""
        num_stages, most = len(self.stages), 2 * self.costs.num_microbatches
        if not self.costs.spec.train.delay:
            return [self.costs.memory.least_depth(num_stages - stage) for stage in range(num_stages)]
        return [
            min(most, microbatches_on_the_way(self.microbatch_seconds[s:], self.link_seconds[s:], self._pace_s))
            for s in range(num_stages)
        ]

    def distance(self, depths: Sequence[int]) -> Distance:
        """Return the effect of distance on the batches. depths: per stage, as `replica_depth` takes them."""
        together = [
            sum(self.costs.memory.depth_of(depth, self.num_microbatches(worker.groups)) for worker in stage.workers)
            for stage, depth in zip(self.stages, depths, strict=True)
        ]
        is_cut_short = any(depth < needed for depth, needed in zip(depths, self._needed_depths, strict=True))
        return self._distance(together, is_cut_short=is_cut_short and bool(self.costs.spec.train.delay))

    def seconds_with(self, depths: Sequence[int]) -> float:
        """Return the seconds of a batch. depths: per stage, of all its workers together."""
        return self._distance(depths, is_cut_short=False).batch_s

    def _distance(self, together: Sequence[int], *, is_cut_short: bool) -> Distance:
        train = self.costs.spec.train
        return Distance(
            stage_seconds=tuple(self.microbatch_seconds),
            link_seconds=tuple(self.link_seconds),
            lateness_s=sum(self.lateness_s),
            pace_s=self._pace_s,
            hidden_batch_s=self.batch_seconds,
            num_microbatches=train.microbatches,
            delay=train.delay,
            depths=tuple(together),
            is_cut_short=is_cut_short,
        )

    @property
    def _pace_s(self) -> float:
        """Return the seconds between two microbatches: on the slowest worker, or on the slowest link."""
        return max([self.pace_s, *(seconds / self.costs.num_microbatches for seconds in self.boundary_seconds)])

    def num_microbatches(self, groups: Iterable[int]) -> int:
        """Return the number of a batch's microbatches in some groups."""
        return self.costs.memory.num_held(groups)

    def connections(self) -> tuple[ConnectionEstimate, ...]:
        """Return each link between workers that share microbatches."""
        costs, links = self.costs, self.costs.links
        places = [(slot.node, slot.device.index) for stage in self.stages for slot in stage.slots]
        name = dict(zip(places, place_names(places), strict=True))
        return tuple(
            ConnectionEstimate(
                upper=name[upper.slot.node, upper.slot.device.index],
                lower=name[lower.slot.node, lower.slot.device.index],
                num_microbatches=number,
                bytes_per_microbatch=costs.cuts.carried_bytes(above.slots, below.slots),
                batch_seconds=number
                * costs.cuts.downward_bytes(above.slots, below.slots)
                / links.bytes_per_s(upper.slot, lower.slot),
                round_trip_s=links.round_trip_s(upper.slot, lower.slot),
                lateness_s=late_s if links.loss(upper.slot, lower.slot) else 0.0,
                is_measured=links.is_measured(upper.slot, lower.slot),
                via=links.via(upper.slot, lower.slot),
                codec=costs.cuts.codec(above.slots, below.slots).name.lower(),
            )
            for late_s, (above, below) in zip(self.lateness_s, pairwise(self.stages), strict=True)
            for upper in above.workers
            for lower in below.workers
            if (number := self.num_microbatches(set(upper.groups) & set(lower.groups)))
        )

    def tie(self) -> TieEstimate | None:
        """Return the exchange between the ends of a tied embedding; None: there is none."""
        if not self.tie_seconds:
            return None
        return TieEstimate(
            first=self.stages[0].workers[0].slot.node,
            last=self.stages[-1].workers[0].slot.node,
            num_bytes=self.costs.num_groups * self.costs.cuts.tied_bytes,
            batch_seconds=self.tie_seconds,
            is_hidden=bool(self.costs.spec.train.delay) and self.tie_seconds <= self.batch_seconds,
        )

    def reductions(self) -> tuple[ReductionEstimate, ...]:
        """Return the reduction of each stage that has several workers."""
        found = []
        for index, stage in enumerate(self.stages):
            num = len(stage.workers)
            if num == 1:
                continue
            seconds = self._reducing_s(index)
            sent = self.costs.reduction_bytes(num, is_shared=stage.shares_update)
            found.append(
                ReductionEstimate(
                    stage_index=index,
                    num_replicas=num,
                    bytes_per_worker=float(sent[self._slices[index]]),
                    batch_seconds=seconds,
                    is_hidden=bool(self.costs.spec.train.delay) and seconds <= self.batch_seconds,
                )
            )
        return tuple(found)

    def _lateness_s(self, upper: PlacedStage, lower: PlacedStage, round_trip_s: float) -> float:
        return lateness_s(
            loss=self.costs.links.worst_loss(upper.slots, lower.slots),
            round_trip_s=round_trip_s,
            frame_bytes=self.costs.cuts.carried_bytes(upper.slots, lower.slots),
            pace_s=self._pace_s,
        )

    def _per_microbatch(self, index: int, worker: Worker) -> float:
        return float(self.costs.seconds(worker.slot)[0][index])

    def _worker(self, index: int, worker: Worker, stage: PlacedStage) -> float:
        each, update = self.costs.seconds(worker.slot)
        if stage.shares_update:
            update = self.costs.shared_update_seconds(worker.slot, len(stage.workers))
        return float(self.num_microbatches(worker.groups) * each[index] + update[index])

    def _stage(self, stage: int) -> float:
        computing = max(self.worker_seconds[stage])
        if len(self.stages[stage].workers) == 1:
            return computing
        reducing = self._reducing_s(stage)
        return max(computing, reducing) if self.costs.spec.train.delay else computing + reducing

    def _reducing_s(self, index: int) -> float:
        stage = self.stages[index]
        return float(self.costs.reduction_seconds(stage.slots, is_shared=stage.shares_update)[self._slices[index]])


def place(costs: StageCosts, cut: Cut) -> tuple[PlacedStage, ...]:
    """Return the stages of a cut, with what each computes again, and the groups of every worker."""
    placed = []
    for index, (run, span) in enumerate(zip(cut.runs, cut.spans, strict=True)):
        choice = costs.stage(run, span, len(cut.runs) - index)
        assert choice is not None, "a cut fits"
        groups = interleaved(choice.shares, costs.num_microbatches)
        placed.append(
            PlacedStage(
                span=span,
                workers=tuple(Worker(slot=slot, groups=own) for slot, own in zip(run, groups, strict=True)),
                recompute=choice.recompute,
                shares_update=choice.shares_update,
            )
        )
    return tuple(placed)


def depths_within_memory(costs: StageCosts, placed: Sequence[PlacedStage], times: PredictedTime) -> list[int]:
    """Return each stage's depth: what the schedule needs with the distance below, and slack, as far as memory
    allows.
    """
    depths = []
    for index, stage in enumerate(placed):
        least = costs.memory.least_depth(len(placed) - index)
        depth = times.depth(index)
        if depth > least and not _all_fit(costs, stage, depth):
            between = range(least + 1, depth)
            depth = least + bisect_left(between, True, key=lambda depth: not _all_fit(costs, stage, depth))
        depths.append(depth)
    return depths


def with_best_recompute(costs: StageCosts, placed: Sequence[PlacedStage]) -> tuple[PlacedStage, ...]:
    """Return stages of which none is better off with another choice of what it computes again, and so another depth."""

    def seconds(stages: Sequence[PlacedStage]) -> float:
        times = PredictedTime(costs, stages)
        return times.distance(depths_within_memory(costs, stages, times)).batch_s

    best, least = tuple(placed), seconds(placed)
    for index, stage in enumerate(placed):
        least_depth = costs.memory.least_depth(len(placed) - index)
        for recompute in costs.slices.recomputes:
            other = replace(stage, recompute=recompute)
            stages = (*best[:index], other, *best[index + 1 :])
            if _all_fit(costs, other, least_depth) and (found := seconds(stages)) < least:
                best, least = stages, found
    return best


def _all_fit(costs: StageCosts, stage: PlacedStage, depth: int) -> bool:
    return all(_fits(costs, stage, worker, depth) for worker in stage.workers)


def _fits(costs: StageCosts, stage: PlacedStage, worker: Worker, depth: int) -> bool:
    limit = worker.slot.room_bytes
    return not limit or device_bytes_of(costs, stage, worker, depth) <= limit


def device_bytes_of(costs: StageCosts, stage: PlacedStage, worker: Worker, depth: int) -> int:
    """Return the predicted bytes of a worker at a depth of its stage, before its factor."""
    return costs.memory.device_bytes(
        costs.slices.slice_number(stage.span, stage.recompute),
        depth,
        worker.groups,
        len(stage.workers),
        is_shared=stage.shares_update,
    )


def _linked_nodes(stages: Sequence[PlacedStage], *, is_tied: bool) -> Iterator[tuple[str, str]]:
    """Yield the nodes of each link, the one that dials first."""
    joined = [*pairwise(stages), *([(stages[0], stages[-1])] if is_tied and len(stages) > 2 else [])]
    for above, below in joined:
        for upper, lower in product(above.workers, below.workers):
            if not set(upper.groups).isdisjoint(lower.groups):
                yield upper.slot.node, lower.slot.node
    for stage in stages:
        yield from combinations([slot.node for slot in stage.slots], 2)


def placed_as(
    spec: JobSpec,
    workers: Sequence[WorkerPart],
    nodes: Iterable[NodeRecord],
    *,
    profiles: Profiles | None = None,
    links: LinkAssumptions | None = None,
) -> PredictedTime | None:
    """Return the times of an existing plan by present measurements; None: a worker's node or device is gone.

    workers: as in PlanRecord, replicas next to each other.
    """
    records = {node.name: node for node in nodes}
    wanted = (node for node in records.values() if is_wanted(node, spec.placement.sites, spec.plugins))
    on_host = sharers_of_hosts(wanted)
    slots = []
    for worker in workers:
        node = records.get(worker.node)
        places = [device.index for device in node.devices] if node is not None else []
        if node is None or worker.device_index not in places:
            return None
        slots.append(DeviceSlot.of(node, places.index(worker.device_index), num_sharers=on_host[node.host]))
    if not slots:
        return None
    profiles = profiles or Profiles()
    relayed = RelayedWays.of((records[worker.node] for worker in workers), records.values())
    by_grpc = spec.train.link == "grpc"
    speeds = Links(links or LinkAssumptions(), profiles, relayed=relayed, by_grpc=by_grpc)
    names, all_groups = spec.layers, tuple(range(spec.train.reduction_groups))
    placed = []
    for positions in replicas_of(workers):
        lead = workers[positions[0]]
        first = names.index(lead.layers[0])
        placed.append(
            PlacedStage(
                span=(first, first + len(lead.layers)),
                workers=tuple(
                    Worker(slot=slots[position], groups=workers[position].groups or all_groups)
                    for position in positions
                ),
                recompute=lead.recompute,
                shares_update=lead.shares_update,
            )
        )
    return PredictedTime(StageCosts(spec, slots, profiles, speeds), placed)


def predict(
    spec: JobSpec,
    workers: Sequence[WorkerPart],
    nodes: Iterable[NodeRecord],
    *,
    profiles: Profiles | None = None,
    links: LinkAssumptions | None = None,
) -> float | None:
    """Return a batch's seconds under an existing plan, as `placed_as` predicts it."""
    times = placed_as(spec, workers, nodes, profiles=profiles, links=links)
    depths = [sum(workers[position].depth for position in positions) for positions in replicas_of(workers)]
    return None if times is None else times.seconds_with(depths)
