"""A leader that cannot hear that it was deposed: what it writes must be refused by etcd itself."""

import asyncio
from collections.abc import Iterable

import pytest

from headway.daemon.blobs.file_threads import Beat
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.cluster_records import LeaderRecord
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import DesiredRecord
from headway.daemon.cluster.transaction import Change, Compare
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.cluster_watch import ClusterWatch
from headway.daemon.decide.commands import Decision, Transaction
from headway.daemon.leader.leadership import Leadership
from tests.integration.conftest import Etcd

DEADLINE_S = 30.0
KEY = Keys.of("j", "desired")


def no_manifest(url: str, manifest: bytes, beat: Beat) -> None:
    """Nothing here ends in a checkpoint."""
    raise AssertionError(url)


async def test_a_leader_that_hears_nothing_of_its_rival_writes_nothing(
    etcd: Etcd, client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its watch is dead when a rival takes the leader key, and it decides on what it last saw: the write is refused."""
    is_deciding, has_tried = asyncio.Event(), asyncio.Event()
    is_deaf = False

    def decide(view: ClusterView, *, now: float) -> Decision:
        is_deciding.set()
        order = Transaction(job="j", reason="test", compare={KEY: 0}, puts={KEY: encode(DesiredRecord())})
        return Decision(commands=(order,) if is_deaf else (), wake_at=now + 0.02)

    async with etcd.client() as own:
        write = own.transaction

        async def transaction(compare: Iterable[Compare], changes: Iterable[Change]) -> int:
            try:
                return await write(compare, changes)
            finally:
                if is_deaf:
                    has_tried.set()

        monkeypatch.setattr(own, "transaction", transaction)
        cluster = ClusterWatch(own)
        record = LeaderRecord(node="one", incarnation="1")
        leadership = Leadership(own, cluster, record=record, ttl_s=5, decide=decide, write_manifest=no_manifest)
        watching, standing = asyncio.create_task(cluster.run()), asyncio.create_task(leadership.run())
        try:
            await asyncio.wait_for(is_deciding.wait(), DEADLINE_S)
            watching.cancel()
            await asyncio.wait([watching])
            await client.put(Keys.LEADER, encode(LeaderRecord(node="rival", incarnation="9")))
            is_deaf = True
            await asyncio.wait_for(has_tried.wait(), DEADLINE_S)
            assert leadership.is_leading, "it heard of the rival after all"
        finally:
            standing.cancel()
            await asyncio.wait([standing])
    assert await client.get(KEY) is None
