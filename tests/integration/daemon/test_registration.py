"""A node's record is what it should be; a dead daemon's records vanish at once, and it comes back with its name."""

import asyncio
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.daemon.base.errors import ConfigError, StoreUnreachableError
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.cluster_records import LeaderRecord
from headway.daemon.cluster.format import decode, encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.lease import Lease
from headway.daemon.cluster.records import Device, NodeRecord
from headway.daemon.decide.cluster_watch import ClusterWatch
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.node.peer_liveness import is_refused
from headway.daemon.node.registration import COPY, Registration

RECORD = NodeRecord(
    name="a",
    incarnation="new",
    address="h:1",
    host="h",
    site="s",
    devices=(Device(kind="cpu"),),
    memory_bytes=1,
    arithmetic_class="c",
)


@asynccontextmanager
async def joined(
    client: EtcdClient, *, predecessor: str = "", lives: bool = False
) -> AsyncIterator[tuple[Registration, "asyncio.Task[None]"]]:
    """A node that has joined and keeps its record true, and the task that does."""
    cluster = ClusterWatch(client)

    async def answers(_: NodeRecord) -> bool:
        return lives

    registration = Registration(RECORD, etcd=client, cluster=cluster, ttl_s=1, predecessor=predecessor, answers=answers)

    async def wake() -> None:
        seen = -1
        while True:
            seen = await cluster.changed(seen)
            registration.look_again()

    await registration.join()
    tasks = [asyncio.create_task(work) for work in (registration.run(), cluster.run(), wake())]
    try:
        yield registration, tasks[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await registration.leave()


async def until(client: EtcdClient, claim: Callable[[NodeRecord], Any]) -> NodeRecord:
    """The node's record, once the claim holds of it."""
    async with asyncio.timeout(20):
        while True:
            found = await client.get(Keys.node("a"))
            if found is not None and claim(record := decode(found.value, NodeRecord)):
                return record
            await asyncio.sleep(0.02)


async def test_a_new_process_ends_what_its_predecessor_left(client: EtcdClient) -> None:
    """The old process died with long leases: its records, its leader key among them, are gone before the new one's."""
    left = [await client.grant_lease(600) for _ in range(2)]
    await client.put(Keys.node("a"), encode(replace(RECORD, incarnation="old")), lease_id=left[0].id)
    await client.put(Keys.worker("j", 1, 0), b"{}", lease_id=left[0].id)
    await client.put(Keys.LEADER, encode(LeaderRecord(node="a", incarnation="old")), lease_id=left[1].id)
    async with joined(client, predecessor="old"):
        assert (await until(client, lambda record: record.incarnation == "new")).address == "h:1"
        assert await client.get(Keys.worker("j", 1, 0)) is None
        assert await client.get(Keys.LEADER) is None
    assert await client.get(Keys.node("a")) is None
    for lease in left:
        await lease.revoke()


async def test_the_record_is_what_it_should_be_whatever_happens_to_it(client: EtcdClient) -> None:
    """A device goes down and up, somebody drains the node, revokes its lease, deletes the record."""
    async with joined(client) as (registration, _):
        registration.change(down_devices=(0,))
        await until(client, lambda record: record.down_devices == (0,))
        found = await client.get(Keys.node("a"))
        assert found is not None
        drained = replace(decode(found.value, NodeRecord), is_draining=True)
        await client.put(found.key, encode(drained), lease_id=found.lease_id)
        registration.change(down_devices=())
        await until(client, lambda record: record.is_draining and not record.down_devices)
        before = registration.lease_id
        await client.revoke_lease(before)
        await until(client, lambda record: record.is_draining)
        assert registration.lease_id != before
        await client.delete(Keys.node("a"))
        await until(client, lambda record: record.incarnation == "new")


async def test_a_busy_etcd_is_asked_again(client: EtcdClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first write is executed and its answer lost, the second is not: the node joins, once, under one lease."""
    transaction, grant, outcomes, num_leases = client.transaction, client.grant_lease, ["lost", "refused"], 0

    async def busy(compare: Any, changes: Any) -> int:
        outcome = outcomes.pop(0) if outcomes else ""
        if outcome != "refused":
            revision = await transaction(compare, changes)
        if outcome:
            raise StoreUnreachableError("etcd", "no answer within 5 s")
        return revision

    async def counted(ttl_s: int, **options: Any) -> Lease:
        nonlocal num_leases
        num_leases += 1
        return await grant(ttl_s, **options)

    monkeypatch.setattr(client, "transaction", busy)
    monkeypatch.setattr(client, "grant_lease", counted)
    async with joined(client) as (registration, _):
        found = await client.get(Keys.node("a"))
        assert found is not None
        assert (found.lease_id, num_leases, outcomes) == (registration.lease_id, 1, [])


async def test_a_name_that_another_daemon_took_is_left_to_it(client: EtcdClient) -> None:
    """While the lease was lost, a daemon of the same name joined, and it stays: this one gives up and says why."""
    async with joined(client) as (registration, keeping):
        other = await client.grant_lease(600)
        await client.put(Keys.node("a"), encode(replace(RECORD, incarnation="other", address="x:1")), lease_id=other.id)
        await client.revoke_lease(registration.lease_id)
        with pytest.raises(ConfigError, match="a: a node of this name is in the cluster, at x:1"):
            await asyncio.wait_for(asyncio.shield(keeping), 20)
        assert (await until(client, lambda _: True)).incarnation == "other"
        await other.revoke()


@pytest.mark.parametrize(("lives", "why"), [(True, f": {COPY}"), (False, "")])
async def test_a_copy_leaves_the_name_to_the_original(client: EtcdClient, lives: bool, why: str) -> None:
    """A cloned machine has the state folder of another one, which answers, or is not reached from here: it gives up
    and says why, and the other keeps its lease.
    """
    lease = await client.grant_lease(600)
    original = replace(RECORD, incarnation="old", address="elsewhere:1", host="elsewhere")
    await client.put(Keys.node("a"), encode(original), lease_id=lease.id)
    with pytest.raises(ConfigError, match=f"a: a node of this name is in the cluster, at elsewhere:1{why}$"):
        async with asyncio.timeout(20), joined(client, predecessor="old", lives=lives):
            pass
    assert (await until(client, lambda _: True)) == original
    await lease.revoke()


async def test_only_a_refused_connection_proves_a_death() -> None:
    """Nobody listens on a port of ours: refused. Somebody does, or the address leads nowhere: no proof."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1)
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        assert not await is_refused(address)
    assert await is_refused(address)
    assert not await is_refused("nowhere.invalid:1")


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
