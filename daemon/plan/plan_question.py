"""The question that a plan answers: all its inputs as one immutable value, and which changes an answer survives. Pure.

A plan takes seconds on many devices, and the cluster changes meanwhile. When an answer arrives, its question is
compared with the present one.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, compress
from operator import attrgetter
from typing import Final, TypedDict, Unpack, overload

from headway.daemon.cluster.memo import Same
from headway.daemon.cluster.records import PROTOCOL_VERSION, Device, DeviceKey, NodeRecord, PlanRecord, WorkerPart
from headway.daemon.jobs.device_defaults import lacks_kernel
from headway.daemon.jobs.job import JobSpec
from headway.daemon.plan.cluster_plan import ClusterPlan
from headway.daemon.plan.connections import LinkAssumptions
from headway.daemon.plan.devices import NOTHING_LEARNED, DeviceSlot, MemoryLessons, natural
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
    slots: Sequence[DeviceSlot]
    """The devices that the plan may use."""
    previous: tuple[WorkerPart, ...] = ()
    """The workers of the plan in force, whose layers should stay."""
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
    offer = _offered_to(spec, nodes, quarantined, memory=conditions.get("memory", NOTHING_LEARNED))
    return PlanQuestion(
        spec=spec,
        slots=_free(Same(offer), busy) if busy else offer.all_slots,
        previous=previous.workers if previous else (),
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
    devices = _offered_to(spec, nodes, quarantined).devices
    return devices - busy if busy else devices


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """What nodes offer to every job that wants the same of them, while no device is busy."""

    names: frozenset[str]
    """The nodes that a plan may use."""
    all_slots: tuple[DeviceSlot, ...]
    """Their devices."""
    devices: frozenset[DeviceKey]
    position: dict[DeviceKey, int]
    """Positions of the devices among the slots."""
    relayed: RelayedWays
    left_out: tuple[str, ...]
    """As in PlanQuestion."""


def _offered_to(
    spec: JobSpec, nodes: Iterable[NodeRecord], quarantined: Set[str], *, memory: MemoryLessons = NOTHING_LEARNED
) -> _Offer:
    """Return what nodes offer to a job. It is computed once for the same tuple of nodes, and for all jobs of a kind."""
    # `auto` is not decided yet, and fits every device.
    computes = spec if spec.train.attention_backend != "auto" else None
    return _offer(Same(tuple(nodes)), spec.placement.sites, computes, frozenset(quarantined), memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one node offers to every job that wants the same of it."""

    node: NodeRecord
    rank: tuple[str | int, ...]
    """Of its name, in natural order."""
    is_wanted: bool
    slots: tuple[tuple[DeviceKey, DeviceSlot], ...]
    no_kernel: tuple[str, ...]
    """Sentences on devices that cannot compute the job's attention."""
    is_relayed: bool


class _Parts:
    """What each node offers to jobs of one kind, found again only for records that are other objects."""

    def __init__(self, sites: tuple[str, ...], computes: JobSpec | None, memory: MemoryLessons) -> None:
        self._sites, self._computes, self._memory = sites, computes, memory
        self._known: dict[str, _Part] = {}

    def of(self, nodes: Sequence[NodeRecord]) -> list[_Part]:
        """Return the parts in natural order of their nodes."""
        known = self._known
        for node in nodes:
            if (part := known.get(node.name)) is None or part.node is not node:
                known[node.name] = self._part(node)
        found = [known[node.name] for node in nodes]
        if len(known) > 2 * len(found):
            self._known = {part.node.name: part for part in found}
        return sorted(found, key=attrgetter("rank"))

    def _part(self, node: NodeRecord) -> _Part:
        computes, is_wanted = self._computes, _is_wanted(self._sites, node)
        positions = range(len(node.devices) if is_wanted else 0)
        slots = (DeviceSlot.of(node, position, self._memory) for position in positions)
        return _Part(
            node=node,
            rank=natural(node.name),
            is_wanted=is_wanted,
            slots=tuple(
                ((node.name, slot.device.index), slot)
                for slot in slots
                if slot.device.index not in node.down_devices and not _lacks_kernel(computes, slot.device)
            ),
            no_kernel=tuple(_no_kernel(computes, node)) if is_wanted else (),
            is_relayed=bool(node.relay),
        )


_parts = lru_cache(maxsize=64)(_Parts)


@lru_cache(maxsize=128)
def _offer(
    nodes: Same[tuple[NodeRecord, ...]],
    sites: tuple[str, ...],
    computes: JobSpec | None,
    quarantined: frozenset[str],
    memory: MemoryLessons,
) -> _Offer:
    """computes: the job whose attention the devices must be able to compute; None: any device can."""
    parts = _parts(sites, computes, memory).of(nodes.value)
    wanted = [part for part in parts if part.is_wanted]
    free = [part for part in wanted if part.node.name not in quarantined] if quarantined else wanted
    out = [f"node {part.node.name} stays out of plans: {part.node.stays_out}" for part in parts if part.node.stays_out]
    out += [f"node {part.node.name} is in quarantine" for part in wanted if part.node.name in quarantined]
    out += [told for part in wanted for told in part.no_kernel]
    out += [no_worker(part.node, part.node.down_devices) for part in free if part.node.down_devices]
    slots = dict(chain.from_iterable(map(attrgetter("slots"), free)))
    on_host = Counter(part.node.host for part in wanted for _ in part.node.devices if part.node.host)
    for part in free:
        number = on_host[part.node.host]
        if number > len(part.node.devices) and part.node.memory_bytes:  # several nodes share the machine's memory
            shared = part.node.memory_bytes // number
            slots |= {key: replace(slot, host_memory_bytes=shared) for key, slot in part.slots}
    return _Offer(
        names=frozenset(map(attrgetter("node.name"), free)),
        all_slots=tuple(slots.values()),
        devices=frozenset(slots),
        position={key: position for position, key in enumerate(slots)},
        relayed=RelayedWays.of((part.node for part in free if part.is_relayed), nodes.value),
        left_out=tuple(out),
    )


class _Slots(Sequence[DeviceSlot]):
    """The slots of an offer that are not busy, as a tuple that is made when somebody looks into it.

    When a node comes, each job asks another question, and most of them are never computed.
    """

    def __init__(self, offer: _Offer, busy: frozenset[DeviceKey]) -> None:
        self._offer, self._all_busy = offer, busy

    @cached_property
    def _busy(self) -> frozenset[DeviceKey]:
        return self._all_busy & self._offer.devices

    @cached_property
    def _all(self) -> tuple[DeviceSlot, ...]:
        is_free = bytearray(b"\1") * len(self._offer.all_slots)
        for key in self._busy:
            is_free[self._offer.position[key]] = False
        return tuple(compress(self._offer.all_slots, is_free))

    def __len__(self) -> int:
        return len(self._offer.all_slots) - len(self._busy)

    def __iter__(self) -> Iterator[DeviceSlot]:
        return iter(self._all)

    @overload
    def __getitem__(self, index: int) -> DeviceSlot: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[DeviceSlot, ...]: ...
    def __getitem__(self, index: int | slice) -> DeviceSlot | tuple[DeviceSlot, ...]:
        return self._all[index]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Sequence) and len(self) == len(other) and self._all == tuple(other)

    def __hash__(self) -> int:
        return hash(self._all)

    def __reduce__(self) -> tuple[type, tuple[tuple[DeviceSlot, ...]]]:
        return tuple, (self._all,)


@lru_cache(maxsize=256)
def _free(offer: Same[_Offer], busy: frozenset[DeviceKey]) -> _Slots:
    """Return the slots that are not busy: the same object for the same question."""
    return _Slots(offer.value, busy)


def _is_wanted(sites: tuple[str, ...], node: NodeRecord) -> bool:
    return (
        not node.is_draining
        and not node.stays_out
        and node.protocol == PROTOCOL_VERSION
        and (not sites or node.site in sites)
    )


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
    return question.spec, question.previous, question.history, question.was_rounded, question.links


def _key(slot: DeviceSlot) -> tuple[str, str, int]:
    return slot.node, slot.incarnation, slot.device.index


def _unmeasured(slot: DeviceSlot) -> DeviceSlot:
    return replace(slot, device=slot.device.unmeasured)


def no_worker(node: NodeRecord, device_indices: Iterable[int]) -> str:
    """Return `a has no worker on device 0`, with the reason that the node gives."""
    why = f" ({node.worker_trouble[:MAX_TROUBLE]})" if node.worker_trouble else ""
    return f"{node.name} has no worker on device {' and '.join(map(str, device_indices))}{why}"
