"""Makes folders that only this user can enter. Everything blocks."""

import errno
import os
import stat
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
