"""The question that a plan answers: all its inputs as one immutable value, and which changes an answer survives. Pure.

A plan takes seconds on many devices, and the cluster changes meanwhile. When an answer arrives, its question is
compared with the present one.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, TypedDict, Unpack

from headway.daemon.cluster.memo import Same
from headway.daemon.cluster.records import PROTOCOL_VERSION, Device, DeviceKey, NodeRecord, PlanRecord, WorkerPart
from headway.daemon.jobs.device_defaults import lacks_kernel
from headway.daemon.jobs.job import JobSpec, PluginsSpec
from headway.daemon.plan.cluster_plan import ClusterPlan
from headway.daemon.plan.connections import LinkAssumptions
from headway.daemon.plan.copy_places import num_copies
from headway.daemon.plan.devices import (
    NOTHING_LEARNED,
    DeviceSlot,
    MemoryLessons,
    is_wanted,
    natural,
    sharers_of_hosts,
)
from headway.daemon.plan.link_choice import linked_pairs
from headway.daemon.plan.paths import NO_RELAYS, NOTHING_BLOCKED, BlockedWays, RelayedWays
from headway.daemon.plan.profiles import Profiles
from headway.daemon.plan.search import Holdings

MAX_TROUBLE: Final = 200
"""Maximum number of characters of a worker's error in a reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """All inputs of a plan."""

    spec: JobSpec
    slots: tuple[DeviceSlot, ...]
    """The devices that the plan may use."""
    previous: tuple[WorkerPart, ...] = ()
    """The workers of the plan in force, whose layers should stay."""
    num_copies: int = 0
    """Nodes that hold each layer of a boundary: the job's number, if that many exist; 0: they do."""
    history: tuple[str, ...] = ()
    """Arithmetic classes on which the job has run."""
    was_rounded: bool = False
    """True if the job has run over a lossy wire."""
    links: LinkAssumptions
    holdings: Holdings = ()
    profiles: Profiles
    blocked: BlockedWays = NOTHING_BLOCKED
    """Blocked ways between the nodes of the seats."""
    relayed: RelayedWays = NO_RELAYS
    """Which of these nodes can only dial out, and their relays. As with a measurement, a plan outlives a change."""
    left_out: tuple[str, ...] = ()
    """Sentences on nodes and devices that the plan may not use, shown when there are too few."""


class Conditions(TypedDict, total=False):
    """The conditions of a plan besides job, nodes and measurements, as in `make_plan`."""

    previous: PlanRecord | None
    busy: frozenset[tuple[str, int]]
    history: tuple[str, ...]
    was_rounded: bool
    links: LinkAssumptions | None
    quarantined: frozenset[str]
    held: Mapping[str, Iterable[str]] | None
    blocked: BlockedWays
    memory: MemoryLessons


def ask(
    spec: JobSpec,
    nodes: Iterable[NodeRecord],
    *,
    profiles: Profiles | None = None,
    **conditions: Unpack[Conditions],
) -> PlanQuestion:
    """Return the question for the best plan of a job; arguments as for `make_plan`."""
    quarantined, previous = conditions.get("quarantined", frozenset()), conditions.get("previous")
    busy, held = conditions.get("busy", frozenset()), conditions.get("held") or {}
    nodes = tuple(nodes)
    offer = _offered_to(spec, nodes, quarantined, memory=conditions.get("memory", NOTHING_LEARNED))
    return PlanQuestion(
        spec=spec,
        slots=_free(Same(offer), busy),
        previous=previous.workers if previous else (),
        num_copies=num_copies(spec, {node.name: node for node in nodes}),
        history=conditions.get("history", ()),
        was_rounded=conditions.get("was_rounded", False),
        links=conditions.get("links") or LinkAssumptions(),
        holdings=tuple(sorted((node, tuple(sorted(layers))) for node, layers in held.items())),
        profiles=profiles or Profiles(),
        blocked=conditions.get("blocked", NOTHING_BLOCKED).among(offer.names),
        relayed=offer.relayed,
        left_out=offer.left_out,
    )


def usable_devices(
    spec: JobSpec, nodes: Iterable[NodeRecord], *, quarantined: Set[str], busy: Set[DeviceKey]
) -> frozenset[DeviceKey]:
    """Return the devices that a plan for the job may use, as `ask` puts them into its slots."""
    return frozenset(_offered_to(spec, nodes, quarantined).slots.keys() - busy)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """What nodes offer to every job that wants the same of them, while no device is busy."""

    names: frozenset[str]
    """The nodes that a plan may use."""
    slots: dict[DeviceKey, DeviceSlot]
    """Their devices, in natural order of the nodes."""
    relayed: RelayedWays
    left_out: tuple[str, ...]
    """As in PlanQuestion."""


def _offered_to(
    spec: JobSpec, nodes: Iterable[NodeRecord], quarantined: Set[str], *, memory: MemoryLessons = NOTHING_LEARNED
) -> _Offer:
    """Return what nodes offer to a job. It is computed once for the same tuple of nodes, and for all jobs of a kind."""
    # `auto` is not decided yet, and fits every device.
    computes = spec if spec.train.attention_backend != "auto" else None
    return _offer(Same(tuple(nodes)), spec.placement.sites, computes, frozenset(quarantined), memory, spec.plugins)


@lru_cache(maxsize=128)
def _offer(
    nodes: Same[tuple[NodeRecord, ...]],
    sites: tuple[str, ...],
    computes: JobSpec | None,
    quarantined: frozenset[str],
    memory: MemoryLessons,
    plugins: PluginsSpec,
) -> _Offer:
    """computes: the job whose attention the devices must be able to compute; None: any device can."""
    present = sorted(nodes.value, key=lambda node: natural(node.name))
    wanted = [node for node in present if is_wanted(node, sites, plugins)]
    free = [node for node in wanted if node.name not in quarantined]
    out = [f"node {node.name} stays out of plans: {node.stays_out}" for node in present if node.stays_out]
    other = [node for node in present if node.protocol != PROTOCOL_VERSION]
    out += [f"node {node.name} speaks protocol {node.protocol}, the leader {PROTOCOL_VERSION}" for node in other]
    out += [f"node {node.name} is in quarantine" for node in wanted if node.name in quarantined]
    out += filter(None, (_why_no_plugins(plugins, node) for node in present))
    out += [told for node in wanted for told in _no_kernel(computes, node)]
    out += [no_worker(node, node.down_devices) for node in free if node.down_devices]
    on_host = sharers_of_hosts(wanted)
    return _Offer(
        names=frozenset(node.name for node in free),
        slots={
            (node.name, slot.device.index): _with_code(slot, computes, plugins)
            for node in free
            for slot in _slots(Same(node), memory, on_host[node.host])
            if slot.device.index not in node.down_devices and not _lacks_kernel(computes, slot.device)
        },
        relayed=RelayedWays.of((node for node in free if node.relay), nodes.value),
        left_out=tuple(out),
    )


def _why_no_plugins(plugins: PluginsSpec, node: NodeRecord) -> str:
    return plugins.why_not_on(node.name, node.allow_plugins, node.ailments)


def _with_code(slot: DeviceSlot, computes: JobSpec | None, plugins: PluginsSpec) -> DeviceSlot:
    """Return a device for a job whose plug-ins, and whose package for attention, are a part of its arithmetic."""
    code = [f"{plugins.wheel} {plugins.sha256[:16]}"] if plugins.sha256 else []
    if computes is not None and computes.train.attention_backend == "flash3":
        code.append(f"flash3 {slot.device.flash3}")
    return replace(slot, arithmetic_class=f"{slot.arithmetic_class} with {' and '.join(code)}") if code else slot


@lru_cache(maxsize=1 << 14)
def _slots(node: Same[NodeRecord], memory: MemoryLessons, num_sharers: int) -> tuple[DeviceSlot, ...]:
    """Return the devices of a node: the same objects for the same record, so that questions are soon compared.

    num_sharers: as in DeviceSlot.of.
    """
    places = range(len(node.value.devices))
    return tuple(DeviceSlot.of(node.value, position, memory, num_sharers=num_sharers) for position in places)


@lru_cache(maxsize=256)
def _free(offer: Same[_Offer], busy: frozenset[DeviceKey]) -> tuple[DeviceSlot, ...]:
    """Return the slots that are not busy: the same object for the same question."""
    return tuple(slot for key, slot in offer.value.slots.items() if key not in busy)


def _lacks_kernel(job: JobSpec | None, device: Device) -> str:
    """Return why a device cannot compute a job's attention; empty: it can."""
    kernel = job.train.attention_backend if job is not None else "auto"
    return "" if job is None or kernel == "auto" else lacks_kernel(kernel, job, (device,))[0]


def _no_kernel(job: JobSpec | None, node: NodeRecord) -> list[str]:
    """Return a sentence for each reason why devices of a node cannot compute a job's attention."""
    if job is None:
        return []
    reasons = sorted(set(filter(None, (_lacks_kernel(job, device) for device in node.devices))))
    return [f'node {node.name} has no attention_backend = "{job.train.attention_backend}": {why}' for why in reasons]


def differs_in_measurements_alone(one: PlanQuestion, other: PlanQuestion) -> bool:
    """Return whether two questions have one job and the same devices: only times and files may differ."""
    if (_situation(one), one.blocked) != (_situation(other), other.blocked) or len(one.slots) != len(other.slots):
        return False
    if one.slots is other.slots:
        return True
    differ = [(before, now) for before, now in zip(one.slots, other.slots, strict=True) if before is not now]
    return {_unmeasured(before) for before, _ in differ} == {_unmeasured(now) for _, now in differ}


def still_answers(plan: ClusterPlan, asked: PlanQuestion, now: PlanQuestion) -> bool:
    """Return whether a plan for an earlier question is also valid, though perhaps not the best, for the present one.

    It is valid if every device that it uses may still be used, by an unchanged process, and its neighbours can talk.
    """
    if _situation(asked) != _situation(now) or not _can_talk(plan, now):
        return False
    before, free = ({_key(slot): slot for slot in question.slots} for question in (asked, now))
    places = [(stage.node, stage.node_incarnation, stage.device_index) for stage in plan.workers]
    return all(
        place in free and place in before and _unmeasured(free[place]) == _unmeasured(before[place]) for place in places
    )


def _can_talk(plan: ClusterPlan, question: PlanQuestion) -> bool:
    """Return whether no link of a plan is blocked."""
    pairs = linked_pairs(plan.workers, trains_tie=question.spec.model.trains_tie)
    return pairs.isdisjoint(question.blocked.pairs)


def _situation(question: PlanQuestion) -> tuple[object, ...]:
    """Return all inputs except measurements and devices."""
    asked = question.spec, question.previous, question.history, question.was_rounded, question.links
    return *asked, question.num_copies


def _key(slot: DeviceSlot) -> tuple[str, str, int]:
    return slot.node, slot.incarnation, slot.device.index


def _unmeasured(slot: DeviceSlot) -> DeviceSlot:
    return replace(slot, device=slot.device.unmeasured)


def no_worker(node: NodeRecord, device_indices: Iterable[int]) -> str:
    """Return `a has no worker on device 0`, with the reason that the node gives."""
    why = f" ({node.worker_trouble[:MAX_TROUBLE]})" if node.worker_trouble else ""
    return f"{node.name} has no worker on device {' and '.join(map(str, device_indices))}{why}"
