"""The folder of an unfinished preparation, with a journal from which the same command goes on after it was stopped.

The folder `.NAME.unfinished` lies beside NAME. It holds the growing data in `data`, and in `journal` a SHA-256 and what
the run needs to go on, pickled. The journal names what is durable in `data`; what lies beyond it is dropped.
"""

import fcntl
import hashlib
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from headway.daemon.base.errors import ConfigError
from headway.stages.durable import make_durable
from headway.stages.errors import DataError

_JOURNAL: Final = "journal"
_DATA: Final = "data"


class Unfinished:
    """A preparation's folder, which this process holds alone."""

    def __init__(self, place: Path, work: str | None) -> None:
        """work: names arguments and inputs; None: another run could not go on."""
        self.data = place / _DATA
        self.can_go_on = work is not None
        self._journal = place / _JOURNAL
        self._work = work

    def left(self) -> Any:
        """Return what an earlier run has saved; None: nothing, or it is damaged, or of another work."""
        try:
            sha256, raw = self._journal.read_bytes().split(b"\n", 1)
            if self._work is None or sha256.decode() != hashlib.sha256(raw).hexdigest():
                return None
            work, saved = pickle.loads(raw)
        except (OSError, ValueError, pickle.UnpicklingError):
            return None
        return saved if work == self._work else None

    def save(self, progress: object) -> None:
        """Replace the journal, durably. What it names in `data` is durable already."""
        raw = pickle.dumps((self._work, progress))
        growing = self._journal.with_suffix(".new")
        with growing.open("wb") as file:
            file.write(hashlib.sha256(raw).hexdigest().encode() + b"\n" + raw)
            file.flush()
            os.fsync(file.fileno())
        growing.replace(self._journal)
        make_durable(self.data)
        make_durable(self._journal.parent)

    def start_afresh(self) -> bool:
        """Empty the folder. Returns whether there was anything in it."""
        was_used = self.data.exists() or self._journal.exists()
        self._journal.unlink(missing_ok=True)
        if self.data.exists():
            shutil.rmtree(self.data)
        self.data.mkdir()
        return was_used

    def keep_only(self, names: set[str]) -> None:
        """Delete files of the data that the journal does not name."""
        for file in self.data.iterdir():
            if file.name not in names:
                file.unlink()

    @property
    def is_worth_keeping(self) -> bool:
        """Return whether a later run can go on with it."""
        return self.can_go_on and self._journal.exists()


@contextmanager
def unfinished(out: Path, work: str | None, warn: Callable[[str], None]) -> Iterator[Unfinished]:
    """Hold the folder of the unfinished `out`. If the block fails for an outer reason, the folder stays.

    Raises DataError when `out` exists, cannot be written, or another process prepares it.
    """
    if out.exists():
        raise DataError(str(out), "exists already; name another folder, or remove it first")
    place = out.parent / f".{out.name}.unfinished"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        place.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise DataError(str(out), f"cannot be written to: {error.strerror}; name another folder") from error
    try:
        _take(lock, place, out)
        yield from _kept_if_stopped(Unfinished(place, work), place, warn)
    finally:
        os.close(lock)


def _kept_if_stopped(found: Unfinished, place: Path, warn: Callable[[str], None]) -> Iterator[Unfinished]:
    try:
        yield found
    except (ConfigError, DataError):
        shutil.rmtree(place, ignore_errors=True)
        raise
    except BaseException:
        if found.is_worth_keeping:
            warn(f"{place}: holds what is done so far; the same command goes on from there")
        else:
            shutil.rmtree(place, ignore_errors=True)
        raise
    shutil.rmtree(place, ignore_errors=True)


def _take(lock: int, place: Path, out: Path) -> None:
    """Lock the folder. Raises DataError when another process or user has it, or a process has just ended with it."""
    if os.fstat(lock).st_uid != os.geteuid():  # what lies in it would decide which files are deleted
        raise DataError(str(place), "belongs to another user; delete it, or name another folder")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), place.lstat()) and not out.exists():
            return
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        what = f"cannot be locked: {error.strerror}; name a folder of another file system"
        raise DataError(str(place), what) from error
    raise DataError(str(out), "is being prepared by another process")
