"""Lists records in etcd that cannot be read, and jobs that it has lost. Pure."""

from headway.daemon.records.ailments import VANISHED
from headway.daemon.records.keys import Keys
from headway.daemon.terminal import printable_name
from headway.daemon.view.cluster_view import ClusterView

MAX_LINES = 20


def vanished_jobs(view: ClusterView) -> dict[str, str]:
    """Return the jobs that etcd has lost, with what their nodes say of them."""
    told = [item for node in view.nodes.values() for item in node.ailments.items()]
    return {what.removeprefix(VANISHED): text for what, text in sorted(told) if what.startswith(VANISHED)}


def set_aside_lines(view: ClusterView, *, job: str = "") -> list[str]:
    """Return a line for each record that is set aside. job: only the records of this job."""
    prefix = Keys.job(job) if job else ""
    keys = sorted(key for key in view.unreadable if key.startswith(prefix))
    lines = [
        f"set aside: {printable_name(key)}: {printable_name(view.unreadable[key].reason)}" for key in keys[:MAX_LINES]
    ]
    return lines + ([f"set aside: {len(keys) - MAX_LINES} more"] if len(keys) > MAX_LINES else [])
