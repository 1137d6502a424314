"""The layer files that a node holds: `<store>/<job>/<timeline>/<boundary>/<file>`, each known by size and checksum."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from headway.daemon.errors import ConfigError, RecoveryError
from headway.daemon.storage.state_key import StateKey, StoredFile

if TYPE_CHECKING:
    from headway.stages.state_file import ContentCheck

CHUNK_BYTES = 1 << 20
NUM_MKDIR_ATTEMPTS: Final = 10


class StateStore:
    """The store of one node, in a folder of its own. Not thread-safe, but files may be read and hashed in threads."""

    def __init__(self, directory: Path, *, quota_bytes: int = 0) -> None:
        """quota_bytes 0: what the file system has."""
        self._directory = directory
        self._quota_bytes = quota_bytes
        self._files: dict[StateKey, StoredFile] = {}
        self._incoming: dict[StateKey, int] = {}
        """Files on their way in, and how large they will be."""
        self.on_change: Callable[[], None] = lambda: None
        """Told whenever another file is held, or one less."""

    @property
    def contents(self) -> Mapping[StateKey, StoredFile]:
        """What is held, by key."""
        return MappingProxyType(self._files)

    @property
    def awaited(self) -> Set[StateKey]:
        """Files on their way in."""
        return frozenset(self._incoming)

    @property
    def size_bytes(self) -> int:
        """Bytes held by complete files."""
        return sum(file.size_bytes for file in self._files.values())

    def open(self) -> None:
        """Make the folder, private to this user, and wipe what an earlier daemon left. Raises ConfigError."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self._directory.lstat()
            if not self._directory.is_dir() or self._directory.is_symlink() or status.st_uid != os.getuid():
                raise ConfigError("belongs to somebody else, or is no folder", str(self._directory))
            self._directory.chmod(0o700)
            self.wipe()
        except OSError as error:
            raise ConfigError(f"cannot be used as store_dir: {error.strerror}", str(self._directory)) from error

    def wipe(self) -> None:
        """Forget and delete everything."""
        self._files.clear()
        self._incoming.clear()
        for entry in self._directory.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def close(self) -> None:
        """Delete the folder itself: what it held dies with its daemon."""
        self._files.clear()
        shutil.rmtree(self._directory, ignore_errors=True)

    def directory_of(self, job: str, timeline: int, boundary: int) -> Path:
        """The folder of a boundary's files, made if it is not there. Raises RecoveryError."""
        directory = self.timeline_directory_of(job, timeline) / str(boundary)
        for attempt in range(1, NUM_MKDIR_ATTEMPTS + 1):
            try:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                break
            except OSError as error:
                if isinstance(error, FileNotFoundError) and attempt < NUM_MKDIR_ATTEMPTS:
                    continue  # a thread deleted an empty folder above it just now
                raise RecoveryError(str(directory), f"cannot be made: {error.strerror or error}") from error
        return directory

    def timeline_directory_of(self, job: str, timeline: int) -> Path:
        """Where the folders of a timeline's boundaries lie, each named by its number."""
        return self._directory / job / str(timeline)

    def path_of(self, key: StateKey) -> Path:
        """Where a file of this key lies or would lie, in a folder that is there. Raises RecoveryError."""
        self.directory_of(key.job, key.timeline, key.boundary)
        return self._place_of(key)

    def _place_of(self, key: StateKey) -> Path:
        return self.timeline_directory_of(key.job, key.timeline) / str(key.boundary) / f"{key.layer}.safetensors"

    def get(self, key: StateKey) -> StoredFile | None:
        """The file of a key, or None."""
        return self._files.get(key)

    def adopt(
        self,
        key: StateKey,
        path: Path,
        *,
        size_bytes: int,
        checksum: str,
        generation: int = 0,
        uid: str = "",
        has_quota: bool = True,
    ) -> StoredFile:
        """Take in a file that was written into `directory_of` the key, within the quota unless told otherwise.

        Raises RecoveryError when it is not there, or there is no room.
        """
        try:
            found_bytes = path.stat().st_size
        except OSError as error:
            raise RecoveryError(str(key), f"{path}: {error.strerror}") from error
        if found_bytes != size_bytes:
            raise RecoveryError(str(key), f"{path} has {found_bytes} bytes, not the {size_bytes} that were written")
        if has_quota:
            self.require_room(size_bytes, str(key), held=key)
        self._incoming.pop(key, None)
        self._files[key] = StoredFile(path, size_bytes, checksum, generation, uid)
        self.on_change()
        return self._files[key]

    def require_room(self, size_bytes: int, what: str, *, held: StateKey | None = None) -> None:
        """Raise RecoveryError, with the figures, when so many bytes more would exceed the quota."""
        replaced_bytes = self._files[held].size_bytes if held in self._files else 0
        awaited_bytes = sum(awaited for key, awaited in self._incoming.items() if key != held)
        after_bytes = self.size_bytes - replaced_bytes + awaited_bytes + size_bytes
        if self._quota_bytes and after_bytes > self._quota_bytes:
            raise RecoveryError(
                what,
                f"the store {self._directory} would hold {after_bytes} bytes, "
                f"and store_quota_bytes allows {self._quota_bytes}",
            )

    def receive(self, key: StateKey, *, size_bytes: int) -> "IncomingFile":
        """Begin, or go on with, a file that comes in pieces; `adopt` it when it is in place, or `abandon` it.

        Raises RecoveryError when it would exceed the quota, with all that is on its way in, or has no folder.
        """
        self.require_room(size_bytes, str(key), held=key)
        path = self.path_of(key)
        self._incoming[key] = size_bytes
        return IncomingFile(str(key), path, size_bytes=size_bytes)

    def abandon(self, key: StateKey) -> None:
        """Drop what has come in of a file. Nothing has: no error."""
        if self._incoming.pop(key, None) is not None:
            path = self._place_of(key)
            partial_path(path).unlink(missing_ok=True)
            _remove_if_empty(path.parent, up_to=self._directory)

    def read(self, key: StateKey, *, offset: int = 0) -> Iterator[bytes]:
        """The file's bytes from an offset on, in chunks. Raises RecoveryError when it is not held."""
        file = self._files.get(key)
        if file is None:
            raise RecoveryError(str(key), "is not held here")
        return read_chunks(file.path, offset=offset)

    def delete(self, key: StateKey) -> None:
        """Delete a file, and its folders when they are empty. Deleting what is not held is no error."""
        self.remove(self.forget([key]))

    def forget(self, keys: Iterable[StateKey]) -> list[Path]:
        """Hold files no more; returns what is to be removed."""
        paths = [file.path for key in keys if (file := self._files.pop(key, None)) is not None]
        if paths:
            self.on_change()
        return paths

    def remove(self, paths: Iterable[Path]) -> None:
        """Remove files from the disk, and their folders when they are empty; may run in a thread."""
        for path in paths:
            path.unlink(missing_ok=True)
            _remove_if_empty(path.parent, up_to=self._directory)

    def known_paths(self) -> frozenset[Path]:
        """Every file that is held or on its way in."""
        awaited = [self._place_of(key) for key in self._incoming]
        return frozenset({*(file.path for file in self._files.values()), *awaited, *map(partial_path, awaited)})

    def sweep(self, known: Set[Path], *, older_than: float, spared: Set[Path] = frozenset()) -> int:
        """Delete files that are not known and were last written before a time; returns their bytes. For a thread.

        spared: folders of which nothing is deleted.
        """
        num_bytes = 0
        for path in [path for path in self._files_on_disk() if path not in known]:
            if not spared.isdisjoint(path.parents):
                continue
            try:
                status = path.stat()
                if status.st_mtime < older_than:
                    self.remove([path])
                    num_bytes += status.st_size
            except OSError:
                continue  # gone meanwhile
        return num_bytes

    def _files_on_disk(self) -> Iterator[Path]:
        """Every file of the folder. Folders come and go meanwhile: os.walk passes over those that it cannot list."""
        for folder, _, names in os.walk(self._directory):
            yield from (Path(folder) / name for name in names)


class IncomingFile:
    """A state file on its way in: bytes go to a partial file beside it, which takes its name when it is verified.

    The checksum is computed as the bytes come. Those of an earlier attempt are read again.
    """

    def __init__(self, what: str, path: Path, *, size_bytes: int) -> None:
        """what: for messages."""
        self.path = path
        self._what = what
        self._size_bytes = size_bytes
        self._partial = partial_path(path)
        self._content: ContentCheck | None = None
        """Of what is here, if it came from the first byte on without a break."""

    @property
    def offset(self) -> int:
        """Bytes that are here already."""
        return self._partial.stat().st_size if self._partial.exists() else 0

    def append(self, data: bytes, *, offset: int) -> None:
        """Add a chunk. Raises RecoveryError when it does not follow on what is here, or there is no room for it.

        What would make the file larger than it was said to be is not written, and what is here is dropped.
        """
        if offset + len(data) > self._size_bytes:
            self._partial.unlink(missing_ok=True)
            raise RecoveryError(self._what, f"arrived with more than the {self._size_bytes} bytes that it should have")
        try:
            with self._partial.open("ab") as file:
                if file.tell() != offset:
                    raise RecoveryError(self._what, f"a chunk began at byte {offset}, not {file.tell()}")
                file.write(data)
            self._check(data, offset)
        except OSError as error:
            self._partial.unlink(missing_ok=True)
            raise RecoveryError(self._what, f"{self._partial.parent}: {error.strerror}") from error

    def verify(self, checksum: str) -> None:
        """Check what is here; may run in a thread. Raises RecoveryError, and drops it, when it is something else."""
        from headway.stages.errors import DamagedFileError
        from headway.stages.state_file import content_checksum

        try:
            if self._content is not None and self._content.num_bytes == self._partial.stat().st_size:
                found = self._content.checksum()
            else:
                found = content_checksum(self._partial)
        except (DamagedFileError, OSError) as error:
            self._partial.unlink(missing_ok=True)
            raise RecoveryError(self._what, f"arrived damaged: {error}") from error
        if found != checksum:
            self._partial.unlink()
            raise RecoveryError(self._what, f"arrived with checksum {found[:12]}…, not {checksum[:12]}…")

    def _check(self, data: bytes, offset: int) -> None:
        from headway.stages.errors import DamagedFileError
        from headway.stages.state_file import ContentCheck

        if offset == 0:
            self._content = ContentCheck(self._partial, self._size_bytes)
        if self._content is not None and self._content.num_bytes == offset:
            try:
                self._content.update(data)
            except DamagedFileError:
                self._content = None  # `verify` reads it again, and tells

    def put_in_place(self) -> None:
        """The verified file gets its name."""
        self._partial.replace(self.path)


def partial_path(path: Path) -> Path:
    """Where a file lies while it comes in."""
    return path.with_suffix(".partial")


def read_chunks(path: Path, *, offset: int = 0) -> Iterator[bytes]:
    """A file's bytes from an offset on, at most CHUNK_BYTES at a time."""
    with path.open("rb") as file:
        file.seek(offset)
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _remove_if_empty(directory: Path, *, up_to: Path) -> None:
    while directory != up_to:
        try:
            directory.rmdir()
        except OSError:
            return  # something is in it, or it is gone
        directory = directory.parent
