"""Who holds which layers: the best order of devices, cut and depth for a job on the nodes that are there. Pure.

The rule: of all plans within memory, take the least predicted seconds of a batch; a plan with fewer stages is preferred
while it is not more than `WORTH_A_STAGE` slower; among equals, the one that leaves most layers where they are, then
the one whose nodes hold most of their layers' files.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import inf
from typing import Final

from headway.daemon.jobs.job import JobSpec
from headway.daemon.planning.connections import ConnectionEstimate, LinkAssumptions
from headway.daemon.planning.device_order import Seat, natural, orders
from headway.daemon.planning.layer_costs import hidden_bytes, layer_costs, microbatch_seconds, update_seconds
from headway.daemon.planning.pipeline_cut import best_cut
from headway.daemon.records import PROTOCOL_VERSION, NodeRecord, PlanRecord, StagePlan
from headway.stages.schedule import schedule_depth

WORTH_A_STAGE: Final = 1.01
"""One more stage must make a batch at least this many times faster."""
HOST_STATES: Final = 2
"""Boundary states that a node's memory must have room for: one being written, one being sent."""
HOST_STATES_WITH_SNAPSHOTS: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """What one stage of a plan is expected to do."""

    stage: StagePlan
    batch_seconds: float
    """Forward, backward and update of one batch."""
    device_bytes: int
    device_limit_bytes: int
    """0: not known, not limited."""
    host_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """A plan, and why."""

    stages: tuple[StagePlan, ...]
    predicted_batch_seconds: float
    estimates: tuple[StageEstimate, ...]
    connections: tuple[ConnectionEstimate, ...]
    is_exact: bool
    exact_reason: str
    arithmetic_classes: tuple[str, ...]
    """Those the job has had before and those of this plan, sorted."""

    @property
    def bottleneck(self) -> int:
        """Index of the slowest stage."""
        return max(range(len(self.estimates)), key=lambda index: (self.estimates[index].batch_seconds, -index))

    def explanation(self) -> tuple[str, ...]:
        """Sentences for `headway plan`."""
        slowest = self.estimates[self.bottleneck]
        lines = [
            f"Stage {self.bottleneck} on {slowest.stage.node} sets the pace: {slowest.batch_seconds:.3g} s of "
            f"{self.predicted_batch_seconds:.3g} s a batch."
        ]
        for index, estimate in enumerate(self.estimates):
            limit = f" of {size(estimate.device_limit_bytes)}" if estimate.device_limit_bytes else ""
            lines.append(
                f"Stage {index} on {estimate.stage.node}: {estimate.batch_seconds:.3g} s a batch, "
                f"{size(estimate.device_bytes)}{limit} on the device at depth {estimate.stage.depth}."
            )
        lines.extend(
            f"{connection.upper} → {connection.lower}: {size(connection.bytes_per_microbatch)} a microbatch each way, "
            f"{connection.batch_seconds:.3g} s a batch, round trip {connection.round_trip_s * 1e3:.3g} ms assumed."
            for connection in self.connections
        )
        lines.append(f"Exact: {'yes' if self.is_exact else 'no'}, because {self.exact_reason}.")
        return tuple(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRefused:
    """No plan, and the arithmetic of it."""

    reason: str
    """A sentence without a full stop, for `status`: what is missing, with numbers."""
    is_final: bool = False
    """No node that could join would help: the job contradicts itself."""


Holdings = tuple[tuple[str, tuple[str, ...]], ...]
"""(node, layers whose files it holds)"""


def make_plan(
    spec: JobSpec,
    nodes: Iterable[NodeRecord],
    *,
    previous: PlanRecord | None = None,
    busy: frozenset[tuple[str, int]] = frozenset(),
    history: tuple[str, ...] = (),
    links: LinkAssumptions | None = None,
    quarantined: frozenset[str] = frozenset(),
    held: Mapping[str, Iterable[str]] | None = None,
) -> ClusterPlan | PlanRefused:
    """The best plan for a job.

    nodes: all that are there; draining and quarantined ones, those of another protocol version or of a site that the
    job does not want are left out, and so are devices that have no worker process. previous: the plan in force, whose
    layers had better stay. busy: (node, device) that other jobs use. history: arithmetic classes that the job has run
    on. held: per node, the layers whose files it need not fetch.
    """
    wanted = sorted((node for node in nodes if _is_wanted(spec, node)), key=lambda node: natural(node.name))
    seats = tuple(
        Seat.of(node, index)
        for node in wanted
        if node.name not in quarantined
        for index, device in enumerate(node.devices)
        if (node.name, device.index) not in busy and device.index not in node.down_devices
    )
    holdings = tuple(sorted((node, tuple(sorted(layers))) for node, layers in (held or {}).items()))
    plan = _plan(spec, seats, previous.stages if previous else (), history, links or LinkAssumptions(), holdings)
    if isinstance(plan, PlanRefused) and not plan.is_final:
        out = [f"node {node.name} is quarantined" for node in wanted if node.name in quarantined]
        out += [
            f"{node.name} has no worker on device {' and '.join(map(str, node.down_devices))}"
            for node in wanted
            if node.down_devices and node.name not in quarantined
        ]
        return replace(plan, reason="; ".join([plan.reason, *out]))
    return plan


def _is_wanted(spec: JobSpec, node: NodeRecord) -> bool:
    return (
        not node.is_draining
        and node.protocol == PROTOCOL_VERSION
        and (not spec.placement.sites or node.site in spec.placement.sites)
    )


@lru_cache(maxsize=1024)
def _plan(
    spec: JobSpec,
    seats: tuple[Seat, ...],
    previous: tuple[StagePlan, ...],
    history: tuple[str, ...],
    links: LinkAssumptions,
    holdings: Holdings,
) -> ClusterPlan | PlanRefused:
    most_stages = min(len(spec.layers), spec.train.microbatches)
    if spec.placement.min_nodes > most_stages:
        return PlanRefused(
            reason=f"min_nodes = {spec.placement.min_nodes}, but {len(spec.layers)} layers and "
            f"{spec.train.microbatches} microbatches allow {most_stages} stages at most",
            is_final=True,
        )
    if spec.train.exactness == "required":
        return _plan_exactly(spec, seats, previous, history, links, holdings)
    return _Planner(spec, seats, previous, history, links, holdings).plan()


def _plan_exactly(
    spec: JobSpec,
    seats: tuple[Seat, ...],
    previous: tuple[StagePlan, ...],
    history: tuple[str, ...],
    links: LinkAssumptions,
    holdings: Holdings,
) -> ClusterPlan | PlanRefused:
    """The best plan on devices of one arithmetic class: of the job's own class, once it has one."""
    classes = sorted({seat.arithmetic_class for seat in seats})
    allowed = [name for name in classes if set(history) <= {name}]
    if not allowed:
        if classes and history:
            return PlanRefused(
                reason=f'exactness = "required" and the job began on {" and ".join(history)}, which no free device has'
            )
        return PlanRefused(reason=_waits_for_nodes(spec, ()))
    by_class = [tuple(seat for seat in seats if seat.arithmetic_class == name) for name in allowed]
    plans = [_Planner(spec, alike, previous, history, links, holdings).plan() for alike in by_class]
    fitting = [plan for plan in plans if isinstance(plan, ClusterPlan)]
    if fitting:
        return min(fitting, key=lambda plan: plan.predicted_batch_seconds)
    refused = plans[0]
    if len(allowed) > 1 and isinstance(refused, PlanRefused):
        return PlanRefused(reason=f'exactness = "required", and on devices of one class alone it {refused.reason}')
    return refused


class _Planner:
    """One search: a job's costs on one set of devices."""

    def __init__(
        self,
        spec: JobSpec,
        seats: tuple[Seat, ...],
        previous: tuple[StagePlan, ...],
        history: tuple[str, ...],
        links: LinkAssumptions,
        holdings: Holdings,
    ) -> None:
        self.spec = spec
        self.seats = seats
        self.previous = previous
        self.history = history
        self.links = links
        self.holdings = dict(holdings)
        self.costs = layer_costs(spec)

    def plan(self) -> ClusterPlan | PlanRefused:
        num_nodes = len({seat.node for seat in self.seats})
        placement = self.spec.placement
        if num_nodes < max(1, placement.min_nodes):
            return PlanRefused(reason=_waits_for_nodes(self.spec, self.seats))
        best_by_length: dict[int, tuple[float, tuple[int, int], ClusterPlan]] = {}
        most_stages = min(len(self.costs), self.spec.train.microbatches, len(self.seats))
        for order in orders(self.seats, most_stages=most_stages, previous=self.previous):
            used = len({seat.node for seat in order})
            if used < placement.min_nodes or (placement.max_nodes and used > placement.max_nodes):
                continue
            candidate = self._cut(order)
            if candidate is None:
                continue
            rank = (
                candidate.predicted_batch_seconds,
                (-self._layers_that_stay(candidate), -self._layers_held(candidate)),
            )
            before = best_by_length.get(len(order))
            if before is None or rank[0] < before[0] * (1 - 1e-9) or (rank[0] <= before[0] and rank[1] < before[1]):
                best_by_length[len(order)] = (*rank, candidate)
        if not best_by_length:
            return PlanRefused(reason=self._memory_arithmetic())
        fastest = min(seconds for seconds, _, _ in best_by_length.values())
        shortest = min(
            length for length, (seconds, _, _) in best_by_length.items() if seconds <= fastest * WORTH_A_STAGE
        )
        return best_by_length[shortest][2]

    def _cut(self, order: tuple[Seat, ...]) -> ClusterPlan | None:
        """The best cut for an order of devices, with depths; None if memory forbids every one."""
        num_stages, train = len(order), self.spec.train
        per_microbatch = [
            _prefix(microbatch_seconds(cost, seat.device, train) for cost in self.costs) for seat in order
        ]
        per_update = [_prefix(update_seconds(cost, seat.device, train) for cost in self.costs) for seat in order]

        def seconds(stage: int, first: int, end: int) -> float:
            if end <= first or not self._fits(order[stage], self._least_depth(stage, num_stages), first, end):
                return inf
            busy = per_microbatch[stage][end] - per_microbatch[stage][first]
            return train.microbatches * busy + per_update[stage][end] - per_update[stage][first]

        ends = best_cut(len(self.costs), num_stages, seconds)
        if ends is None:
            return None
        firsts = (0, *ends[:-1])
        spans = list(zip(firsts, ends, strict=True))
        times = [seconds(stage, first, end) for stage, (first, end) in enumerate(spans)]
        pace = max(
            per_microbatch[stage][end] - per_microbatch[stage][first] for stage, (first, end) in enumerate(spans)
        )
        depths = self._depths(order, spans, pace)
        return self._describe(order, spans, times, depths, pace)

    def _describe(
        self,
        order: tuple[Seat, ...],
        spans: list[tuple[int, int]],
        times: list[float],
        depths: list[int],
        pace: float,
    ) -> ClusterPlan:
        """The plan's records and what is said about them."""
        train, names = self.spec.train, self.spec.layers
        stages = tuple(
            StagePlan(
                node=seat.node,
                node_incarnation=seat.incarnation,
                device_index=seat.device.index,
                layers=names[first:end],
                depth=depth,
            )
            for seat, (first, end), depth in zip(order, spans, depths, strict=True)
        )
        estimates = tuple(
            StageEstimate(
                stage=stage,
                batch_seconds=time,
                device_bytes=self._device_bytes(depth, *span),
                device_limit_bytes=seat.device.memory_bytes,
                host_bytes=self._host_bytes(*span),
            )
            for stage, seat, span, time, depth in zip(stages, order, spans, times, depths, strict=True)
        )
        carried = hidden_bytes(self.spec)
        connections = tuple(
            ConnectionEstimate(
                upper=upper.node,
                lower=lower.node,
                bytes_per_microbatch=carried,
                batch_seconds=train.microbatches * carried / self.links.bytes_per_s(upper, lower),
                round_trip_s=self.links.round_trip_s(upper, lower),
            )
            for upper, lower in pairwise(order)
        )
        predicted = max([*times, *(connection.batch_seconds for connection in connections)])
        if train.delay == 0:
            # The pipe fills and drains with every batch, and waits for each link once there and once back.
            predicted += (len(order) - 1) * pace + sum(connection.round_trip_s for connection in connections)
        classes = tuple(sorted({*self.history, *(seat.arithmetic_class for seat in order)}))
        return ClusterPlan(
            stages=stages,
            predicted_batch_seconds=predicted,
            estimates=estimates,
            connections=connections,
            is_exact=len(classes) == 1,
            exact_reason=_exact_reason(order, classes),
            arithmetic_classes=classes,
        )

    def _least_depth(self, stage: int, num_stages: int) -> int:
        """What the schedule needs without latency."""
        train = self.spec.train
        return schedule_depth(train.schedule, train.microbatches, num_stages, stage)

    def _depths(self, order: tuple[Seat, ...], spans: list[tuple[int, int]], pace: float) -> list[int]:
        """What the schedule needs with the round trips below each stage, as far as memory allows."""
        train, num_stages = self.spec.train, len(order)
        depths = []
        for stage, span in enumerate(spans):
            latency = sum(self.links.round_trip_s(upper, lower) for upper, lower in pairwise(order[stage:]))
            depth = schedule_depth(train.schedule, train.microbatches, num_stages, stage, latency / pace)
            least = self._least_depth(stage, num_stages)
            while depth > least and not self._fits(order[stage], depth, *span):
                depth -= 1
            depths.append(depth)
        return depths

    def _fits(self, seat: Seat, depth: int, first: int, end: int) -> bool:
        limit, host_limit = seat.device.memory_bytes, seat.host_memory_bytes
        return not (limit and self._device_bytes(depth, first, end) > limit) and not (
            host_limit and self._host_bytes(first, end) > host_limit
        )

    def _device_bytes(self, depth: int, first: int, end: int) -> int:
        return sum(cost.resident_bytes + depth * cost.activation_bytes for cost in self.costs[first:end])

    def _host_bytes(self, first: int, end: int) -> int:
        copies = HOST_STATES_WITH_SNAPSHOTS if self.spec.fault.snapshot_every else HOST_STATES
        return copies * sum(cost.state_bytes for cost in self.costs[first:end])

    def _layers_that_stay(self, plan: ClusterPlan) -> int:
        before = {
            (layer, stage.node, stage.node_incarnation, stage.device_index)
            for stage in self.previous
            for layer in stage.layers
        }
        return sum(
            (layer, stage.node, stage.node_incarnation, stage.device_index) in before
            for stage in plan.stages
            for layer in stage.layers
        )

    def _layers_held(self, plan: ClusterPlan) -> int:
        return sum(layer in self.holdings.get(stage.node, ()) for stage in plan.stages for layer in stage.layers)

    def _memory_arithmetic(self) -> str:
        """Why nothing fits, with the numbers of the largest layer and of the whole."""
        largest = max(self.costs, key=lambda cost: cost.resident_bytes + cost.activation_bytes)
        whole = self._device_bytes(1, 0, len(self.costs))
        limits = [seat.device.memory_bytes for seat in self.seats if seat.device.memory_bytes]
        if not limits:
            return "finds no set of nodes that fulfils [placement]"
        unlimited = len(limits) < len(self.seats)
        return (
            f"does not fit: its layers need {size(whole)} on devices at one microbatch in flight "
            f"({largest.name} alone {size(largest.resident_bytes + largest.activation_bytes)}), and "
            f"{len(self.seats)} free device{'s have' if len(self.seats) != 1 else ' has'} {size(sum(limits))}"
            f"{' and more' if unlimited else ''} together, {size(max(limits))} the largest"
        )


def _prefix(values: Iterable[float]) -> list[float]:
    """Sums of the first 0, 1, … values."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums


def _waits_for_nodes(spec: JobSpec, seats: tuple[Seat, ...]) -> str:
    here = len({seat.node for seat in seats})
    wanted = max(1, spec.placement.min_nodes)
    missing = wanted - here
    where = f" of {' or '.join(spec.placement.sites)}" if spec.placement.sites else ""
    return f"waits for {missing} {'more ' if here else ''}node{'s' if missing > 1 else ''}{where}" + (
        f" (min_nodes = {wanted}, {here} free)" if wanted > 1 else ""
    )


def _exact_reason(order: tuple[Seat, ...], classes: tuple[str, ...]) -> str:
    if len(classes) == 1:
        return f"all workers are of one arithmetic class ({classes[0]})"
    here = sorted({seat.arithmetic_class for seat in order})
    if len(here) > 1:
        examples = (next(seat for seat in order if seat.arithmetic_class == name) for name in here)
        return "the workers are of several arithmetic classes: " + ", ".join(
            f"{seat.node} has {seat.arithmetic_class}" for seat in examples
        )
    return f"the job has run on several arithmetic classes: {', '.join(classes)}"


def size(num_bytes: float) -> str:
    """Bytes for people: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"
