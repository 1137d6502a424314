"""Folders in shared places, such as /dev/shm, that end with their owner: a later process removes ownerless ones.

Next to a folder lies `<folder>.owner`, which its owner keeps locked. The kernel releases the lock when the process
ends, in any way. So a lock that can be taken proves that the folder has no owner.
"""

import errno
import fcntl
import os
import shutil
import stat
import time
from pathlib import Path
from typing import Final

NUM_MKDIR_ATTEMPTS: Final = 10


def make_folder(directory: Path) -> None:
    """Make a folder and those above it, private to this user. Raises OSError."""
    for attempt in range(1, NUM_MKDIR_ATTEMPTS + 1):
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            return
        except FileNotFoundError:
            if attempt == NUM_MKDIR_ATTEMPTS:
                raise
            # a thread has just deleted an empty folder above it


def make_private(folder: Path) -> None:
    """Make a folder that only this user can enter. Raises OSError, also when it is somebody else's."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "belongs to another user, or is not a folder", str(folder))
    folder.chmod(0o700)


SUFFIX: Final = ".owner"
PREFIX: Final = "headway-"
PATIENCE_S: Final = 5.0
"""Maximum wait for a process that is removing the folder under the lock."""


class OwnedFolder:
    """One folder, which may not exist yet. Call `claim` before it is made, and `release` when it is gone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._owner = folder.with_name(folder.name + SUFFIX)
        self._lock = -1

    def claim(self) -> bool:
        """Own the folder until this process ends. Returns False when another process owns it."""
        until = time.monotonic() + PATIENCE_S
        while (lock := _locked(self._owner, flags=os.O_CREAT)) is None:
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        self._lock = lock
        return True

    @property
    def owner_file(self) -> Path:
        """Return the file next to the folder that marks it as owned."""
        return self._owner

    def release(self) -> None:
        """Give up the folder. Idempotent."""
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
    """Return the file, open and locked, if no other process has the lock; its earlier owner may have removed it."""
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
