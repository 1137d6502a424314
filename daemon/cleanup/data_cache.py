"""Deletes from the cache of token shards what nobody needs: downloads that broke off, data sets of forgotten jobs."""

import shutil
import time
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from headway.daemon.cleanup.compiled_code import once_a_day
from headway.daemon.shards.incoming_data import INCOMING
from headway.daemon.view.cluster_view import ClusterView
from headway.stages.data.shard_index import INDEX_NAME

DOWNLOAD_KEPT_S: Final = 7 * 86400.0
"""Time after which a download that broke off is not expected to go on."""
SHA256_CHARACTERS: Final = 64
"""Length of a data set's folder name; the built-in text has a name in words."""
DATA_KEPT_S: Final = 30 * 86400.0
"""Time for which a data set stays that no job names. It may have been sent for a job to come."""


async def sweep_data(cache_dir: Path, view: ClusterView) -> None:
    """Sweep the cache soon after the daemon's start and then once a day, until cancelled."""
    await once_a_day(view, lambda: sweeping(cache_dir, named(view), now=time.time()), told_as="data_deleted")


def named(view: ClusterView) -> frozenset[str]:
    """Return the data sets of all jobs, by SHA-256: also of jobs that have ended, whose data others may ask for."""
    specs = [job.spec for job in view.jobs.values() if job.spec is not None]
    return frozenset(part.sha256 for spec in specs for part in spec.data.parts)


def sweeping(cache_dir: Path, needed: Set[str], *, now: float) -> Callable[[], int]:
    """Return a function that deletes what is left over, and returns the bytes it freed.

    needed: data sets that stay, by SHA-256. now: seconds since the epoch.
    """
    return partial(_sweep, cache_dir, needed, now)


def _sweep(cache_dir: Path, needed: Set[str], now: float) -> int:
    num_bytes = sum(map(_delete, _broken_off(cache_dir, now - DOWNLOAD_KEPT_S)))
    return num_bytes + sum(map(_delete, _forgotten(cache_dir, needed, now - DATA_KEPT_S)))


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
