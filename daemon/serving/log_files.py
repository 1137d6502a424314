"""The output of a job's workers on one node: a rotating file, read from its end or followed."""

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from headway.daemon.storage.file_threads import Beat, FileThreads

FOLLOW_PERIOD_S = 0.2
READ_BYTES = 1 << 16


async def read_log(
    path: Path, threads: FileThreads, *, last_lines: int = 0, follow: bool = False
) -> AsyncIterator[str]:
    """Yield lines of a log file: all, or the last ones; then, if followed, new ones until the caller stops.

    A file that does not exist yet has no lines. A rotated file (`.1` next to it) is read before the present one. Raises
    RecoveryError.
    """
    lines, position, inode = await threads.run(str(path), lambda _: _read_existing(path, last_lines))
    for line in lines:
        yield line
    rest = ""
    while follow:
        text, position, inode = await threads.run(str(path), partial(_read_new, path, position, inode))
        *complete, rest = (rest + text).split("\n")
        for line in complete:
            yield line
        if not text:
            await asyncio.sleep(FOLLOW_PERIOD_S)


def _read_existing(path: Path, last_lines: int) -> tuple[list[str], int, int]:
    lines: deque[str] = deque(maxlen=last_lines or None)
    position, inode = 0, 0
    for file_path in (path.with_name(path.name + ".1"), path):
        try:
            with file_path.open("rb") as file:
                raw = file.read()
                complete = raw[: raw.rfind(b"\n") + 1] if file_path == path else raw
                lines.extend(complete.decode("utf-8", errors="replace").splitlines())
                position, inode = len(complete), os.fstat(file.fileno()).st_ino
        except FileNotFoundError:
            position, inode = 0, 0
    return list(lines), position, inode


def _read_new(path: Path, position: int, inode: int, _: Beat) -> tuple[str, int, int]:
    """Return new lines; if the file was replaced, from its beginning."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno()).st_ino
            file.seek(position if found == inode else 0)
            raw = file.read(READ_BYTES)
            return raw.decode("utf-8", errors="replace"), file.tell(), found
    except FileNotFoundError:
        return "", 0, 0
