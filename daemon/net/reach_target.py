"""One port of a node and the process that should listen there. Pure."""

from dataclasses import dataclass
from typing import Final, Protocol

from headway.daemon.cluster.measurements import Port

MAX_REASON: Final = 200
"""Maximum number of characters kept of a reason: the other side may send anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One port of a node, and the process that should listen there."""

    node: str
    incarnation: str
    """Incarnation of the node's daemon."""
    port: Port
    address: str
    device_index: int = -1
    worker: str = ""
    """Incarnation of the worker; empty for a daemon."""


def worker_target(node: str, incarnation: str, device_index: int, address: str, worker: str) -> Target:
    """Return the port of a worker, and the process that should listen there."""
    return Target(
        node=node,
        incarnation=incarnation,
        port=Port.WORKER,
        address=address,
        device_index=device_index,
        worker=worker,
    )


class Reach(Protocol):
    """Finds out whether ports of other nodes answer; reaching.py implements it."""

    async def prove(self, target: Target) -> str:
        """Dial now. Returns why the port does not answer; empty: it does."""
        ...

    def link_failed(self, target: Target, reason: str) -> None:
        """Record that a worker's dial of a port failed."""
        ...

    def doubt(self, node: str) -> None:
        """Record that a link with a node was lost."""
        ...
