"""Prunes the folder of jobs' logs: files unused for a month, and the oldest when the folder is too large.

The log of an unfinished job stays, even if the job writes nothing.
"""

import time
from collections.abc import Callable, Set
from functools import partial
from pathlib import Path
from typing import Final

from headway.daemon.cleanup.compiled_code import once_a_day, prune
from headway.daemon.records.records import TERMINAL_PHASES
from headway.daemon.view.cluster_view import ClusterView

MOST_BYTES: Final = 1 << 30
"""Maximum size on one node, without unfinished jobs; the log of one job takes at most 32 MiB."""
SLACK_S: Final = 3600.0
"""A log that was written or read within this time stays: someone may be reading why the job ended."""


async def keep_logs_small(folder: Path, view: ClusterView) -> None:
    """Prune the folder of the logs, until cancelled."""
    await once_a_day(view, lambda: pruning(folder, unfinished(view), now=time.time()), told_as="job_logs_deleted")


def unfinished(view: ClusterView) -> frozenset[str]:
    """Return the jobs that may still print."""
    return frozenset(name for name, job in view.jobs.items() if job.phase.phase not in TERMINAL_PHASES)


def pruning(folder: Path, jobs: Set[str], *, now: float, most_bytes: int = MOST_BYTES) -> Callable[[], int]:
    """Return a function that deletes old logs, except those of these jobs, and returns the bytes it freed. now: epoch
    time.
    """
    names = {f"{job}.log{ending}" for job in jobs for ending in ("", ".1")}
    return partial(
        prune, folder, now=now, most_bytes=most_bytes, slack_s=SLACK_S, is_spared=lambda path: path.name in names
    )
