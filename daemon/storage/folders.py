"""Makes folders below which others delete empty folders meanwhile."""

from pathlib import Path
from typing import Final

NUM_MKDIR_ATTEMPTS: Final = 10


def make_folder(directory: Path) -> None:
    """Make a folder and those above it, private to this user. Blocks. Raises OSError."""
    for attempt in range(1, NUM_MKDIR_ATTEMPTS + 1):
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            return
        except FileNotFoundError:
            if attempt == NUM_MKDIR_ATTEMPTS:
                raise
            # a thread has just deleted an empty folder above it
