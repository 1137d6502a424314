"""Redirects a worker's standard output and error: to its job's log while it serves one, else to their first target.

It moves file descriptors 1 and 2 themselves, so that output of C++ or of a crash handler arrives too. It appends,
because the workers of a node may share the file, and renames a full file to `<name>.1`.
"""

import os
import sys
from pathlib import Path

MAX_LOG_BYTES = 16 << 20
_STANDARD_FDS = (1, 2)


class WorkerOutput:
    """The process's standard descriptors. One per process; `rotate` may be called from another thread."""

    def __init__(self) -> None:
        self._originals = tuple(os.dup(fd) for fd in _STANDARD_FDS)
        self._path: Path | None = None

    def redirect(self, path: Path) -> None:
        """Append to this file from now on. Raises OSError when it cannot be opened."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._point_at(path)
        self._path = path
        self.rotate()

    def restore(self) -> None:
        """Print to the process's first targets again."""
        self._path = None
        sys.stdout.flush()
        sys.stderr.flush()
        for original, fd in zip(self._originals, _STANDARD_FDS, strict=True):
            os.dup2(original, fd)

    def rotate(self) -> None:
        """Start a new file if this one is full, or if another worker has renamed it."""
        path = self._path
        if path is None:
            return
        ours = os.fstat(_STANDARD_FDS[0])
        try:
            is_current = path.stat().st_ino == ours.st_ino
        except FileNotFoundError:
            is_current = False
        if is_current and ours.st_size < MAX_LOG_BYTES:
            return
        if is_current:
            path.replace(path.with_name(path.name + ".1"))
        self._point_at(path)

    def _point_at(self, path: Path) -> None:
        opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        sys.stdout.flush()
        sys.stderr.flush()
        for fd in _STANDARD_FDS:
            os.dup2(opened, fd)
        os.close(opened)
