"""etcd goes away and comes back: with all its data, with an older state, with nothing, or without its history."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from headway.daemon.base.errors import StoreUnreachableError
from headway.daemon.cluster.client import FIRST_PAGE_KEYS, EtcdClient
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import Desired, DesiredRecord, NodeRecord
from headway.daemon.decide.cluster_watch import ClusterWatch
from headway.daemon.local.processes import EtcdServer, EtcdServerConfig
from headway.proto import etcd_pb2
from tests.rigs.backup import empty, restore_backup, save_backup
from tests.rigs.cluster_watch import until_desired, watching

DEADLINE_S = 30.0
KEY = Keys.of("j", "desired")
LATER = Keys.of("later", "desired")
NODE = NodeRecord(
    name="a", incarnation="a-1", address="", host="", site="x", devices=(), memory_bytes=0, arithmetic_class=""
)
_log = structlog.get_logger()

RUNNING, PAUSED = encode(DesiredRecord()), encode(DesiredRecord(state=Desired.PAUSED))


@pytest.fixture
async def server(own_server_config: EtcdServerConfig) -> AsyncIterator[EtcdServer]:
    """One that a test kills and starts again, on the same ports."""
    async with await EtcdServer.start(replace(own_server_config, fsync=True)) as server:
        yield server


async def until_reachable(cluster: ClusterWatch, is_reachable: bool) -> None:
    """Return when the watch knows it."""
    async with asyncio.timeout(DEADLINE_S):
        while cluster.is_reachable is not is_reachable:
            await cluster.changed(cluster.version)


async def test_listings_do_not_shrink_while_etcd_is_away(server: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt fails for another reason than the size of its page: afterwards thousands of daemons list at once."""
    async with EtcdClient(server.access(timeout_s=1.0)) as client:
        await client.put(KEY, RUNNING)
        answer, limits = client._range, list[int]()

        def asked(request: etcd_pb2.RangeRequest) -> Awaitable[etcd_pb2.RangeResponse]:
            limits.append(request.limit)
            return answer(request)

        monkeypatch.setattr(client, "_range", asked)
        await client.get_prefix("")
        await server.kill()
        for _ in range(3):
            with pytest.raises(StoreUnreachableError):
                await client.get_prefix("")
        await server.restart()
        async with asyncio.timeout(DEADLINE_S):
            while True:
                with suppress(StoreUnreachableError):
                    await client.get_prefix("")
                    break
        assert min(limits) == FIRST_PAGE_KEYS, limits


@pytest.mark.parametrize("away_s", [1.5, pytest.param(30.0, marks=pytest.mark.slow)])
async def test_etcd_that_comes_back_with_its_data_is_followed_on(server: EtcdServer, away_s: float) -> None:
    """Away for longer than a lease: little work meanwhile; within 5 s the view, a key and the lease go on."""
    async with EtcdClient(server.access()) as client, watching(client) as cluster:
        lease = await client.grant_lease(1)
        revision = await client.put(Keys.node("a"), encode(NODE), lease_id=lease.id)
        assert await cluster.caught_up(revision, timeout_s=DEADLINE_S)
        assert cluster.view.steady_since is not None
        await server.kill()
        await until_reachable(cluster, False)
        assert cluster.view.steady_since is None
        worked_s = time.process_time()
        await asyncio.sleep(away_s)
        worked_s = time.process_time() - worked_s
        assert "a" in cluster.view.nodes
        away_until = time.monotonic()
        await server.restart()
        back_at = time.monotonic()
        await until_reachable(cluster, True)
        view_s = time.monotonic() - back_at
        await client.put(KEY, PAUSED)
        await until_desired(cluster, Desired.PAUSED)
        assert time.monotonic() - back_at < 5.0
        assert cluster.view.steady_since is not None
        assert cluster.view.steady_since >= away_until
        async with asyncio.timeout(5.0):
            while lease.remaining_s == 0:
                await asyncio.sleep(0.02)
        assert not lease.lost.is_set()
        assert (cluster.view.epoch, cluster.view.absent_since) == (0, {})
        _log.info("measured", away_s=away_s, cpu_s=round(worked_s, 3), view_back_after_s=round(view_s, 3))
        assert worked_s < 0.1 * away_s
        await lease.revoke()


async def test_an_absence_found_after_an_outage_counts_from_the_listing(server: EtcdServer) -> None:
    """A node's record vanishes while etcd is out of sight: the node is absent since etcd was seen again."""
    async with EtcdClient(server.access()) as client:
        await client.put(Keys.node("a"), encode(NODE))
        async with watching(client) as cluster:
            await until_reachable(cluster, True)
            await server.kill()
            await until_reachable(cluster, False)
            # On another port, where the watch does not find it.
            async with await EtcdServer.start(server.config) as hidden, EtcdClient(hidden.access()) as other:
                await other.delete(Keys.node("a"))
            assert "a" in cluster.view.nodes
            back_at = time.monotonic()
            await server.restart()
            await until_reachable(cluster, True)
            assert "a" not in cluster.view.nodes
            assert cluster.view.steady_since is not None
            assert back_at < cluster.view.absent_since["a"] <= cluster.view.steady_since


async def test_a_restored_backup_makes_the_view_anew(server: EtcdServer, tmp_path: Path) -> None:
    """Changes after a backup are undone by restoring it: the view has the old state, and follows it from there on."""
    async with EtcdClient(server.access()) as client, watching(client) as cluster:
        await client.put(KEY, RUNNING)
        kept = await client.grant_lease(30)
        save_backup(server, tmp_path / "backup")
        newer = await client.grant_lease(3)
        await client.put(Keys.node("a"), encode(NODE), lease_id=newer.id)
        await client.put(LATER, RUNNING)
        for _ in range(20):
            before = await client.put(KEY, PAUSED)
        assert await cluster.caught_up(before, timeout_s=DEADLINE_S)
        view = cluster.view
        with capture_logs() as logs:
            await restore_backup(server, tmp_path / "backup")
            await until_desired(cluster, Desired.RUNNING)
        assert cluster.view is view
        assert (view.epoch, set(view.jobs), set(view.absent_since)) == (1, {"j"}, {"a"})
        assert cluster.revision < before
        [line] = [log for log in logs if log["event"] == "etcd_history_went_back"]
        assert line["log_level"] == "error"
        assert server.endpoint in line["etcd"]
        # The new changes have revisions that the view had seen before, for other changes.
        assert await client.put(KEY, PAUSED) < before
        await until_desired(cluster, Desired.PAUSED)
        await asyncio.wait_for(newer.lost.wait(), DEADLINE_S)
        assert "expired" in newer.reason
        assert await client.renew_lease(kept.id) > 0
        await kept.revoke()


async def test_a_history_that_has_overtaken_ours_is_still_another(server: EtcdServer, tmp_path: Path) -> None:
    """Restored, and changed more often than before, all while nobody watched: it is not taken for a continuation."""
    async with EtcdClient(server.access()) as client, EtcdClient(server.access()) as other:
        await client.put(KEY, RUNNING)
        save_backup(server, tmp_path / "backup")
        await client.put(LATER, RUNNING)
        last = await client.put(KEY, PAUSED)
        async with watching(client) as cluster:
            assert await cluster.caught_up(last, timeout_s=DEADLINE_S)
            listing = client.get_prefix
            may_list = asyncio.Event()

            async def get_prefix(prefix: str, **options: Any) -> object:
                await may_list.wait()
                return await listing(prefix, **options)

            client.get_prefix = get_prefix  # type: ignore[assignment, method-assign]
            await restore_backup(server, tmp_path / "backup")
            for _ in range(10):
                await other.put("/elsewhere", b"")
            may_list.set()
            await until_desired(cluster, Desired.RUNNING)
            assert (cluster.view.epoch, set(cluster.view.jobs)) == (1, {"j"})


async def test_an_empty_etcd_in_the_place_of_the_old_one_empties_the_view(server: EtcdServer) -> None:
    """The data folder is lost: jobs and nodes vanish from the view, which then follows the new etcd."""
    async with EtcdClient(server.access()) as client, watching(client) as cluster:
        await client.put(Keys.node("a"), encode(NODE))
        await client.put(LATER, RUNNING)
        revision = await client.put(KEY, RUNNING)
        assert await cluster.caught_up(revision, timeout_s=DEADLINE_S)
        await empty(server)
        async with asyncio.timeout(DEADLINE_S):
            while cluster.view.epoch == 0:
                await cluster.changed(cluster.version)
        assert (cluster.view.jobs, cluster.view.nodes, cluster.view.revisions) == ({}, {}, {})
        await client.put(KEY, PAUSED)
        await until_desired(cluster, Desired.PAUSED)
        assert cluster.revision < revision
