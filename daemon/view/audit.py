"""Compares a view with what etcd says has changed: etcd's watches have lost events in some releases."""

from collections.abc import Mapping
from dataclasses import dataclass

from headway.daemon.etcd.client import Changes
from headway.daemon.view.etcd_history import HistoryMark


@dataclass(frozen=True, slots=True)
class Verified:
    """How far a view is known to be right."""

    revision: int = 0
    """The view has every change up to this revision; 0: nothing is verified."""
    asked_at: int = 0
    """Revision of etcd at the last comparison. By the next one the watch must have shown all changes up to it."""


def due(verified: Verified, seen: HistoryMark) -> int:
    """Return the revision at which etcd and the view must be alike. seen: the view's progress."""
    return max(seen.revision, verified.asked_at)


def why_wrong(seen: HistoryMark, found: Changes, *, held: Mapping[str, int]) -> str:
    """Return why the view must be listed again; empty: it has every change that its watch had to show.

    seen: the view's progress. found: the changes since it was last verified, as of the revision that is due. held: the
    keys of the view, with the revision of each.
    """
    if found.cluster_id != seen.cluster_id or found.revision < seen.revision or found.raft_term < seen.raft_term:
        return "its history is another one"
    wrong = sorted(key for key, revision in found.revisions.items() if held.get(key) != revision)
    if wrong:
        return f"the watch has missed {len(wrong)} changes, such as that of {wrong[0]}"
    if found.num_keys != len(held):
        return f"it has {found.num_keys} keys, and the view {len(held)}"
    return ""
