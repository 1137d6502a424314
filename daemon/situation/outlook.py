"""Estimates what a running job could gain by another plan, from the view's measurements and memories. Pure."""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from operator import itemgetter
from typing import Final

from headway.daemon.costs.layer_costs import layer_costs
from headway.daemon.costs.profiles import Profiles
from headway.daemon.planning.cluster_plan import ClusterPlan
from headway.daemon.planning.predicted_time import predict
from headway.daemon.planning.rebalance import (
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
from headway.daemon.records.identity import Same
from headway.daemon.records.measurements import DeviceSpeed, LinkProbe, ProbeRecord, ProfileRecord
from headway.daemon.records.records import DeviceKey, NodeRecord, PlanRecord
from headway.daemon.view.cluster_view import ClusterView, JobView

LEAST_SAMPLES: Final = 8
"""Minimum number of timed microbatches before a plan uses them: all early samples of `stages/telemetry/layer_times.py`.
The newest of these count.
"""


def measured(job: JobView, view: ClusterView) -> Profiles:
    """Return the measurements of workers and daemons, for present nodes."""
    layers = {
        # How far samples differ changes no plan, so a plan is not asked for again when that alone changes.
        device: {kind: replace(times, spread=0.0) for kind, times in profile.layers.items()}
        for device, profile in job.profiles.items()
        if device[0] in view.nodes and profile.num_samples >= LEAST_SAMPLES
    }
    processes = view.derived.lasting(
        "processes", view.nodes.values(), lambda: {name: node.incarnation for name, node in view.nodes.items()}
    )
    links = view.derived.of(
        "links",
        (processes, *view.probes.values()),
        lambda: tuple(
            way for name in sorted(view.probes) for way in _ways_of(name, Same(view.probes[name]), Same(processes))
        ),
    )
    return replace(Profiles.of(layers), links=links)


@lru_cache(maxsize=1 << 13)
def _ways_of(
    name: str, record: Same[ProbeRecord], processes: Same[dict[str, str]]
) -> tuple[tuple[tuple[str, str], LinkProbe], ...]:
    """Return a node's measured ways to present nodes, sorted. processes: the present incarnation of each node."""
    if processes.value.get(name) != record.value.incarnation:
        return ()
    ways = sorted(record.value.peers.items(), key=itemgetter(0))
    return tuple(((name, peer), probe) for peer, probe in ways if peer in processes.value)


def as_fast_as_their_like(nodes: Iterable[NodeRecord]) -> dict[str, NodeRecord]:
    """Return nodes by name. All devices of one model count as fast as the fastest of them, in each dtype.

    Benchmark differences between devices of one model are noise. A truly slower device shows in its layers' times.

    """
    found = {node.name: node for node in nodes}
    fastest: dict[tuple[str, str], DeviceSpeed] = {}
    for node in found.values():
        for device in node.devices:
            key = (device.kind, device.model)
            best = fastest.get(key, DeviceSpeed())
            fastest[key] = DeviceSpeed(
                float32=max(device.speed, best.float32), bfloat16=max(device.bfloat16_speed, best.bfloat16)
            )
    return {
        name: _with_speeds(
            Same(node),
            tuple(fastest[device.kind, device.model] if device.model else None for device in node.devices),
        )
        for name, node in found.items()
    }


@lru_cache(maxsize=1 << 13)
def _with_speeds(node: Same[NodeRecord], speeds: tuple[DeviceSpeed | None, ...]) -> NodeRecord:
    """Return a node whose devices have other speeds. None: the device keeps its own."""
    if not any(speeds):
        return node.value
    devices = (
        replace(device, speed=speed.float32, bfloat16_speed=speed.bfloat16) if speed is not None else device
        for device, speed in zip(node.value.devices, speeds, strict=True)
    )
    return replace(node.value, devices=tuple(devices))


@lru_cache(maxsize=1 << 13)
def as_planned(node: Same[NodeRecord]) -> NodeRecord:
    """Return a node without what plans do not read, and what changes often."""
    return replace(node.value, generations={}, ailments={}, started_at=0.0)


def on_probation(plan: PlanRecord | None, view: ClusterView, *, now: float) -> dict[str, float]:
    """Return when a job starts on or moves to each node outside its plan that leaves too often."""
    own = {(stage.node, stage.node_incarnation) for stage in plan.stages} if plan is not None else set()
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
    nodes: Iterable[NodeRecord],
    best: ClusterPlan,
    profiles: Profiles,
    *,
    now: float,
    newcomers: frozenset[str] = frozenset(),
) -> Outlook | None:
    """Return the change that the best plan would make; None: no plan is in force, or a worker is gone or not yet
    measured.

    With half of the measurements, the job would rebalance now and again later. newcomers: nodes that registered after
    the plan; a job without `recut` moves to no other.
    """
    plan, spec = job.plan, job.spec
    if plan is None or spec is None:
        return None
    predicted_s = predict(spec, plan.stages, nodes, profiles=profiles)
    if predicted_s is None:
        return None
    progress = job.progress
    # Until this plan has reported a batch, its own prediction is the best knowledge of its speed.
    present_s, done = predicted_s, plan.boundary
    if progress is not None and progress.generation == plan.generation:
        done = progress.batch + 1
        if progress.tokens_per_second > 0:
            # The plan predicts the factor; the seconds of a batch are measured.
            present_s = spec.train.tokens_per_batch / progress.tokens_per_second
    is_unmoved = is_same(plan.stages, best.stages)
    own = {(stage.node, stage.device_index) for stage in plan.stages}
    brings_workers = not own >= {(stage.node, stage.device_index) for stage in best.stages}
    # Such a job moves to nodes that have joined, but never because of measurements alone.
    if not spec.placement.recut and newcomers.isdisjoint(stage.node for stage in best.stages):
        return None
    # With half of the measurements, slow and fast workers cannot be compared, and the job would move twice.
    if job.profiles and not brings_workers and not all(_is_measured(job, plan, device) for device in own):
        return None
    rates = [speed.bytes_per_s for _, speed in profiles.links]
    pauses = [job.profiles[device].replan_s for device in own if device in job.profiles]
    return Outlook(
        present_s=present_s,
        # Scaled by the same error, because the planner misses the present plan's time by about as much.
        best_s=present_s * best.predicted_batch_seconds / max(predicted_s, 1e-12),
        is_other=not is_unmoved or is_depth_alone(plan.stages, best.stages),
        brings_workers=brings_workers,
        goes_back=not is_unmoved and job.left is not None and is_same(job.left.stages, best.stages),
        batches_left=max(0, spec.train.batches - done),
        cost=MoveCost(
            num_bytes=moving_bytes(layer_costs(spec), plan.stages, best.stages),
            bytes_per_s=min([DEFAULT_BYTES_PER_S, *rates]),
            pause_s=max(pauses, default=0.0) or DEFAULT_PAUSE_S,
        ),
        spread=max((_spread(job.profiles[device]) for device in own if device in job.profiles), default=0.0),
        doubt=job.promises.doubt(now) if newcomers.isdisjoint(stage.node for stage in best.stages) else 0.0,
        since_changes=tuple(now - at for at in job.changed_at),
    )


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
