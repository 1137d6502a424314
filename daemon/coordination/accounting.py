"""Records once a minute how much each user has used. Only the leader does this. Pure."""

from headway.daemon.coordination.commands import Transaction
from headway.daemon.records.format import encode
from headway.daemon.records.keys import Keys
from headway.daemon.view.cluster_view import ClusterView


def usage_due_at(view: ClusterView) -> float | None:
    """Return when the count must be written; None: no user has jobs, or a newer release counts."""
    garbage = view.unreadable.get(Keys.USAGE)
    return view.usage.due_at() if garbage is None or not garbage.is_newer else None


def write_usage(view: ClusterView, *, now: float, written_at: float) -> Transaction | None:
    """Write `usage` if the count is due, even over an unreadable record. The command belongs to no job."""
    due_at = usage_due_at(view)
    if due_at is None or now < due_at:
        return None
    return Transaction(
        job="",
        reason="what users have used",
        compare={Keys.USAGE: view.revisions.get(Keys.USAGE, 0)},
        puts={Keys.USAGE: encode(view.usage.record(now=now, written_at=written_at))},
    )
