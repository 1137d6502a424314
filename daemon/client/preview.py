"""Previews the plan of a job on some nodes: the dry run of `headway plan`. Pure."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from headway.daemon.base.errors import ConfigError
from headway.daemon.base.terminal import table
from headway.daemon.client.plan_simulation import Forecast, forecast
from headway.daemon.client.stage_arithmetic import (
    StageArithmetic,
    legend,
    memory_rows,
    seconds_rows,
    stage_arithmetic,
)
from headway.daemon.cluster.records import Device, NodeRecord, PlanRecord, WorkerPart, replicas_of
from headway.daemon.jobs.data_choices import epochs_text
from headway.daemon.jobs.device_defaults import for_devices, what_was_filled_in
from headway.daemon.jobs.job import JobSpec, shares_text
from headway.daemon.plan.cluster_plan import ClusterPlan, PlanRefused, StageEstimate, group_names, layer_range, size
from headway.daemon.plan.connections import LinkAssumptions, Links
from headway.daemon.plan.devices import DeviceSlot
from headway.daemon.plan.link_choice import PlannedLink, link_sentences, planned_links
from headway.daemon.plan.paths import RelayedWays
from headway.daemon.plan.planner import make_plan
from headway.daemon.plan.profiles import Profiles
from headway.daemon.plan.stage_costs import StageCosts

MOST_SPARES: Final = 8
"""Maximum number of spares named; JSON has all."""

Row = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPreview:
    """One worker of the plan."""

    stage: int
    node: str
    device: str
    """`cuda:0`"""
    layers: str
    """`embed, block.0-3`"""
    groups: tuple[int, ...]
    """Reduction groups that it computes, shared with other replicas of its stage; empty: all."""
    share: float
    """Share of the batch's microbatches."""
    depth: int
    recompute: str
    """What the backward computes again: none, attention, block."""
    batch_seconds: float
    device_bytes: int
    device_limit_bytes: int
    """Memory limit of the device; 0: not known, not limited."""
    device_reserve_bytes: int
    """Memory of the device that no plan fills, beyond the limit."""
    host_bytes: int
    host_limit_bytes: int
    """Memory limit of the host; 0: not known, not limited."""
    arithmetic: StageArithmetic
    """What its memory on the device and its seconds consist of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPreview:
    """One link between workers of neighbouring stages."""

    upper: str
    lower: str
    bytes_per_microbatch: int
    """Coded bytes each way."""
    microbatches: int
    """Microbatches of a batch."""
    batch_seconds: float
    """Seconds to carry a batch; computation hides them while they are less than the slowest worker's."""
    round_trip_s: float
    lateness_s: float
    """Additional delay of frames where packets are lost."""
    codec: str
    """Codec of the hidden states on the link: `none`, `bf16`, `int8`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistancePreview:
    """The figures that show whether the microbatches in flight hide the links."""

    microbatches: int
    """The job's m."""
    least_microbatches: int
    """The m that would hide all links under 2bw."""
    on_links_s: float
    """One microbatch's time on all links, there and back, with late frames."""
    lateness_s: float
    """Additional delay of frames, over all links."""
    on_links_microbatches: float
    """One microbatch's time on all links, in microbatches."""
    hidden: bool
    hidden_batch_seconds: float
    """Seconds of a batch if distance cost nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationPreview:
    """The simulation of the plan."""

    batches: int
    batch_seconds: float
    bubbles: tuple[float, ...]
    """Share of a batch's time in which each worker is idle."""
    peaks_in_flight: tuple[int, ...]
    """Maximum number of microbatches in flight, for each worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPreview:
    """A plan that has not been made."""

    job: str
    stages: tuple[WorkerPart, ...]
    """Its workers; replicas of one stage are next to each other."""
    predicted_batch_seconds: float
    tokens_per_second: float
    bottleneck: str
    """A sentence about the slowest part."""
    workers: tuple[WorkerPreview, ...]
    links: tuple[LinkPreview, ...]
    spares: tuple[str, ...]
    """Nodes that the plan does not need."""
    spare_devices: tuple[str, ...] = ()
    """Devices that the plan does not need on the nodes that it uses: `paris:1`."""
    filled_in: str = ""
    """Keys that the job leaves to the cards, with their values."""
    epochs: int = 0
    """Number of epochs that the job names; 0: its file says `batches`."""
    batches: int | None = None
    """Number of batches of the job; None: its epochs are not counted, because the data is not here."""
    may_stop_early: bool = False
    """Whether evaluations may end the job before its last batch."""
    data: str = ""
    """Several data sources with their shares; empty: there is one."""
    exact: bool
    exact_reason: str
    explanation: tuple[str, ...]
    distance: DistancePreview | None = None
    about_distance: tuple[str, ...] = ()
    """The sentence on m, if links are long."""
    link_kinds: tuple[PlannedLink, ...] = ()
    """Every link between neighbouring stages and between replicas, with its kind and reason."""
    simulation: SimulationPreview | None = None

    @property
    def lines(self) -> list[str]:
        """Return the preview for people."""
        workers, stages = len(self.workers), len(replicas_of(self.stages))
        on = f" on {workers} workers" if workers != stages else ""
        head = (
            f"{self.job}: {stages} stage{'s' * (stages != 1)}{on}, {self.predicted_batch_seconds:.3g} s a batch "
            f"predicted, {self.tokens_per_second:,.0f} tokens/s"
        )
        lines = [head, "", *table(_WORKER_TITLES, [_worker_row(worker) for worker in self.workers])]
        if self.links:
            lines += ["", *table(_LINK_TITLES, [_link_row(link) for link in self.links])]
        if self.simulation is not None:
            lines += ["", *self._simulated(self.simulation)]
        reductions = [
            line for line in self.explanation if line.startswith(("Replicas of stage", "The embedding is tied"))
        ]
        every = (*self.spares, *self.spare_devices)
        shown = every if len(every) <= MOST_SPARES else (*every[:MOST_SPARES], f"and {len(every) - MOST_SPARES} more")
        spares = [f"Spare: {', '.join(shown)}."] if shown else []
        exact = f"Exact: {'yes' if self.exact else 'no'}, because {self.exact_reason}."
        kinds = link_sentences(self.link_kinds)
        left_out = [f"The job leaves some keys to the cards: {self.filled_in}."] if self.filled_in else []
        facts = [*left_out, *self._data, *self._epochs, self.bottleneck, *reductions, *self.about_distance]
        return [*lines, "", *facts, *kinds, *spares, exact]

    @property
    def arithmetic(self) -> list[str]:
        """Return the arithmetic of memory and seconds for people."""
        names = [(str(worker.stage), worker.node, worker.device) for worker in self.workers]
        told = [worker.arithmetic for worker in self.workers]
        tables = []
        for titles, rows in (memory_rows(told), seconds_rows(told)):
            joined = [(*name, *row) for name, row in zip(names, rows, strict=True)]
            tables.append(table(("stage", "node", "device", *titles), joined))
        return ["memory on devices, GiB:", *tables[0], "", *legend(told), "", "seconds:", *tables[1]]

    @property
    def _data(self) -> list[str]:
        mixed = [f"Microbatches draw their rows from several sources: {self.data}."] if self.data else []
        early = ["Evaluations may end the job before its last batch."] if self.may_stop_early else []
        return mixed + early

    @property
    def _epochs(self) -> list[str]:
        if not self.epochs:
            return []
        if self.batches is None:
            return [f"The data is not here, so it is not known how many batches {epochs_text(self.epochs)} take."]
        seconds = self.batches * self.predicted_batch_seconds
        return [f"{epochs_text(self.epochs)} of the data are {self.batches} batches, {seconds:.3g} s as predicted."]

    def _simulated(self, simulation: SimulationPreview) -> list[str]:
        over = simulation.batch_seconds / self.predicted_batch_seconds - 1
        return [
            f"simulated: {simulation.batch_seconds:.3g} s a batch over {simulation.batches} batches, "
            f"{over:+.1%} of the prediction",
            *table(
                ("stage", "worker", "bubble", "most in flight"),
                [
                    (*label.split(maxsplit=1), f"{bubble:.1%}", str(peak))
                    for label, bubble, peak in zip(
                        worker_labels(self.stages), simulation.bubbles, simulation.peaks_in_flight, strict=True
                    )
                ],
            ),
        ]


def equal_nodes(num_nodes: int, *, memory_bytes: int = 0) -> tuple[NodeRecord, ...]:
    """Return equal CPU nodes of one site. memory_bytes: of each; 0: enough."""
    return tuple(
        NodeRecord(
            name=f"node-{index}",
            incarnation=f"preview-{index}",
            address="",
            host="",
            site="default",
            devices=(Device(kind="cpu"),),
            memory_bytes=memory_bytes,
            arithmetic_class="equal",
        )
        for index in range(1, num_nodes + 1)
    )


def preview(
    spec: JobSpec,
    nodes: Sequence[NodeRecord],
    *,
    named: Collection[str] | None = None,
    links: LinkAssumptions | None = None,
    is_simulated: bool = False,
    has_data: bool = True,
) -> tuple[PlanPreview, Forecast | None]:
    """Return the plan of a job that has all nodes to itself, and its simulation if requested.

    named: as for `resolve_job`. has_data: the job has what its data decides, such as its number of batches.

    Raises ConfigError with the planner's reason for refusing.
    """
    devices = [device for node in nodes for device in node.devices]
    given, spec = spec, for_devices(spec, devices, source=f"job {spec.job.name}", named=named)
    plan = make_plan(spec, nodes, links=links)
    if isinstance(plan, PlanRefused):
        raise ConfigError(plan.reason, f"job {spec.job.name}")
    slots = [DeviceSlot.of(node, position) for node in nodes for position in range(len(node.devices))]
    known = Profiles()
    relayed = RelayedWays.of(nodes, nodes)
    costs = StageCosts(spec, slots, known, Links(links or LinkAssumptions(), known, relayed=relayed))
    run = forecast(spec, plan.workers, nodes, links=links) if is_simulated else None
    explanation = plan.explanation()
    found = PlanPreview(
        job=spec.job.name,
        stages=plan.workers,
        predicted_batch_seconds=plan.predicted_batch_seconds,
        tokens_per_second=spec.train.tokens_per_batch / plan.predicted_batch_seconds,
        bottleneck=explanation[0],
        workers=_workers(plan, slots, costs),
        links=_links(plan),
        spares=plan.spares,
        spare_devices=_spare_devices(plan, slots),
        filled_in=what_was_filled_in(given, spec),
        epochs=spec.train.epochs,
        batches=None if spec.train.epochs and not has_data else spec.train.batches,
        may_stop_early=spec.train.stops_early,
        data=shares_text(spec.data),
        exact=plan.is_exact,
        exact_reason=plan.exact_reason,
        explanation=explanation,
        distance=_distance(plan),
        about_distance=plan.about_distance,
        link_kinds=planned_links(
            spec,
            PlanRecord(generation=0, timeline=0, workers=plan.workers, codecs=plan.codecs),
            {node.name: node for node in nodes},
        ),
        simulation=None if run is None else _simulation(run),
    )
    return found, run


def worker_labels(stages: Sequence[WorkerPart]) -> tuple[str, ...]:
    """Return each worker's stage and place: `0 berlin-1`, `1 paris:0`."""
    name = _names(stages)
    return tuple(
        f"{index} {name(stages[position])}"
        for index, positions in enumerate(replicas_of(stages))
        for position in positions
    )


_WORKER_TITLES = (
    *("stage", "node", "device", "layers", "share", "depth", "recompute"),
    *("s/batch", "device memory", "host memory"),
)
_LINK_TITLES = ("link", "a microbatch, each way", "microbatches", "s/batch", "round trip")


def _worker_row(worker: WorkerPreview) -> Row:
    return (
        str(worker.stage),
        worker.node,
        worker.device,
        worker.layers,
        f"{worker.share:.0%}, {group_names(worker.groups)}" if worker.groups else "all",
        str(worker.depth),
        worker.recompute,
        f"{worker.batch_seconds:.3g}",
        _of(worker.device_bytes, worker.device_limit_bytes)
        + (f", {size(worker.device_reserve_bytes)} in reserve" if worker.device_reserve_bytes else ""),
        _of(worker.host_bytes, worker.host_limit_bytes),
    )


def _link_row(link: LinkPreview) -> Row:
    return (
        f"{link.upper} → {link.lower}",
        size(link.bytes_per_microbatch) + (f" ({link.codec})" if link.codec != "none" else ""),
        str(link.microbatches),
        f"{link.batch_seconds:.3g}",
        f"{link.round_trip_s * 1e3:.3g} ms" + (f" + {link.lateness_s * 1e3:.3g} ms" if link.lateness_s else ""),
    )


def _of(num_bytes: int, limit: int) -> str:
    return f"{size(num_bytes)} of {size(limit)}" if limit else size(num_bytes)


def _workers(plan: ClusterPlan, slots: Iterable[DeviceSlot], costs: StageCosts) -> tuple[WorkerPreview, ...]:
    slot_of = {(slot.node, slot.device.index): slot for slot in slots}
    num_replicas = Counter(estimate.stage_index for estimate in plan.estimates)

    def worker(estimate: StageEstimate) -> WorkerPreview:
        stage = estimate.stage
        slot = slot_of[stage.node, stage.device_index]
        device = slot.device
        return WorkerPreview(
            stage=estimate.stage_index,
            node=stage.node,
            device=f"{device.kind}:{device.index}",
            layers=layer_range(stage.layers),
            groups=stage.groups,
            share=estimate.share,
            depth=stage.depth,
            recompute=stage.recompute or costs.spec.train.recompute,
            batch_seconds=estimate.batch_seconds,
            device_bytes=estimate.device_bytes,
            device_limit_bytes=estimate.device_limit_bytes,
            device_reserve_bytes=device.reserve_bytes,
            host_bytes=estimate.host_bytes,
            host_limit_bytes=estimate.host_limit_bytes,
            arithmetic=stage_arithmetic(costs, estimate, slot, num_replicas[estimate.stage_index]),
        )

    return tuple(map(worker, plan.estimates))


def _links(plan: ClusterPlan) -> tuple[LinkPreview, ...]:
    """Return the plan's links in its own order, with the devices' numbers if a node has several workers."""
    name = _names(plan.workers)
    pairs = [
        (plan.workers[upper], plan.workers[lower])
        for above, below in pairwise(replicas_of(plan.workers))
        for upper in above
        for lower in below
        if _share_microbatches(plan.workers[upper], plan.workers[lower])
    ]
    return tuple(
        LinkPreview(
            upper=name(upper),
            lower=name(lower),
            bytes_per_microbatch=connection.bytes_per_microbatch,
            microbatches=connection.num_microbatches,
            batch_seconds=connection.batch_seconds,
            round_trip_s=connection.round_trip_s,
            lateness_s=connection.lateness_s,
            codec=connection.codec,
        )
        for (upper, lower), connection in zip(pairs, plan.connections, strict=True)
    )


def _spare_devices(plan: ClusterPlan, slots: Iterable[DeviceSlot]) -> tuple[str, ...]:
    used = {(stage.node, stage.device_index) for stage in plan.workers}
    nodes = {node for node, _ in used}
    places = [(slot.node, slot.device.index) for slot in slots if slot.node in nodes]
    return tuple(f"{node}:{index}" for node, index in places if (node, index) not in used)


def _distance(plan: ClusterPlan) -> DistancePreview | None:
    found = plan.distance
    if found is None:
        return None
    return DistancePreview(
        microbatches=found.num_microbatches,
        least_microbatches=found.least_microbatches,
        on_links_s=found.on_links_s,
        lateness_s=found.lateness_s,
        on_links_microbatches=found.on_links,
        hidden=found.is_hidden or not found.is_far,
        hidden_batch_seconds=found.hidden_batch_s,
    )


def _names(stages: Sequence[WorkerPart]) -> Callable[[WorkerPart], str]:
    """Return each worker's node, with the device if the node has several workers."""
    number = Counter(stage.node for stage in stages)
    return lambda stage: stage.node if number[stage.node] == 1 else f"{stage.node}:{stage.device_index}"


def _share_microbatches(one: WorkerPart, other: WorkerPart) -> bool:
    return not one.groups or not other.groups or bool(set(one.groups) & set(other.groups))


def _simulation(run: Forecast) -> SimulationPreview:
    return SimulationPreview(
        batches=run.num_batches, batch_seconds=run.step_seconds, bubbles=run.bubbles, peaks_in_flight=run.peaks
    )
