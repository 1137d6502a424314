"""The files of a model's folder, anywhere that fsspec reads: their sizes, small ones whole, large ones by range.

All functions block, perhaps for ever: daemons call them by FileThreads. Every failure is a RecoveryError that names the
file: a NoAccessError if this machine lacks credentials or a package, a StorageAwayError if a server does not answer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from fsspec.asyn import sync

from headway.daemon.base.errors import RecoveryError, StorageAwayError
from headway.daemon.base.file_system import check_allowed, check_opened, is_local, open_url, told_as

PIECE_BYTES: Final = 16 << 20
"""Bytes of one request: a server answers each within a minute on a slow line."""


_MISSING: Final = "is missing"
_NOT_NOW: Final = (408, 425, 429)
"""Answers of HTTP below 500 after which another attempt may succeed."""


class MissingFileError(RecoveryError):
    """The folder does not have this file."""


class OriginFolder:
    """A folder or URL. Its files may be altered at any time, so whoever reads compares checksums."""

    def __init__(self, url: str, *, beat: Callable[[], None] = lambda: None) -> None:
        """beat: is called between any two requests. Raises RecoveryError for a URL that nothing here can read."""
        self.url = url.rstrip("/")
        self._beat = beat
        self._file_system, self._path = open_url(self.url)

    def named(self, name: str) -> str:
        """Return a file's name for people."""
        return f"{self.url}/{name}"

    def has(self, name: str) -> bool:
        """Return whether a file exists. Raises RecoveryError when nobody can say it now, and for a broken link."""
        self._beat()
        try:
            with self._told(name):
                found: Any = self._file_system.info(self._at(name))
        except MissingFileError as error:
            if error.reason != _MISSING:
                raise
            return False
        return bool(found.get("type") == "file")

    def names(self) -> list[str]:
        """Return the names of the folder's files, for a sentence about it; none if nobody lists them."""
        if self.url.startswith(("http:", "https:")):
            return []
        with suppress(Exception):
            return [name.rpartition("/")[2] for name in self._file_system.ls(self._path, detail=False)]
        return []

    def size_of(self, name: str) -> int:
        """Return a file's size in bytes. Raises RecoveryError when the server does not say it."""
        self._beat()
        with self._told(name):
            size: Any = self._file_system.info(self._at(name)).get("size")
        if not isinstance(size, int) or size < 0:
            raise RecoveryError(self.named(name), "has a size that its server does not say")
        return size

    def read_small(self, name: str, most_bytes: int) -> bytes:
        """Return a whole file. Raises RecoveryError for a larger one."""
        size = self.size_of(name)
        if size > most_bytes:
            raise RecoveryError(self.named(name), f"has {size} bytes; at most {most_bytes} are read")
        return b"".join(self.read(name, 0, size))

    def read(self, name: str, begin: int, end: int) -> Iterator[bytes]:
        """Yield the bytes of a range, piece by piece. Raises RecoveryError when there are fewer, or others come."""
        for start in range(begin, end, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, end)
            self._beat()
            with self._told(name):
                piece = self._range(self._at(name), start, stop)
            if len(piece) > stop - start:
                raise RecoveryError(self.named(name), "comes as a whole: its server does not answer by range")
            if len(piece) < stop - start:
                raise RecoveryError(self.named(name), f"is truncated: it ends at byte {start + len(piece)}")
            yield piece

    def _range(self, path: str, start: int, end: int) -> bytes:
        """Return the bytes of a range, and perhaps one piece more if a server sends more."""
        protocol = self._file_system.protocol
        if "http" in ((protocol,) if isinstance(protocol, str) else protocol):
            return bytes(sync(self._file_system.loop, _http_range, self._file_system, path, start, end))
        if is_local(self._file_system):
            with Path(path).open("rb") as file:
                check_opened(file)
                file.seek(start)
                return file.read(end - start)
        return bytes(self._file_system.cat_file(path, start=start, end=end))

    def _at(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{name}"

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        url = self.named(name)
        check_allowed(url)  # the folder was; one of its files may be a link that leads out of it
        with told_as(url, "read", StorageAwayError):
            try:
                yield
            except (FileNotFoundError, NotADirectoryError) as error:
                if isinstance(error.__cause__, Exception) and _is_outage(error.__cause__):
                    raise error.__cause__ from error
                link = Path(self._at(name))
                is_broken = is_local(self._file_system) and link.is_symlink()
                what = f"is a link to {link.readlink()}, which is not there; download it again" if is_broken else ""
                raise MissingFileError(url, what or _MISSING) from error


def _is_outage(cause: Exception) -> bool:
    """Return whether a file counts as not found although its server said nothing about it: fsspec's HTTP does so."""
    status = getattr(cause, "status", None)
    if isinstance(status, int):
        return status >= 500 or status in _NOT_NOW
    names = {kind.__name__ for kind in type(cause).__mro__}
    return isinstance(cause, TimeoutError) or bool(names & {"ClientConnectionError", "ClientPayloadError"})


async def _http_range(file_system: Any, url: str, start: int, end: int) -> bytes:
    """Return what a server answers to a range, cut off after the first piece too many.

    fsspec's own request reads an answer to its end, and a server may send one without end.
    """
    request = {**file_system.kwargs, "headers": {**file_system.kwargs.get("headers", {})}}
    request["headers"]["Range"] = f"bytes={start}-{end - 1}"
    session, raw = await file_system.set_session(), bytearray()
    async with session.get(file_system.encode_url(url), **request) as answer:
        file_system._raise_not_found_for_status(answer, url)
        async for piece in answer.content.iter_any():
            raw += piece
            if len(raw) > end - start:
                break
    return bytes(raw)
