"""Keeps streams between daemons, so that a daemon's death is known at once and not only when its lease ends.

The leader's daemon has a stream to every other daemon, and every other daemon has one to the leader's. A broken stream
is a hint; a refused connection is the proof, because then no process listens there. A daemon with the proof revokes
the dead daemon's leases, so that its records vanish. Silence proves nothing (the network may be cut): then the lease
decides.
"""

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from headway.daemon.base.activities import Activities
from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.base.errors import RecoveryError, in_one_line
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.decide.cluster_watch import Member
from headway.daemon.node.registration import leases_of
from headway.stages.errors import PeerError

log = structlog.get_logger()

FIRST_WORD_S: Final = 5.0
"""Time for a daemon to answer when a stream to it is opened."""
RETRY_PAUSE_S: Final = 0.5
CONNECT_TIMEOUT_S: Final = 1.0
REFUSALS: Final = 2
REFUSAL_PAUSE_S: Final = 0.05
REVOKE_TIMEOUT_S: Final = 5.0
ACTIVITY: Final = "peer liveness"


@dataclass(frozen=True, slots=True)
class PeerLife:
    """One incarnation of one daemon."""

    node: str
    incarnation: str
    address: str


class PeerLiveness:
    """The streams of one daemon. `run` until cancelled."""

    def __init__(self, member: Member, client: NodeClient, activities: Activities) -> None:
        self._member = member
        self._activities = activities
        self._client = client
        self._streams: dict[PeerLife, asyncio.Task[None]] = {}
        self._met: set[PeerLife] = set()
        """Daemons that have answered at least once. An address that never led to its daemon proves nothing."""

    async def run(self) -> None:
        """Keep a stream to each daemon that needs one now."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    seen = self._member.cluster.version
                    wanted = self._wanted()
                    self._met &= wanted
                    for peer in self._streams.keys() - wanted:
                        self._streams.pop(peer).cancel()
                    for peer in wanted - self._streams.keys():
                        name = f"company of {peer.node}"
                        keeping = self._activities.keep(ACTIVITY, partial(self._accompany, peer, group))
                        self._streams[peer] = group.create_task(keeping, name=name)
                    await self._member.cluster.changed(seen)
        finally:
            self._streams.clear()

    def _wanted(self) -> set[PeerLife]:
        view, own = self._member.view, self._member.node
        leader = view.leader.node if view.leader is not None else ""
        others = view.nodes.values() if leader == own else filter(None, [view.nodes.get(leader)])
        return {
            PeerLife(node.name, node.incarnation, node.address) for node in others if node.name != self._member.node
        }

    async def _accompany(self, peer: PeerLife, group: asyncio.TaskGroup) -> None:
        """Follow a daemon until cancelled, because its record is gone or the leader has changed.

        A revocation that has begun is finished nevertheless: the first lease that ends changes the view.
        """
        while True:
            try:
                await self._follow(peer)
            except (PeerError, RecoveryError, TimeoutError) as error:
                log.debug("company_ended", node=peer.node, reason=str(error))
            if peer in self._met and await is_refused(peer.address):
                await asyncio.shield(group.create_task(self._revoke_dead_peer(peer), name=f"burial of {peer.node}"))
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _follow(self, peer: PeerLife) -> None:
        """Follow a daemon's stream until it ends. Raises TimeoutError, PeerError and RecoveryError."""
        stream = self._client.accompany(NodeEndpoint(peer.node, peer.address), self._member.node)
        async with asyncio.timeout(FIRST_WORD_S):
            first = await anext(stream, None)
        if first is not None and first.incarnation == peer.incarnation:
            self._met.add(peer)
            log.info("company_found", node=peer.node, incarnation=peer.incarnation)
            async for _ in stream:
                pass

    async def _revoke_dead_peer(self, peer: PeerLife) -> None:
        """Revoke the leases of the dead daemon's records, if they are still that daemon's."""
        try:
            async with asyncio.timeout(REVOKE_TIMEOUT_S):
                for lease_id in await leases_of(self._member.etcd, peer.node, peer.incarnation):
                    log.warning("dead_daemons_lease_revoked", node=peer.node, lease=f"{lease_id:x}")
                    await self._member.etcd.revoke_lease(lease_id)
        except Exception as error:  # then the lease ends by itself
            log.warning("lease_not_revoked", node=peer.node, reason=in_one_line(error))


async def is_refused(address: str) -> bool:
    """Return whether the machine answers, each time, that no process listens at host:port.

    Behind the port of another node, a refusal tells of that one.
    """
    if "/" in address:
        return False
    host, _, port = address.rpartition(":")
    for attempt in range(REFUSALS):
        if attempt:
            await asyncio.sleep(REFUSAL_PAUSE_S)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except ConnectionRefusedError:
            continue
        except (OSError, TimeoutError):
            return False
        writer.close()
        return False
    return True
