"""Keeps in a node's state folder for how long its daemons have seen jobs ended: a restart loses an hour at most.

The file has seconds of steady clocks and no date, so that a wrong date of any machine retires nothing.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import structlog

from headway.daemon.errors import RecoveryError
from headway.daemon.storage.file_threads import Beat, FileThreads
from headway.stages.durable import make_durable

KEPT_EVERY_S: Final = 3600.0
log = structlog.get_logger()


class EndedAges:
    """The file of one node."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._threads = FileThreads("ended jobs", num_at_once=1, most_hung=1)
        self._kept_at = 0.0

    def read(self) -> dict[str, float]:
        """Return seconds by end of a job; empty if the file is missing or damaged. Blocks."""
        try:
            ages = msgspec.json.decode(self._path.read_bytes(), type=dict[str, float])
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            log.warning("ended_ages_not_read", path=str(self._path), reason=str(error))
            return {}
        return {ending: age for ending, age in ages.items() if 0.0 <= age < math.inf}

    async def keep(self, ages: Mapping[str, float], *, now: float) -> None:
        """Write them if that is due. now: seconds of a monotonic clock. A disk that refuses is asked again later."""
        if not self._kept_at:
            self._kept_at = now
        if now < self._kept_at + KEPT_EVERY_S:
            return
        self._kept_at = now

        def write(_: Beat) -> None:
            draft = self._path.with_suffix(".draft")
            draft.write_bytes(msgspec.json.encode(ages))
            make_durable(draft)
            draft.replace(self._path)

        try:
            await self._threads.run(str(self._path), write)
        except RecoveryError as error:
            log.warning("ended_ages_not_kept", path=str(self._path), reason=error.reason)
