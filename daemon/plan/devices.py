"""The devices that plans may use, and how much of their memory. Pure.

No plan fills a CUDA device: the context takes about 0.5 GiB, cuBLAS 32 MiB, NCCL's buffers a few hundred MiB, and
fragments of torch's allocator grow with what it holds.

A measured peak above the prediction raises the prediction for the job on all devices of that model, whatever the cut:
what the estimate misses, such as an operator's work space, grows with the stage. A device that ran out of memory also
gets less than was planned there, because other processes or fragments may have taken the rest.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Final

from headway.daemon.cluster.measurements import DeviceShortage, MemoryShortage
from headway.daemon.cluster.records import PROTOCOL_VERSION, Device, NodeRecord
from headway.daemon.jobs.job import PluginsSpec

LEFT_FREE: Final = 0.1
"""Part of the prediction that a device gets less after it ran out of memory: each attempt is clearly smaller."""
NEGLIGIBLE: Final = 1.01
"""A demand below this factor is noise."""
MOST_DEMAND: Final = 1e6
"""Maximum of a demand. It is more than any device has room for, and no computed number of bytes overflows."""
ROUNDING: Final = 1e-9

Model = tuple[str, str]
"""(kind, model) of a device"""


@dataclass(frozen=True, slots=True)
class MemoryLessons:
    """What plans of one job respect beside the devices' own limits. Equal lessons are equal keys of a cache."""

    demands: tuple[tuple[Model, float], ...] = ()
    """Factor on predicted bytes, by model of the device; sorted. Models without one have a factor of 1."""
    rooms: tuple[tuple[tuple[str, str, int], int], ...] = ()
    """Most bytes that plans put on a device, by (node, incarnation, device); sorted."""

    @classmethod
    def of(cls, shortages: Iterable[DeviceShortage], demands: Mapping[Model, float]) -> "MemoryLessons":
        """Join what shortages and measured peaks tell. demands: measured factors by model."""
        factors = {model: factor for model, factor in demands.items() if factor >= NEGLIGIBLE}
        rooms = {}
        for each in shortages:
            rooms[each.node, each.node_incarnation, each.device_index] = each.room_bytes
            if each.demand >= NEGLIGIBLE:
                factors[each.kind, each.model] = max(each.demand, factors.get((each.kind, each.model), 1.0))
        demands_of = ((model, min(factor, MOST_DEMAND)) for model, factor in factors.items())
        return cls(demands=tuple(sorted(demands_of)), rooms=tuple(sorted(rooms.items())))

    def demand(self, device: Device) -> float:
        """Return the factor on the bytes that are predicted for a device."""
        return next((factor for model, factor in self.demands if model == (device.kind, device.model)), 1.0)

    def room(self, node: str, incarnation: str, device_index: int) -> int:
        """Return the most bytes that plans put on a device; 0: no shortage limits it."""
        return dict(self.rooms).get((node, incarnation, device_index), 0)


NOTHING_LEARNED: Final = MemoryLessons()


def measured_demand(peak_bytes: int, predicted_bytes: int, *, usable_bytes: int) -> float:
    """Return the factor by which a stage's measured peak exceeded its prediction, to hundredths; at least 1.

    usable_bytes: the plan's limit on that device; 0: none. A stage that has run there fits there: a peak inside the
    reserve counts as the limit, so that the same plan is possible again.
    """
    if peak_bytes <= 0 or predicted_bytes <= 0:
        return 1.0
    factor = ceil(100 * peak_bytes / predicted_bytes) / 100
    if usable_bytes:
        factor = min(factor, (1 - ROUNDING) * usable_bytes / predicted_bytes)
    return max(factor, 1.0)


def faded(demand: float) -> float:
    """Return a factor with half its excess; 1 once that is noise."""
    less = 1 + (demand - 1) / 2
    return less if less >= NEGLIGIBLE else 1.0


def after_shortage(
    before: Iterable[DeviceShortage],
    shortage: MemoryShortage,
    *,
    place: tuple[str, str, int],
    device: Device,
    predicted_bytes: int,
    demand: float,
) -> tuple[DeviceShortage, ...]:
    """Return the shortages after one more, at most one a device.

    place: (node, incarnation, device). predicted_bytes: of the stage there, before any factor. demand: the factor that
    plans have used. The same report twice changes nothing.
    """
    earlier = {(each.node, each.node_incarnation, each.device_index): each for each in before}
    needed = shortage.believed(device.memory_bytes).needed_bytes
    factor = max(demand, ceil(100 * needed / predicted_bytes) / 100) if predicted_bytes else demand
    room = int((1 - LEFT_FREE) * (predicted_bytes * factor or needed))
    if place in earlier:
        room, factor = min(room, earlier[place].room_bytes), max(factor, earlier[place].demand)
    node, incarnation, index = place
    earlier[place] = DeviceShortage(
        node=node,
        node_incarnation=incarnation,
        device_index=index,
        kind=device.kind,
        model=device.model,
        room_bytes=max(room, 1),
        demand=factor,
    )
    return tuple(earlier[key] for key in sorted(earlier))


def still_of_use(shortages: Iterable[DeviceShortage], present: Iterable[tuple[str, str]]) -> tuple[DeviceShortage, ...]:
    """Return the shortages on present (node, incarnation), and of each model the largest demand, wherever it was."""
    if not (shortages := tuple(shortages)):
        return ()
    there, kept = frozenset(present), []
    largest: dict[Model, DeviceShortage] = {}
    for each in sorted(shortages, key=lambda each: -each.demand):
        is_first = largest.setdefault((each.kind, each.model), each) is each
        if (each.node, each.node_incarnation) in there or (is_first and each.demand >= NEGLIGIBLE):
            kept.append(each)
    return tuple(sorted(kept, key=lambda each: (each.node, each.node_incarnation, each.device_index)))


GIB: Final = 1 << 30
FIXED_BYTES: Final = GIB
FRAGMENTS: Final = 0.04
"""Fragments' share of a device's memory."""


def cuda_reserve(memory_bytes: int, reserve_gib: float | None = None) -> int:
    """Return the bytes that plans leave free on a device. reserve_gib: from the settings; None: the default."""
    if not memory_bytes:
        return 0
    wanted = FIXED_BYTES + FRAGMENTS * memory_bytes if reserve_gib is None else reserve_gib * GIB
    return min(round(wanted), memory_bytes - 1)


@lru_cache(maxsize=1 << 16)
def natural(name: str) -> tuple[str | int, ...]:
    """Sort key that puts node-10 after node-2."""
    return tuple(int(part) if index % 2 else part for index, part in enumerate(re.split(r"([0-9]+)", name)))


def place_names(places: Sequence[tuple[str, int]]) -> list[str]:
    """Return the names of workers by (node, device): the node's, as `node:device` if it has several of them."""
    number = Counter(node for node, _ in places)
    return [node if number[node] == 1 else f"{node}:{device}" for node, device in places]


def is_wanted(node: NodeRecord, sites: tuple[str, ...], plugins: PluginsSpec) -> bool:
    """Return whether a job's plans may use a node. sites: to which it is limited; empty: it is not."""
    return (
        not node.is_draining
        and not node.stays_out
        and node.protocol == PROTOCOL_VERSION
        and (not sites or node.site in sites)
        and not plugins.why_not_on(node.name, node.allow_plugins, node.ailments)
    )


def sharers_of_hosts(nodes: Iterable[NodeRecord]) -> Counter[str]:
    """Return how many devices of some nodes are on each host that they name."""
    return Counter(node.host for node in nodes if node.host for _ in node.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSlot:
    """One device of one node, with room for one worker."""

    node: str
    incarnation: str
    site: str
    device: Device
    host_memory_bytes: int
    """The device's part of the node's memory, which all devices of the node share."""
    arithmetic_class: str
    is_only_one: bool
    """True if the node has no other device."""
    host: str = ""
    """Machine on which the node is; empty: the node does not say."""
    limit_bytes: int = 0
    """Memory that plans may fill: the device's, or less after it ran out; 0: not limited."""
    layer_folder: str = ""
    """Folder whose room `host_memory_bytes` is a part of, as in NodeRecord; empty: of the memory."""
    demand: float = 1.0
    """Factor on the predicted bytes of a stage here, as far as the job's measured peaks exceed them."""

    @property
    def machine(self) -> str:
        """Return what the devices of one machine have in common."""
        return f"host {self.host}" if self.host else f"node {self.node}"

    @property
    def key(self) -> tuple[str, str, int]:
        """Return its place, as a worker's part of a plan names it: (node, incarnation, device)."""
        return self.node, self.incarnation, self.device.index

    @property
    def room_bytes(self) -> int:
        """Return the most predicted bytes, before the factor, that fit; 0: not limited."""
        return max(int(self.limit_bytes / self.demand), 1) if self.limit_bytes else 0

    @classmethod
    def of(
        cls, node: NodeRecord, position: int, memory: MemoryLessons = NOTHING_LEARNED, *, num_sharers: int = 0
    ) -> "DeviceSlot":
        """Return the node's device at a position of its list. memory: what the job has learned of its memory.

        num_sharers: devices of all nodes that share the memory and the cores of the node's machine; 0: the node's own.
        """
        device, num_sharers = node.devices[position], max(num_sharers, len(node.devices))
        limits = (device.usable_bytes, memory.room(node.name, node.incarnation, device.index))
        return cls(
            node=node.name,
            incarnation=node.incarnation,
            site=node.site,
            device=replace(device, num_cores=device.num_cores / num_sharers),
            host_memory_bytes=node.memory_bytes // num_sharers,
            arithmetic_class=device.arithmetic_class or node.arithmetic_class,
            is_only_one=len(node.devices) == 1,
            host=node.host,
            limit_bytes=min(filter(None, limits), default=0),
            layer_folder=node.layer_folder,
            demand=memory.demand(device),
        )


Kind = tuple[str, str, str, float, int, int, str, tuple[float, ...]]
"""(site, node if it is one of its kind, device kind, speed, room, host bytes, arithmetic class, measured)"""


class Kinds:
    """Groups seats that can change places without affecting a plan."""

    def __init__(
        self,
        pace_of: Callable[[DeviceSlot], tuple[float, ...]] | None = None,
        *,
        distinct_nodes: frozenset[str] = frozenset(),
        blocked: frozenset[tuple[str, str]] = frozenset(),
        entrance: Callable[[str], str] = lambda _: "",
    ) -> None:
        """pace_of: measured times of a device, beyond its speed. distinct_nodes: nodes whose links are measured.

        blocked: pairs of nodes that cannot talk. entrance: what sets a node apart by the relays of its links.
        """
        self._entrance = entrance
        self._pace_of = pace_of
        self._distinct_nodes = distinct_nodes
        self._blocked: dict[str, str] = {}
        for name in sorted({node for pair in blocked for node in pair}):
            others = {other for pair in blocked if name in pair for other in pair if other != name or len({*pair}) == 1}
            self._blocked[name] = "!" + ",".join(sorted(others))

    def of(self, slot: DeviceSlot) -> Kind:
        """Return the kind of a seat. Seats of one kind are equal in everything that matters to a plan."""
        device = slot.device
        is_alike = slot.is_only_one and slot.node not in self._distinct_nodes
        return (
            slot.site,
            self._blocked.get(slot.node, "") + self._entrance(slot.node) if is_alike else slot.node,
            device.kind,
            self.speed(slot),
            slot.room_bytes,
            slot.host_memory_bytes,
            slot.arithmetic_class,
            self._pace_of(slot) if self._pace_of else (),
        )

    def speed(self, slot: DeviceSlot) -> float:
        """Return the relative speed, from measured times if they exist."""
        return 1.0 / sum(self._pace_of(slot)[::2]) if self._pace_of else slot.device.speed
