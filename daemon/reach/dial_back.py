"""Dials the ports of other nodes on request, so that a node learns from the other side whether it can be reached.

Only registered ports of this cluster's nodes are dialled, a few at once, with the deadlines of reach_dial.py. So nobody
can use a daemon as a port scanner, and every caller has a certificate of the cluster.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from headway.daemon.reach.reach_target import Target
from headway.daemon.reach.reaching import ports_of
from headway.daemon.view.cluster_view import ClusterView
from headway.proto import control_pb2

AT_ONCE: Final = 8
MOST_NODES: Final = 64


class DialBack:
    """The dialler of one daemon."""

    def __init__(self, view: ClusterView, *, node: str, prove: Callable[[Target], Awaitable[str]]) -> None:
        """prove: returns why a port does not answer; empty: it does."""
        self._view = view
        self._node = node
        self._prove = prove
        self._room = asyncio.Semaphore(AT_ONCE)
        """Limit of dials for all callers together."""

    async def dial(self, nodes: Iterable[str]) -> list[control_pb2.DialledPort]:
        """Dial every registered port of some nodes, except this one; unregistered names are left out."""
        targets = [
            target
            for name in sorted(set(nodes) - {self._node})[:MOST_NODES]
            if name in self._view.nodes
            for target in ports_of(self._view.nodes[name])
        ]
        return list(await asyncio.gather(*map(self._dial_one, targets)))

    async def _dial_one(self, target: Target) -> control_pb2.DialledPort:
        async with self._room:
            began = time.monotonic()
            reason = await self._prove(target)
            seconds = time.monotonic() - began
        port, address = str(target.port), target.address
        return control_pb2.DialledPort(node=target.node, port=port, address=address, reason=reason, seconds=seconds)
