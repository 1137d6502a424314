"""Whether what etcd says now can have come after what it said before. Pure.

etcd may have been restored from an older backup, or replaced by an empty one, while nobody watched.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HistoryMark:
    """How far a history had come."""

    revision: int = 0
    """0: nothing was seen yet."""
    cluster_id: int = 0
    raft_term: int = 0


def went_back(
    seen: HistoryMark, found: HistoryMark, *, known: Mapping[str, int], listed: Mapping[str, int]
) -> str | None:
    """Why `found` is no continuation of `seen`, or None if it is.

    seen: what was known before the listing was asked for, and `found` the listing's own. known: for each key, the
    revision of its last change or deletion that we heard of. listed: the revision that the listing has.
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
