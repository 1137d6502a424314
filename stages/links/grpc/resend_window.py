"""Holds the sent and not yet acknowledged items of one direction of a link, to resend them after a break.

Items are numbered from 0 and held, not copied, until the peer has acknowledged them. No socket, no thread, no clock.
"""

from collections import deque
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class ResendWindow(Generic[ItemT]):
    """Numbers rise: acknowledged ≤ next to write ≤ next to push. All items from the first to the last are held."""

    def __init__(self) -> None:
        self._held: deque[tuple[ItemT, int]] = deque()
        self._first_held = 0
        self._next_to_write = 0
        self._next_to_push = 0
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all held items."""
        return self._num_bytes

    @property
    def next_to_push(self) -> int:
        """Return the number of the next pushed item. Changed by `push` alone."""
        return self._next_to_push

    @property
    def next_to_write(self) -> int:
        """Return the number of the next item to write, whether it exists yet or not."""
        return self._next_to_write

    def push(self, item: ItemT, *, num_bytes: int) -> None:
        """Hold one more item."""
        self._held.append((item, num_bytes))
        self._next_to_push += 1
        self._num_bytes += num_bytes

    def pop_unwritten(self) -> ItemT | None:
        """Return the next item to write, which stays held; None when all have been written since the last break."""
        position = self._next_to_write - self._first_held
        if position == len(self._held):
            return None
        self._next_to_write += 1
        return self._held[position][0]

    def acknowledge(self, next_expected: int) -> None:
        """Note that the peer has all items before `next_expected`. Raises ValueError when that is impossible."""
        if next_expected > self._next_to_write:
            raise ValueError(f"acknowledgement {next_expected} of frames not yet sent")
        if next_expected < self._first_held:
            raise ValueError(f"acknowledgement {next_expected} after {self._first_held}")
        while self._first_held < next_expected:
            self._num_bytes -= self._held.popleft()[1]
            self._first_held += 1

    def resume(self, next_expected: int) -> None:
        """Begin a new stream: write again from `next_expected` on. Raises ValueError like `acknowledge`."""
        self.acknowledge(next_expected)
        self._next_to_write = next_expected

    def clear(self) -> None:
        """Drop all items: nothing is written any more, and nothing pushed."""
        self._first_held = self._next_to_write
        self._held.clear()
        self._num_bytes = 0
