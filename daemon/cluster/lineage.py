"""Knows which boundaries are a run's own past, what stays known of its plans, which parts its journal has, and how a
manifest is sealed. Pure.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

import msgspec

from headway.daemon.cluster.format import encode
from headway.stages.state.file_digest import FileDigest


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """A timeline and those from which it grew: they tell which boundaries are a run's own past.

    A rollback begins a new timeline, so that state from before it and from after it is never mixed.
    """

    timeline: int
    ancestry: tuple[tuple[int, int], ...] = ()
    """(timeline, boundary up to which it counts), oldest first, without the present one."""

    def up_to(self, timeline: int) -> "Lineage":
        """Return the lineage of an earlier timeline of this run's past, as it was then."""
        return Lineage(timeline=timeline, ancestry=tuple(entry for entry in self.ancestry if entry[0] < timeline))

    def has(self, timeline: int, boundary: int) -> bool:
        """Return whether a boundary of a timeline is this run's own past."""
        return timeline == self.timeline or any(
            timeline == ancestor and boundary <= last for ancestor, last in self.ancestry
        )

    def rolled_back(self, to: tuple[int, int], *, timeline: int) -> "Lineage":
        """Return the lineage of a new timeline that begins at a (timeline, boundary) of this one's past."""
        origin, boundary = to
        assert self.has(origin, boundary), f"boundary {boundary} of timeline {origin} is not in the past of {self}"
        older = [entry for entry in self.ancestry if entry[0] < origin]
        return Lineage(timeline=timeline, ancestry=(*older, (origin, boundary)))


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


_HEAD: Final = b'{"format":1,"has_digest":true,'
_SEAL: Final = re.compile(rb',"digest":"([0-9a-f]{64})"}\Z')


def sealed(manifest: dict[str, Any]) -> bytes:
    """Return a manifest's bytes: its format, its fields and the digest."""
    body = _HEAD + encode(manifest)[1:]
    return body[:-1] + b',"digest":"' + sha256(body).hexdigest().encode() + b'"}'


def check_seal(raw: bytes) -> bool:
    """Return whether a manifest has a digest: earlier releases wrote none. Raises ValueError when a byte was altered.

    Head and end both tell of the digest, so one altered byte does not make a manifest look like an earlier one.
    """
    found = _SEAL.search(raw)
    if found is None and not raw.startswith(_HEAD):
        return False
    if found is None or sha256(raw[: found.start()] + b"}").hexdigest().encode() != found[1]:
        raise ValueError("it was altered after it was written: its digest is another")
    return True


MOST_STAGES: Final = 128
"""Stages of a plan that are outlined: no more can be told apart on a screen."""
MOST_HOLDERS: Final = 128
"""Holders that an outline names, over all its stages, and at least one of each."""


class StageOutline(msgspec.Struct, frozen=True, array_like=True):
    """One stage of a plan that was in force, in few bytes: a job keeps hundreds of plans."""

    first: int
    """Index of its first layer among the model's layers."""
    last: int
    holders: tuple[tuple[str, int], ...]
    """Devices that computed it as (node, index), the lead first."""
    num_others: int = 0
    """Further devices, which are not named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutline:
    """What stays known of a plan after it is gone: who held which layers."""

    timeline: int
    boundary: int
    """First batch that it computed."""
    furthest: int
    """First batch that was not begun before it, as in PlanRecord."""
    predicted_batch_seconds: float
    stages: tuple[StageOutline, ...]
    """Empty: it had more than `MOST_STAGES`, or it is long past and had many."""
