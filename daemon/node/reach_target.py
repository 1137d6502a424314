"""One port of a node and the process that should listen there. Pure."""

from dataclasses import dataclass
from typing import Final, Protocol

from headway.daemon.measurements import Port

MAX_REASON: Final = 200
"""Characters that are kept of why a port does not answer: the other side may say anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One port of a node, and the process that should listen there."""

    node: str
    incarnation: str
    """Of the node's daemon."""
    port: Port
    address: str
    device_index: int = -1
    worker: str = ""
    """The incarnation of the worker; empty for a daemon."""


def worker_target(node: str, incarnation: str, device_index: int, address: str, worker: str) -> Target:
    """The port of a worker, and who should listen there."""
    return Target(
        node=node,
        incarnation=incarnation,
        port=Port.WORKER,
        address=address,
        device_index=device_index,
        worker=worker,
    )


class Reach(Protocol):
    """What finds out whether ports of other nodes answer; reaching.py does."""

    async def prove(self, target: Target) -> str:
        """Dial now. Returns why it does not answer; empty: it does."""
        ...

    def link_failed(self, target: Target, reason: str) -> None:
        """A worker has dialled a port in vain."""
        ...

    def hurry(self, node: str) -> None:
        """A link with a node was lost."""
        ...
