"""Brings the data of a job to this machine for `headway reference`, if it lies at a URL."""

import asyncio
from pathlib import Path
from typing import IO

from headway.daemon.jobs.data_place import is_url
from headway.daemon.jobs.job import DataSpec
from headway.daemon.jobs.resolve import data_folder
from headway.daemon.origin.origin_config import as_config_error
from headway.daemon.shards.download import Download
from headway.daemon.shards.givers import UrlGiver
from headway.daemon.shards.verified_shards import VerifiedShards
from headway.daemon.storage.file_threads import FileThreads


def folder_here(data: DataSpec, cache_dir: Path, *, progress: IO[str] | None = None) -> Path:
    """Return a folder with a job's data on this machine: what lies at a URL is brought into the cache, verified.

    progress: stream for a line that overwrites itself. Raises ConfigError, DataError.
    """
    if not is_url(data.source):
        return data_folder(data.source, cache_dir)

    def tell(num_bytes: int, total_bytes: int) -> None:
        if progress is not None:
            progress.write(f"\r{data.source}: {num_bytes / 1e6:,.1f} of {total_bytes / 1e6:,.1f} MB ")
            progress.flush()

    async def bring() -> None:
        giver = UrlGiver(data.source, FileThreads("data at URLs"))
        await Download(
            cache_dir / data.sha256,
            data.sha256,
            givers=lambda: [giver],
            verified=VerifiedShards(),
            threads=FileThreads("downloads of data"),
            tell=tell,
        ).run()

    with as_config_error():
        asyncio.run(bring())
    if progress is not None:
        progress.write("\n")
    return cache_dir / data.sha256
