"""Deletes once a day what nobody needs: code compiled for jobs, jobs' logs, token shards.

Compiled code and logs go when they were unused for a month, the oldest also when their folder is too large. A file's
access time is its last use; on a file system without access times, the modification time counts. Deleting a file of
code costs the next worker the compiler's time; a worker that has loaded it does not notice.
"""

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Final

import structlog

from headway.daemon.blobs.download import INCOMING
from headway.daemon.cluster.records import TERMINAL_PHASES
from headway.daemon.decide.cluster_view import ClusterView
from headway.stages.data.shard_index import INDEX_NAME

log = structlog.get_logger()

KEPT_S: Final = 30 * 86400.0
MOST_CODE_BYTES: Final = 4 << 30
CODE_SLACK_S: Final = 2 * 86400.0
"""Tolerance of times: file systems update access times once a day, and clocks of nodes differ."""
MOST_LOG_BYTES: Final = 1 << 30
"""Maximum size on one node, without unfinished jobs; the log of one job takes at most 32 MiB."""
LOG_SLACK_S: Final = 3600.0
"""A log that was written or read within this time stays: someone may be reading why the job ended."""
DOWNLOAD_KEPT_S: Final = 7 * 86400.0
"""Time after which a download that broke off is not expected to go on."""
SHA256_CHARACTERS: Final = 64
"""Length of a data set's folder name; the built-in text has a name in words."""
DATA_KEPT_S: Final = 30 * 86400.0
"""Time for which a data set stays that no job names. It may have been sent for a job to come."""
FIRST_LOOK_S: Final = 60.0
PERIOD_S: Final = 86400.0
LOCK: Final = ".lock"
"""Suffix of empty lock files of compilers: never deleted, because a process may hold one."""


async def sweep_daily(view: ClusterView, *, code: Path, logs: Path, data: Path) -> None:
    """Sweep the folders soon after the daemon's start, and then once a day, until cancelled."""
    wait_s = FIRST_LOOK_S
    while True:
        await asyncio.sleep(wait_s)
        if view.steady_since is None:
            wait_s = FIRST_LOOK_S  # the daemon does not know the present jobs now
            continue
        now, since, jobs, needed = time.time(), code_needed_since(view), unfinished(view), named(view)
        sweeps = {
            "compiled code": lambda now=now, since=since: prune(code, now=now, needed_since=since),
            "job logs": lambda now=now, jobs=jobs: prune_logs(logs, jobs, now=now),
            "data": lambda now=now, needed=needed: sweep_data(data, needed, now=now),
        }
        for what, sweep in sweeps.items():
            if num_bytes := await asyncio.to_thread(sweep):
                log.info("files_swept", what=what, size_bytes=num_bytes)
        wait_s = PERIOD_S


def code_needed_since(view: ClusterView) -> float:
    """Return since when unfinished jobs may use code: seconds since the epoch, inf when there are none."""
    submissions = (
        job.submission for job in view.jobs.values() if job.submission and job.phase.phase not in TERMINAL_PHASES
    )
    return min((each.submitted_at for each in submissions if each.spec.train.compile), default=inf)


def unfinished(view: ClusterView) -> frozenset[str]:
    """Return the jobs that may still print."""
    return frozenset(name for name, job in view.jobs.items() if job.phase.phase not in TERMINAL_PHASES)


def named(view: ClusterView) -> frozenset[str]:
    """Return the data sets of all jobs, by SHA-256: also of jobs that have ended, whose data others may ask for."""
    specs = [job.spec for job in view.jobs.values() if job.spec is not None]
    return frozenset(part.sha256 for spec in specs for part in spec.data_sets)


def prune(
    folder: Path,
    *,
    now: float,
    needed_since: float = inf,
    most_bytes: int = MOST_CODE_BYTES,
    slack_s: float = CODE_SLACK_S,
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


def prune_logs(folder: Path, jobs: Set[str], *, now: float, most_bytes: int = MOST_LOG_BYTES) -> int:
    """Delete old logs, except those of these jobs, even if they print nothing. Return the bytes. now: epoch time."""
    names = {f"{job}.log{ending}" for job in jobs for ending in ("", ".1")}
    return prune(folder, now=now, most_bytes=most_bytes, slack_s=LOG_SLACK_S, is_spared=lambda path: path.name in names)


def sweep_data(cache_dir: Path, needed: Set[str], *, now: float) -> int:
    """Delete downloads that broke off, and data sets of forgotten jobs. Return the bytes.

    needed: data sets that stay, by SHA-256. now: seconds since the epoch.
    """
    num_bytes = sum(map(_delete, _broken_off(cache_dir, now - DOWNLOAD_KEPT_S)))
    return num_bytes + sum(map(_delete, _forgotten(cache_dir, needed, now - DATA_KEPT_S)))


def _files(folder: Path) -> list[tuple[float, int, Path]]:
    """Return (last used, bytes, path) of each file."""
    found = []
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names if not name.endswith(LOCK)):
            with suppress(OSError):
                stat = path.lstat()
                found.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    return found


def _broken_off(cache_dir: Path, written_before: float) -> Iterator[Path]:
    for incoming in cache_dir.glob(f"*/{INCOMING}"):
        # Without its index a folder holds no data set: even its finished shards belong to the download.
        left = incoming if (incoming.parent / INDEX_NAME).exists() else incoming.parent
        with suppress(OSError):
            if max(path.stat().st_mtime for path in _tree(left)) < written_before:
                yield left


def _forgotten(cache_dir: Path, needed: Set[str], used_before: float) -> Iterator[Path]:
    """Yield data sets that no job names. Whoever opens one reads its index, which so has the time of its last use."""
    for index in cache_dir.glob(f"*/{INDEX_NAME}"):
        with suppress(OSError):
            stat = index.stat()
            is_old = max(stat.st_atime, stat.st_mtime) < used_before
            if is_old and index.parent.name not in needed and len(index.parent.name) == SHA256_CHARACTERS:
                yield index.parent


def _delete(folder: Path) -> int:
    """Delete a folder. Return its bytes; 0 if that fails."""
    with suppress(OSError):
        num_bytes = sum(path.stat().st_size for path in _tree(folder) if path.is_file())
        shutil.rmtree(folder)
        return num_bytes
    return 0


def _tree(folder: Path) -> Iterator[Path]:
    yield folder
    yield from folder.rglob("*")
