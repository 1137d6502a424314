"""Detects that etcd's history went back: its answer cannot follow its earlier answers. Pure.

etcd may have been restored from an older backup, or replaced by an empty one, while no daemon watched.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HistoryMark:
    """The progress of an etcd history."""

    revision: int = 0
    """Last revision; 0: nothing was seen yet."""
    cluster_id: int = 0
    raft_term: int = 0


def went_back(
    seen: HistoryMark, found: HistoryMark, *, known: Mapping[str, int], listed: Mapping[str, int]
) -> str | None:
    """Return why `found` cannot follow `seen`, or None if it can.

    seen: the mark before the listing was requested; found: the listing's own mark. known: for each key, the revision of
    its last known change or deletion. listed: for each key, its revision in the listing.
    """
    if seen.revision == 0:
        return None
    if found.cluster_id != seen.cluster_id:
        return f"cluster {found.cluster_id:x} answers in place of {seen.cluster_id:x}"
    if found.revision < seen.revision:
        return f"revision {found.revision} after {seen.revision}"
    if found.raft_term < seen.raft_term:
        return f"raft term {found.raft_term} after {seen.raft_term}"
    for key, revision in listed.items():
        if revision < known.get(key, 0) <= found.revision:
            return f"{key} is of revision {revision} after {known[key]}"
    return None
