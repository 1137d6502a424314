"""An etcd with users and passwords, as people run one of their own."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest

from headway.daemon.base.errors import StoreError, StoreUnreachableError
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.connection import EtcdAccess
from headway.daemon.local.processes import EtcdServer, EtcdServerConfig
from tests.rigs.backup import etcdctl
from tests.rigs.server import free_port

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
