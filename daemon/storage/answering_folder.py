"""Says at a daemon's start which folder it waits for: one on a dead server answers when that server is back."""

import asyncio
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Final, TypeVar

import structlog

from headway.daemon.storage.file_threads import FileThreads

T = TypeVar("T")
SAID_EVERY_S: Final = 5.0
log = structlog.get_logger()


async def answered(setting: str, folder: Path, act: Callable[[], T], *, tell: Callable[[str], None]) -> T:
    """Return act(), which uses the folder of a setting, from a thread, so that signals count meanwhile.

    tell: is told what the start waits for, again and again. Raises what act raises: ConfigError or RecoveryError.
    """
    began = time.monotonic()
    call = asyncio.ensure_future(FileThreads("start", silence_s=inf).run(str(folder), lambda _: act()))
    while not (await asyncio.wait({call}, timeout=SAID_EVERY_S))[0]:
        waited_s = round(time.monotonic() - began)
        log.warning("folder_does_not_answer", setting=setting, folder=str(folder), waited_s=waited_s)
        tell(f"waiting for {setting} {folder}: its file system has not answered for {waited_s} s")
    return call.result()
