"""What a long line is: its rate, its delay and what it loses."""

from dataclasses import dataclass

QUEUE_S = 0.1
"""Seconds of data in the queue of the router before the line; then senders wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line between two sites; the same both ways."""

    round_trip_ms: float = 0.0
    mbit_s: float = 10_000.0
    """10⁶ bits a second, each way."""
    jitter_ms: float = 0.0
    """Each packet is late by up to this much more, each way; order is kept."""
    loss: float = 0.0
    """Share of the packets that is lost."""

    @property
    def bytes_per_s(self) -> float:
        """Each way."""
        return self.mbit_s * 1e6 / 8
