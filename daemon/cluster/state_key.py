"""Names the files of a node's store. Pure."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headway.stages.state.file_digest import FileDigest

LEAST_BYTES_PER_S: Final = 20e6
"""Minimum rate of disks and links that deadlines expect."""
SLOWEST_LINE_BYTES_PER_S: Final = 125e3
"""1 Mbit/s. A slower probe makes no deadline longer: a record of 1 byte/s would make it endless."""


def transfer_s(num_bytes: float, *, line_bytes_per_s: float = LEAST_BYTES_PER_S) -> float:
    """Return the time to write, read or fetch bytes at the minimum rate, or at a measured rate if that is lower."""
    return num_bytes / min(max(line_bytes_per_s, SLOWEST_LINE_BYTES_PER_S), LEAST_BYTES_PER_S)


JOURNAL = "journal"
"""Name of the journal, which counts as a layer wherever files are named: the losses so far, kept by the last stage."""

CARRIED_PART = "origin"
"""Name of the part with the files that an export carries over from a model's folder; no layer is called that."""
BASE_PREFIX = "base:"
"""Before the name of a layer: the source of its frozen weights, beside which adapters are trained."""
ORIGIN_PLACE = (0, 0)
"""Timeline and boundary of the parts of a model's folder: no run has timeline 0."""


@dataclass(frozen=True, slots=True, order=True)
class StateKey:
    """One layer of one boundary."""

    job: str
    timeline: int
    boundary: int
    layer: str

    @property
    def is_of_origin(self) -> bool:
        """Return whether it is a part of the folder with the job's initial weights."""
        return (self.timeline, self.boundary) == ORIGIN_PLACE

    def __str__(self) -> str:
        return f"{self.layer} at boundary {self.boundary} of {self.job}, timeline {self.timeline}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile(FileDigest):
    """A complete, verified file of the store."""

    path: Path
    generation: int = 0
    """Generation of the plan under which it was written or fetched."""
    uid: str = ""
    """Submission to which it belongs: a later job of its name cannot use it."""
