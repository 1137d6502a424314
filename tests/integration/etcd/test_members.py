"""An etcd of several members, and one with users and passwords."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, replace

import pytest
import structlog

from headway.daemon.base.errors import StoreError, StoreUnreachableError
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.connection import EtcdAccess
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import Desired, DesiredRecord
from headway.daemon.local.processes import EtcdServer, EtcdServerConfig
from tests.rigs.backup import etcdctl
from tests.rigs.cluster_watch import until_desired, watching
from tests.rigs.members import access_to, leader_of, started_members
from tests.rigs.server import free_port

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


PASSWORD = "right"


@dataclass(slots=True)
class GuardedEtcd:
    """A server that wants a password; tests restart it."""

    server: EtcdServer

    def access(self, password: str = PASSWORD, *, user: str = "root") -> EtcdAccess:
        """Return the access of a user with a password."""
        return replace(self.server.access(timeout_s=10), user=user, password=password)


@pytest.fixture
async def guarded(own_server_config: EtcdServerConfig) -> AsyncIterator[GuardedEtcd]:
    """An etcd with one user, root."""
    config = replace(own_server_config, client_port=free_port(), fsync=True)
    found = GuardedEtcd(await EtcdServer.start(config))
    try:
        etcdctl(found.server, "user", "add", f"root:{PASSWORD}")
        etcdctl(found.server, "user", "grant-role", "root", "root")
        etcdctl(found.server, "auth", "enable")
        yield found
    finally:
        await found.server.stop()


async def test_a_user_with_the_right_password_works(guarded: GuardedEtcd) -> None:
    """Keys, leases and watches, all with the token of one login."""
    async with EtcdClient(guarded.access()) as client, await client.grant_lease(5) as lease:
        revision = await client.put("/x", b"1", lease_id=lease.id)
        async for batch in client.watch("/", from_revision=revision):
            assert batch.revision == revision
            break


async def test_a_wrong_user_or_password_is_refused_in_one_line(guarded: GuardedEtcd) -> None:
    """Not an outage: the error says who is refused, is not StoreUnreachableError, and keeps the password to itself."""
    for user, password in [("root", "sesame"), ("nobody", "sesame"), ("", "")]:
        async with EtcdClient(guarded.access(password, user=user)) as client:
            with pytest.raises(StoreError, match=f"{user or 'without a user'} is refused") as refused:
                await client.get("/x")
        assert not isinstance(refused.value, StoreUnreachableError)
        assert "\n" not in str(refused.value)
        assert "sesame" not in str(refused.value)


async def test_a_forgotten_login_is_renewed(guarded: GuardedEtcd) -> None:
    """etcd forgets its tokens when it restarts: the same client, its keepalives and its watch go on."""
    async with EtcdClient(guarded.access()) as client, await client.grant_lease(10) as lease:
        revision = await client.put("/x", b"1")
        await guarded.server.stop(timeout_s=0.0)
        guarded.server = await EtcdServer.start(guarded.server.config)
        async for batch in client.watch("/", from_revision=revision):
            assert batch.revision == revision
            break
        assert await client.put("/x", b"2") > revision
        assert await client.renew_lease(lease.id) > 0
