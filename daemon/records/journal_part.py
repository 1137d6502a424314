"""A file with old rows of a job's journal, and when a checkpoint closes such a part. Pure.

A job's journal grows with every batch, and moves with the last stage. So a checkpoint puts old rows into a part, once:
`journal/<timeline>-<boundary>` next to the folders of the boundaries. When the checkpoint's record names a part, the
last stage drops the rows of that part. Snapshots then hold only newer rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from headway.daemon.records.lineage import Lineage
from headway.stages.state.file_digest import FileDigest

MIN_ROWS: Final = 1024
"""Fewest rows of a part."""
GROWTH: Final = 256
"""A part has at least 1/256 of all rows before it: 2^31 batches make fewer than 2600 parts."""
MAX_PARTS: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalPart(FileDigest):
    """One part. It begins where the part before it ends, or earlier."""

    timeline: int
    boundary: int
    """Boundary at which it ends."""
    is_inherited: bool = False
    """True if it comes from the job from whose checkpoint this one started: its timeline is that job's."""

    @property
    def place(self) -> tuple[int, int]:
        """The checkpoint that closed the part, as (timeline, boundary)."""
        return self.timeline, self.boundary


def end_of(parts: Sequence[JournalPart]) -> int:
    """Return the boundary up to which parts have the journal's rows."""
    return parts[-1].boundary if parts else 0


def own_parts(parts: Sequence[JournalPart], lineage: Lineage | None) -> tuple[JournalPart, ...]:
    """Return the parts that are a run's own past: a rollback may have left others. None: all are."""
    return tuple(part for part in parts if lineage is None or part.is_inherited or lineage.has(*part.place))


def with_next_part(
    parts: Sequence[JournalPart], journal: FileDigest, *, timeline: int, boundary: int
) -> tuple[JournalPart, ...]:
    """Return a checkpoint's parts: those before it and, if it has enough newer rows, its own journal.

    parts: of the checkpoint before it, as far as they are the run's own past.
    """
    end = end_of(parts)
    if boundary - end < max(MIN_ROWS, end // GROWTH) or len(parts) >= MAX_PARTS:
        return tuple(parts)
    own = JournalPart(timeline=timeline, boundary=boundary, size_bytes=journal.size_bytes, checksum=journal.checksum)
    return (*parts, own)
