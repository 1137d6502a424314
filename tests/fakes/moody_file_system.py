"""An fsspec file system in memory, `moody://`, that can hang, or fail with any error, as drivers do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

PROTOCOL = "moody"


class Mood:
    """What happens at the next calls."""

    def __init__(self) -> None:
        self.error: Callable[[], BaseException] | None = None
        self.gate = Event()
        """Calls wait for it."""
        self.gate.set()
        self.num_calls = 0

    def strike(self) -> None:
        """At the beginning of a call."""
        self.num_calls += 1
        self.gate.wait()
        if self.error is not None:
            raise self.error()


MOOD = Mood()


class MoodyFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """All of one process share their files."""

    protocol = PROTOCOL
    store: dict[str, Any] = {}  # noqa: RUF012 (as the class above has it)
    pseudo_dirs: list[str] = [""]  # noqa: RUF012

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        MOOD.strike()
        return super()._open(path, mode, **options)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        MOOD.strike()
        return super().ls(path, detail, **options)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        MOOD.strike()
        super().rm(path, recursive, maxdepth)


@contextmanager
def moody() -> Iterator[Mood]:
    """The file system is known, empty and in a good mood; afterwards no call hangs any more."""
    fsspec.register_implementation(PROTOCOL, MoodyFileSystem, clobber=True)
    MoodyFileSystem.store.clear()
    MOOD.error, MOOD.num_calls = None, 0
    MOOD.gate.set()
    try:
        yield MOOD
    finally:
        MOOD.error = None
        MOOD.gate.set()
