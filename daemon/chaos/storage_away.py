"""Puts a checkpoint folder out of reach: moves it aside, and puts a plain file in its place."""

import os
from contextlib import suppress
from pathlib import Path

from headway.daemon.chaos.healer import Healer

AWAY = ".away"


class StorageAway:
    """Makes a local folder unreachable, and restores it when the last overlapping fault ends."""

    def __init__(self, folder: Path, healer: Healer) -> None:
        self._folder = folder
        self._away = folder.with_name(folder.name + AWAY)
        self._healer = healer
        self._num_takers = 0

    def take(self) -> None:
        """Move the folder away: a process that opens its path finds a file. Raises OSError."""
        self._num_takers += 1
        if self._num_takers > 1:
            return
        script = 'test -e "$1" && { rm -f "$0"; mv -T "$1" "$0"; }'
        self._healer.promise("sh", "-c", script, str(self._folder), str(self._away))
        self._folder.mkdir(parents=True, exist_ok=True)
        self._folder.rename(self._away)
        self._folder.touch()

    def bring_back(self) -> None:
        """Restore the folder, once for each `take`. A second restore is no error."""
        self._num_takers = max(self._num_takers - 1, 0)
        if self._num_takers or not self._away.exists():
            return
        with suppress(FileNotFoundError):
            self._folder.unlink()
        os.rename(self._away, self._folder)  # noqa: PTH104 (the name is a folder's, in one step)
