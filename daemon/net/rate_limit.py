"""Counts the files that this node sends, and limits the rate of those for which nobody waits.

Copies, checkpoints and exports share one token bucket (`transfer_mbit_s`), so that training keeps the rest of the line.
A file that a worker is to load is never held: until it arrives the whole pipeline stands still.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from threading import Lock
from typing import Final


class TokenBucket:
    """Tokens come at a rate, into a bucket of limited size; a sender that takes more than is there waits for the rest.

    Taken tokens are gone, with or without the wait; waits are served in the order of the requests.
    """

    def __init__(self, *, bytes_per_s: float, burst_bytes: float, now: float) -> None:
        """burst_bytes: bytes that may be sent at once after a pause. now: seconds of the clock of `take`."""
        self._bytes_per_s = bytes_per_s
        self._burst_bytes = burst_bytes
        self._level = burst_bytes
        """Level of the bucket; negative: bytes for which a sender already waits."""
        self._since = now

    def take(self, num_bytes: int, now: float) -> float:
        """Return the seconds to wait before these bytes may go."""
        self._level = min(self._burst_bytes, self._level + (now - self._since) * self._bytes_per_s)
        self._since = now
        self._level -= num_bytes
        return max(0.0, -self._level / self._bytes_per_s)


BYTES_PER_MBIT: Final = 125_000
PIECE_S: Final = 0.1
"""Time for one piece of a limited sender, so that many receivers at once hear from it all the time."""
LEAST_PIECE_BYTES: Final = 16 << 10
MOST_PIECE_BYTES: Final = 1 << 20


class TransferKind(StrEnum):
    """The purpose of a transfer."""

    RECOVERY = "recovery"  # a worker waits for the file
    COPY = "copy"  # a copy for safety, or an export
    CHECKPOINT = "checkpoint"
    DATA = "data"  # tokens: the first stage waits for them


@dataclass(slots=True)
class Sent:
    """All transfers of one kind so far."""

    num_bytes: int = 0
    seconds: float = 0.0
    """Seconds from the first byte to the last of each transfer, summed."""
    held_s: float = 0.0
    """Part of `seconds` for which the limit held them."""


class OutgoingTransfers:
    """The transfers of one daemon. Used by its event loop and by the threads that write checkpoints."""

    def __init__(self, limit_mbit_s: float = 0.0) -> None:
        """limit_mbit_s: rate of all transfers for which nobody waits, together; 0: no limit."""
        rate = limit_mbit_s * BYTES_PER_MBIT
        self._piece_bytes = round(min(MOST_PIECE_BYTES, max(LEAST_PIECE_BYTES, rate * PIECE_S)))
        self._bucket: TokenBucket | None = None
        if limit_mbit_s:
            self._bucket = TokenBucket(bytes_per_s=rate, burst_bytes=self._piece_bytes, now=time.monotonic())
        self._lock = Lock()
        self._sent = {kind: Sent() for kind in TransferKind}

    @property
    def sent(self) -> Mapping[TransferKind, Sent]:
        """Return the counts of all kinds."""
        return self._sent

    async def send(self, kind: TransferKind, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the bytes, counted; if nobody waits for them, at the limited rate and in smaller pieces."""
        is_limited = self._bucket is not None and kind is TransferKind.COPY
        with self._timed(kind):
            async for chunk in chunks:
                for piece in self._pieces(chunk) if is_limited else (chunk,):
                    if is_limited and (wait_s := self._wait_s(kind, len(piece))):
                        await asyncio.sleep(wait_s)
                    yield piece
                    self._sent[kind].num_bytes += len(piece)

    @contextmanager
    def checkpointing(self, is_awaited: Callable[[], bool]) -> Iterator[Callable[[int], None]]:
        """Return, for a thread that writes a file, a function to call with the length of each chunk; it may block.

        is_awaited: whether a stop waits for the checkpoint, so that it is not held.
        """

        kind = TransferKind.CHECKPOINT

        def before(num_bytes: int) -> None:
            if self._bucket is not None and not is_awaited() and (wait_s := self._wait_s(kind, num_bytes)):
                time.sleep(wait_s)
            self._sent[kind].num_bytes += num_bytes

        with self._timed(kind):
            yield before

    @contextmanager
    def _timed(self, kind: TransferKind) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._sent[kind].seconds += time.monotonic() - began

    def _pieces(self, chunk: bytes) -> Iterator[bytes]:
        return (chunk[start : start + self._piece_bytes] for start in range(0, len(chunk), self._piece_bytes))

    def _wait_s(self, kind: TransferKind, num_bytes: int) -> float:
        assert self._bucket is not None, "only with a limit"
        with self._lock:
            wait_s = self._bucket.take(num_bytes, time.monotonic())
            self._sent[kind].held_s += wait_s
        return wait_s
