"""Records of memory that ran out on a device: what a worker reports, and what a job's plans keep of it."""

import math
from dataclasses import dataclass
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
