"""A ClusterView that is kept current from a real etcd."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from headway.daemon.base.errors import StoreUnreachableError
from headway.daemon.cluster.client import EtcdClient, Snapshot
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import PREFIX, Keys
from headway.daemon.cluster.measurements import ProbeRecord
from headway.daemon.cluster.records import Desired, DesiredRecord
from headway.daemon.local.processes import EtcdServer, EtcdServerConfig
from tests.integration.conftest import Etcd
from tests.rigs.cluster_watch import DEADLINE_S, until_desired, watching
from tests.rigs.server import free_port

KEY = Keys.of("j", "desired")
OTHER = Keys.of("other", "desired")


def noted_listings(client: EtcdClient, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prefixes that are listed from now on."""
    listed, list_all = list[str](), client.get_prefix

    async def noted(prefix: str, **options: Any) -> Snapshot:
        listed.append(prefix)
        return await list_all(prefix, **options)

    monkeypatch.setattr(client, "get_prefix", noted)
    return listed


async def test_the_view_has_what_was_there_and_what_comes(etcd: Etcd, client: EtcdClient) -> None:
    """A key from before, a change, a deletion: each shows in the view, and `caught_up` waits for just that."""
    await client.put(KEY, encode(DesiredRecord()))
    async with watching(client) as cluster:
        await until_desired(cluster, Desired.RUNNING)
        revision = await client.put(KEY, encode(DesiredRecord(state=Desired.PAUSED)))
        assert await cluster.caught_up(revision, timeout_s=DEADLINE_S)
        assert cluster.view.jobs["j"].desired.state is Desired.PAUSED
        assert cluster.is_reachable
        await client.delete(KEY)
        assert await cluster.caught_up(revision + 1, timeout_s=DEADLINE_S)
        assert cluster.view.revision_of(KEY) == 0
        assert not await cluster.caught_up(revision + 1000, timeout_s=0.01)


async def test_a_view_has_the_leaders_own_records_only_where_they_are_needed(
    etcd: Etcd, client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of what nodes write is for the leader. The others hear nothing of it. A daemon that begins to lead has
    what was there and hears what comes.
    """
    probes = [ProbeRecord(incarnation=f"a-{life}", peers={}) for life in range(3)]
    await client.put(Keys.probes("a"), encode(probes[0]))
    leads, listed = False, noted_listings(client, monkeypatch)
    async with watching(client, leads=lambda: leads) as cluster, asyncio.timeout(DEADLINE_S):
        heard = await client.put(KEY, encode(DesiredRecord()))
        assert await cluster.caught_up(heard, timeout_s=DEADLINE_S)
        await client.put(Keys.probes("a"), encode(probes[1]))
        heard = await client.put(KEY, encode(DesiredRecord(state=Desired.PAUSED)))
        assert await cluster.caught_up(heard, timeout_s=DEADLINE_S)
        assert (cluster.view.probes, listed) == ({}, [PREFIX])
        leads = True
        assert await cluster.probes_seen(timeout_s=DEADLINE_S)
        assert cluster.view.probes == {"a": probes[1]}
        heard = await client.put(Keys.probes("a"), encode(probes[2]))
        assert await cluster.caught_up(heard, timeout_s=DEADLINE_S)
        assert cluster.view.probes == {"a": probes[2]}
        assert await cluster.probes_seen(timeout_s=0.0)
        leads = False
        heard = await client.put(Keys.probes("a"), encode(probes[0]))
        assert await cluster.caught_up(heard, timeout_s=DEADLINE_S)
        assert listed == [PREFIX, Keys.FOR_LEADER]
        assert cluster.view.probes == {"a": probes[0]}, "a daemon that no longer leads goes on hearing of them"


async def test_etcd_that_is_away_when_a_daemon_wins_is_in_sight_again(
    etcd: Etcd, client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is listed then, and the new leader decides: it does nothing while etcd is out of sight."""
    await client.put(Keys.probes("a"), encode(ProbeRecord(incarnation="a-1", peers={})))
    leads, num_away, list_all = False, 0, client.get_prefix

    async def away_once(prefix: str, **options: Any) -> Snapshot:
        nonlocal num_away
        if prefix == Keys.FOR_LEADER and not num_away:
            num_away += 1
            raise StoreUnreachableError("etcd", "is away")
        return await list_all(prefix, **options)

    monkeypatch.setattr(client, "get_prefix", away_once)
    async with watching(client, leads=lambda: leads) as cluster:
        heard = await client.put(KEY, encode(DesiredRecord()))
        assert await cluster.caught_up(heard, timeout_s=DEADLINE_S)
        leads = True
        assert await cluster.probes_seen(timeout_s=DEADLINE_S)
        assert (num_away, set(cluster.view.probes), cluster.is_reachable) == (1, {"a"}, True)
        assert cluster.view.steady_since is not None


async def test_a_daemon_that_leads_again_takes_etcd_for_the_same(own_server_config: EtcdServerConfig) -> None:
    """It led, etcd was away, it led again: nothing that it heard of meanwhile is an older history."""
    leads = True
    async with (
        await EtcdServer.start(replace(own_server_config, fsync=True)) as server,
        EtcdClient(server.access()) as client,
    ):
        await client.put(Keys.probes("a"), encode(ProbeRecord(incarnation="a-1", peers={})))
        await client.put(OTHER, encode(DesiredRecord()))  # so that any listing is later than the ways
        async with watching(client, leads=lambda: leads) as cluster:
            assert await cluster.probes_seen(timeout_s=DEADLINE_S)
            leads = False
            for _ in range(2):
                await server.restart()
                heard = await client.put(KEY, encode(DesiredRecord()))
                assert await cluster.caught_up(heard, timeout_s=DEADLINE_S)
                leads = True
            assert await cluster.probes_seen(timeout_s=DEADLINE_S)
            assert (cluster.view.epoch, set(cluster.view.probes)) == (0, {"a"})


async def test_a_daemon_that_wins_while_etcd_lists_has_the_leaders_records(
    etcd: Etcd, client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listing was asked for without them. It asks for them at once."""
    await client.put(Keys.probes("a"), encode(ProbeRecord(incarnation="a-1", peers={})))
    leads, list_all = False, client.get_prefix

    async def won_meanwhile(prefix: str, **options: Any) -> Snapshot:
        nonlocal leads
        found = await list_all(prefix, **options)
        leads = True
        return found

    monkeypatch.setattr(client, "get_prefix", won_meanwhile)
    async with watching(client, leads=lambda: leads) as cluster:
        assert await cluster.probes_seen(timeout_s=DEADLINE_S)
        assert set(cluster.view.probes) == {"a"}


async def test_the_view_catches_up_after_an_outage_with_a_compaction(own_server_config: EtcdServerConfig) -> None:
    """etcd goes away; meanwhile keys change and vanish, and their history is compacted: the view is right again."""
    config = replace(own_server_config, client_port=free_port(), fsync=True)
    server = await EtcdServer.start(config)
    try:
        async with EtcdClient(server.access(timeout_s=10)) as client:
            await client.put(KEY, encode(DesiredRecord()))
            await client.put(OTHER, encode(DesiredRecord()))
            async with watching(client) as cluster:
                await until_desired(cluster, Desired.RUNNING)
                await server.stop(timeout_s=0.0)
                async with asyncio.timeout(DEADLINE_S):
                    while cluster.is_reachable:
                        await cluster.changed(cluster.version)
                lost_at, reason = cluster.reachable_since, cluster.unreachable_reason
                assert reason
                # A new start on another port, where the watch does not find it yet, to change history behind its back.
                server = await EtcdServer.start(replace(config, client_port=0))
                async with EtcdClient(server.access()) as secret:
                    revision = await secret.put(KEY, encode(DesiredRecord(state=Desired.PAUSED)))
                    await secret.delete(OTHER)
                    for _ in range(5):
                        revision = await secret.put(KEY, encode(DesiredRecord(state=Desired.CANCELLED)))
                    await secret.compact(revision)
                await server.stop()
                server = await EtcdServer.start(config)
                await until_desired(cluster, Desired.CANCELLED)
                assert cluster.view.revision_of(OTHER) == 0
                assert cluster.is_reachable
                assert cluster.reachable_since > lost_at
    finally:
        await server.stop()
