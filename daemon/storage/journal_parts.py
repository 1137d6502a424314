"""Journal parts in durable storage: `<checkpoint_dir>/<job>/<uid>/journal/<timeline>-<boundary>.safetensors`.

A part is a copy of a checkpoint's journal, made before the manifest that names it. records/journal_part.py says when a
checkpoint closes a part. All functions block: call them by FileThreads.
"""

from collections.abc import Callable
from pathlib import Path

import structlog

from headway.daemon.records.lineage import JournalPart
from headway.daemon.storage.checkpoint import fetch_file, read_chunks_of, write_chunks
from headway.daemon.storage.checkpoint_names import PartFile, part_file, part_name
from headway.daemon.storage.file_system import open_url, told_as

log = structlog.get_logger()


def copy_part(source: str, target: str, *, is_inherited: bool, beat: Callable[[], None] = lambda: None) -> None:
    """Copy a file to a journal part. A missing part of another job is only logged. Raises RecoveryError."""
    if is_inherited and not _exists(source):
        log.warning("journal_part_missing", url=source)
        return
    write_chunks(target, read_chunks_of(source, beat=beat), beat=beat)


def fetch_part(url: str, part: JournalPart, target: Path, *, beat: Callable[[], None] = lambda: None) -> bool:
    """Fetch a part from the folder of the parts to a local path. Returns False when it does not exist.

    Raises DamagedCopyError when it is altered, RecoveryError.
    """
    source = f"{url}/{part_name(*part.place)}"
    if not _exists(source):
        return False
    fetch_file(source, part, target, beat=beat)
    return True


def list_parts(url: str) -> list[PartFile]:
    """Return the parts in a folder, also those half written; none if it does not exist. Raises RecoveryError."""
    file_system, path = open_url(url)
    with told_as(url, "listed"):
        file_system.invalidate_cache(path)  # object stores cache listings
        entries = file_system.ls(path, detail=False) if file_system.isdir(path) else []
    found = [part_file(name) for name in sorted(entry.rsplit("/", 1)[-1] for entry in entries)]
    return [file for file in found if file is not None]


def delete_part(url: str, name: str) -> None:
    """Delete a part's file. Deleting a missing one is no error. Raises RecoveryError."""
    file_system, path = open_url(f"{url}/{name}")
    with told_as(url, "deleted"):
        if file_system.exists(path):
            file_system.rm_file(path)


def _exists(url: str) -> bool:
    file_system, path = open_url(url)
    with told_as(url, "read"):
        file_system.invalidate_cache(path.rpartition("/")[0])
        return bool(file_system.exists(path))
