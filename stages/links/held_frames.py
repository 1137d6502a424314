"""Limits how many frames of one link are in memory here: in the inbox, or with the code that took them.

A neighbour that keeps to the schedule never has more than the contract's number under way. But the protocol allows
more: an acknowledgement confirms that a frame has arrived, not that it was used.
"""

import weakref

from torch import Tensor

from headway.stages.links.frame_contract import FrameContract
from headway.stages.links.link import Frame

SLACK = 2
"""Multiple of the contract's number that is allowed: a used frame may not be freed yet."""


class HeldFrames:
    """Counts by the life of each frame's first tensor. `add` belongs to one thread; tensors may die in any."""

    def __init__(self, contract: FrameContract) -> None:
        self.max_frames = SLACK * contract.max_unacknowledged_frames
        self._alive: set[weakref.ref[Tensor]] = set()

    @property
    def num_frames(self) -> int:
        """Return the number of arrived frames that still exist."""
        return len(self._alive)

    def add(self, frame: Frame) -> None:
        """Note an arrived frame. Raises OverflowError when there are too many already."""
        if len(self._alive) >= self.max_frames:
            raise OverflowError(f"more than {self.max_frames} frames that nobody has used")
        if frame.tensors:
            self._alive.add(weakref.ref(frame.tensors[0], self._alive.discard))
