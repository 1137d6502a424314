"""Dials the ports of other nodes because somebody asks: so a node learns from the other side whether it is reached.

Only what nodes of this cluster have registered is dialled, a few ports at once, with the deadlines of reach_dial.py. So
nobody makes a port scanner of a daemon, and who may ask at all has a certificate of the cluster.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from headway.daemon.coordination.cluster_view import ClusterView
from headway.daemon.node.reach_target import Target
from headway.daemon.node.reaching import ports_of
from headway.proto import control_pb2

AT_ONCE: Final = 8
MOST_NODES: Final = 64


class DialBack:
    """Of one daemon."""

    def __init__(self, view: ClusterView, *, node: str, prove: Callable[[Target], Awaitable[str]]) -> None:
        """prove: why a port does not answer; empty: it does."""
        self._view = view
        self._node = node
        self._prove = prove
        self._room = asyncio.Semaphore(AT_ONCE)
        """Of all that ask."""

    async def dial(self, nodes: Iterable[str]) -> list[control_pb2.DialledPort]:
        """Every registered port of some nodes, but of this one; names that nobody has registered are left out."""
        targets = [
            target
            for name in sorted(set(nodes) - {self._node})[:MOST_NODES]
            if name in self._view.nodes
            for target in ports_of(self._view.nodes[name])
        ]
        return list(await asyncio.gather(*map(self._dial_one, targets)))

    async def _dial_one(self, target: Target) -> control_pb2.DialledPort:
        async with self._room:
            reason = await self._prove(target)
        return control_pb2.DialledPort(node=target.node, port=str(target.port), address=target.address, reason=reason)
