"""The leader writes down, once a minute, what users have used. Pure."""

from headway.daemon.coordination.cluster_view import ClusterView
from headway.daemon.coordination.commands import Transaction
from headway.daemon.record_format import encode
from headway.daemon.record_keys import Keys


def write_usage(view: ClusterView, *, now: float, written_at: float) -> Transaction | None:
    """`usage`, if it is time. It concerns no job."""
    due_at = view.usage.due_at()
    if due_at is None or now < due_at:
        return None
    return Transaction(
        job="",
        reason="what users have used",
        compare={Keys.USAGE: view.revision_of(Keys.USAGE)},
        puts={Keys.USAGE: encode(view.usage.record(now=now, written_at=written_at))},
    )
