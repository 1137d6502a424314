"""Imitates a full disk for some processes: sets their limit on the size of files to zero (prlimit(2)).

Every write to a regular file then fails with an OSError, as on a full disk; sockets and pipes still work. The limit
applies to one node's processes, so others keep the machine's disk and memory.
"""

import resource
from collections.abc import Collection
from contextlib import suppress
from typing import Final

from headway.daemon.chaos.healer import Healer

UNLIMITED: Final = "unlimited"


class FullDisk:
    """Limits processes, and restores their previous limits."""

    def __init__(self, healer: Healer) -> None:
        self._healer = healer
        self._limits_before: dict[int, tuple[int, int]] = {}

    def spread(self, pids: Collection[int]) -> None:
        """Limit these processes too. An ended process is no error."""
        for pid in set(pids) - self._limits_before.keys():
            with suppress(ProcessLookupError, PermissionError):
                soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                # a child inherits its parent's limit of zero
                self._limits_before[pid] = (hard if soft == 0 else soft, hard)
                self._healer.promise("prlimit", f"--pid={pid}", f"--fsize={_text(hard)}:{_text(hard)}")
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))

    def end(self, pids: Collection[int]) -> None:
        """Lift the limit, also from these processes: a child inherited it from a limited one."""
        for pid in {*pids, *self._limits_before}:
            with suppress(ProcessLookupError, PermissionError):
                soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                if soft == 0:
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, self._limits_before.get(pid, (hard, hard)))


def _text(limit: int) -> str:
    return UNLIMITED if limit == resource.RLIM_INFINITY else str(limit)
