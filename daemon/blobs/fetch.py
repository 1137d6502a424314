"""Brings one file of known digest from whoever has it: state files and token shards, into a node or to a command.

Received bytes stay on disk, so the next source, or the next attempt, continues from there. They are hashed as they
come, and the file takes its name when they are verified.
"""

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TypeVar

import structlog

from headway.daemon.base.errors import DamagedCopyError, RecoveryError, StorageAwayError, UnwritableError
from headway.daemon.blobs.file_threads import Beat
from headway.stages.errors import DamagedFileError, PeerError, UnavailableError
from headway.stages.state.file_digest import FileDigest

T = TypeVar("T")
log = structlog.get_logger()

READ_BYTES: Final = 8 << 20
SHA256_CHARACTERS: Final = 64
"""Length of a SHA-256 in hexadecimal digits: of a digest of this length, the whole file is hashed by it. Other digests
are the checksum of a state file's content.
"""


class ServerAwayError(UnavailableError):
    """The server of a URL does not answer: another attempt may succeed."""


class InThread(Protocol):
    """Runs a blocking call in a thread."""

    def __call__(self, act: Callable[[Beat], T], /) -> Awaitable[T]:
        """Return act(beat). Raises RecoveryError."""
        ...


async def _nothing() -> None:
    return


@dataclass(frozen=True, slots=True)
class Source:
    """One that may give a file."""

    name: str
    """For people."""
    read: Callable[[int], AsyncIterator[bytes]]
    """Yields the file's bytes from an offset on, unverified; a piece may be empty. Raises PeerError, RecoveryError."""
    doubt: Callable[[], Awaitable[None]] = _nothing
    """Is called when its bytes were wrong: it may check its own file."""


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
        self._check = self._new_check()
        self.num_bytes = 0
        """Number of bytes that are here, and hashed: those of an earlier attempt only after `resume`."""

    @property
    def is_whole(self) -> bool:
        """Return whether all bytes are here."""
        return self.num_bytes == self._expected.size_bytes

    def resume(self, beat: Beat = lambda: None) -> None:
        """Hash the bytes of an earlier attempt. Raises OSError."""
        if self.num_bytes or not self._partial.exists():
            return
        if self._partial.stat().st_size > self._expected.size_bytes:
            self.drop()
            return
        try:
            with self._partial.open("rb", buffering=0) as file:
                while chunk := file.read(READ_BYTES):
                    self._check.update(chunk)
                    self.num_bytes += len(chunk)
                    beat()
        except DamagedFileError:
            self.drop()

    def append(self, piece: bytes, sender: str) -> None:
        """Add the next bytes. Raises RecoveryError if they are too many or make no such file, UnwritableError if the
        disk takes no more.
        """
        if self.num_bytes + len(piece) > self._expected.size_bytes:
            self.drop()
            what = f"is damaged: it has more than its {self._expected.size_bytes} bytes"
            raise DamagedCopyError(sender or self.what, what)
        try:
            with self._partial.open("ab") as file:
                file.write(piece)
        except OSError as error:
            self.drop()
            raise UnwritableError(str(self._partial.parent), error.strerror or str(error)) from error
        self.num_bytes += len(piece)
        with self._refusing(sender):
            self._check.update(piece)

    def verify(self, sender: str) -> None:
        """Check the bytes. Raises RecoveryError if some are missing, and DamagedCopyError if they are wrong.

        sender: of the last bytes. Earlier bytes may have come from another source.
        """
        if not self.is_whole:
            what = f"ended after {self.num_bytes} of {self._expected.size_bytes} bytes"
            raise RecoveryError(sender or self.what, what)
        with self._refusing(sender):
            found = self._check.checksum()
        if found != self._expected.checksum:
            kind = "SHA-256" if isinstance(self._check, _Sha256) else "checksum"
            what = f"has {kind} {found[:12]}…, not {self._expected.checksum[:12]}…"
            self.drop()
            raise DamagedCopyError(sender or self.what, what)

    def put_in_place(self) -> None:
        """Give the verified file its name: a reader of an older file of that name keeps it. Raises OSError."""
        self._partial.touch()  # a shard without tokens never received bytes
        self._partial.replace(self.path)

    def drop(self) -> None:
        """Delete the bytes."""
        self._partial.unlink(missing_ok=True)
        self._check = self._new_check()
        self.num_bytes = 0

    def _refusing(self, sender: str) -> "_Refusing":
        return _Refusing(self, sender or self.what)

    def _new_check(self) -> "_Check":
        if len(self._expected.checksum) == SHA256_CHARACTERS:
            return _Sha256()
        from headway.stages.state.state_file import ContentCheck  # imports torch, which commands rarely need

        return ContentCheck(self._partial, self._expected.size_bytes)


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


class _Refusing:
    """Turns damage that the body finds into DamagedCopyError, and deletes the bytes."""

    def __init__(self, file: PartialFile, item: str) -> None:
        self._file, self._item = file, item

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, DamagedFileError):
            self._file.drop()
            raise DamagedCopyError(self._item, f"is damaged: {error.reason}") from error


async def fetch(
    file: PartialFile,
    sources: Callable[[], Iterable[Source]],
    *,
    in_thread: InThread,
    tell: Callable[[int], None] = lambda _: None,
) -> Source:
    """Bring a file, verified and in place; return who gave the rest of it. Sources take turns while more bytes arrive.

    in_thread: runs what uses the disk. tell: is called with the number of bytes that are there.

    Raises RecoveryError with each source's reason if none gives it, StorageAwayError if this machine's disk or a URL's
    server does not answer, UnwritableError if the disk takes no more. Bytes that have come stay for the next attempt.
    """

    def resume(beat: Beat) -> None:
        def moved() -> None:
            beat()
            tell(file.num_bytes)

        file.resume(moved)

    await in_thread(resume)
    while True:
        before, reasons, is_away = file.num_bytes, [], False
        for source in sources():
            try:
                await _fetch_from(source, file, in_thread, tell)
            except (StorageAwayError, UnwritableError):
                raise  # the fault is on this machine: no other source can help
            except (PeerError, RecoveryError) as error:
                log.warning("fetch_failed", what=file.what, source=source.name, error=str(error))
                reasons.append(str(error))
                is_away |= isinstance(error, ServerAwayError)
                continue
            await in_thread(lambda _: file.put_in_place())
            return source
        if file.num_bytes <= before:
            kind = StorageAwayError if is_away else RecoveryError
            raise kind(file.what, "; ".join(reasons) or "there is no other node")


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
            async for piece in source.read(file.num_bytes):
                await in_thread(partial(_append, file, piece, source.name))
                tell(file.num_bytes)
        await in_thread(lambda _: file.verify(source.name))
    except (StorageAwayError, UnwritableError):
        raise
    except RecoveryError:
        await source.doubt()
        raise


def _append(file: PartialFile, piece: bytes, sender: str, _: Beat) -> None:
    if piece:
        file.append(piece, sender)


def partial_path(path: Path) -> Path:
    """Return the path of a file while it arrives."""
    return path.with_suffix(".partial")
