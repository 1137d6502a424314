"""Certificates and endpoints for links over real sockets."""

from collections.abc import Iterator

import pytest

from headway.daemon.certificates import CertificateAuthority
from headway.stages.link_endpoint import LinkEndpoint
from headway.stages.loop_thread import LoopThread
from headway.stages.tls_identity import TlsIdentity

Endpoints = tuple[LoopThread, LinkEndpoint, LinkEndpoint]


@pytest.fixture(scope="session")
def identity(tmp_path_factory: pytest.TempPathFactory) -> TlsIdentity:
    """What all nodes of this test run present."""
    return TlsIdentity.read(CertificateAuthority.create(tmp_path_factory.mktemp("authority")).issue("node"))


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> TlsIdentity:
    """Signed by another authority."""
    return TlsIdentity.read(CertificateAuthority.create(tmp_path_factory.mktemp("stranger")).issue("node"))


@pytest.fixture(scope="package")
def endpoints(identity: TlsIdentity) -> Iterator[Endpoints]:
    """Two workers' endpoints in one process, on one loop as gRPC's asyncio wants it."""
    loop = LoopThread("test-links")
    loop.start()
    ends = [
        LinkEndpoint(loop=loop, identity=identity, host="127.0.0.1", incarnation=name, protocol=1)
        for name in ("above", "below")
    ]
    for end in ends:
        end.start()
    yield loop, ends[0], ends[1]
    for end in ends:
        end.stop()
    loop.stop()
