"""Knows how long a device may need for work that its worker has launched. Pure.

Operations on a CUDA device are launched and run later, a few ahead of it. A worker that waits for the device, for
example to free memory, waits for all of them: at most as many microbatches as may be ahead, and an update.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from headway.proto.control_pb2 import LayerSeconds, StageAssignment
from headway.stages.spec import timed_kind

_TYPE: Final = re.compile(r" \w+")
"""What a kind says of a block's type."""


@dataclass(frozen=True, slots=True)
class LaunchedWork:
    """The most that a worker of a stage may have launched."""

    kinds: tuple[str, ...]
    """Kind of each of its layers, as their times are known."""
    num_ahead: int
    """Most operations that it may have launched."""

    @classmethod
    def of(cls, stage: StageAssignment, *, num_ahead: int) -> "LaunchedWork":
        """Return the work of a stage that is about to start."""
        return cls(tuple(timed_kind(layer, stage.recompute) for layer in stage.layers), num_ahead)

    def seconds(self, timed: Mapping[str, LayerSeconds]) -> float:
        """Return its seconds, from the measured times of each kind of layer; 0: one is not timed yet."""
        seconds: dict[str, float] = {}
        for kind, layer in timed.items():
            # Of blocks of several types, the slowest counts for each: a plan's stage does not say which are which.
            plain = _TYPE.sub("", kind)
            most = self.num_ahead * (layer.forward_s + layer.backward_s) + layer.update_s
            seconds[plain] = max(seconds.get(plain, 0.0), most)
        return sum(seconds[kind] for kind in self.kinds) if seconds.keys() >= set(self.kinds) else 0.0
