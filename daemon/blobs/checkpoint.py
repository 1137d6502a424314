"""Durable storage of boundaries: `<checkpoint_dir>/<job>/<uid>/<boundary>/<layer>.safetensors`; a manifest comes last.

Without its manifest a checkpoint does not count. Beside the boundaries, `journal/<timeline>-<boundary>.safetensors` has
parts of the journal: copies of a checkpoint's journal, made before the manifest that names them. Any fsspec file system
serves; on a local one every file, the manifest too, appears by an atomic rename. All functions block, perhaps for ever:
call them by FileThreads. Every failure is a RecoveryError; it is a NoAccessError if this node lacks credentials or a
package.
"""

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

import structlog

from headway.daemon.base.errors import ConfigError, DamagedCopyError, RecoveryError, StorageAwayError
from headway.daemon.base.file_system import check_opened, is_local, open_url, sentence, told_as
from headway.daemon.blobs.checkpoint_names import (
    MANIFEST,
    SET_ASIDE,
    PartFile,
    file_name,
    part_file,
    part_name,
    partial_name,
    place_of_folder,
)
from headway.daemon.blobs.fetch import Arrival, Source, source_at
from headway.daemon.blobs.file_threads import FileThreads
from headway.daemon.cluster.format import decode
from headway.daemon.cluster.lineage import JournalPart, check_seal
from headway.daemon.cluster.records import CheckpointRecord
from headway.stages.state.file_digest import FileDigest

log = structlog.get_logger()

MANIFEST_ASIDE: Final = "manifest.set-aside.json"
CHUNK_BYTES = 1 << 20
GONE_LOOKS: Final = 5
GONE_PAUSE_S: Final = 2.0
"""A file is gone if so many looks do not find it, with this pause between them."""
MAX_MANIFEST_BYTES: Final = 16 << 20
"""A manifest names every layer: ten thousand layers take 2 MB."""


def copy_part(source: str, target: str, *, is_inherited: bool, beat: Callable[[], None] = lambda: None) -> None:
    """Copy a file to a journal part. A missing part of another job is only logged. Raises RecoveryError."""
    if is_inherited and not is_there(source):
        log.warning("journal_part_missing", url=source)
        return
    write_chunks(target, read_chunks_of(source, beat=beat), beat=beat)


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


def resolve_checkpoint_dir(checkpoint_dir: str, checkpoint_root: Path | None) -> str:
    """Return a job's checkpoint folder as a URL or absolute path.

    Raises ConfigError for a relative folder on a cluster without a root: each machine would write into its own folder.
    """
    if "://" in checkpoint_dir or os.path.isabs(checkpoint_dir):  # noqa: PTH117 (a URL is no Path)
        return checkpoint_dir.rstrip("/")
    if checkpoint_root is None:
        raise ConfigError(
            f"checkpoint_dir = {checkpoint_dir!r} is relative, which only a cluster on one machine allows; give a "
            "URL or an absolute path that all nodes see",
            "[fault]",
        )
    return str(checkpoint_root.resolve() / checkpoint_dir)


def copy_to_checkpoint(
    path: Path,
    url: str,
    layer: str,
    *,
    before: Callable[[int], None] | None = None,
    beat: Callable[[], None] = lambda: None,
) -> None:
    """Copy one layer's file into the folder of a boundary. Raises RecoveryError, naming the URL.

    before: is called with the length of each chunk before it is written, and may block. beat: as in `write_manifest`.
    """

    def chunks(source: IO[bytes]) -> Iterator[bytes]:
        while chunk := source.read(CHUNK_BYTES):
            if before is not None:
                before(len(chunk))
            yield chunk

    target = f"{url}/{file_name(layer)}"
    with path.open("rb") as source:
        write_chunks(target, chunks(source), beat=beat)


def write_manifest(url: str, manifest: bytes, *, beat: Callable[[], None] = lambda: None) -> None:
    """Write the manifest, which makes the checkpoint count: the last write. Raises RecoveryError, naming the URL.

    beat: is called before the step that makes the file appear. If it raises, the file does not appear.
    """
    write_chunks(f"{url}/{MANIFEST}", iter([manifest]), beat=beat)


def read_manifest(url: str, *, beat: Callable[[], None] = lambda: None) -> CheckpointRecord:
    """Return the manifest of a boundary's folder. beat: is called while it stays missing.

    Raises DamagedCopyError when it is altered, unreadable or gone, RecoveryError when the folder cannot be read.
    """
    try:
        raw = read_manifest_bytes(url)
    except StorageAwayError as error:
        if _is_gone(f"{url}/{MANIFEST}", error, beside=url.rpartition("/")[0], beat=beat):
            raise DamagedCopyError(error.item, error.reason) from error
        raise
    try:
        check_seal(raw)
        return decode(raw, CheckpointRecord)
    except (ValueError, RecursionError) as error:
        raise DamagedCopyError(f"{url}/{MANIFEST}", f"is not a checkpoint's manifest: {sentence(error)}") from error


def _is_gone(url: str, error: StorageAwayError, *, beside: str, beat: Callable[[], None]) -> bool:
    """Return whether a file that was not found stays away while another one is there.

    A store may say for a moment that a file is not there, and of an unmounted share it is true of all of them. Raises
    StorageAwayError when their file system fails.
    """
    if not isinstance(error.__cause__, FileNotFoundError):
        return False
    for look in range(GONE_LOOKS):
        if look:
            time.sleep(GONE_PAUSE_S)
        beat()
        if is_there(url) or not is_there(beside):
            return False
    return True


def is_there(url: str) -> bool:
    """Return whether a file or folder exists. Raises StorageAwayError when its file system fails."""
    file_system, path = open_url(url)
    with told_as(url, "read", StorageAwayError):
        file_system.invalidate_cache(path)
        return bool(file_system.exists(path))


def set_aside(url: str, reason: str) -> None:
    """Take a damaged checkpoint out of use: its manifest gets another name, and a file beside it says why.

    The folder stays. A second call ends what a cut-off one began. Raises RecoveryError, naming the URL: nothing is made
    where the checkpoint is not there, as on a share that is not mounted.
    """
    if not is_there(f"{url}/{SET_ASIDE}"):  # the first reason stays: a later one is that the manifest is gone
        if not (is_there(f"{url}/{MANIFEST}") or is_there(f"{url}/{MANIFEST_ASIDE}")):
            raise StorageAwayError(url, f"has no {MANIFEST} now, so nothing is set aside")
        write_chunks(f"{url}/{SET_ASIDE}", iter([f"{reason}\n".encode()]))
    file_system, path = open_url(url)
    with told_as(url, "set aside"), suppress(FileNotFoundError):
        file_system.mv(f"{path}/{MANIFEST}", f"{path}/{MANIFEST_ASIDE}")


def read_manifest_bytes(url: str) -> bytes:
    """Return the bytes of a manifest's file, up to the maximum. Raises RecoveryError, naming the URL."""
    target = f"{url}/{MANIFEST}"
    raw = bytearray()
    for chunk in read_chunks_of(target):
        raw += chunk
        if len(raw) > MAX_MANIFEST_BYTES:
            raise RecoveryError(target, f"is not a checkpoint's manifest: it has more than {MAX_MANIFEST_BYTES} bytes")
    return bytes(raw)


def delete_checkpoint(url: str) -> None:
    """Delete a boundary's folder, its manifest first, so that it never looks complete. A missing folder is no error.

    Raises RecoveryError, naming the URL.
    """
    file_system, path = open_url(url)
    with told_as(url, "deleted"):
        for target in (f"{path}/{MANIFEST}", path):
            with suppress(FileNotFoundError):
                file_system.rm(target, recursive=target == path)


def list_boundaries(url: str) -> list[tuple[int, int, bool]]:
    """Return (timeline, boundary, whether its manifest exists) for every boundary's folder that is not set aside.

    Returns an empty list if the folder does not exist. Raises RecoveryError, naming the URL.
    """
    file_system, path = open_url(url)
    found = []
    with told_as(url, "listed"):
        file_system.invalidate_cache(path)  # object stores cache listings
        entries = file_system.ls(path, detail=True) if file_system.isdir(path) else []
        for entry in entries:
            folder = entry["name"].rstrip("/")
            place = place_of_folder(folder.rsplit("/", 1)[-1]) if entry["type"] == "directory" else None
            if place is not None:
                file_system.invalidate_cache(folder)
                has_manifest = file_system.exists(f"{folder}/{MANIFEST}")
                if has_manifest or not file_system.exists(f"{folder}/{SET_ASIDE}"):
                    found.append((*place, has_manifest))
    return sorted(found)


def layer_at(url: str, layer: str, expected: FileDigest, threads: FileThreads, *, is_forwarded: bool = False) -> Source:
    """Return a layer's file in the folder of a boundary as a source. What its manifest names and is not there, while
    the manifest is, counts as damaged.

    is_forwarded: read for another node, which waits for bytes and looks again itself: absence is told at once.
    """
    file, manifest = f"{url}/{file_name(layer)}", "" if is_forwarded else f"{url}/{MANIFEST}"
    return source_at(url, file, threads, partial(_read_stored, file, expected, manifest))


def part_at(url: str, part: JournalPart, threads: FileThreads) -> Source:
    """Return a journal part in the folder of the parts as a source."""
    file = f"{url}/{part_name(*part.place)}"
    return source_at(url, file, threads, partial(_read_stored, file, part, ""))


def _read_stored(
    url: str, expected: FileDigest, beside: str, offset: int = 0, beat: Callable[[], None] = lambda: None
) -> Iterator[bytes]:
    """Yield a file's chunks from an offset on. Raises DamagedCopyError when it ends early, or is gone while `beside` is
    there; StorageAwayError.
    """
    num_bytes = offset
    try:
        for chunk in read_chunks_of(url, offset=offset, beat=beat):
            num_bytes += len(chunk)
            yield chunk
    except StorageAwayError as error:
        if beside and _is_gone(url, error, beside=beside, beat=beat):
            raise DamagedCopyError(url, "is missing from the checkpoint") from error
        raise
    if num_bytes < expected.size_bytes:
        raise DamagedCopyError(url, f"is damaged: it ends after {num_bytes} of {expected.size_bytes} bytes")


def verify_files(url: str, files: Mapping[str, FileDigest]) -> None:
    """Read every file of a checkpoint. Raises DamagedCopyError for one that is not what the manifest names, and
    StorageAwayError for one that cannot be read.
    """
    for layer, expected in files.items():
        file = f"{url}/{file_name(layer)}"
        arrived = Arrival(expected, what=file)
        for chunk in _read_stored(file, expected, ""):
            arrived.add(chunk)
        arrived.verify()


def probe(checkpoint_dir: str) -> None:
    """Test that a resolved checkpoint folder can be written to. Raises RecoveryError, naming it."""
    target = f"{checkpoint_dir}/.probe-{secrets.token_hex(8)}"
    write_chunks(target, iter([b"headway"]))
    file_system, path = open_url(target)
    with told_as(target, "deleted"):
        file_system.rm_file(path)


def write_chunks(url: str, chunks: Iterator[bytes], *, beat: Callable[[], None] = lambda: None) -> None:
    """Write a whole file: on a local file system it is synced and renamed into place; elsewhere the driver's put writes
    it.
    """
    file_system, path = open_url(url)
    with told_as(url, "written"):
        if not is_local(file_system):
            _put(file_system.open(path, "wb"), chunks, beat)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(partial_name(target.name, secrets.token_hex(4)))
        try:
            with draft.open("wb") as local:
                for chunk in chunks:
                    local.write(chunk)
                local.flush()
                os.fsync(local.fileno())
            beat()
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)


def _put(file: Any, chunks: Iterator[bytes], beat: Callable[[], None]) -> None:
    """Write a driver's file and close it. After an error no part of it may appear: closing would complete it."""
    try:
        for chunk in chunks:
            file.write(chunk)
        beat()
    except BaseException:
        with suppress(Exception):
            file.discard()
        with suppress(AttributeError):
            file.closed = True
        raise
    file.close()


def read_chunks_of(url: str, *, offset: int = 0, beat: Callable[[], None] = lambda: None) -> Iterator[bytes]:
    """Yield a file's unverified chunks from an offset on. beat: is called with each. Raises StorageAwayError."""
    file_system, path = open_url(url)
    with told_as(url, "read", StorageAwayError):
        file = file_system.open(path, "rb")
    try:
        if is_local(file_system):
            check_opened(file)
        with told_as(url, "read", StorageAwayError):
            file.seek(offset)
        while True:
            # the yield is outside, so that an error of the chunk's reader is not translated
            with told_as(url, "read", StorageAwayError):
                chunk = file.read(CHUNK_BYTES)
            if not chunk:
                return
            beat()
            yield chunk
    finally:
        with suppress(Exception):
            file.close()
