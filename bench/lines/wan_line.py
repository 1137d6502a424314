"""What a long line does to bytes: serialisation, delay, jitter, loss as TCP shows it, and cuts. Time is given.

Loss is emulated by what TCP makes of it. A segment is lost with a given probability; what lies behind it waits one
round trip for its retransmission, and no connection is faster than Reno is with that loss (Mathis, Semke, Mahdavi and
Ott, 1997): segment / round trip × sqrt(3/2) / sqrt(loss). Nothing passes during a cut; afterwards each connection goes
on at its next retransmission: 0.2, 0.6, 1.4, 3 … seconds after its first loss, one that was dialled meanwhile 1, 3,
7 … seconds after it was dialled.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

SEGMENT_BYTES = 1448
QUEUE_S = 0.1
"""Seconds of data in the queue of the router before the line; then senders wait."""
FIRST_RETRANSMISSION_S = 0.2
FIRST_REDIAL_S = 1.0
"""TCP's own: the timeout of data, and of a dialled connection's first segment; both double."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line between two sites; the same both ways."""

    round_trip_ms: float = 0.0
    mbit_s: float = 10_000.0
    """10⁶ bits a second, each way."""
    jitter_ms: float = 0.0
    """Each piece is late by up to this much more, each way; order is kept."""
    loss: float = 0.0
    """Share of the segments that is lost."""

    @property
    def bytes_per_s(self) -> float:
        """Each way."""
        return self.mbit_s * 1e6 / 8

    @property
    def connection_bytes_per_s(self) -> float:
        """Return the rate of one TCP connection: the line's, or less if segments are lost."""
        if not self.loss or not self.round_trip_ms:
            return self.bytes_per_s
        return min(self.bytes_per_s, reno_bytes_per_s(self.loss, self.round_trip_ms / 1e3))

    @property
    def piece_bytes(self) -> int:
        """Return the bytes taken from a sender at once: a millisecond's worth."""
        return int(min(64 << 10, max(4 << 10, self.bytes_per_s / 1e3)))


def reno_bytes_per_s(loss: float, round_trip_s: float) -> float:
    """The ceiling of one connection, by Mathis and others."""
    return SEGMENT_BYTES / round_trip_s * math.sqrt(1.5 / loss)


@dataclass(slots=True)
class Way:
    """One direction of the line, for all its connections."""

    line: Line
    seed: int = 0
    _free_at: float = 0.0
    _draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def has_room(self, now: float) -> bool:
        """Return whether the router takes more."""
        return self._free_at - now < QUEUE_S

    def room_at(self) -> float:
        """Return when the router takes more."""
        return self._free_at - QUEUE_S

    def put(self, num_bytes: int, now: float, stream: "Stream") -> float:
        """Return when a piece of a connection arrives at the other end."""
        line = self.line
        self._free_at = max(now, self._free_at) + num_bytes / line.bytes_per_s
        stream.free_at = max(now, stream.free_at) + num_bytes / line.connection_bytes_per_s
        arrives = max(self._free_at, stream.free_at) + line.round_trip_ms / 2e3
        if line.jitter_ms:
            arrives += self._draw.random() * line.jitter_ms / 1e3
        if line.loss and self._draw.random() > (1 - line.loss) ** math.ceil(num_bytes / SEGMENT_BYTES):
            arrives += line.round_trip_ms / 1e3
        stream.last_arrival = max(arrives, stream.last_arrival)
        return stream.last_arrival


@dataclass(slots=True)
class Stream:
    """One direction of one connection."""

    free_at: float = 0.0
    last_arrival: float = 0.0


def after_cut(begun_at: float, ended_at: float, first_s: float) -> float:
    """Return when a connection continues that lost its first segment at `begun_at`: at its first try after the cut."""
    return next(at for at in _tries(begun_at, first_s) if at >= ended_at)


def _tries(begun_at: float, first_s: float) -> Iterator[float]:
    wait_s, at = first_s, begun_at
    while True:
        at += wait_s
        yield at
        wait_s = min(2 * wait_s, 60.0)
