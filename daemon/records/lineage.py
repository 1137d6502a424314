"""Knows which boundaries are a run's own past, over all its rollbacks. Pure."""

from dataclasses import dataclass


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
