"""Reads a nodes file: machines and links that a cluster might have, as TOML, for a plan before any is rented. Pure.

Missing memory counts as enough; missing links are as the planner assumes them. Sizes are in GB of 10⁹ bytes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import combinations
from typing import Final, Literal

from headway.daemon.base.addresses import NODE_NAME_RULE, is_node_name
from headway.daemon.base.errors import ConfigError
from headway.daemon.cluster.records import Device, NodeRecord
from headway.daemon.jobs.rules import MAX_TEXT
from headway.daemon.jobs.typed_toml import nearest, read_typed
from headway.daemon.plan.card_rates import memory_gb_s_of
from headway.daemon.plan.connections import LinkAssumptions
from headway.daemon.plan.devices import DeviceSlot, cuda_reserve
from headway.daemon.plan.layer_costs import CPU_FLOPS_PER_THREAD, CUDA_FLOPS
from headway.stages.spec import TrainSpec

GB: Final = 10**9
MOST_NODES: Final = 10_000
MOST_DEVICES: Final = 1024
"""Maximum number of devices of one machine."""
MOST_IN_ALL: Final = 100_000
"""Maximum number of devices of all machines."""
RATES: Final = ("tflops", "float32_tflops", "bfloat16_tflops")
MOST_NAMED: Final = 4
"""Maximum number of models that an assumption names."""
LEAST: Final = 1e-6
UNNAMED_CAPABILITY: Final = "8.6"
"""Of a card that the file says nothing about: the least of those that compute bfloat16 and lack some kernels."""
MOST: Final = 1e9
"""Maximum of every number, so that no computed result overflows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEntry:
    """`[[nodes.devices]]`: one or several equal devices of a node."""

    kind: Literal["cpu", "cuda"] = "cpu"
    model: str = ""
    """Name for people, and part of the arithmetic class: equal devices give equal bits."""
    count: int = 1
    memory_gb: float = 0.0
    """Memory of each device; 0: enough."""
    capability: float | None = None
    """Compute capability of a CUDA device; None: it computes bfloat16, and has no kernel that only large cards have."""
    reserve_gib: float | None = None
    """Part of it that plans leave free, as `cuda_reserve_gib` of a daemon; None: a daemon's default, on a CPU none."""
    speed: float = 0.0
    """Speed relative to the device of the estimates; 0: 1.0, or derived from `tflops`."""
    tflops: float = 0.0
    """10¹² operations a second of its matrix products in the job's dtype; 0: `speed` gives the rate."""
    float32_tflops: float = 0.0
    """The same in float32, whatever the job's dtype; 0: as fast, relative to the device of the estimates, as in
    bfloat16.
    """
    bfloat16_tflops: float = 0.0
    """The same in bfloat16; 0: as fast, relatively, as in float32."""
    memory_gb_s: float = 0.0
    """10⁹ bytes a second of its memory; 0: as its model's data sheet says. If that is not known, elementwise work costs
    no time of its own.
    """
    cores: float = 0.0
    """Cores of a CPU's machine, which its devices share; 0: as many as the job's threads take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEntry:
    """`[[nodes]]`: one machine, or several equal ones."""

    name: str
    """Name; with a count, the nodes are `name-1`, `name-2` …"""
    count: int = 1
    site: str = "default"
    """Nodes of one site have a fast network between them."""
    site_is_private: bool = False
    """True if the site's network is private, as for a daemon: its CPU workers may then have plain links."""
    memory_gb: float = 0.0
    """Memory of the host; 0: enough."""
    devices: tuple[DeviceEntry, ...] = (DeviceEntry(),)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEntry:
    """`[[links]]`: the links between the nodes of two sites, or inside one."""

    sites: tuple[str, str]
    mbit_s: float
    """10⁶ bits a second, each way."""
    round_trip_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesFile:
    """A cluster that may be rented."""

    nodes: tuple[NodeEntry, ...]
    links: tuple[LinkEntry, ...] = ()

    def records(self, train: TrainSpec) -> tuple[NodeRecord, ...]:
        """Return the nodes as etcd would have them, for a job of this kind: `tflops` refer to its dtype."""
        return tuple(_record(entry, name, train) for entry in self.nodes for name in _names(entry))

    def link_assumptions(self) -> LinkAssumptions:
        """Return the links that the file names, and assumptions for all others."""
        known = tuple((*_pair(*link.sites), link.round_trip_ms / 1e3, link.mbit_s * 1e6 / 8) for link in self.links)
        return SiteLinks(known=known)

    def assumed(self, train: TrainSpec) -> list[str]:
        """Return what a plan of this job assumes of cards and links because the file does not say it, with the keys."""
        told, links = [], LinkAssumptions()
        cards = [device for node in self.nodes for device in node.devices if device.kind == "cuda"]
        if names := _models([card for card in cards if not any(getattr(card, key) for key in ("speed", *RATES))]):
            tflops = f"{CUDA_FLOPS[train.dtype] / 1e12:g} TFLOPS"
            told.append(f"assumes {tflops} of {names} ({train.dtype}_tflops)")
        if names := _models([card for card in cards if not card.memory_gb_s and not memory_gb_s_of(card.model)]):
            told.append(f"takes no time for elementwise work on {names} (memory_gb_s)")
        known = {_pair(*link.sites) for link in self.links}
        machines: Counter[str] = Counter()
        for node in self.nodes:
            machines[node.site] += node.count
        if any(number > 1 and (site, site) not in known for site, number in machines.items()):
            told.append(f"assumes {_link(links.site_bytes_per_s, links.site_round_trip_s)} inside a site ([[links]])")
        if any(pair not in known for pair in combinations(sorted(machines), 2)):
            told.append(f"assumes {_link(links.far_bytes_per_s, links.far_round_trip_s)} between sites ([[links]])")
        return told


@dataclass(frozen=True, kw_only=True)
class SiteLinks(LinkAssumptions):
    """Links known by the sites of their ends."""

    known: tuple[tuple[str, str, float, float], ...] = field(default=())
    """Each entry is (site, the same or a later site, round trip in seconds, bytes a second)."""

    @cached_property
    def _by_sites(self) -> dict[tuple[str, str], tuple[float, float]]:
        return {(one, other): (round_trip_s, bytes_per_s) for one, other, round_trip_s, bytes_per_s in self.known}

    def round_trip_s(self, one: DeviceSlot, other: DeviceSlot) -> float:
        """Return the round trip between two devices."""
        found = self._between(one, other)
        return LinkAssumptions.round_trip_s(self, one, other) if found is None else found[0]

    def bytes_per_s(self, one: DeviceSlot, other: DeviceSlot, *, by_grpc: bool = False) -> float:
        """Return the bandwidth between two devices, each way."""
        found = self._between(one, other)
        return LinkAssumptions.bytes_per_s(self, one, other, by_grpc=by_grpc) if found is None else found[1]

    def _between(self, one: DeviceSlot, other: DeviceSlot) -> tuple[float, float] | None:
        is_inside = one.machine == other.machine
        return None if is_inside else self._by_sites.get(_pair(one.site, other.site))


def parse_nodes(text: str, source: str) -> NodesFile:
    """Return the nodes that TOML text describes. Raises ConfigError at `source:nodes[0].key`, one line."""
    found: NodesFile = read_typed(text, NodesFile, source)
    _check_nodes(found, source)
    _check_links(found, source)
    return found


def _names(entry: NodeEntry) -> tuple[str, ...]:
    return (entry.name,) if entry.count == 1 else tuple(f"{entry.name}-{index + 1}" for index in range(entry.count))


def _models(devices: Sequence[DeviceEntry]) -> str:
    names = list(dict.fromkeys(device.model or "cards without `model`" for device in devices))
    return ", ".join(names[:MOST_NAMED]) + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")


def _link(bytes_per_s: float, round_trip_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e6:g} Mbit/s and {round_trip_s * 1e3:g} ms"


def _pair(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one <= other else (other, one)


def _record(entry: NodeEntry, name: str, train: TrainSpec) -> NodeRecord:
    each = [device for device in entry.devices for _ in range(device.count)]
    devices = tuple(
        Device(
            kind=device.kind,
            index=index,
            model=device.model,
            capability=_capability(device),
            flash3="any" if _capability(device).startswith("9.") else "",  # a package can be installed
            memory_bytes=round(device.memory_gb * GB),
            reserve_bytes=_reserve(device),
            speed=_speed(device, train, "float32"),
            bfloat16_speed=_speed(device, train, "bfloat16"),
            memory_gb_s=device.memory_gb_s or memory_gb_s_of(device.model) * (device.kind == "cuda"),
            num_cores=0.0 if device.kind == "cuda" else device.cores or float(train.threads * len(each)),
            arithmetic_class=_class(device),
        )
        for index, device in enumerate(each)
    )
    return NodeRecord(
        name=name,
        incarnation=f"preview-{name}",
        address="",
        host=name,
        site=entry.site,
        site_is_private=entry.site_is_private,
        devices=devices,
        memory_bytes=round(entry.memory_gb * GB),
        arithmetic_class=" and ".join(sorted(set(map(_class, entry.devices)))),
        allow_plugins=("any",),
    )


def _capability(device: DeviceEntry) -> str:
    if device.kind != "cuda":
        return ""
    return UNNAMED_CAPABILITY if device.capability is None else f"{device.capability:.1f}"


def _reserve(device: DeviceEntry) -> int:
    if device.kind != "cuda" and device.reserve_gib is None:
        return 0
    return cuda_reserve(round(device.memory_gb * GB), device.reserve_gib)


def _class(device: DeviceEntry) -> str:
    return device.model or f"any {device.kind}"


def _speed(device: DeviceEntry, train: TrainSpec, dtype: str) -> float:
    """Return the speed of a dtype's products: from its own rate, from the other dtype's, or as `speed` says."""
    rates = {"float32": device.float32_tflops, "bfloat16": device.bfloat16_tflops}
    if not any(rates.values()):
        rates[train.dtype] = device.tflops
    known = dtype if rates[dtype] else next((name for name, rate in rates.items() if rate), "")
    if not known:
        return device.speed or 1.0
    reference = CUDA_FLOPS[known] if device.kind == "cuda" else CPU_FLOPS_PER_THREAD[known] * train.threads
    return rates[known] * 1e12 / reference


def _check_nodes(found: NodesFile, source: str) -> None:
    if not found.nodes:
        raise ConfigError("has no node; describe one under [[nodes]]", f"{source}:nodes")
    names: dict[str, int] = {}
    num_nodes = num_devices = 0
    for index, entry in enumerate(found.nodes):
        place = f"{source}:nodes[{index}]"
        if not is_node_name(entry.name):
            raise ConfigError(f"{entry.name[:60]!r} is not a node name, which is {NODE_NAME_RULE}", f"{place}.name")
        if not 1 <= len(entry.site) <= MAX_TEXT or not entry.site.isprintable():
            raise ConfigError(f"a site's name has 1 to {MAX_TEXT} printable characters", f"{place}.site")
        _check_numbers(entry, place)
        if not entry.devices:
            raise ConfigError("a node without devices computes nothing; leave it out", f"{place}.devices")
        num_nodes, num_devices = num_nodes + entry.count, num_devices + entry.count * _check_devices(entry, place)
        for number, most, what in ((num_nodes, MOST_NODES, "nodes"), (num_devices, MOST_IN_ALL, "devices")):
            if number > most:
                raise ConfigError(f"more than {most} {what} in all", f"{place}.count")
        for name in _names(entry):
            if name in names:
                raise ConfigError(f"{name!r} is also a name of nodes[{names[name]}]", f"{place}.name")
            names[name] = index


def _check_devices(entry: NodeEntry, place: str) -> int:
    """Check the devices of a node; return their number."""
    num_devices = 0
    for number, device in enumerate(entry.devices):
        own = f"{place}.devices[{number}]"
        if len(device.model) > MAX_TEXT or not device.model.isprintable():
            raise ConfigError(f"a model has at most {MAX_TEXT} printable characters", f"{own}.model")
        _check_numbers(device, own)
        num_devices += device.count
        if num_devices > MOST_DEVICES:
            what = f"no machine has more than {MOST_DEVICES} devices, this has {num_devices}"
            raise ConfigError(what, f"{own}.count")
        told = [key for key in RATES if getattr(device, key)]
        if device.speed and told:
            raise ConfigError("excludes `speed`; give one of the two", f"{own}.{told[0]}")
        if device.tflops and told[1:]:
            what = "excludes `tflops`, which is for the job's dtype; give one of the two"
            raise ConfigError(what, f"{own}.{told[1]}")
    return num_devices


def _check_links(found: NodesFile, source: str) -> None:
    sites = sorted({entry.site for entry in found.nodes})
    seen: dict[tuple[str, str], int] = {}
    for index, link in enumerate(found.links):
        place = f"{source}:links[{index}]"
        for site in link.sites:
            if site not in sites:
                hint = nearest(site, sites) or f"; there are {', '.join(sites)}"
                raise ConfigError(f"no node is of site {site!r}{hint}", f"{place}.sites")
        pair = _pair(*link.sites)
        if pair in seen:
            raise ConfigError(f"links[{seen[pair]}] is between the same sites", f"{place}.sites")
        seen[pair] = index
        _check_numbers(link, place)


def _check_numbers(entry: NodeEntry | DeviceEntry | LinkEntry, place: str) -> None:
    for item in fields(entry):
        value, least = getattr(entry, item.name), {"count": 1, "mbit_s": LEAST}.get(item.name, 0)
        if not isinstance(value, (int, float)):
            continue
        if value < least:
            raise ConfigError(f"must be at least {least:g}, is {value}", f"{place}.{item.name}")
        if value > MOST:
            raise ConfigError(f"must be at most {MOST:g}, is {value}", f"{place}.{item.name}")
        if item.name in ("speed", "memory_gb_s", *RATES) and 0 < value < LEAST:
            raise ConfigError(f"must be 0 or at least {LEAST:g}, is {value}", f"{place}.{item.name}")
