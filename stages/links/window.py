"""What one side of a link holds: sent frames until they are acknowledged, arrived ones until they are used. And the
size of a stream's chunks. No socket, no thread, no clock here.
"""

import weakref
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Generic, TypeVar

from torch import Tensor

from headway.stages.links.frame_codec import CHUNK_BYTES
from headway.stages.links.frame_contract import FrameContract
from headway.stages.links.link import Frame

SLACK = 2
"""Multiple of the contract's number of frames that may be held: a used frame may not be freed yet."""

FIRST_CHUNK_BYTES = 64 << 10
MIN_CHUNK_BYTES = 16 << 10
CHUNK_SECONDS = 0.25
"""Target time of one chunk."""
PACE_BYTES = 1 << 20
"""Bytes written before the size changes: the first bytes go into buffers, at full speed on any line."""

ItemT = TypeVar("ItemT")


class ResendWindow(Generic[ItemT]):
    """The sent and not yet acknowledged items of one direction, to resend them after a break. Items are numbered from 0
    and held, not copied.

    Numbers rise: acknowledged ≤ next to write ≤ next to push. All items from the first to the last are held.
    """

    def __init__(self) -> None:
        self._held: deque[tuple[ItemT, int]] = deque()
        self._first_held = 0
        self.next_to_write = 0
        """Number of the next item to write, whether it exists yet or not."""
        self.next_to_push = 0
        """Number of the next pushed item. Changed by `push` alone."""
        self.num_bytes = 0
        """Bytes of all held items."""

    def push(self, item: ItemT, *, num_bytes: int) -> None:
        """Hold one more item."""
        self._held.append((item, num_bytes))
        self.next_to_push += 1
        self.num_bytes += num_bytes

    def unwritten(self) -> Iterator[ItemT]:
        """Yield the items that have not been written since the last break, in their order."""
        return (item for item, _ in islice(self._held, self.next_to_write - self._first_held, None))

    def pop_unwritten(self) -> ItemT | None:
        """Return the next item to write, which stays held; None when all have been written since the last break."""
        position = self.next_to_write - self._first_held
        if position == len(self._held):
            return None
        self.next_to_write += 1
        return self._held[position][0]

    def acknowledge(self, next_expected: int) -> None:
        """Note that the peer has all items before `next_expected`. Raises ValueError when that is impossible."""
        if next_expected > self.next_to_write:
            raise ValueError(f"acknowledgement {next_expected} of frames not yet sent")
        if next_expected < self._first_held:
            raise ValueError(f"acknowledgement {next_expected} after {self._first_held}")
        while self._first_held < next_expected:
            self.num_bytes -= self._held.popleft()[1]
            self._first_held += 1

    def resume(self, next_expected: int) -> None:
        """Begin a new stream: write again from `next_expected` on. Raises ValueError like `acknowledge`."""
        self.acknowledge(next_expected)
        self.next_to_write = next_expected

    def clear(self) -> None:
        """Drop all items: nothing is written any more, and nothing pushed."""
        self._first_held = self.next_to_write
        self._held.clear()
        self.num_bytes = 0


class HeldFrames:
    """Limits how many frames of one link are in memory here: in the inbox, or with the code that took them.

    A neighbour that keeps to the schedule never has more than the contract's number under way. But the protocol allows
    more: an acknowledgement confirms that a frame has arrived, not that it was used. Frames count by the life of their
    first tensor. `add` belongs to one thread; tensors may die in any.
    """

    def __init__(self, contract: FrameContract) -> None:
        self.max_frames = SLACK * contract.max_unacknowledged_frames
        self._alive: set[weakref.ref[Tensor]] = set()

    def make_sure_of_room(self, num_waiting: int = 0) -> None:
        """Raise OverflowError when there are too many already. num_waiting: frames that are still to arrive."""
        if len(self._alive) + num_waiting >= self.max_frames:
            raise OverflowError(f"more than {self.max_frames} frames that nobody has used")

    def add(self, frame: Frame) -> None:
        """Note an arrived frame. Raises OverflowError when there are too many already."""
        self.make_sure_of_room()
        if frame.tensors:
            self._alive.add(weakref.ref(frame.tensors[0], self._alive.discard))


class WritePace:
    """The chunk size of one stream: on a slow line, a large chunk would leave the peer without a message for too
    long.
    """

    def __init__(self) -> None:
        self.chunk_bytes = FIRST_CHUNK_BYTES
        self._num_bytes = 0
        self._seconds = 0.0

    def wrote(self, num_bytes: int, seconds: float) -> None:
        """Note how long bytes took."""
        self._num_bytes += num_bytes
        self._seconds += seconds
        if self._num_bytes >= PACE_BYTES or self._seconds >= CHUNK_SECONDS:
            wanted = int(CHUNK_SECONDS * self._num_bytes / max(self._seconds, 1e-6))
            self.chunk_bytes = max(MIN_CHUNK_BYTES, min(CHUNK_BYTES, wanted))
            self._num_bytes, self._seconds = 0, 0.0
