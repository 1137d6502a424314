"""What is measured, as it lies in etcd: a job's progress and goodput, times of layers, ways between nodes.

Records as in records.py; where one is missing, estimates take its place.
"""

from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingRecord:
    """`jobs/<job>/reading/<node>`, leased by its node: it reads the job's data, to verify it."""

    num_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressRecord:
    """`jobs/<job>/progress`: at most once a second."""

    generation: int
    batch: int
    """Last batch whose loss is known."""
    loss: float
    tokens_per_second: float
    recent: tuple[tuple[int, float], ...] = ()
    """(batch, loss) since the last record, at most 256; provisional until a boundary is written."""
    updated_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputRecord:
    """`jobs/<job>/goodput/<generation>/<position>`, leased by its node: what a worker's seconds went to."""

    node: str
    incarnation: str
    """Of the worker's process. Only its newest record counts: its seconds go on from plan to plan."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By class, since it began to serve the job."""
    recent: dict[str, float] = field(default_factory=dict)
    """The same for the last minute, of this plan only."""
    typical_s: float = 0.0
    num_replayed: int = 0
    num_resumed: int = 0
    trouble: str = ""
    """Why its last periodic snapshot was not written, or how far apart they are now."""
    waits_for: str = ""
    """The neighbour, with its address, that it has waited for so long that it stands still; empty: it works."""
    awaited_worker: int = -1
    """The position in the plan of that neighbour; -1: it works, or waits for no neighbour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """What one layer takes on a device, as medians of the newest samples."""

    forward_s: float
    """One microbatch."""
    backward_s: float
    """One microbatch, with what is computed again."""
    update_s: float = 0.0
    """One update."""
    spread: float = 0.0
    """By how much the samples of a microbatch differ, relatively: half of what their middle ones span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRecord:
    """`jobs/<job>/profile/<node>/<device>`, leased by its node: what the worker of a device has measured."""

    generation: int
    """Of the plan under which it was measured."""
    layers: dict[str, LayerTime] = field(default_factory=dict)
    """By kind of layer: `embed`, `block` or `head`, as far as it has some."""
    peak_bytes: int = 0
    """Most that was allocated on a CUDA device; 0: not known."""
    num_samples: int = 0
    """Microbatches that were timed."""
    replan_s: float = 0.0
    """What the last planned change took of this worker; 0: none yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProbe:
    """What a node has measured of the way to another one."""

    round_trip_s: float
    bytes_per_s: float
    """From the other one to this one."""
    loss: float = 0.0
    """Of the packets from the other one, the part that is lost; 0: hardly any, or nobody counts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRecord:
    """`probes/<node>`, leased: the ways from a node to its peers, as it has measured them."""

    incarnation: str
    peers: dict[str, LinkProbe] = field(default_factory=dict)
    """By the name of the other node."""


class Port(StrEnum):
    """Which port of a node was dialled."""

    DAEMON = "daemon"
    WORKER = "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachFact:
    """What a node found when it dialled one port of another node, or another port of its own machine."""

    to: str
    """The name of the node that was dialled."""
    to_incarnation: str
    port: Port
    address: str
    """host:port that was dialled."""
    device_index: int = -1
    """The device whose worker listens there; -1: the daemon does."""
    reason: str = ""
    """Why it does not answer; empty: it answers, with TLS and as the process that is meant."""
    measured_at: float = 0.0
    """Seconds since the epoch by the clock of the node that dialled, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachRecord:
    """`reach/<node>`, leased by its node: which ports of other nodes it reaches. At most one fact for each port."""

    incarnation: str
    """Of the node that dialled: what another process found does not count."""
    facts: tuple[ReachFact, ...] = ()
