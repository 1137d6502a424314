"""A dead daemon's records vanish at once, whoever it was, and it comes back with its name and address."""

import asyncio
import signal
import time
from pathlib import Path

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.cluster_records import LeaderRecord
from headway.daemon.cluster.format import decode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import NodeRecord
from headway.daemon.local.cluster import LocalCluster

LEASE_TTL_S = 10
DEADLINE_S = 60.0


async def _node(client: EtcdClient, name: str) -> NodeRecord | None:
    found = await client.get(Keys.node(name))
    return decode(found.value, NodeRecord) if found is not None else None


async def _leader(client: EtcdClient) -> str:
    async with asyncio.timeout(DEADLINE_S):
        while (found := await client.get(Keys.LEADER)) is None:
            await asyncio.sleep(0.02)
    return decode(found.value, LeaderRecord).node


async def _vanished(client: EtcdClient, before: NodeRecord) -> float:
    """Seconds until a node's record of before is gone."""
    began = time.monotonic()
    async with asyncio.timeout(DEADLINE_S):
        while (now := await _node(client, before.name)) is not None and now.incarnation == before.incarnation:
            await asyncio.sleep(0.005)
    return time.monotonic() - began


async def _is_back(client: EtcdClient, before: NodeRecord) -> NodeRecord:
    async with asyncio.timeout(DEADLINE_S):
        while (now := await _node(client, before.name)) is None or now.incarnation == before.incarnation:
            await asyncio.sleep(0.05)
    return now


async def _accompanied(cluster: LocalCluster, by: NodeRecord, of: NodeRecord) -> None:
    """Return when a daemon's present process keeps another company; what its predecessor found does not count."""
    log = cluster.state_dir / "nodes" / by.name / "daemon.log"
    async with asyncio.timeout(DEADLINE_S):
        while not _has_found(log.read_text(errors="replace").splitlines(), by, of):
            await asyncio.sleep(0.05)


def _has_found(lines: list[str], finder: NodeRecord, found: NodeRecord) -> bool:
    registered = [at for at, line in enumerate(lines) if "node_registered" in line and finder.incarnation in line]
    return bool(registered) and any(
        "company_found" in line and found.incarnation in line for line in lines[registered[0] :]
    )


async def test_a_dead_daemons_records_are_gone_at_once(tmp_path: Path) -> None:
    """SIGKILL of a follower, then of the leader: gone long before the lease of 10 s, and back at the same address.

    SIGSTOP of a daemon is no death: its record stays for as long as its lease.
    """
    settings = {"lease_ttl_s": LEASE_TTL_S, "num_spares": 0}
    async with (
        LocalCluster(tmp_path / "state", num_nodes=2, node_settings=settings) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        client = session.client
        leader = await _leader(client)
        follower = next(node.name for node in cluster.nodes if node.name != leader)

        for victim in (follower, leader):
            before = await _node(client, victim)
            other = await _node(client, follower if victim == leader else leader)
            assert before is not None
            assert other is not None
            await _accompanied(cluster, other, before)
            cluster.kill_node(victim, signal.SIGKILL)
            assert await _vanished(client, before) < LEASE_TTL_S / 2
            after = await _is_back(client, before)
            assert after.address == before.address
        successor = await _leader(client)
        assert successor == follower

        keeper = await _node(client, follower)
        assert keeper is not None
        await _accompanied(cluster, keeper, after)
        cluster.kill_node(leader, signal.SIGSTOP)
        before = await _node(client, leader)
        assert before is not None
        await asyncio.sleep(LEASE_TTL_S / 4)
        assert await _node(client, leader) == before
        cluster.kill_node(leader, signal.SIGCONT)
