"""Measurements in etcd: a job's progress and goodput, times of layers, ways between nodes.

They are records as in records.py. Estimates replace a missing one.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

MOST_NEEDED: Final = 16
"""Times its device's memory that a process may need by a report that is believed. A plan gives a stage less than the
device has, and no estimate is so wrong; beyond it the report says nothing of any size.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShortage:
    """An allocation that a device refused, as torch describes it; 0: it does not say."""

    wanted_bytes: int = 0
    """Size of the refused allocation."""
    allocated_bytes: int = 0
    """Bytes of the tensors that the process had on the device."""
    allowed_bytes: int = 0
    """Memory that the process may use: the device's, or its share of it."""

    @property
    def needed_bytes(self) -> int:
        """Return the least memory with which this allocation would have succeeded; 0: not known."""
        return self.wanted_bytes + self.allocated_bytes if self.allocated_bytes else 0

    def believed(self, memory_bytes: int) -> "MemoryShortage":
        """Return what to believe of the report; impossible sizes are unknown. memory_bytes: the device's; 0: unknown.

        What one device reports counts for all of its model, so a wrong size would keep a job from all of them.
        """
        is_impossible = memory_bytes and self.needed_bytes > MOST_NEEDED * memory_bytes
        return MemoryShortage() if is_impossible else self


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShortage:
    """The consequence for a job's next plans after its worker ran out of memory on a device."""

    node: str
    node_incarnation: str
    device_index: int
    kind: str = ""
    model: str = ""
    """Kind and model of the device: `demand` counts for all devices of this model."""
    room_bytes: int = 0
    """Maximum predicted bytes that plans put on this device."""
    demand: float = 1.0
    """Factor on the predicted bytes of every stage on such devices."""


def is_possible(shortage: DeviceShortage) -> bool:
    """Return whether a shortage is possible: plans give the device some memory, and predictions are only raised."""
    return 1 <= shortage.demand < math.inf and shortage.room_bytes > 0


LEAST_SPEED: Final = 1e-9
MOST_SPEED: Final = 1e12
"""Limits of a device's relative speed: plans divide by it, and no computed time may overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingRecord:
    """`jobs/<job>/reading/<node>`, leased by its node, which is reading the job's data, or its model's folder."""

    num_bytes: int
    total_bytes: int
    url: str = ""
    """The model's folder; empty: the data is read, to verify it."""
    silent_s: float = 0.0
    """Time since the last byte came, in steps of a few seconds; 0: bytes are coming."""


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
    evaluations: tuple[tuple[int, float], ...] = ()
    """(batch, loss on held-out text) since the last record, at most 256, or else the last one before."""
    gradient_norm: float | None = None
    """Of `batch`, before clipping; None: of an earlier release."""
    final_eval_loss: float | None = None
    """Loss on held-out text after the update of `batch`, if that is the job's last one."""
    updated_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCuts:
    """What befell the link of two workers of a plan."""

    ends: tuple[int, int]
    """Their positions, rising."""
    num_cut: int
    num_back: int
    """Times that it went on; fewer than `num_cut`: it is cut now."""
    cut_s: float
    """Seconds for which it was cut, of the times after which it went on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputRecord:
    """`jobs/<job>/goodput/<generation>/<position>`, leased by its node: how a worker's seconds were spent."""

    node: str
    incarnation: str
    """Incarnation of the worker's process. Only its newest record counts: its seconds go on from plan to plan."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by class, since it began to serve the job."""
    earlier: dict[str, float] = field(default_factory=dict)
    """Those that its record of the plan before had: the rest is of this plan."""
    recent: dict[str, float] = field(default_factory=dict)
    """Seconds by class in the last minute, of this plan only."""
    typical_s: float = 0.0
    num_replayed: int = 0
    num_resumed: int = 0
    trouble: str = ""
    """Reason why its last periodic snapshot was not written, or the present interval of snapshots."""
    waits_for: str = ""
    """Neighbour, with its address, for which the worker stands still; empty: the worker is working."""
    awaited_worker: int = -1
    """Position of that neighbour in the plan; -1: the worker is working, or waits for no neighbour."""
    cuts: tuple[LinkCuts, ...] = ()
    """Its links that have been cut under this plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpeed:
    """Relative speeds of a device's matrix products, by dtype, as in Device; 0: not measured."""

    float32: float = 0.0
    bfloat16: float = 0.0
    memory_gb_s: float = 0.0
    """As in Device: measured of a card alone. On a CPU it is a part of the speeds."""


def is_speed(value: float) -> bool:
    """Return whether a device may have this relative speed, or this memory_gb_s, or number of cores."""
    return LEAST_SPEED <= value <= MOST_SPEED


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """Times of one layer on a device, as medians of the newest samples."""

    forward_s: float
    """Forward of one microbatch."""
    backward_s: float
    """Backward of one microbatch, with its recomputation."""
    update_s: float = 0.0
    """One update."""
    spread: float = 0.0
    """Relative spread of the samples of a microbatch: half of the range of the middle ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRecord:
    """`jobs/<job>/profile/<node>/<device>`, leased by its node: the measurements of a device's worker."""

    generation: int
    """Generation of the plan under which it was measured."""
    layers: dict[str, LayerTime] = field(default_factory=dict)
    """Times by kind of layer, for the kinds that the worker has: `embed`, `block`, `head`. A block of which the
    backward computes a part again has its own kind: `block+attention`, `block+block`.
    """
    peak_bytes: int = 0
    """Maximum allocation on a CUDA device; 0: not known."""
    num_samples: int = 0
    """Number of timed microbatches."""
    replan_s: float = 0.0
    """Seconds that the last planned change cost this worker; 0: none yet."""
    predicted_bytes: int = 0
    """The plan's estimate of `peak_bytes`; 0: not known."""
    demand: float = 1.0
    """Factor by which peaks of the job exceeded their estimates on this device, for plans to come; older ones fade."""
    device_kind: str = ""
    device_model: str = ""
    """Kind and model of the device: `demand` counts for all devices of this model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProbe:
    """A node's measurement of the way to another one."""

    round_trip_s: float
    bytes_per_s: float
    """Bytes a second from the other node to this one."""
    loss: float = 0.0
    """Share of the packets from the other node that is lost; 0: hardly any, or unknown."""
    via: str = ""
    """host:port of the relay through which it was measured; empty: directly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRecord:
    """`~/probes/<node>`, leased: a node's measurements of the ways to its peers."""

    incarnation: str
    peers: dict[str, LinkProbe] = field(default_factory=dict)
    """Measurements by the name of the other node."""


class Port(StrEnum):
    """The port of a node that was dialled."""

    DAEMON = "daemon"
    WORKER = "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachFact:
    """The result of dialling one port of another node, or another port of the node's own machine."""

    to: str
    """Name of the node that was dialled."""
    to_incarnation: str
    port: Port
    address: str
    """The dialled address as host:port."""
    device_index: int = -1
    """Device whose worker listens there; -1: the daemon listens there."""
    reason: str = ""
    """Reason why it does not answer; empty: it answers, with TLS and as the expected process."""
    measured_at: float = 0.0
    """Seconds since the epoch by the clock of the dialling node, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachRecord:
    """`reach/<node>`, leased by its node: which ports of other nodes it does not reach, each once."""

    incarnation: str
    """Incarnation of the dialling node. Facts of another process do not count."""
    facts: tuple[ReachFact, ...] = ()
