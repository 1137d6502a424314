"""Deletes interrupted downloads of data that were not continued for a week."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from headway.daemon.cleanup.compiled_code import once_a_day
from headway.daemon.shards.incoming_data import INCOMING
from headway.daemon.view.cluster_view import ClusterView
from headway.stages.data.shard_index import INDEX_NAME

KEPT_S: Final = 7 * 86400.0


async def sweep_downloads(cache_dir: Path, view: ClusterView) -> None:
    """Sweep the cache soon after the daemon's start and then once a day, until cancelled."""
    await once_a_day(view, lambda: sweeping(cache_dir, now=time.time()), told_as="left_downloads_deleted")


def sweeping(cache_dir: Path, *, now: float) -> Callable[[], int]:
    """Return a function that deletes them and returns the bytes it freed. now: seconds since the epoch."""
    return partial(_sweep, cache_dir, now - KEPT_S)


def _sweep(cache_dir: Path, written_before: float) -> int:
    num_bytes = 0
    for incoming in cache_dir.glob(f"*/{INCOMING}"):
        # Without its index a folder holds no data set: even its finished shards belong to the download.
        left = incoming if (incoming.parent / INDEX_NAME).exists() else incoming.parent
        with suppress(OSError):
            if max(path.stat().st_mtime for path in _tree(left)) < written_before:
                num_bytes += sum(path.stat().st_size for path in _tree(left) if path.is_file())
                shutil.rmtree(left)
    return num_bytes


def _tree(folder: Path) -> Iterator[Path]:
    yield folder
    yield from folder.rglob("*")
