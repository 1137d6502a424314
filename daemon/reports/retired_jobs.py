"""Tells of jobs whose records were deleted."""

from headway.daemon.records.retired_record import RetiredRecord
from headway.daemon.reports.moments import date_and_time


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
