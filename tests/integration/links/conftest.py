"""Certificates and endpoints for links over real sockets."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headway.daemon.net.certificates import CertificateAuthority
from headway.stages.links.collective.endpoint import CollectiveEndpoint
from headway.stages.links.endpoint import LinkEndpoint
from headway.stages.links.loop_thread import LoopThread
from headway.stages.links.streams import LocalPlace
from headway.stages.sockets.tls_identity import TlsIdentity

Endpoints = tuple[LoopThread, LinkEndpoint, LinkEndpoint]
NOBODY_LISTENS = 1
"""A TCP port for links that must not need one."""
CollectiveEnds = tuple[CollectiveEndpoint, CollectiveEndpoint]


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    """The cluster's."""
    return CertificateAuthority.create(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def identity(authority: CertificateAuthority) -> TlsIdentity:
    """Return the identity that all nodes of this test run present."""
    return TlsIdentity.read(authority.issue("node"))


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> TlsIdentity:
    """Signed by another authority."""
    return TlsIdentity.read(CertificateAuthority.create(tmp_path_factory.mktemp("stranger")).issue("node"))


@dataclass
class Stuck:
    """The peers whose groups did not let go, as the endpoints told of them."""

    peers: list[str] = field(default_factory=list)


@dataclass
class Workers:
    """Two workers' endpoints of both kinds, in one process and on one loop as gRPC's asyncio wants it."""

    grpc: Endpoints
    collective: CollectiveEnds
    stuck: Stuck


@pytest.fixture(scope="package")
def workers(identity: TlsIdentity) -> Iterator[Workers]:
    """Up for all tests of this folder."""
    loop, stuck = LoopThread("test-links"), Stuck()
    loop.start()
    ends: list[LinkEndpoint] = []
    collectives: list[CollectiveEndpoint] = []
    for name in ("above", "below"):
        end = LinkEndpoint(loop=loop, identity=identity, host="127.0.0.1", incarnation=name, protocol=1)
        collective = CollectiveEndpoint(
            loop=loop,
            identity=identity,
            host="127.0.0.1",
            incarnation=name,
            protocol=1,
            on_stuck=stuck.peers.append,
        )
        for name, answer in collective.methods.items():
            end.add_method(name, answer)
        end.start()
        ends.append(end)
        collectives.append(collective)
    yield Workers((loop, ends[0], ends[1]), (collectives[0], collectives[1]), stuck)
    for end in ends:
        end.stop()
    loop.stop()


@pytest.fixture(scope="package")
def endpoints(workers: Workers) -> Endpoints:
    """The two workers' gRPC links."""
    return workers.grpc


@pytest.fixture(scope="package")
def node_folder() -> Iterator[Path]:
    """The private folder of a node; short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="headway-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="package")
def node_endpoints(workers: Workers, identity: TlsIdentity, node_folder: Path) -> Iterator[Endpoints]:
    """Two workers of one node, on the loop of the others."""
    loop, place = workers.grpc[0], LocalPlace("node", node_folder)
    above, below = (
        LinkEndpoint(loop=loop, identity=identity, host="127.0.0.1", incarnation=name, protocol=1, local=place)
        for name in ("above", "below")
    )
    above.start()
    below.start()
    yield loop, above, below
    above.stop()
    below.stop()
