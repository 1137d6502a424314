"""A dead daemon's records vanish at once, whoever it was, and it comes back with its name and address."""

import asyncio
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.etcd.client import EtcdClient
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.records.cluster_records import LeaderRecord
from headway.daemon.records.format import decode
from headway.daemon.records.keys import Keys
from headway.daemon.records.records import NodeRecord

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


async def _accompanied(cluster: LocalCluster, by: Iterable[str], of: NodeRecord) -> None:
    """Return when one of these daemons keeps another company."""
    logs = [cluster.state_dir / "nodes" / name / "daemon.log" for name in by]
    async with asyncio.timeout(DEADLINE_S):
        while not any("company_found" in line and of.incarnation in line for path in logs for line in _lines(path)):
            await asyncio.sleep(0.05)


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()


async def test_a_dead_daemons_records_are_gone_at_once(tmp_path: Path) -> None:
    """SIGKILL of a follower, then of the leader: gone long before the lease of 10 s, and back at the same address.

    SIGSTOP of a daemon is no death: its record stays for as long as its lease.
    """
    settings = {"lease_ttl_s": LEASE_TTL_S, "num_spares": 0}
    async with (
        LocalCluster(tmp_path / "state", num_nodes=3, node_settings=settings) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        client = session.client
        leader = await _leader(client)
        follower = next(node.name for node in cluster.nodes if node.name != leader)

        for victim in (follower, leader):
            before = await _node(client, victim)
            assert before is not None
            others = [node.name for node in cluster.nodes if node.name != victim]
            await _accompanied(cluster, others if victim == leader else [leader], before)
            cluster.kill_node(victim, signal.SIGKILL)
            assert await _vanished(client, before) < LEASE_TTL_S / 2
            after = await _is_back(client, before)
            assert after.address == before.address
        successor = await _leader(client)
        assert successor != leader

        stopped = next(node.name for node in cluster.nodes if node.name not in (leader, successor))
        cluster.kill_node(stopped, signal.SIGSTOP)
        before = await _node(client, stopped)
        assert before is not None
        await asyncio.sleep(LEASE_TTL_S / 4)
        assert await _node(client, stopped) == before
        cluster.kill_node(stopped, signal.SIGCONT)
