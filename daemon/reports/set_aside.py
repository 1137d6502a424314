"""Tells of records in etcd that cannot be read, of jobs that it has lost, and of jobs that are retired."""

import time

from headway.daemon.records.cluster_records import RetiredRecord
from headway.daemon.records.keys import Keys
from headway.daemon.records.records import VANISHED
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


def date_and_time(at: float) -> str:
    """Return seconds since the epoch as `2026-11-22 17:25:03`."""
    return _written(at, "%Y-%m-%d %H:%M:%S")


def time_of_day(at: float) -> str:
    """Return seconds since the epoch as `17:25:03`."""
    return _written(at, "%H:%M:%S")


def _written(at: float, form: str) -> str:
    try:
        return time.strftime(form, time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return "?"


def sentence_on(job: RetiredRecord) -> str:
    """Return what is known of a retired job, in one line."""
    progress = f" after batch {job.batch} with loss {job.loss:.4f}" if job.batch >= 0 else ""
    checkpoint = f"; its newest checkpoint stays at {job.checkpoint}" if job.checkpoint else ""
    ended, retired = date_and_time(job.since), date_and_time(job.retired_at)
    return f"is retired: {job.phase} at {ended}{progress}, its records were deleted at {retired}{checkpoint}"


def retired_line(num_jobs: int) -> str:
    """Return how many jobs are retired; empty: none is."""
    if not num_jobs:
        return ""
    jobs = "1 retired job is" if num_jobs == 1 else f"{num_jobs} retired jobs are"
    return f"{jobs} not listed; `headway status JOB` tells of one"
