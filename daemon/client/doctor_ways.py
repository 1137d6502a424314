"""The findings of `headway doctor` about the ways between nodes: each daemon dials the others, as their peers would."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.findings import Finding
from headway.daemon.costs.blocked_ways import REMEDY
from headway.daemon.errors import ConfigError, RecoveryError
from headway.daemon.rpc.peer_client import NodeClient
from headway.daemon.view.cluster_view import ClusterView
from headway.proto.control_pb2 import DialledPort
from headway.stages.errors import PeerError

MOST_NODES: Final = 16
"""Maximum number of nodes asked, the first by name; these nodes dial each other."""
MOST_LISTED: Final = 20
"""Maximum number of ways listed. If there are more, those that answer are only counted."""


async def examine_ways(session: ClusterSession, view: ClusterView) -> list[Finding]:
    """Return one finding for each way from a node to another, and one for all."""
    names = sorted(view.nodes)[:MOST_NODES]
    if session.identity is None or len(names) < 2:
        return []
    client = NodeClient(session.identity)
    try:
        answers = await asyncio.gather(*(_ask(client, view, name, names) for name in names))
    finally:
        await client.close()
    ways = [way for answer in answers for way in answer]
    blocked = [way for way in ways if not way.is_fine]
    listed = ways if len(ways) <= MOST_LISTED else blocked
    left_out = len(view.nodes) - len(names)
    found = f"{len(ways) - len(blocked)} of {len(ways)} answer"
    if left_out:
        found += f"; {left_out} more nodes were not asked"
    return [*listed, Finding(what="ways between nodes", is_fine=not blocked, found=found)]


async def examine_ways_from(
    session: ClusterSession, view: ClusterView, source: str, targets: Sequence[str]
) -> list[Finding]:
    """Return one finding for each way from one node to others, as that node's daemon dials them now.

    targets: empty stands for all others. Raises ConfigError for a name that no node has, or without a certificate.
    """
    for name in (source, *targets):
        if name not in view.nodes:
            known = ", ".join(sorted(view.nodes)[:MOST_LISTED]) or "none"
            raise ConfigError(f"no node has this name; the cluster has {known}", name)
    if session.identity is None:
        raise ConfigError("an operator's or a node's certificate is needed", "--certs")
    client = NodeClient(session.identity)
    try:
        return await _ask(client, view, source, sorted(set(targets or view.nodes) - {source}))
    finally:
        await client.close()


async def _ask(client: NodeClient, view: ClusterView, source: str, names: Sequence[str]) -> list[Finding]:
    others = [name for name in names if name != source]
    try:
        reply = await client.dial_peers(view.nodes[source].endpoint, others)
    except (PeerError, RecoveryError) as error:
        advice = "its daemon could not be asked from here; see the ways to it"
        return [Finding(what=f"{source} → the others", is_fine=False, found=str(error), advice=advice)]
    return [way_of(source, other, [port for port in reply.ports if port.node == other]) for other in others]


def way_of(source: str, target: str, ports: Iterable[DialledPort]) -> Finding:
    """Return the finding of one way: which ports of the target answered the source."""
    told = list(ports)
    silent = [f"its {port.port} at {port.address}: {port.reason}" for port in told if port.reason]
    if not told:
        return Finding(what=f"{source} → {target}", is_fine=True, found="the node is no longer registered")
    found = "; ".join(silent) or ", ".join(map(_answer, told))
    advice = REMEDY if silent else ""
    return Finding(what=f"{source} → {target}", is_fine=not silent, found=found, advice=advice)


def _answer(port: DialledPort) -> str:
    took = f" in {1e3 * port.seconds:.0f} ms" if port.seconds else ""
    return f"{port.port} at {port.address} answers{took}"
