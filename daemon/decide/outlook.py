"""Estimates what a running job could gain by another plan, from the view's measurements and memories. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from operator import itemgetter
from typing import Final

from headway.daemon.cluster.measurements import LinkProbe, ProbeRecord, ProfileRecord
from headway.daemon.cluster.memo import remembered
from headway.daemon.cluster.records import ANY_NEWER, DeviceKey, NodeRecord, PlanRecord, WorkerPart, newer_ailment
from headway.daemon.decide.cluster_view import ClusterView, refused_code
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import JobSpec
from headway.daemon.plan.cluster_plan import ClusterPlan
from headway.daemon.plan.devices import Model
from headway.daemon.plan.layer_costs import LayerCost, layer_costs
from headway.daemon.plan.predicted_time import predict
from headway.daemon.plan.profiles import Layers, Profiles, Ways
from headway.daemon.plan.rebalance import (
    DEFAULT_BYTES_PER_S,
    DEFAULT_PAUSE_S,
    WINDOW_S,
    MoveCost,
    Outlook,
    is_depth_alone,
    is_same,
    moving_bytes,
    probation_s,
)

LEAST_SAMPLES: Final = 8
"""Minimum number of timed microbatches before a plan uses them: all early samples of `stages/telemetry/layer_times.py`.
The newest of these count.
"""
Way = tuple[tuple[str, str], LinkProbe]
"""((from, to), what was measured)"""
Speeds = tuple[float, float, float]
"""Relative speeds of a device in float32 and bfloat16, as in Device."""


def measured(job: JobView, view: ClusterView) -> Profiles:
    """Return the measurements of workers and daemons, for present nodes."""
    return Profiles(layers=_layers(job.profiles, _processes(view.nodes)), links=all_ways(view))


@remembered(size=256)
def _layers(profiles: dict[DeviceKey, ProfileRecord], present: dict[str, str]) -> Layers:
    """Return the measured times of a job's layers on present nodes."""
    return Profiles.of(
        {
            # How far samples differ changes no plan, so a plan is not asked for again when that alone changes.
            device: {kind: replace(times, spread=0.0) for kind, times in profile.layers.items()}
            for device, profile in profiles.items()
            if device[0] in present and profile.num_samples >= LEAST_SAMPLES
        }
    ).layers


@remembered(is_lasting=True)
def _processes(nodes: dict[str, NodeRecord]) -> dict[str, str]:
    """Return the present incarnation of each node: the same object, as long as they are the same."""
    return {name: node.incarnation for name, node in nodes.items()}


def all_ways(view: ClusterView) -> Ways:
    """Return the measured ways between all present nodes, sorted: the same object, as long as they are the same."""
    return _ways(view.probes, _processes(view.nodes))


@remembered(is_lasting=True)
def _ways(probes: dict[str, ProbeRecord], present: dict[str, str]) -> Ways:
    return tuple(
        way
        for name in sorted(probes)
        if present.get(name) == probes[name].incarnation
        for way in _ways_told(name, probes[name])
        if way[0][1] in present
    )


@remembered(size=4096)
def _ways_told(name: str, record: ProbeRecord) -> Ways:
    return tuple(((name, peer), record.peers[peer]) for peer in sorted(record.peers))


def slowest_way(view: ClusterView) -> float:
    """Return the bytes a second of the slowest measured way between present nodes; without one, infinity."""
    return _slowest(all_ways(view))


@remembered()
def _slowest(ways: Ways) -> float:
    return min((probe.bytes_per_s for _, probe in ways), default=inf)


def planned_nodes(view: ClusterView, job: str) -> dict[str, NodeRecord]:
    """Return the present nodes that can read a job, by name, as plans see them: the same object, as long as they are
    the same.
    """
    return _that_read(job, _planned(view.nodes), _ailing(view.nodes))


@remembered(size=256)
def _that_read(job: str, nodes: dict[str, NodeRecord], ailing: dict[str, dict[str, str]]) -> dict[str, NodeRecord]:
    blinding = {newer_ailment(job), ANY_NEWER}
    blind = {name for name, ailments in ailing.items() if blinding & ailments.keys()}
    return {name: node for name, node in nodes.items() if name not in blind} if blind else nodes


@remembered(is_lasting=True)
def _planned(nodes: dict[str, NodeRecord]) -> dict[str, NodeRecord]:
    return as_fast_as_their_like(map(_without_news, nodes.values()))


def as_fast_as_their_like(nodes: Iterable[NodeRecord]) -> dict[str, NodeRecord]:
    """Return nodes by name. All devices of one model count as fast as the fastest of them, in each dtype.

    Benchmark differences between devices of one model are noise. A truly slower device shows in its layers' times.

    """
    found = {node.name: node for node in nodes}
    fastest = _fastest(map(_speeds_of, found.values()))
    return {name: _with_speeds(node, fastest) for name, node in found.items()}


def _speeds_of(node: NodeRecord) -> frozenset[tuple[Model, Speeds]]:
    """Return the speeds of a node's devices of known models."""
    return frozenset(
        ((device.kind, device.model), (device.speed, device.bfloat16_speed, device.memory_gb_s))
        for device in node.devices
        if device.model
    )


def _fastest(speeds: Iterable[frozenset[tuple[Model, Speeds]]]) -> dict[Model, Speeds]:
    """Return the highest speeds of each model of device."""
    found: dict[Model, Speeds] = {}
    for model, (float32, bfloat16, memory_gb_s) in frozenset[tuple[Model, Speeds]]().union(*speeds):
        known = found.get(model, (0.0, 0.0, 0.0))
        found[model] = max(known[0], float32), max(known[1], bfloat16), max(known[2], memory_gb_s)
    return found


def _with_speeds(node: NodeRecord, fastest: Mapping[Model, Speeds]) -> NodeRecord:
    """Return a node whose devices have the speeds of their models. A device of no known model keeps its own."""
    devices = tuple(
        replace(device, speed=speeds[0], bfloat16_speed=speeds[1], memory_gb_s=speeds[2])
        if (speeds := fastest.get((device.kind, device.model))) is not None
        else device
        for device in node.devices
    )
    return replace(node, devices=devices) if devices != node.devices else node


@remembered(is_lasting=True)
def _ailing(nodes: dict[str, NodeRecord]) -> dict[str, dict[str, str]]:
    return {name: node.ailments for name, node in nodes.items() if node.ailments}


@remembered(size=4096)
def _without_news(node: NodeRecord) -> NodeRecord:
    """Return a node without what plans do not read, and what changes often."""
    return replace(node, generations={}, ailments=refused_code(node), started_at=0.0)


def on_probation(plan: PlanRecord | None, view: ClusterView, *, now: float) -> dict[str, float]:
    """Return when a job starts on or moves to each node outside its plan that leaves too often."""
    own = {(stage.node, stage.node_incarnation) for stage in plan.workers} if plan is not None else set()
    found = {}
    for name, departures in view.departures.items():
        node = view.nodes.get(name)
        if node is None or (name, node.incarnation) in own:
            continue
        until = view.arrived_at.get(name, now) + probation_s(sum(at > now - WINDOW_S for at in departures))
        if until > now:
            found[name] = until
    return found


def outlook(
    job: JobView,
    best: ClusterPlan,
    *,
    predicted_s: float | None,
    slowest_bytes_per_s: float,
    now: float,
    newcomers: frozenset[str] = frozenset(),
) -> Outlook | None:
    """Return the change that the best plan would make; None: no plan is in force, or a worker is gone or not yet
    measured.

    With half of the measurements, the job would rebalance now and again later. predicted_s: of a batch under the plan
    in force, by present measurements; None: a worker's node is gone. slowest_bytes_per_s: of all measured ways.
    newcomers: nodes of the best plan that registered after the plan in force; a job without `recut` moves to no other.
    """
    plan, spec = job.plan, job.spec
    if plan is None or spec is None or predicted_s is None:
        return None
    progress = job.progress
    # Until this plan has reported a batch, its own prediction is the best knowledge of its speed.
    present_s, done = predicted_s, plan.boundary
    if progress is not None and progress.generation == plan.generation:
        done = progress.batch + 1
        if progress.tokens_per_second > 0:
            # The plan predicts the factor; the seconds of a batch are measured.
            present_s = spec.train.tokens_per_batch / progress.tokens_per_second
    is_unmoved = is_same(plan.workers, best.workers)
    own = {(stage.node, stage.device_index) for stage in plan.workers}
    brings_workers = not own >= {(stage.node, stage.device_index) for stage in best.workers}
    # Such a job moves to nodes that have joined, but never because of measurements alone.
    if not spec.placement.recut and newcomers.isdisjoint(stage.node for stage in best.workers):
        return None
    # With half of the measurements, slow and fast workers cannot be compared, and the job would move twice.
    if job.profiles and not brings_workers and not all(_is_measured(job, plan, device) for device in own):
        return None
    pauses = [job.profiles[device].replan_s for device in own if device in job.profiles]
    return Outlook(
        present_s=present_s,
        # Scaled by the same error, because the planner misses the present plan's time by about as much.
        best_s=present_s * best.predicted_batch_seconds / max(predicted_s, 1e-12),
        is_other=not is_unmoved or is_depth_alone(plan.workers, best.workers),
        brings_workers=brings_workers,
        goes_back=not is_unmoved and job.left is not None and is_same(job.left.workers, best.workers),
        batches_left=max(0, spec.train.batches - done),
        cost=MoveCost(
            num_bytes=_moving_bytes(layer_costs(spec), plan.workers, best.workers),
            bytes_per_s=min(DEFAULT_BYTES_PER_S, slowest_bytes_per_s),
            pause_s=max(pauses, default=0.0) or DEFAULT_PAUSE_S,
        ),
        spread=max((_spread(job.profiles[device]) for device in own if device in job.profiles), default=0.0),
        doubt=job.promises.doubt(now) if newcomers.isdisjoint(stage.node for stage in best.workers) else 0.0,
        since_changes=tuple(now - at for at in job.changed_at),
    )


@remembered(size=256)
def _moving_bytes(costs: tuple[LayerCost, ...], before: tuple[WorkerPart, ...], after: tuple[WorkerPart, ...]) -> int:
    return moving_bytes(costs, before, after)


def _spread(profile: ProfileRecord) -> float:
    """Return the seconds of a device's layers, divided in proportion to the measured times."""
    weights = [times.forward_s + times.backward_s for times in profile.layers.values()]
    spreads = [times.spread for times in profile.layers.values()]
    whole = sum(weights)
    return sum(weight * spread for weight, spread in zip(weights, spreads, strict=True)) / whole if whole else 0.0


def _is_measured(job: JobView, plan: PlanRecord, device: DeviceKey) -> bool:
    """Return whether a worker has measured its layers under the plan in force."""
    profile = job.profiles.get(device)
    return profile is not None and profile.generation == plan.generation and profile.num_samples >= LEAST_SAMPLES


# --- Predictions: few measured ways are between one plan's nodes ------------------------------------------------------


def relays_of(stages: Sequence[WorkerPart], nodes: Mapping[str, NodeRecord]) -> frozenset[str]:
    """Return the relays of a plan's nodes. What any other nodes measured through these is read too."""
    own = (nodes.get(stage.node) for stage in stages)
    return frozenset(node.relay for node in own if node is not None and node.relay)


@remembered(size=256)
def concerned(stages: Sequence[WorkerPart], nodes: Mapping[str, NodeRecord]) -> dict[str, NodeRecord]:
    """Return the nodes that a plan's prediction reads: its own, as far as they are there, those that share the cores of
    their machines, and their relays.
    """
    own = [node for stage in stages if (node := nodes.get(stage.node)) is not None]
    relays, hosts = relays_of(stages, nodes), {node.host for node in own if node.host}
    beside = (node for node in nodes.values() if node.address in relays or node.host in hosts)
    return {node.name: node for node in (*own, *beside)}


def predicted(
    spec: JobSpec, stages: Sequence[WorkerPart], *, known: Mapping[str, NodeRecord], profiles: Profiles
) -> float | None:
    """Return what `predict` would, from all nodes and measurements. known: the plan's `concerned` nodes."""
    ways = _ways_of(profiles.links, frozenset(known), relays_of(stages, known))
    return _predict(spec, tuple(stages), profiles.layers, ways, *known.values())


@remembered(size=256, is_lasting=False)
def _ways_of(links: Ways, names: frozenset[str], relays: frozenset[str]) -> frozenset[Way]:
    """Return the measured ways between some nodes, and those of any nodes through some relays."""
    return frozenset(way for way in links if names.issuperset(way[0]) or (relays and way[1].via in relays))


@remembered(size=256)
def _predict(
    spec: JobSpec, stages: tuple[WorkerPart, ...], layers: Layers, ways: frozenset[Way], *known: NodeRecord
) -> float | None:
    return predict(spec, stages, known, profiles=Profiles(layers, tuple(sorted(ways, key=itemgetter(0)))))
