"""The record that is left of a job when its own records are deleted."""

from dataclasses import dataclass

from headway.daemon.records.records import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class RetiredRecord:
    """`retired/<job>`: a job that was removed, or that ended long ago. A later job may take its name."""

    phase: Phase
    """The phase in which it ended."""
    generation: int
    """Highest generation of all jobs of this name. A later job of the name begins above it, so that no number is used
    twice.
    """
    since: float = 0.0
    """Seconds since the epoch at which it ended."""
    retired_at: float = 0.0
    batch: int = -1
    """Last batch whose loss was known; -1: none."""
    loss: float = 0.0
    checkpoint: str = ""
    """Folder of its newest checkpoint, which stays; empty: it has none."""
