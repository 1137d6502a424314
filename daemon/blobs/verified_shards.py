"""Remembers which files of token shards this node has hashed, and in which state, so that each state is read once.

A state is the size, the time of the last write and of the last change, and the inode. A written, replaced or restored
file has another state and is hashed again. The memory is a file in the state folder; without it, everything is hashed.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Final

import structlog

from headway.stages.data.shard_index import FileState, read_index, state_of
from headway.stages.errors import DataError

log = structlog.get_logger()

CHUNK_BYTES: Final = 8 << 20
MAX_REMEMBERED: Final = 100_000
FRESH_S: Final = 3600.0
"""A file that was hashed within this time is not read again beside training."""

Advance = Callable[[int], None]
"""Called for each piece that was read, with its bytes."""


class VerifiedShards:
    """The memory of hashed files; used by threads that hash different data sets."""

    def __init__(self, memory: Path | None = None) -> None:
        """memory: a file that keeps the memory across restarts."""
        self._memory = memory
        self._known: dict[str, tuple[str, FileState]] = _read(memory)
        self._hashed_at: dict[str, float] = {}
        """When this process has hashed a file, by its monotonic clock."""
        self._writing = Lock()

    def num_bytes_to_read(self, folder: Path) -> int:
        """Return the bytes of a folder's shards that were not hashed in their present state. Raises DataError."""
        index = read_index(folder)
        files = [folder / each.file for each in index.files if not self._knows(folder / each.file, each.sha256)]
        return sum(state_of(file)[0] for file in files)

    def verify(self, folder: Path, advance: Advance) -> None:
        """Hash unknown shards of a folder. Raises DataError for one that does not fit its hash."""
        for each in read_index(folder).files:
            self.verify_file(folder / each.file, each.sha256, advance)

    def verify_file(self, file: Path, sha256: str, advance: Advance) -> None:
        """Hash one file, unless it is known. Raises DataError when it does not fit its hash."""
        if self._knows(file, sha256):
            return
        before = state_of(file)
        found = _sha256(file, advance)
        if found != sha256:
            raise DataError(str(file), f"was changed or damaged: its SHA-256 is {found[:12]}…, not {sha256[:12]}…")
        if state_of(file) != before:
            raise DataError(str(file), "is being written to")
        self._remember(file, found, before)

    def read_again(self, folder: Path, advance: Advance) -> None:
        """Hash the folder's shards once more whose notes are not fresh.

        A disk that loses bits changes no time of a file, so its state looks as it was. Raises DataError for such a
        file, and forgets its note.
        """
        for each in read_index(folder).files:
            file = folder / each.file
            is_fresh = time.monotonic() < self._hashed_at.get(str(file.resolve()), -FRESH_S) + FRESH_S
            if is_fresh or not self._knows(file, each.sha256):
                continue  # without a note, its next opening reads it anyway
            state, found = state_of(file), _sha256(file, advance)
            if found != each.sha256 and state_of(file) == state:
                self._known.pop(str(file.resolve()), None)
                what = f"has decayed: its SHA-256 is {found[:12]}…, not {each.sha256[:12]}…, and nobody wrote to it"
                raise DataError(str(file), what)
            self._hashed_at[str(file.resolve())] = time.monotonic()

    def remember(self, file: Path, sha256: str) -> None:
        """Note a file that was hashed while it was written, and is in place. Raises DataError when it is gone."""
        self._remember(file, sha256, state_of(file))

    def has_read(self, folder: Path) -> bool:
        """Return whether shards in this folder itself were ever verified here, in this state or another."""
        place = os.path.realpath(folder)
        return any(os.path.dirname(path) == place for path in list(self._known))  # noqa: PTH120 (100,000 of them)

    def _knows(self, file: Path, sha256: str) -> bool:
        return self._known.get(str(file.resolve())) == (sha256, state_of(file))

    def _remember(self, file: Path, sha256: str, state: FileState) -> None:
        path = str(file.resolve())
        self._hashed_at[path] = time.monotonic()
        with self._writing:
            self._known.pop(path, None)
            self._known[path] = (sha256, state)
            while len(self._known) > MAX_REMEMBERED:
                del self._known[next(iter(self._known))]
            self._write()

    def _write(self) -> None:
        if self._memory is None:
            return
        draft = self._memory.with_suffix(".draft")
        try:
            draft.write_text(json.dumps(self._known))
            draft.replace(self._memory)
        except OSError as error:
            log.warning("verified_shards_not_kept", path=str(self._memory), reason=error.strerror)


def _sha256(file: Path, advance: Advance) -> str:
    digest, buffer = hashlib.sha256(), bytearray(CHUNK_BYTES)
    try:
        with file.open("rb", buffering=0) as stream:
            while num_read := stream.readinto(buffer):
                digest.update(memoryview(buffer)[:num_read])
                advance(num_read)
    except OSError as error:
        raise DataError(str(file), f"cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _read(memory: Path | None) -> dict[str, tuple[str, FileState]]:
    """Read the memory. A missing memory is no error, and other formats are ignored."""
    found: dict[str, tuple[str, FileState]] = {}
    with suppress(Exception):
        for path, (sha256, state) in json.loads(memory.read_bytes()).items() if memory is not None else ():
            size, written, changed, inode = (int(number) for number in state)
            found[str(path)] = (str(sha256), (size, written, changed, inode))
    return found
