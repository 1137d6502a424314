"""Certificates and endpoints for links over real sockets."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from headway.stages.link_endpoint import LinkEndpoint
from headway.stages.loop_thread import LoopThread
from headway.stages.tls_identity import SERVER_NAME, TlsIdentity

Endpoints = tuple[LoopThread, LinkEndpoint, LinkEndpoint]


def issue_identity() -> TlsIdentity:
    """A throw-away authority and one certificate of it, by the rule of tls_identity.py."""

    def certificate(
        name: str, key: ec.EllipticCurvePrivateKey, issuer_key: ec.EllipticCurvePrivateKey, *, is_ca: bool
    ) -> bytes:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        )
        return builder.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    return TlsIdentity(
        certificate("test authority", ca_key, ca_key, is_ca=True),
        certificate("node", key, ca_key, is_ca=False),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


@pytest.fixture(scope="session")
def identity() -> TlsIdentity:
    """What all nodes of this test run present."""
    return issue_identity()


@pytest.fixture(scope="session")
def stranger() -> TlsIdentity:
    """Signed by another authority."""
    return issue_identity()


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
