"""A real etcd with TLS on, one for the whole run; every test gets a client and starts from an empty store."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from headway.daemon.cluster.binary import find_etcd_binary
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.connection import EtcdAccess
from headway.daemon.cluster.transaction import Delete
from headway.daemon.local.processes import EtcdServer, EtcdServerConfig
from headway.daemon.net.certificates import CertificateAuthority
from headway.stages.sockets.tls_identity import TlsIdentity

if TYPE_CHECKING:
    from tests.integration.exactness.training import Oracle
    from tests.rigs.fault_harness import FaultHarness

NUM_NODES = 5
"""Number of nodes of the cluster for faults: as many as 2-1-2 replicas need."""


@dataclass(frozen=True, slots=True)
class Etcd:
    """A running etcd, and how to reach it."""

    server: EtcdServer
    authority: CertificateAuthority
    identity: TlsIdentity
    """A client's, of the authority that the server trusts."""

    @property
    def endpoint(self) -> str:
        """host:port."""
        return self.server.endpoint

    def access(self, *, timeout_s: float = 10.0) -> EtcdAccess:
        """Return the access for a client with a certificate."""
        return self.server.access(self.identity, timeout_s=timeout_s)

    def client(self, *, timeout_s: float = 10.0) -> EtcdClient:
        """A new client; whoever makes one closes it."""
        return EtcdClient(self.access(timeout_s=timeout_s))


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """One server for all tests of the run."""
    directory = tmp_path_factory.mktemp("etcd")
    authority = CertificateAuthority.create(directory / "authority")
    config = EtcdServerConfig(
        binary=find_etcd_binary(),
        data_dir=directory / "data",
        log_file=directory / "etcd.log",
        certificates=authority.issue("etcd"),
        fsync=False,
    )
    server = asyncio.run(EtcdServer.start(config))
    yield Etcd(server, authority, TlsIdentity.read(authority.issue("test")))
    asyncio.run(server.stop())
    authority.delete()


@pytest.fixture
async def etcd(shared_etcd: Etcd) -> Etcd:
    """The shared server, with no key in it."""
    async with shared_etcd.client() as client:
        await client.transaction([], [Delete("", is_prefix=True)])
    return shared_etcd


@pytest.fixture
async def client(etcd: Etcd) -> AsyncIterator[EtcdClient]:
    """A client of the shared server."""
    async with etcd.client() as client:
        yield client


@pytest.fixture
def own_server_config(tmp_path: Path) -> EtcdServerConfig:
    """Return settings for tests that stop, freeze or reconfigure a server: not yet started, in a folder of the test."""
    return EtcdServerConfig(
        binary=find_etcd_binary(),
        data_dir=tmp_path / "data",
        log_file=tmp_path / "etcd.log",
        certificates=CertificateAuthority.create(tmp_path / "authority").issue("etcd"),
        fsync=False,
    )


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> "Oracle":
    """Runs each distinct job once in the plain loop."""
    from tests.integration.exactness.training import Oracle  # torch, which tests of etcd do without

    return Oracle(tmp_path_factory.mktemp("oracle"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_harness(tmp_path_factory: pytest.TempPathFactory) -> "AsyncIterator[FaultHarness]":
    """One cluster with spares and a history, up for the whole run, for all faults that it survives."""
    from tests.rigs.fault_harness import fault_harness

    async with fault_harness(tmp_path_factory.mktemp("ground"), num_nodes=NUM_NODES) as shared:
        yield shared


@pytest_asyncio.fixture(loop_scope="session")
async def harness(shared_harness: "FaultHarness") -> "FaultHarness":
    """The shared cluster with every node up again after the test before."""
    await shared_harness.all_nodes_up(NUM_NODES)
    return shared_harness
