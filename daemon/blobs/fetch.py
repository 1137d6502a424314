"""Brings one file of known digest from whoever has it: state files and token shards, into a node or to a command.

Received bytes stay on disk, so the next source, or the next attempt, continues from there. They are hashed as they
come, and the file takes its name when they are verified.
"""

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TypeVar

import structlog

from headway.daemon.base.errors import DamagedCopyError, RecoveryError, StorageAwayError, UnwritableError
from headway.daemon.blobs.file_threads import Beat, FileThreads
from headway.stages.errors import DamagedFileError, PeerError, UnavailableError
from headway.stages.state.file_digest import FileDigest

T = TypeVar("T")
log = structlog.get_logger()

READ_BYTES: Final = 8 << 20
SHA256_CHARACTERS: Final = 64
"""Length of a SHA-256 in hexadecimal digits: of a digest of this length, the whole file is hashed by it. Other digests
are the checksum of a state file's content.
"""


class SourceAwayError(UnavailableError):
    """The file system of a source does not answer: another attempt may succeed."""


class InThread(Protocol):
    """Runs a blocking call in a thread."""

    def __call__(self, act: Callable[[Beat], T], /) -> Awaitable[T]:
        """Return act(beat). Raises RecoveryError."""
        ...


async def _nothing(_: RecoveryError) -> None:
    return


@dataclass(frozen=True, slots=True)
class Source:
    """One that may give a file."""

    name: str
    """For people."""
    read: Callable[[int], AsyncIterator[bytes]]
    """Yields the file's bytes from an offset on, unverified; a piece may be empty. Raises PeerError, RecoveryError."""
    doubt: Callable[[RecoveryError], Awaitable[None]] = _nothing
    """Is told of what was wrong with its bytes, or why it has none: it may check its own file."""
    is_own_place: bool = False
    """This is where the file belongs. If nobody gives it, the error is what was wrong here."""

    async def pieces(self, offset: int) -> AsyncIterator[bytes]:
        """Yield as `read`. Its outage is a SourceAwayError: a StorageAwayError is one of this machine's own disk."""
        try:
            async for piece in self.read(offset):
                yield piece
        except StorageAwayError as error:
            raise SourceAwayError(error.item, error.reason) from error


def source_at(
    url: str,
    name: str,
    threads: FileThreads,
    begin: Callable[[int, Beat], Iterator[bytes]],
) -> Source:
    """Return a file of a checkpoint, a model or a data set as the source that it belongs to.

    name: for people. begin(offset, beat): returns its unverified chunks; each is read by a call of its own.
    """
    return Source(name, lambda offset: threads.pieces(url, lambda beat: begin(offset, beat)), is_own_place=True)


class Arrival:
    """A file whose bytes come in order: counted and hashed."""

    def __init__(self, expected: FileDigest, *, what: str) -> None:
        """what: the file's name in errors about bytes of no sender."""
        self.num_bytes = 0
        self._what = what
        self._expected = expected
        self._is_hashed_whole = len(expected.checksum) == SHA256_CHARACTERS
        self._check: _Check = _Sha256()
        if not self._is_hashed_whole:
            from headway.stages.state.state_file import ContentCheck  # imports torch, which commands rarely need

            self._check = ContentCheck(Path(what), expected.size_bytes)

    def add(self, piece: bytes, sender: str = "") -> None:
        """Add the next bytes. Raises DamagedCopyError if they are too many or make no such file."""
        if self.num_bytes + len(piece) > self._expected.size_bytes:
            what = f"is damaged: it has more than its {self._expected.size_bytes} bytes"
            raise DamagedCopyError(sender or self._what, what)
        self.num_bytes += len(piece)
        with self._told(sender):
            self._check.update(piece)

    def verify(self, sender: str = "") -> None:
        """Raise RecoveryError if bytes are missing, DamagedCopyError if they are wrong.

        sender: of the last bytes. Earlier bytes may have come from another source.
        """
        if self.num_bytes < self._expected.size_bytes:
            what = f"ended after {self.num_bytes} of {self._expected.size_bytes} bytes"
            raise RecoveryError(sender or self._what, what)
        with self._told(sender):
            found = self._check.checksum()
        if found != self._expected.checksum:
            kind = "SHA-256" if self._is_hashed_whole else "checksum"
            what = f"has {kind} {found[:12]}…, not {self._expected.checksum[:12]}…"
            raise DamagedCopyError(sender or self._what, what)

    @contextmanager
    def _told(self, sender: str) -> Iterator[None]:
        try:
            yield
        except DamagedFileError as error:
            raise DamagedCopyError(sender or self._what, f"is damaged: {error.reason}") from error


class PartialFile:
    """An arriving file. Every method blocks, so it belongs in a thread.

    One that broke off stays for the next attempt. One with wrong bytes, or too many, is deleted with all its bytes.
    """

    def __init__(self, path: Path, expected: FileDigest, *, what: str, partial: Path | None = None) -> None:
        """what: the file's name in errors. partial: where bytes gather; None: next to the path."""
        self.path = path
        self.what = what
        self._expected = expected
        self._partial = partial or partial_path(path)
        self._arrived = Arrival(expected, what=what)

    @property
    def num_bytes(self) -> int:
        """Return the bytes that are here, and hashed: those of an earlier attempt only after `resume`."""
        return self._arrived.num_bytes

    @property
    def is_whole(self) -> bool:
        """Return whether all bytes are here."""
        return self.num_bytes == self._expected.size_bytes

    def resume(self, beat: Beat = lambda: None) -> None:
        """Hash the bytes of an earlier attempt. Raises OSError."""
        if self.num_bytes or not self._partial.exists():
            return
        try:
            with self._partial.open("rb", buffering=0) as file:
                while chunk := file.read(READ_BYTES):
                    self._arrived.add(chunk)
                    beat()
        except DamagedCopyError:
            self.drop()

    def append(self, piece: bytes, sender: str) -> None:
        """Add the next bytes. Raises RecoveryError if they are too many or make no such file, UnwritableError if the
        disk takes no more.
        """
        try:
            self._arrived.add(piece, sender)
            with self._partial.open("ab") as file:
                file.write(piece)
        except DamagedCopyError:
            self.drop()
            raise
        except OSError as error:
            self.drop()
            raise UnwritableError(str(self._partial.parent), error.strerror or str(error)) from error

    def verify(self, sender: str) -> None:
        """Check the bytes; raises as `Arrival.verify`."""
        try:
            self._arrived.verify(sender)
        except DamagedCopyError:
            self.drop()
            raise

    def put_in_place(self) -> None:
        """Give the verified file its name: a reader of an older file of that name keeps it. Raises OSError."""
        self._partial.touch()  # a shard without tokens never received bytes
        self._partial.replace(self.path)

    def drop(self) -> None:
        """Delete the bytes."""
        self._partial.unlink(missing_ok=True)
        self._arrived = Arrival(self._expected, what=self.what)


class _Check(Protocol):
    """The digest of bytes that come in order. Both methods raise DamagedFileError."""

    def update(self, piece: bytes, /) -> None: ...

    def checksum(self) -> str: ...


class _Sha256:
    """Of a whole file."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def update(self, piece: bytes, /) -> None:
        self._digest.update(piece)

    def checksum(self) -> str:
        return self._digest.hexdigest()


async def fetch(
    file: PartialFile,
    sources: Callable[[], Iterable[Source]],
    *,
    in_thread: InThread,
    tell: Callable[[int], None] = lambda _: None,
) -> Source:
    """Bring a file, verified and in place; return who gave the rest of it. Sources take turns while more bytes arrive.

    in_thread: runs what uses the disk. tell: is called with the number of bytes that are there.

    Raises RecoveryError with each source's reason if none gives it, or what was wrong at the file's own place;
    StorageAwayError if this machine's disk or a source's file system does not answer, UnwritableError if the disk takes
    no more. Bytes that have come stay for the next attempt.
    """

    def resume(beat: Beat) -> None:
        def moved() -> None:
            beat()
            tell(file.num_bytes)

        file.resume(moved)

    await in_thread(resume)
    while True:
        before, failures = file.num_bytes, Failures(file.what)
        for source in sources():
            try:
                await _fetch_from(source, file, in_thread, tell)
            except (StorageAwayError, UnwritableError):
                raise  # the fault is on this machine: no other source can help
            except (PeerError, RecoveryError) as error:
                log.warning("fetch_failed", what=file.what, source=source.name, error=str(error))
                failures.add(source, error)
                continue
            await in_thread(lambda _: file.put_in_place())
            return source
        if file.num_bytes <= before:
            raise failures.error() from failures.first


class Failures:
    """Why no source has given a file."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._reasons: list[str] = []
        self._is_away = False
        self._at_own_place: RecoveryError | None = None
        self.first: Exception | None = None

    def add(self, source: Source, error: PeerError | RecoveryError) -> None:
        """Note why a source gave nothing."""
        self._reasons.append(str(error))
        self._is_away |= isinstance(error, SourceAwayError)
        self.first = self.first or error
        if source.is_own_place:
            told = StorageAwayError(error.peer, error.reason) if isinstance(error, PeerError) else error
            self._at_own_place = self._at_own_place or told

    def error(self) -> RecoveryError:
        """Return the one error that stands for all."""
        kind = StorageAwayError if self._is_away else RecoveryError
        return self._at_own_place or kind(self._what, "; ".join(self._reasons) or "there is no other node")


async def _fetch_from(source: Source, file: PartialFile, in_thread: InThread, tell: Callable[[int], None]) -> None:
    num_before = file.num_bytes
    try:
        await _receive(source, file, in_thread, tell)
    except DamagedCopyError:
        if not num_before:
            raise
        # bytes from another source may be the wrong ones, so now fetch all of it from this one
        await _receive(source, file, in_thread, tell)


async def _receive(source: Source, file: PartialFile, in_thread: InThread, tell: Callable[[int], None]) -> None:
    """Receive and verify the rest of a file. Of a whole one of an earlier attempt, nothing more is asked for."""
    try:
        if not file.is_whole:
            async for piece in source.pieces(file.num_bytes):
                await in_thread(partial(_append, file, piece, source.name))
                tell(file.num_bytes)
        await in_thread(lambda _: file.verify(source.name))
    except (StorageAwayError, UnwritableError):
        raise
    except RecoveryError as error:
        await source.doubt(error)
        raise


def _append(file: PartialFile, piece: bytes, sender: str, _: Beat) -> None:
    if piece:
        file.append(piece, sender)


def partial_path(path: Path) -> Path:
    """Return the path of a file while it arrives."""
    return path.with_suffix(".partial")
