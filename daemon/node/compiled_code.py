"""The folder with what was compiled for jobs: what nobody has used for long goes, and the oldest when it is too much.

Whoever finds code there reads it, so a file's access time says when it was used last; on a file system that keeps none,
the time of writing stands in. A file that goes costs the next worker that needs it the compiler's time, and one that
has loaded it nothing.
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

from headway.daemon.coordination.cluster_view import ClusterView
from headway.daemon.records import TERMINAL_PHASES

log = structlog.get_logger()

KEPT_S: Final = 30 * 86400.0
MOST_BYTES: Final = 4 << 30
SLACK_S: Final = 2 * 86400.0
"""File systems note an access once a day, and nodes' clocks differ."""
FIRST_LOOK_S: Final = 60.0
PERIOD_S: Final = 86400.0
LOCK: Final = ".lock"
"""Ending of empty files by which compilers keep apart: never deleted, for somebody may hold one."""


async def keep_small(folder: Path, view: ClusterView) -> None:
    """Until cancelled: look after the folder of compiled code."""
    await once_a_day(
        view,
        lambda: partial(prune, folder, now=time.time(), needed_since=needed_since(view)),
        told_as="compiled_code_deleted",
    )


async def once_a_day(view: ClusterView, pruning: Callable[[], Callable[[], int]], *, told_as: str) -> None:
    """Until cancelled: look after a folder soon after the daemon's start, and then once a day.

    pruning: is called here and returns what runs in a thread, which returns how many bytes it has deleted. told_as: the
    event in the daemon's log.
    """
    wait_s = FIRST_LOOK_S
    while True:
        await asyncio.sleep(wait_s)
        if view.steady_since is None:
            wait_s = FIRST_LOOK_S  # nobody knows now which jobs there are
            continue
        if num_bytes := await asyncio.to_thread(pruning()):
            log.info(told_as, size_bytes=num_bytes)
        wait_s = PERIOD_S


def needed_since(view: ClusterView) -> float:
    """Since when jobs may use code that are not over: seconds since the epoch, inf when there are none."""
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
    """Delete what was not used for KEPT_S, then the longest unused until the rest is most_bytes. Returns the bytes.

    What was used since `needed_since`, or within slack_s of now, stays, whatever it takes. now, needed_since: seconds
    since the epoch.
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
        with suppress(OSError):  # most are not empty
            if Path(parent) != folder and Path(parent).stat().st_mtime < now - KEPT_S:
                Path(parent).rmdir()
    return num_deleted


def _files(folder: Path) -> list[tuple[float, int, Path]]:
    """(last used, bytes, path)"""
    found = []
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names if not name.endswith(LOCK)):
            with suppress(OSError):
                stat = path.lstat()
                found.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    return found
