"""An fsspec file system in memory, `moody://`, that can hang, or fail with any error, as drivers do.

As in an object store, a file that is written appears when it is closed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

PROTOCOL = "moody"


class Mood:
    """The results of the next calls."""

    def __init__(self) -> None:
        self.error: Callable[[], BaseException] | None = None
        self.gate = Event()
        """Calls about the paths below wait for it."""
        self.gate.set()
        self.hung = ""
        """A part of the paths that the gate is for."""
        self.closing = Event()
        """A file that was written appears when this is set."""
        self.closing.set()
        self.num_calls = 0
        self.num_closing = 0

    def strike(self, path: str) -> None:
        """At the beginning of a call."""
        self.num_calls += 1
        if self.hung in path:
            self.gate.wait()
        if self.error is not None:
            raise self.error()

    def strike_at_close(self) -> None:
        """Strike when all of a file has been sent."""
        self.num_closing += 1
        self.closing.wait()


MOOD = Mood()


class MoodyFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """All of one process share their files."""

    protocol = PROTOCOL
    store: dict[str, Any] = {}  # noqa: RUF012 (as the class above has it)
    pseudo_dirs: list[str] = [""]  # noqa: RUF012

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        MOOD.strike(path)
        if mode == "wb":
            return MoodyUpload(self, self._strip_protocol(path))
        return super()._open(path, mode, **options)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        MOOD.strike(path)
        return super().ls(path, detail, **options)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        MOOD.strike(path)
        super().rm(path, recursive, maxdepth)


class MoodyUpload(MemoryFile):  # type: ignore[misc]
    """A file that is written: it appears once, when it is closed and was not discarded."""

    is_over = False

    def discard(self) -> None:
        self.is_over = True

    def close(self) -> None:
        if not self.is_over:
            self.is_over = True
            MOOD.strike_at_close()
            self.commit()


@contextmanager
def moody() -> Iterator[Mood]:
    """The file system is known, empty and in a good mood; afterwards no call hangs any more."""
    fsspec.register_implementation(PROTOCOL, MoodyFileSystem, clobber=True)
    MoodyFileSystem.store.clear()
    MOOD.error, MOOD.hung, MOOD.num_calls, MOOD.num_closing = None, "", 0, 0
    MOOD.gate.set()
    MOOD.closing.set()
    try:
        yield MOOD
    finally:
        MOOD.error = None
        MOOD.gate.set()
        MOOD.closing.set()
