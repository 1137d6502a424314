"""Names of what a node's store holds. Pure."""

from dataclasses import dataclass
from pathlib import Path

JOURNAL = "journal"
"""Counts as a layer wherever files are named: the losses so far, kept by the last stage."""


@dataclass(frozen=True, slots=True, order=True)
class StateKey:
    """One layer of one boundary."""

    job: str
    timeline: int
    boundary: int
    layer: str

    def __str__(self) -> str:
        return f"{self.layer} at boundary {self.boundary} of {self.job}, timeline {self.timeline}"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A complete, verified file of the store."""

    path: Path
    size_bytes: int
    checksum: str
    """Of its content, see stages/state_file.py."""
    generation: int = 0
    """Of the plan under which it was written or fetched."""
    uid: str = ""
    """Of the submission that it belongs to: a job of the same name after it has no use for it."""
