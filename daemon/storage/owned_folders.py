"""Folders in shared places, such as /dev/shm, that die with their owner: who comes next removes those of the dead.

Beside a folder lies `<folder>.owner`, which its owner keeps locked. The kernel ends the lock with the process, however
that ends, so a lock that can be had proves that nobody owns the folder.
"""

import fcntl
import os
import shutil
import time
from pathlib import Path
from typing import Final

SUFFIX: Final = ".owner"
PREFIX: Final = "headway-"
PATIENCE_S: Final = 5.0
"""For somebody who removes the folder just now, under the same lock."""


class OwnedFolder:
    """One folder, which may not be there yet. `claim` before it is made, `release` when it is gone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._owner = folder.with_name(folder.name + SUFFIX)
        self._lock = -1

    def claim(self) -> bool:
        """Own it, until this process ends. Returns False when another process does."""
        until = time.monotonic() + PATIENCE_S
        while (lock := _locked(self._owner, flags=os.O_CREAT)) is None:
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        self._lock = lock
        return True

    @property
    def owner_file(self) -> Path:
        """What lies beside the folder as long as it is owned."""
        return self._owner

    def release(self) -> None:
        """Own it no more. Idempotent."""
        if self._lock >= 0:
            self._owner.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1


def remove_ownerless(parent: Path, *, prefix: str = PREFIX) -> list[Path]:
    """Remove this user's folders there whose owners are dead, and return them. Raises nothing."""
    removed = []
    try:
        owners = [path for path in parent.glob(f"{prefix}*{SUFFIX}") if path.lstat().st_uid == os.getuid()]
    except OSError:
        return []
    for owner in owners:
        lock = _locked(owner, flags=0)
        if lock is None:
            continue
        folder = owner.with_name(owner.name.removesuffix(SUFFIX))
        if not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)
        owner.unlink(missing_ok=True)
        os.close(lock)
        removed.append(folder)
    return removed


def _locked(path: Path, *, flags: int) -> int | None:
    """The file, open and locked, if nobody else has the lock; it may have been removed by who had it before."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_ino == path.lstat().st_ino:
            return lock
    except OSError:
        pass
    os.close(lock)
    return None
