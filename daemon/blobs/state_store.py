"""Keeps a node's layer files: `<store>/<job>/<timeline>/<boundary>/<file>`, each known by size and checksum.

The disk may hang. So the event loop keeps only the lists, and everything on the disk happens in threads of the store's
own: when they get no answer, the calls end with an error, and the daemon goes on.
"""

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

import structlog

from headway.daemon.base.errors import ConfigError, RecoveryError
from headway.daemon.base.owned_folders import make_folder, make_private
from headway.daemon.blobs.fetch import PartialFile, Source, fetch, partial_path
from headway.daemon.blobs.file_threads import Beat, FileThreads
from headway.daemon.cluster.state_key import StateKey, StoredFile
from headway.stages.state.file_digest import FileDigest

CHUNK_BYTES = 1 << 20
NUM_AT_ONCE: Final = 4
SILENCE_S: Final = 20.0
"""Time for the store's file system to answer: a disk that is busy with a checkpoint may take seconds."""

T = TypeVar("T")
log = structlog.get_logger()


class StateStore:
    """The store of one node, in its own folder, for one event loop. Functions that block say so."""

    def __init__(self, directory: Path, *, quota_bytes: int = 0, silence_s: float = SILENCE_S) -> None:
        """quota_bytes 0: the size of the file system."""
        self._directory = directory
        self._threads = FileThreads("layer files", num_at_once=NUM_AT_ONCE, silence_s=silence_s, most_hung=1)
        self._removals: set[asyncio.Task[None]] = set()
        self._quota_bytes = quota_bytes
        self._files: dict[StateKey, StoredFile] = {}
        self._incoming: dict[StateKey, int] = {}
        """Arriving files, with their final size."""
        self._damaged: list[StateKey] = []
        self.on_change: Callable[[], None] = lambda: None
        """Called whenever the set of held files changes."""

    @property
    def contents(self) -> Mapping[StateKey, StoredFile]:
        """Return the held files by key."""
        return MappingProxyType(self._files)

    @property
    def awaited(self) -> Set[StateKey]:
        """Return the keys of arriving files."""
        return frozenset(self._incoming)

    @property
    def size_bytes(self) -> int:
        """Return the bytes of complete files."""
        return sum(file.size_bytes for file in self._files.values())

    @property
    def directory(self) -> Path:
        """Return the store's folder."""
        return self._directory

    async def in_thread(self, act: Callable[[Beat], T], /) -> T:
        """Return act(beat), which uses the store's folder, from a thread. Raises RecoveryError; StorageAwayError when
        the file system does not answer.

        A cancelled caller waits for the thread: the next attempt on a file must not meet the bytes of this one.
        """
        call = asyncio.ensure_future(self._threads.run(str(self._directory), act))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.wait({call})
            if not call.cancelled():
                call.exception()  # nobody waits for it
            raise

    async def check(self) -> None:
        """Find out whether the folder can be written. Raises RecoveryError."""

        def touch(_: Beat) -> None:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.utime(self._directory)

        await self.in_thread(touch)

    def open(self) -> None:
        """Make the folder, private to this user, and delete files of an earlier daemon. Blocks. Raises ConfigError."""
        try:
            make_private(self._directory)
            self.wipe()
        except OSError as error:
            raise ConfigError(f"cannot be used as store_dir: {error.strerror}", str(self._directory)) from error

    def room_bytes(self) -> int:
        """Return the free room, at least 1, in sixteenths of the file system: equal machines say the same. Blocks."""
        usage = shutil.disk_usage(self._directory)
        return max(usage.free * 16 // max(usage.total, 1) * usage.total // 16, 1)

    def wipe(self) -> None:
        """Forget and delete everything. Blocks."""
        self._files.clear()
        self._incoming.clear()
        for entry in self._directory.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    async def close(self) -> None:
        """Delete the folder itself: its files end with its daemon. A disk that hangs keeps them."""

        def delete(beat: Beat) -> None:
            for path in self._files_on_disk():
                beat()
                path.unlink(missing_ok=True)
            shutil.rmtree(self._directory, ignore_errors=True)

        self._files.clear()
        with contextlib.suppress(RecoveryError):
            await self.in_thread(delete)

    def directory_of(self, job: str, timeline: int, boundary: int) -> Path:
        """Return the folder of a boundary's files, made if it does not exist. Blocks. Raises RecoveryError."""
        directory = self.timeline_directory_of(job, timeline) / str(boundary)
        try:
            make_folder(directory)
        except OSError as error:
            raise RecoveryError(str(directory), f"cannot be made: {error.strerror or error}") from error
        return directory

    def timeline_directory_of(self, job: str, timeline: int) -> Path:
        """Return the folder that has the folders of a timeline's boundaries, each named by its number."""
        return self._directory / job / str(timeline)

    def path_of(self, key: StateKey) -> Path:
        """Return the path of a key's file, in a folder that exists. Blocks. Raises RecoveryError."""
        self.directory_of(key.job, key.timeline, key.boundary)
        return self._place_of(key)

    async def place_for(self, key: StateKey) -> Path:
        """Return the path at which a key's file is to be written, in a folder that exists. Raises RecoveryError."""
        await self.removed()  # a deletion that comes late would take the new file
        return await self.in_thread(lambda _: self.path_of(key))

    def _place_of(self, key: StateKey) -> Path:
        return self.timeline_directory_of(key.job, key.timeline) / str(key.boundary) / f"{key.layer}.safetensors"

    def get(self, key: StateKey) -> StoredFile | None:
        """Return the file of a key, or None."""
        return self._files.get(key)

    async def adopt(self, key: StateKey, file: StoredFile) -> None:
        """Take in a file that was written into `directory_of` the key, within the quota.

        Raises RecoveryError when the file does not exist, or there is no room.
        """
        await self.require_written({file.path: file.size_bytes})
        self.hold(key, file)

    async def require_written(self, files: Mapping[Path, int]) -> None:
        """Raise RecoveryError unless every file is there, with its size, and no deletion that comes late takes it."""
        await self.removed()

        def look(_: Beat) -> None:
            for path, size_bytes in files.items():
                try:
                    found_bytes = path.stat().st_size
                except OSError as error:
                    raise RecoveryError(str(path), error.strerror or str(error)) from error
                if found_bytes != size_bytes:
                    raise RecoveryError(str(path), f"has {found_bytes} bytes, not the {size_bytes} that were written")

        await self.in_thread(look)

    def hold(self, key: StateKey, file: StoredFile, *, has_quota: bool = True) -> None:
        """Hold a file that is written, within the quota unless told otherwise. Raises RecoveryError."""
        if has_quota:
            self.require_room(file.size_bytes, str(key), held=key)
        self._incoming.pop(key, None)
        self._files[key] = file
        self.on_change()

    def require_room(self, size_bytes: int, what: str, *, held: StateKey | None = None) -> None:
        """Raise RecoveryError, with the figures, when this many more bytes would exceed the quota."""
        replaced_bytes = self._files[held].size_bytes if held in self._files else 0
        awaited_bytes = sum(awaited for key, awaited in self._incoming.items() if key != held)
        after_bytes = self.size_bytes - replaced_bytes + awaited_bytes + size_bytes
        if self._quota_bytes and after_bytes > self._quota_bytes:
            raise RecoveryError(
                what,
                f"the store {self._directory} would hold {after_bytes} bytes, "
                f"and store_quota_bytes allows {self._quota_bytes}",
            )

    async def receive(self, key: StateKey, expected: FileDigest) -> PartialFile:
        """Begin or continue a file that comes in pieces; `adopt` it when it is in place, or `abandon` it.

        Raises RecoveryError when it would exceed the quota, together with all arriving files, or has no folder.
        """
        self.require_room(expected.size_bytes, str(key), held=key)
        path = await self.place_for(key)
        self.require_room(expected.size_bytes, str(key), held=key)  # others may have begun meanwhile
        self._incoming[key] = expected.size_bytes
        return PartialFile(path, expected, what=str(key))

    async def bring(
        self,
        key: StateKey,
        sources: Callable[[], Iterable[Source]],
        *,
        expected: FileDigest,
        generation: int = 0,
        uid: str = "",
        tell: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Bring a file in from the first source that gives it, continuing at the next where one failed.

        tell: is called with the number of bytes that are there. Raises RecoveryError as `fetch`. Bytes that have come
        stay for the next attempt, until the file is abandoned.
        """
        file = await self.receive(key, expected)
        source = await fetch(file, sources, in_thread=self.in_thread, tell=tell)
        size_bytes, checksum = expected.size_bytes, expected.checksum
        await self.adopt(
            key, StoredFile(path=file.path, size_bytes=size_bytes, checksum=checksum, generation=generation, uid=uid)
        )
        log.info("state_fetched", key=str(key), source=source.name, size_bytes=size_bytes)

    def abandon(self, key: StateKey) -> None:
        """Drop the pieces of an arriving file, soon. If there are none, nothing happens."""
        if self._incoming.pop(key, None) is not None:
            self._remove_soon([partial_path(self._place_of(key))])

    def read(self, key: StateKey, *, offset: int = 0) -> Iterator[bytes]:
        """Yield the file's bytes from an offset on, in chunks: each blocks. Raises RecoveryError when the file is not
        held.
        """
        file = self._files.get(key)
        if file is None:
            raise RecoveryError(str(key), "is not held by this node")
        return read_chunks(file.path, offset=offset)

    def delete(self, *keys: StateKey) -> None:
        """Stop holding files at once, and delete them soon, with their folders when they are empty.

        Deleting a file that is not held is no error.
        """
        if paths := self._forget(keys):
            self._remove_soon(paths)

    def drop_damaged(self, key: StateKey) -> None:
        """Stop holding a file whose content is not what was written: whoever needs it fetches another copy."""
        log.error("damaged_file_dropped", key=str(key))
        self._damaged.append(key)
        self.delete(key)

    @property
    def damage(self) -> str:
        """Return what was found damaged since the daemon started; empty: nothing."""
        if not self._damaged:
            return ""
        number = len(self._damaged)
        what = f"{number} file{'s were' if number > 1 else ' was'} found damaged and dropped, the last one"
        return f"{what} {self._damaged[-1]}; other copies serve instead. Check this machine's memory and disk"

    async def discard(self, paths: Iterable[Path]) -> None:
        """Delete files that are not held. Raises RecoveryError."""
        known = {file.path for file in self._files.values()}
        unknown = [path for path in paths if path not in known]
        await self.in_thread(lambda beat: self.remove(unknown, beat))

    async def removed(self) -> None:
        """Wait for deletions that have begun."""
        if self._removals:
            await asyncio.wait(set(self._removals))

    def _remove_soon(self, paths: list[Path]) -> None:
        async def remove() -> None:
            try:
                await self.in_thread(lambda beat: self.remove(paths, beat))
            except RecoveryError as error:
                log.warning("layer_files_not_removed", num_files=len(paths), reason=str(error))  # a sweep finds them

        removal = asyncio.get_running_loop().create_task(remove(), name="removal of layer files")
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    def _forget(self, keys: Iterable[StateKey]) -> list[Path]:
        """Stop holding files; return the paths to remove."""
        paths = [file.path for key in keys if (file := self._files.pop(key, None)) is not None]
        if paths:
            self.on_change()
        return paths

    def remove(self, paths: Iterable[Path], beat: Beat = lambda: None) -> None:
        """Remove files from the disk, and their folders when they are empty. Blocks."""
        for path in paths:
            beat()
            path.unlink(missing_ok=True)
            _remove_if_empty(path.parent, up_to=self._directory)

    def known_paths(self) -> frozenset[Path]:
        """Return the path of every held or arriving file."""
        awaited = [self._place_of(key) for key in self._incoming]
        return frozenset({*(file.path for file in self._files.values()), *awaited, *map(partial_path, awaited)})

    def sweep(
        self,
        known: Set[Path],
        *,
        older_than: float,
        spared: Set[Path] = frozenset(),
        beat: Beat = lambda: None,
    ) -> int:
        """Delete unknown files that were last written before a time; return their bytes. Blocks.

        spared: folders in which nothing is deleted.
        """
        num_bytes = 0
        for path in [path for path in self._files_on_disk() if path not in known]:
            if not spared.isdisjoint(path.parents):
                continue
            beat()
            try:
                status = path.stat()
                if status.st_mtime < older_than:
                    self.remove([path])
                    num_bytes += status.st_size
            except OSError:
                continue  # the file is already gone
        return num_bytes

    def _files_on_disk(self) -> Iterator[Path]:
        """Yield every file of the folder. Folders come and go meanwhile: os.walk skips those that it cannot list."""
        for folder, _, names in os.walk(self._directory):
            yield from (Path(folder) / name for name in names)


def read_chunks(path: Path, *, offset: int = 0) -> Iterator[bytes]:
    """Yield a file's bytes from an offset on, at most CHUNK_BYTES at a time."""
    with path.open("rb") as file:
        file.seek(offset)
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _remove_if_empty(directory: Path, *, up_to: Path) -> None:
    while directory != up_to:
        try:
            directory.rmdir()
        except OSError:
            return  # the folder has files, or is gone
        directory = directory.parent
