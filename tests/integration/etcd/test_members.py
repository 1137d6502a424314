"""Three members on loopback: one of them dies, the leader or the one that we talk to."""

import asyncio
import os
import signal
import time
from contextlib import suppress

import pytest
import structlog

from headway.daemon.base.errors import StoreUnreachableError
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import Desired, DesiredRecord
from headway.daemon.local.processes import EtcdServer, EtcdServerConfig
from tests.rigs.cluster_watch import until_desired, watching
from tests.rigs.members import access_to, leader_of, started_members

KEY = Keys.of("j", "desired")
_log = structlog.get_logger()

RESUME_S = 4.0
"""One to two seconds on a quiet machine."""


async def put_at_last(client: EtcdClient, key: str, value: bytes) -> int:
    """A write that may be repeated; which it must be when its answer was lost."""
    while True:
        with suppress(StoreUnreachableError):
            return await client.put(key, value)


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)], ids=["killed", "frozen"]
)
async def test_a_member_dies_and_work_goes_on(own_server_config: EtcdServerConfig, how: signal.Signals) -> None:
    """First a follower is killed and comes back, then the leader, which we talk to: all goes on with the others."""
    async with started_members(own_server_config) as servers:
        leader = await leader_of(servers)
        follower, third = [server for server in servers if server is not leader]
        await lose_a_follower([third, follower, leader], follower)
        await follower.restart()
        leader = await leader_of(servers)
        await lose_the_leader([leader, *(server for server in servers if server is not leader)], how)


async def lose_a_follower(servers: list[EtcdServer], victim: EtcdServer) -> None:
    """Not the one that we talk to: a write and its echo are quick, and the view stays in sight."""
    async with EtcdClient(access_to(servers)) as client, watching(client) as cluster:
        await client.put(KEY, encode(DesiredRecord()))
        await until_desired(cluster, Desired.RUNNING)
        steady_since = cluster.view.steady_since
        await victim.kill()
        killed_at = time.monotonic()
        await client.put(KEY, encode(DesiredRecord(state=Desired.PAUSED)))
        await until_desired(cluster, Desired.PAUSED)
        assert time.monotonic() - killed_at < RESUME_S
        assert cluster.view.steady_since == steady_since


async def lose_the_leader(servers: list[EtcdServer], how: signal.Signals) -> None:
    """The first endpoint: reads, writes, the view and both kinds of leases go on with the other two."""
    victim, *others = servers
    async with (
        EtcdClient(access_to(servers, timeout_s=5.0)) as client,
        EtcdClient(access_to(others)) as bystander,
        watching(client) as cluster,
        await client.grant_lease(2) as lease,
        await client.grant_lease(2, is_strict=True) as strict,
    ):
        await client.put("/alive", b"", lease_id=lease.id)
        await client.put(KEY, encode(DesiredRecord()))
        await until_desired(cluster, Desired.RUNNING)
        os.kill(victim.pid, how)
        killed_at = time.monotonic()
        assert await client.get("/alive") is not None
        read_s = time.monotonic() - killed_at
        await put_at_last(bystander, KEY, encode(DesiredRecord(state=Desired.PAUSED)))
        await put_at_last(client, "/written", b"")
        written_s = time.monotonic() - killed_at
        await until_desired(cluster, Desired.PAUSED)
        seen_s = time.monotonic() - killed_at
        _log.info("measured", how=how.name, read_s=read_s, written_s=written_s, seen_s=seen_s)
        assert max(read_s, written_s) < RESUME_S
        assert seen_s < RESUME_S + (5.0 if how is signal.SIGSTOP else 0.0)
        await asyncio.sleep(max(killed_at + 2.8 - time.monotonic(), 0.0))
        lease.check()
        strict.check()
        assert await client.get("/alive") is not None
        assert cluster.view.epoch == 0
