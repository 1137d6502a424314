"""Garbage in a real etcd: watches go on, leaders lead, daemons write their own records again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headway.daemon.base.errors import ConflictError, InvariantLostError
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.cluster_records import LeaderRecord
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import NodeRecord
from headway.daemon.cluster.transaction import Compare, Put, to_text
from headway.daemon.decide.cluster_watch import ClusterWatch
from headway.daemon.leader.leadership import Leadership
from headway.daemon.node.registration import Registration
from tests.integration.conftest import Etcd
from tests.rigs.cluster_watch import watching
from tests.rigs.leadership import candidate

DEADLINE_S = 30.0
RECORD = NodeRecord(
    name="a", incarnation="a-1", address="x:1", host="x", site="x", devices=(), memory_bytes=0, arithmetic_class=""
)


async def until(cluster: ClusterWatch, condition: Any) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await cluster.changed(cluster.version)


async def test_a_key_that_is_no_text_ends_no_watch_and_no_listing(client: EtcdClient) -> None:
    """One at the listing and one later; what follows them arrives; both can be deleted by name."""
    first, second = to_text(b"/headway/\xff\xfe"), to_text(b"/headway/jobs/\xc3/spec")
    await client.put(first, b"\xff")
    async with watching(client) as cluster:
        await until(cluster, lambda: first in cluster.view.unreadable)
        await client.put(second, b"\xff")
        await client.put(Keys.node("a"), encode(RECORD))
        await until(cluster, lambda: "a" in cluster.view.nodes)
        assert set(cluster.view.unreadable) == {first, second}
        for key in (first, second):
            assert await client.delete(key)
        await until(cluster, lambda: not cluster.view.unreadable)


async def test_no_transaction_compares_equal_with_a_record_that_cannot_be_read(client: EtcdClient) -> None:
    """The revision that the view gives for it is none that etcd knows."""
    key = Keys.of("j", "phase")
    await client.put(key, b"{}")
    async with watching(client) as cluster:
        await until(cluster, lambda: cluster.view.revision_of(key) > 0)
        await client.put(key, b'{"format":2}')
        await until(cluster, lambda: key in cluster.view.unreadable)
        with pytest.raises(ConflictError):
            await client.transaction([Compare.unchanged(key, cluster.view.revision_of(key))], [Put(key, b"{}")])


async def test_a_leader_key_that_nobody_can_read_is_replaced(etcd: Etcd, client: EtcdClient) -> None:
    """It has no lease, so it would stay for ever; the leader whose key was overwritten leads again."""
    await client.put(Keys.LEADER, b"garbage")
    async with candidate(etcd, "one") as one:
        await one.until_leading()
        await client.put(Keys.LEADER, b"garbage again")
        async with asyncio.timeout(DEADLINE_S):
            while one.leadership.is_leading:
                await asyncio.sleep(0.01)
        await one.until_leading()
        await until(one.cluster, lambda: one.cluster.view.leader == LeaderRecord(node="one", incarnation="1"))


async def test_the_leader_of_a_newer_release_is_left_alone(etcd: Etcd, client: EtcdClient) -> None:
    """A key of a later format: nobody of this release stands."""
    await client.put(Keys.LEADER, b'{"format":2,"who":"x"}')
    async with candidate(etcd, "one") as one:
        await until(one.cluster, lambda: Keys.LEADER in one.cluster.view.unreadable)
        vacancy = Leadership._vacancy(one.leadership)
        assert vacancy is None
        found = await client.get(Keys.LEADER)
        assert found is not None
        assert found.value == b'{"format":2,"who":"x"}'


async def nobody(_: NodeRecord) -> bool:
    """No other daemon of the name answers."""
    return False


@asynccontextmanager
async def registered(client: EtcdClient, cluster: ClusterWatch) -> AsyncIterator[Registration]:
    """Node a, while its record is kept true."""
    registration = Registration(RECORD, etcd=client, cluster=cluster, ttl_s=1, predecessor="", answers=nobody)

    async def look() -> None:
        seen = -1
        while True:
            seen = await cluster.changed(seen)
            registration.look_again()

    tasks = [asyncio.create_task(look())]
    try:
        await registration.join()
        tasks.append(asyncio.create_task(registration.run()))
        yield registration
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await registration.leave()


async def test_a_daemon_writes_its_record_again_when_it_became_garbage(client: EtcdClient) -> None:
    """Before it joins, and while it lives: nobody's lease holds what lies there."""
    await client.put(Keys.node("a"), b"\x00")
    async with watching(client) as cluster, registered(client, cluster):
        await until(cluster, lambda: cluster.view.nodes.get("a") == RECORD)
        await client.put(Keys.node("a"), b'{"name": 3}')
        await until(cluster, lambda: Keys.node("a") in cluster.view.unreadable)
        await until(cluster, lambda: cluster.view.nodes.get("a") == RECORD)


async def test_a_name_that_a_newer_release_holds_is_not_taken(client: EtcdClient) -> None:
    """Its lease lives: that is another daemon, whatever its record says."""
    async with await client.grant_lease(10) as lease, watching(client) as cluster:
        await client.put(Keys.node("a"), b'{"format":2}', lease_id=lease.id)
        registration = Registration(RECORD, etcd=client, cluster=cluster, ttl_s=1, predecessor="", answers=nobody)
        with pytest.raises(InvariantLostError, match="a newer release wrote it"):
            await registration.join()
