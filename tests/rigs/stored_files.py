"""Fetches one file from one source, for tests without a daemon."""

import asyncio
from pathlib import Path

from headway.daemon.blobs.checkpoint import layer_at
from headway.daemon.blobs.fetch import PartialFile, Source, fetch
from headway.daemon.blobs.file_threads import FileThreads
from headway.stages.state.file_digest import FileDigest


def fetch_from(source: Source, expected: FileDigest, target: Path) -> None:
    """Bring a file to a path."""
    file = PartialFile(target, expected, what="the file")
    in_thread = FileThreads("tests").run
    asyncio.run(fetch(file, lambda: [source], in_thread=lambda act: in_thread(str(target), act)))


def fetch_layer(url: str, layer: str, expected: FileDigest, target: Path) -> None:
    """Bring a layer of a checkpoint to a path."""
    fetch_from(layer_at(url, layer, expected, FileThreads("tests")), expected, target)
