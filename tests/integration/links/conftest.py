"""Certificates and endpoints for links over real sockets."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.daemon.net.certificates import CertificateAuthority
from headway.stages.links.endpoint import LinkEndpoint
from headway.stages.links.loop_thread import LoopThread
from headway.stages.links.streams import LocalPlace
from headway.stages.sockets.tls_identity import TlsIdentity
from tests.rigs.two_sides import Endpoints

NOBODY_LISTENS = 1
"""A TCP port for links that must not need one."""


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


@pytest.fixture(scope="package")
def endpoints(identity: TlsIdentity) -> Iterator[Endpoints]:
    """Two workers' endpoints, in one process and on one loop as gRPC's asyncio wants it. Up for all tests here."""
    loop = LoopThread("test-links")
    loop.start()
    above, below = (
        LinkEndpoint(loop=loop, identity=identity, host="127.0.0.1", incarnation=name, protocol=1)
        for name in ("above", "below")
    )
    above.start()
    below.start()
    yield loop, above, below
    above.stop()
    below.stop()
    loop.stop()


@pytest.fixture(scope="package")
def node_folder() -> Iterator[Path]:
    """The private folder of a node; short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="headway-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="package")
def node_endpoints(endpoints: Endpoints, identity: TlsIdentity, node_folder: Path) -> Iterator[Endpoints]:
    """Two workers of one node, on the loop of the others."""
    loop, place = endpoints[0], LocalPlace("node", node_folder)
    above, below = (
        LinkEndpoint(loop=loop, identity=identity, host="127.0.0.1", incarnation=name, protocol=1, local=place)
        for name in ("above", "below")
    )
    above.start()
    below.start()
    yield loop, above, below
    above.stop()
    below.stop()
