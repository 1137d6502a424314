"""How many frames of one link are in memory here: in the inbox, or with whoever took them from there.

A neighbour that keeps to the schedule never has more than the contract's number under way, but nothing in the protocol
stops it from sending more: an acknowledgement says that a frame has arrived, not that it was used.
"""

import weakref

from torch import Tensor

from headway.stages.frame_contract import FrameContract
from headway.stages.link import Frame

SLACK = 2
"""Times the contract's number: what has just been used may not have been let go of yet."""


class HeldFrames:
    """Counts by the life of each frame's first tensor. `add` belongs to one thread; tensors may die in any."""

    def __init__(self, contract: FrameContract) -> None:
        self.max_frames = SLACK * contract.max_unacknowledged_frames
        self._alive: set[weakref.ref[Tensor]] = set()

    @property
    def num_frames(self) -> int:
        """That have arrived and still exist."""
        return len(self._alive)

    def add(self, frame: Frame) -> None:
        """A frame has arrived. Raises OverflowError where there are too many already."""
        if len(self._alive) >= self.max_frames:
            raise OverflowError(f"more than {self.max_frames} frames that nobody has used")
        if frame.tensors:
            self._alive.add(weakref.ref(frame.tensors[0], self._alive.discard))
