"""Previews the plan of a job on some nodes: the dry run of `headway plan`. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass, replace
from math import ceil
from statistics import fmean
from typing import Final

from headway.daemon.base.errors import ConfigError
from headway.daemon.base.terminal import counted, fitted, split_table, table
from headway.daemon.client.plan_simulation import Forecast, forecast
from headway.daemon.cluster.records import Device, NodeRecord, PlanRecord, WorkerPart, replicas_of
from headway.daemon.jobs.device_defaults import for_devices, what_was_filled_in
from headway.daemon.jobs.job import JobSpec, shares_text
from headway.daemon.jobs.rules import why_no_halves
from headway.daemon.plan.card_hints import hints
from headway.daemon.plan.cluster_plan import ClusterPlan, PlanRefused, StageEstimate, group_names, layer_range, size
from headway.daemon.plan.connections import ConnectionEstimate, LinkAssumptions
from headway.daemon.plan.devices import GIB, place_names
from headway.daemon.plan.link_choice import PlannedLink, link_sentences, planned_links
from headway.daemon.plan.planner import make_plan
from headway.daemon.plan.schedule_choice import with_chosen_schedule

MOST_SPARES: Final = 8
"""Maximum number of spares named; JSON has all."""
MOST_GROUPS: Final = 8
"""Maximum number of reduction groups that a plan advises: the sums of each take memory."""
WORTH_TELLING: Final = 0.05
"""Least gain in tokens/s for which other reduction groups, or cuts inside blocks, are advised."""
GIGA: Final = 1e9
MEGA: Final = 1e6
MIB: Final = 1 << 20
TERA: Final = 1e12

Row = tuple[str, ...]


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
    plan: ClusterPlan
    tokens_per_second: float
    explanation: tuple[str, ...]
    """Sentences on the plan; the first is about its slowest part."""
    least_microbatches: int
    """The m that would hide all links under 2bw."""
    hides_links: bool
    """Whether a batch takes no longer than it would on one site."""
    spare_devices: tuple[str, ...] = ()
    """Devices that the plan does not need on the nodes that it uses: `paris:1`."""
    cuts: str = ""
    """The gain of cuts inside blocks; empty: there is little, or the job has them."""
    sharing: str = ""
    """What the job would gain if spare devices shared stages with others; empty: nothing, or they may."""
    filled_in: str = ""
    """Keys that the job leaves to the cards, with their values."""
    schedule: str
    """The job's, or the one that was chosen."""
    schedule_reason: str = ""
    """Which schedule was chosen, and why; empty: the job names one."""
    epochs: int = 0
    """Number of epochs that the job names; 0: its file says `batches`."""
    batches: int | None = None
    """Number of batches of the job; None: its epochs are not counted, because the data is not here."""
    sync_batches: int = 0
    """Batches without delay before the others have one."""
    may_stop_early: bool = False
    """Whether evaluations may end the job before its last batch."""
    hints: tuple[str, ...] = ()
    """What keeps the job from running well on the cards."""
    own_loss: str = ""
    """A plug-in's loss, whose memory is not known; empty: the loss is Headway's."""
    data: str = ""
    """Several data sources with their shares; empty: there is one."""
    link_kinds: tuple[PlannedLink, ...] = ()
    """Every link between neighbouring stages and between replicas, with its kind and reason."""
    simulation: SimulationPreview | None = None

    @property
    def lines(self) -> list[str]:
        """Return the preview for people."""
        return self.lines_for(None)

    def lines_for(self, width: int | None) -> list[str]:
        """Return the preview for people. width: columns of their screen; None: no screen, so no line is broken."""
        plan = self.plan
        workers, stages = len(plan.workers), len(replicas_of(plan.workers))
        on = f" on {workers} workers" if workers != stages else ""
        head = (
            f"{self.job}: {counted(stages, 'stage')}{on}, {plan.predicted_batch_seconds:.3g} s a batch "
            f"predicted, {self.tokens_per_second:,.0f} tokens/s"
        )
        workers_of = [_worker_row(estimate) for estimate in plan.estimates]
        lines = [head, "", *split_table(_WORKER_TITLES, workers_of, num_keys=3, screen_width=width)]
        if plan.connections:
            lines += ["", *table(_LINK_TITLES, [_link_row(link) for link in plan.connections])]
        if self.simulation is not None:
            lines += ["", *self._simulated(self.simulation)]
        pace, *others = self.explanation
        reductions = [line for line in others if line.startswith(("Replicas of stage", "The embedding is tied"))]
        every = (*plan.spares, *self.spare_devices)
        shown = every if len(every) <= MOST_SPARES else (*every[:MOST_SPARES], f"and {len(every) - MOST_SPARES} more")
        spares = [f"Spare: {', '.join(shown)}."] if shown else []
        spares += [self.sharing] if self.sharing else []
        cuts = [self.cuts] if self.cuts else []
        left_out = [f"The job leaves some keys to the cards: {self.filled_in}."] if self.filled_in else []
        left_out += [self.schedule_reason] if self.schedule_reason else []
        facts = [*left_out, *self._data, *self._epochs, pace, *cuts, *reductions, *plan.about_distance]
        facts += [*link_sentences(self.link_kinds), *spares, *self.hints, others[-1]]
        return [*lines, "", *(line for fact in facts for line in fitted([fact], width))]

    def arithmetic_for(self, width: int | None) -> list[str]:
        """Return the arithmetic of memory and seconds for people. width: as for `lines_for`."""
        workers = self.plan.estimates
        parts = [part for part in _PARTS if any(getattr(worker.memory, part) for worker in workers)]
        is_small = max(sum(astuple(worker.memory)) for worker in workers) < GIB
        unit, unit_bytes = ("MiB", MIB) if is_small else ("GiB", GIB)
        tables = [
            split_table(
                ("stage", "node", "device", *titles),
                [(str(w.stage_index), w.stage.node, w.device, *row) for w, row in zip(workers, rows, strict=True)],
                num_keys=3,
                screen_width=width,
            )
            for titles, rows in (
                (_memory_titles(parts), [_memory_row(worker, parts, unit_bytes) for worker in workers]),
                (_SECONDS_TITLES, [_seconds_row(worker) for worker in workers]),
            )
        ]
        legend = [line for name in parts for line in fitted([f"{name:11}  {_PARTS[name]}"], width)]
        return [f"memory on devices, {unit}:", *tables[0], "", *legend, "", "seconds:", *tables[1]]

    @property
    def _data(self) -> list[str]:
        mixed = [f"Microbatches draw their rows from several sources: {self.data}."] if self.data else []
        early = ["Evaluations may end the job before its last batch."] if self.may_stop_early else []
        k, seconds = counted(self.sync_batches, "batch"), self.plan.distance.drained_batch_s
        sync = [f"Without delay at first: {k}, {seconds:.3g} s each as predicted."] if self.sync_batches else []
        own_loss = f"What {self.own_loss} keeps in memory is counted as for a cross entropy."
        return mixed + sync + early + ([own_loss] if self.own_loss else [])

    @property
    def _epochs(self) -> list[str]:
        if not self.epochs:
            return []
        if self.batches is None:
            epochs = counted(self.epochs, "epoch")
            return [
                f"The data is not here, so it is not known how many batches {epochs} take.",
                "With it the warm-up, the batches without delay and the rest's betas are open, if the file is silent.",
            ]
        later = self.batches - self.sync_batches
        seconds = later * self.plan.predicted_batch_seconds + self.sync_batches * self.plan.distance.drained_batch_s
        epochs = f"{counted(self.epochs, 'epoch')} of the data: {counted(self.batches, 'batch')}"
        return [f"{epochs}, {seconds:.3g} s as predicted."]

    def _simulated(self, simulation: SimulationPreview) -> list[str]:
        over = simulation.batch_seconds / self.plan.predicted_batch_seconds - 1
        return [
            f"simulated: {simulation.batch_seconds:.3g} s a batch over {counted(simulation.batches, 'batch')}, "
            f"{over:+.1%} of the prediction",
            *table(
                ("stage", "worker", "bubble", "most in flight"),
                [
                    (*label.split(maxsplit=1), f"{bubble:.1%}", str(peak))
                    for label, bubble, peak in zip(
                        worker_labels(self.plan.workers), simulation.bubbles, simulation.peaks_in_flight, strict=True
                    )
                ],
            ),
        ]


def equal_nodes(num_nodes: int, *, memory_bytes: int = 0, num_cores: float = 0.0) -> tuple[NodeRecord, ...]:
    """Return equal CPU nodes of one site. memory_bytes: of each; 0: enough.

    num_cores: of the machine on which all of them are, as `headway run` starts them; 0: each has one of its own.
    """
    return tuple(
        NodeRecord(
            name=f"node-{index}",
            incarnation=f"preview-{index}",
            address="",
            host="this machine" if num_cores else "",
            site="default",
            devices=(Device(kind="cpu", num_cores=num_cores),),
            memory_bytes=memory_bytes * (num_nodes if num_cores else 1),
            arithmetic_class="equal",
            allow_plugins=("any",),
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
    spec, why = with_chosen_schedule(spec, nodes, links=links)
    plan = make_plan(spec, nodes, links=links)
    if isinstance(plan, PlanRefused):
        raise ConfigError(plan.reason, f"job {spec.job.name}")
    run = forecast(spec, plan.workers, nodes, links=links) if is_simulated else None
    distance = plan.distance
    found = PlanPreview(
        job=spec.job.name,
        plan=plan,
        tokens_per_second=spec.train.tokens_per_batch / plan.predicted_batch_seconds,
        explanation=plan.explanation(),
        least_microbatches=distance.least_microbatches,
        hides_links=distance.is_hidden or not distance.is_far,
        spare_devices=_spare_devices(plan, nodes),
        sharing=_gain_of_sharing(spec, plan, nodes, links),
        cuts=_gain_of_cuts(spec, plan, nodes, links),
        filled_in=what_was_filled_in(given, spec),
        schedule=spec.train.schedule,
        schedule_reason=why,
        hints=hints(spec, nodes, {(each.node, each.device_index) for each in plan.workers}, named=named),
        epochs=spec.train.epochs,
        batches=None if spec.train.epochs and not has_data else spec.train.batches,
        sync_batches=spec.train.sync_batches,
        may_stop_early=spec.train.stops_early,
        own_loss=spec.train.loss if spec.train.has_own_loss else "",
        data=shares_text(spec.data),
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
    names = place_names([(worker.node, worker.device_index) for worker in stages])
    return tuple(
        f"{index} {names[position]}" for index, positions in enumerate(replicas_of(stages)) for position in positions
    )


_WORKER_TITLES = (
    *("stage", "node", "device", "layers", "share", "depth", "recompute"),
    *("s/batch", "device memory", "host memory"),
)
_LINK_TITLES = ("link", "a microbatch, each way", "microbatches", "s/batch", "round trip")
_SECONDS_TITLES = ("TFLOP a microbatch", "TFLOP/s", "s/microbatch", "microbatches", "s/update", "s/batch")


def _worker_row(worker: StageEstimate) -> Row:
    groups = worker.stage.groups
    return (
        str(worker.stage_index),
        worker.stage.node,
        worker.device,
        layer_range(worker.stage.layers),
        f"{worker.share:.0%}, {group_names(groups)}" if groups else "all",
        str(worker.stage.depth),
        worker.recompute,
        f"{worker.batch_seconds:.3g}",
        _of(worker.device_bytes, worker.device_limit_bytes)
        + (f", {size(worker.device_reserve_bytes)} in reserve" if worker.device_reserve_bytes else ""),
        _of(worker.host_bytes, worker.host_limit_bytes),
    )


def _link_row(link: ConnectionEstimate) -> Row:
    return (
        f"{link.upper} → {link.lower}",
        size(link.bytes_per_microbatch) + (f" ({link.codec})" if link.codec != "none" else ""),
        str(link.num_microbatches),
        f"{link.batch_seconds:.3g}",
        f"{link.round_trip_s * 1e3:.3g} ms" + (f" + {link.lateness_s * 1e3:.3g} ms" if link.lateness_s else ""),
    )


def _memory_titles(parts: Sequence[str]) -> Row:
    return ("parameters", *parts, "sum", "of usable", "reserve")


def _memory_row(worker: StageEstimate, parts: Sequence[str], unit_bytes: int) -> Row:
    def told(num_bytes: float) -> str:
        return f"{num_bytes / unit_bytes:.2f}"

    return (
        f"{worker.num_parameters / GIGA:.3f} B" if unit_bytes == GIB else f"{worker.num_parameters / MEGA:.3f} M",
        *(told(getattr(worker.memory, part)) for part in parts),
        told(sum(astuple(worker.memory))),
        told(worker.device_limit_bytes) if worker.device_limit_bytes else "enough",
        told(worker.device_reserve_bytes),
    )


def _seconds_row(worker: StageEstimate) -> Row:
    """Return operations over rate, which is a microbatch; with the update it is a batch."""
    seconds = worker.seconds
    return (
        f"{seconds.flops / TERA:.4g}",
        f"{seconds.flops_per_s / TERA:.4g}",
        f"{seconds.microbatch_s:.4g}",
        str(seconds.num_microbatches),
        f"{seconds.update_s:.3g}",
        f"{seconds.batch_s:.3g}",
    )


def _of(num_bytes: int, limit: int) -> str:
    return f"{size(num_bytes)} of {size(limit)}" if limit else size(num_bytes)


def _spare_devices(plan: ClusterPlan, nodes: Sequence[NodeRecord]) -> tuple[str, ...]:
    used = {(worker.node, worker.device_index) for worker in plan.workers}
    used_nodes = {node for node, _ in used}
    places = [(node.name, device.index) for node in nodes if node.name in used_nodes for device in node.devices]
    return tuple(f"{node}:{index}" for node, index in places if (node, index) not in used)


def _gain_of_sharing(
    spec: JobSpec, plan: ClusterPlan, nodes: Sequence[NodeRecord], links: LinkAssumptions | None
) -> str:
    """Return what a job with one reduction group would gain by more of them; empty: too little."""
    train, num_devices = spec.train, sum(len(node.devices) for node in nodes)
    for_each = ceil(num_devices / len(plan.workers))  # devices for each worker of the plan
    groups = min(MOST_GROUPS, train.microbatches, 1 << (for_each - 1).bit_length())
    if train.reduction_groups > 1 or groups == 1 or spec.placement.replicas:
        return ""
    shared = make_plan(replace(spec, train=replace(train, reduction_groups=groups)), nodes, links=links)
    if isinstance(shared, PlanRefused):
        return ""
    if plan.predicted_batch_seconds < (1 + WORTH_TELLING) * shared.predicted_batch_seconds:
        return ""
    tokens_per_s = train.tokens_per_batch / shared.predicted_batch_seconds
    return (
        f"With reduction_groups = {groups} up to {groups} workers may share a stage: {tokens_per_s:,.0f} tokens/s on "
        f"{counted(len(shared.workers), 'worker')}."
    )


def _gain_of_cuts(spec: JobSpec, plan: ClusterPlan, nodes: Sequence[NodeRecord], links: LinkAssumptions | None) -> str:
    """Return what a job of whole blocks on cards would gain by cuts inside them; empty: too little."""
    seconds = [worker.batch_seconds for worker in plan.estimates]
    is_even = max(seconds) < (1 + WORTH_TELLING) * fmean(seconds)
    if is_even or spec.placement.split_blocks or any(worker.device.startswith("cpu") for worker in plan.estimates):
        return ""
    halves = spec.with_values({"placement.split_blocks": True})
    found = make_plan(halves, nodes, links=links) if not why_no_halves(halves) else None
    if not isinstance(found, ClusterPlan):
        return ""
    if plan.predicted_batch_seconds < (1 + WORTH_TELLING) * found.predicted_batch_seconds:
        return ""
    tokens_per_s = spec.train.tokens_per_batch / found.predicted_batch_seconds
    return f"With split_blocks = true a stage may end inside a block: {tokens_per_s:,.0f} tokens/s."


def _simulation(run: Forecast) -> SimulationPreview:
    return SimulationPreview(
        batches=run.num_batches, batch_seconds=run.step_seconds, bubbles=run.bubbles, peaks_in_flight=run.peaks
    )


_PARTS: Final = {
    "weights": "fp32 masters",
    "versions": "two versions of the weights in the job's dtype",
    "frozen": "weights beside adapters, in one version",
    "optimizer": "momentum, second moments, and Error Feedback's last update",
    "gradients": "fp32: sums of the reduction groups, a set that waits, buffers of replicas and ties; of a backward "
    "what its activations have not made room for",
    "activations": "what layers keep for the backward, times the depth",
    "loss": "fp32: the log-softmax, times the depth, and the gradients of a microbatch's logits, or of a chunk's",
    "recomputed": "the graph of one block while its backward runs",
    "update": "what an update takes for a moment, above the most that a backward takes",
    "shares": "results of Newton-Schulz that replicas send each other",
    "feedback": "remainders that the next frame of a coded link carries",
    "beyond": "the excess of measured peaks over these parts",
}
