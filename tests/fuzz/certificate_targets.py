"""What strangers and nodes say about certificates, invitations and requests: no bytes give more than was signed."""

import ssl
import tempfile
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from headway.daemon.base.errors import ConfigError
from headway.daemon.cluster.cluster_records import InvitationRecord, IssuedRecord, RevokedRecord
from headway.daemon.cluster.format import UnreadableRecordError, decode, encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.net.certificates import CertificateAuthority, check_own_certificate, names_in, read_certificate
from headway.daemon.net.invitation import RefusedError, check_secret, sealed
from headway.daemon.net.join_token import (
    AskCertificate,
    JoinAnswer,
    JoinToken,
    read_answer,
    read_request,
    read_token,
    write_token,
)
from headway.daemon.net.signing_request import new_key, read_signing_request, signing_request
from headway.stages.sockets.roles import Role, holder
from headway.stages.sockets.tls_identity import TlsIdentity

SECRET = b"s" * 24
SEAL_KEY = b"k" * 32


@cache
def operator() -> TlsIdentity:
    """Return an operator's identity, one for the process."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        authority = CertificateAuthority.create(Path(folder) / "ca")
        return TlsIdentity.read(authority.issue("me", role=Role.OPERATOR))


def _invitation() -> InvitationRecord:
    import hashlib

    invitation = InvitationRecord(
        name="n",
        role="node",
        hosts=("10.0.0.7",),
        etcd=("10.0.0.5:2379",),
        secret_sha256=hashlib.sha256(SECRET).hexdigest(),
        expires_at=2e9,
        valid_s=600.0,
        invited_by=("me",),
    )
    return sealed(invitation, SEAL_KEY)


def invitation(data: bytes) -> None:
    """An invitation that any node has written: it lets nobody in but as the authority has sealed it."""
    with suppress(UnreadableRecordError, RefusedError):
        found = decode(data, InvitationRecord)
        check_secret(found, SECRET, seal_keys=[SEAL_KEY], now=1e9)
        assert found == _invitation()


def join_request(data: bytes) -> None:
    """What a stranger says to the join port."""
    with suppress(ValueError, RefusedError):
        request = read_request(data)
        if isinstance(request, AskCertificate):
            read_signing_request(request.request)


def signing(data: bytes) -> None:
    """A request to sign, in DER, as its PEM holds it. Its names are all that the authority looks at."""
    with suppress(RefusedError):
        _, names = read_signing_request(_pem(data, "CERTIFICATE REQUEST"))
        assert all(isinstance(name, str) for name in names)


def join_answer(data: bytes) -> None:
    """What answers at the address of a token, before it is known who that is."""
    with suppress(ValueError):
        ssl.PEM_cert_to_DER_cert(read_answer(data).authority)


def token(data: bytes) -> None:
    """What somebody pastes after `headway join`."""
    with suppress(ConfigError):
        read_token(data.decode(errors="surrogateescape"))


def certificate(data: bytes) -> None:
    """A certificate in DER, as the PEM of somebody's folder holds it."""
    pem = _pem(data, "CERTIFICATE")
    with suppress(ConfigError):
        found = read_certificate(pem.encode(), "cert.pem")
        check_own_certificate(found, "cert.pem", serves=True, now=datetime(2026, 1, 1, tzinfo=UTC))
        holder(names_in(found))


def _pem(der: bytes, kind: str) -> str:
    return ssl.DER_cert_to_PEM_cert(der).replace("CERTIFICATE", kind)


def invitations() -> list[bytes]:
    """A true one, and one whose seal is missing."""
    return [encode(_invitation()), encode(replace(_invitation(), seal=""))]


def join_requests() -> list[bytes]:
    """Both kinds."""
    request = signing_request("n", new_key()).replace("\n", "\\n")
    asked = f'{{"ask":"certificate","name":"n","secret":"c3M=","request":"{request}"}}\n'
    return [b'{"ask":"authority"}\n', asked.encode()]


def signings() -> list[bytes]:
    """A true one."""
    return [x509.load_pem_x509_csr(signing_request("n", new_key()).encode()).public_bytes(Encoding.DER)]


def join_answers() -> list[bytes]:
    """A certificate, and a refusal."""
    import msgspec

    me = operator()
    told = JoinAnswer(authority=me.ca.decode(), certificate=me.certificate.decode(), role="node", etcd=("a:1",))
    return [msgspec.json.encode(told), msgspec.json.encode(JoinAnswer(refusal="no"))]


def tokens() -> list[bytes]:
    """A true one."""
    return [write_token(JoinToken("n", ("10.0.0.7:7070/join",), bytes(32), SECRET)).encode()]


def certificates() -> list[bytes]:
    """An operator's, and its authority's."""
    me = operator()
    return [x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER) for pem in (me.certificate, me.ca)]


def entries() -> dict[str, object]:
    """Records about certificates, by key."""
    return {
        Keys.revoked("me"): RevokedRecord(name="me", revoked_at=1.0, revoked_by="you"),
        Keys.issued("n"): IssuedRecord(name="n", role="node", serial="A", issued_at=1.0, expires_at=2.0),
        Keys.invitation("n"): _invitation(),
    }
