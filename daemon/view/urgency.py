"""Tells which changes in etcd may wait a moment, so that one look of a daemon is about many of them. Pure."""

from typing import Final

from headway.daemon.records.keys import Keys

PER_NODE_S: Final = 1e-3
"""Seconds per node of the cluster for which such a change may wait: 10 ms for 10 nodes, 1 s for 1,000."""
_MEASURED: Final = (Keys.PROBES, Keys.REACH)
_OF_NODES: Final = (Keys.NODES, *_MEASURED)
_PATIENT: Final = frozenset({"goodput", "progress", "profile", "events"})
"""Records of a job that no step of a plan waits for."""


def may_wait(key: str, *, is_deleted: bool, leads: bool) -> bool:
    """Return whether a change may wait: of what a node or a worker has measured or says of itself, but not its end.

    leads: whether the daemon that asks is the leader's. The others learn from plans what a node's end means for them.
    """
    if is_deleted:
        return key.startswith(_MEASURED if leads else _OF_NODES)
    if key.startswith(Keys.JOBS):
        _, _, leaf = key.removeprefix(Keys.JOBS).partition("/")
        return leaf.partition("/")[0] in _PATIENT
    return key.startswith(_OF_NODES)
