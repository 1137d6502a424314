"""Deletes folders when this process ends in any way: a shell that waits for the end of a pipe."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

TIMEOUT_S = 10.0

_SCRIPT = """
read -r swept && exit 0
for attempt in 1 2 3 4 5 6 7 8; do
    rm -rf -- "$@" && sleep 0.5
done
"""
"""A line on the pipe means a clean end. The pipe's end without a line means that the parent and its children
are gone.
"""


class Sweeper:
    """Watches over folders until `sweep`."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "headway-sweeper", *map(str, self._folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def sweep(self) -> None:
        """Delete the folders now and end the watch. Idempotent."""
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.write(b"swept\n")
            self._process.stdin.close()
        self._process.wait(TIMEOUT_S)
