"""Prunes the folder of code compiled for jobs: unused files after a while, and the oldest when the folder is too large.

A file's access time is its last use, because a process that uses code reads it. On a file system without access
times, the modification time counts. Deleting a file costs the next worker the compiler's time; a worker that has
loaded the file does not notice.
"""

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import Final

import structlog

from headway.daemon.records.records import TERMINAL_PHASES
from headway.daemon.view.cluster_view import ClusterView

log = structlog.get_logger()

KEPT_S: Final = 30 * 86400.0
MOST_BYTES: Final = 4 << 30
SLACK_S: Final = 2 * 86400.0
"""Tolerance of times: file systems update access times once a day, and clocks of nodes differ."""
FIRST_LOOK_S: Final = 60.0
PERIOD_S: Final = 86400.0
LOCK: Final = ".lock"
"""Suffix of empty lock files of compilers: never deleted, because a process may hold one."""


async def keep_small(folder: Path, view: ClusterView) -> None:
    """Prune the folder of compiled code, until cancelled."""
    await once_a_day(
        view,
        lambda: partial(prune, folder, now=time.time(), needed_since=needed_since(view)),
        told_as="compiled_code_deleted",
    )


async def once_a_day(view: ClusterView, pruning: Callable[[], Callable[[], int]], *, told_as: str) -> None:
    """Prune a folder soon after the daemon's start, and then once a day, until cancelled.

    pruning: is called here, and returns a function for a thread that returns how many bytes it has deleted. told_as:
    the event in the daemon's log.
    """
    wait_s = FIRST_LOOK_S
    while True:
        await asyncio.sleep(wait_s)
        if view.steady_since is None:
            wait_s = FIRST_LOOK_S  # the daemon does not know the present jobs now
            continue
        if num_bytes := await asyncio.to_thread(pruning()):
            log.info(told_as, size_bytes=num_bytes)
        wait_s = PERIOD_S


def needed_since(view: ClusterView) -> float:
    """Return since when unfinished jobs may use code: seconds since the epoch, inf when there are none."""
    return min(
        (
            job.submission.submitted_at
            for job in view.jobs.values()
            if job.submission is not None
            and job.submission.spec.train.compile
            and job.phase.phase not in TERMINAL_PHASES
        ),
        default=inf,
    )


def prune(
    folder: Path,
    *,
    now: float,
    needed_since: float = inf,
    most_bytes: int = MOST_BYTES,
    slack_s: float = SLACK_S,
    is_spared: Callable[[Path], bool] = lambda _: False,
) -> int:
    """Delete files not used for KEPT_S, then the longest unused until the rest is most_bytes. Return the bytes.

    Files used since `needed_since`, or within slack_s of now, stay at any size. now, needed_since: seconds since the
    epoch.
    """
    spared_since = min(now, needed_since) - slack_s
    files = sorted(_files(folder))
    num_left = sum(size for _, size, _ in files)
    num_deleted = 0
    for used_at, size, path in files:
        is_old = used_at < now - KEPT_S
        if used_at >= spared_since or not (is_old or num_left > most_bytes):
            break
        if is_spared(path):
            continue
        with suppress(OSError):
            path.unlink()
            num_left -= size
            num_deleted += size
    for parent, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):  # most folders are not empty
            if Path(parent) != folder and Path(parent).stat().st_mtime < now - KEPT_S:
                Path(parent).rmdir()
    return num_deleted


def _files(folder: Path) -> list[tuple[float, int, Path]]:
    """Return (last used, bytes, path) of each file."""
    found = []
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names if not name.endswith(LOCK)):
            with suppress(OSError):
                stat = path.lstat()
                found.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    return found
