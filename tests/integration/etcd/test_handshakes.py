"""The messages when a command and etcd reject each other's certificates, or when the server is not etcd."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from headway.daemon.base.errors import ConfigError
from headway.daemon.cli import program as cli
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.net.certificates import CertificateAuthority
from headway.daemon.node.identity import read_identity
from headway.daemon.node.settings import NodeConfig
from headway.stages.sockets.tls_identity import CA_FILE, CERTIFICATE_FILE, TlsIdentity
from tests.integration.conftest import Etcd

BOTH = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
DAY = timedelta(days=1)


def issued(
    authority: CertificateAuthority,
    name: str,
    *,
    begins: timedelta = -DAY,
    purposes: Sequence[x509.ObjectIdentifier] = BOTH,
) -> Path:
    """A certificate of two days that begins so long from now: what a clock that is days off makes of a good one."""
    folder = authority.issue(name)
    made = x509.load_pem_x509_certificate((folder / CERTIFICATE_FILE).read_bytes())
    key = load_pem_private_key((authority.directory / "ca-key.pem").read_bytes(), password=None)
    begin = datetime.now(UTC) + begins
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    again = (
        x509.CertificateBuilder()
        .subject_name(made.subject)
        .issuer_name(made.issuer)
        .public_key(made.public_key())
        .serial_number(made.serial_number)
        .not_valid_before(begin)
        .not_valid_after(begin + 2 * DAY)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(names, critical=False)
        .sign(key, hashes.SHA256())  # type: ignore[arg-type]
    )
    (folder / CERTIFICATE_FILE).write_bytes(again.public_bytes(Encoding.PEM))
    return folder


class Person:
    """Asks etcd, or what somebody takes for it, by the command line."""

    def __init__(self, etcd: Etcd, capsys: pytest.CaptureFixture[str]) -> None:
        self.authority = etcd.authority
        self._etcd = etcd
        self._capsys = capsys

    async def reads(self, certificates: Path | None, *, endpoint: str = "") -> str:
        """The one line on stderr."""
        arguments = ["jobs", "--etcd", endpoint or self._etcd.endpoint]
        arguments += ["--certs", str(certificates)] if certificates else []
        code = await asyncio.to_thread(cli.run, arguments)
        line = self._capsys.readouterr().err
        assert (code in (2, 3), line.count("\n")) == (True, 1), line
        assert "SSL" not in line
        return line


@pytest.fixture
def person(etcd: Etcd, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Person:
    """Use a patience of one second instead of five."""
    monkeypatch.setattr(ClusterSession.__init__, "__kwdefaults__", {"timeout_s": 2.0})
    for variable in ("HEADWAY_ETCD", "HEADWAY_CERTS", "HEADWAY_DEBUG"):
        monkeypatch.delenv(variable, raising=False)
    return Person(etcd, capsys)


async def test_an_expired_certificate_is_told_with_both_dates(person: Person) -> None:
    """One's own: nobody is dialled, the line names the file."""
    folder = issued(person.authority, "late", begins=-10 * DAY)
    line = await person.reads(folder)
    assert f"{folder}/cert.pem: expired on " in line
    assert "this machine's clock says" in line


async def test_a_clock_that_is_behind_is_told_with_both_dates(person: Person) -> None:
    """The certificate begins after what the clock says."""
    line = await person.reads(issued(person.authority, "early", begins=10 * DAY))
    assert "is valid from " in line
    assert "set the clock, or make a new certificate" in line


async def test_a_certificate_for_servers_alone_is_told(person: Person) -> None:
    """etcd would say no more than `bad certificate`. A daemon's has to be for clients and for servers."""
    folder = issued(person.authority, "server-only", purposes=BOTH[:1])
    assert "may not be used by clients (clientAuth)" in await person.reads(folder)
    with pytest.raises(ConfigError, match=r"may not be used by clients \(clientAuth\)"):
        read_identity(NodeConfig(name="server-only", certificates=folder))
    client_only = issued(person.authority, "client-only", purposes=BOTH[1:])
    with pytest.raises(ConfigError, match=r"may not be used by servers \(serverAuth\)"):
        read_identity(NodeConfig(name="client-only", certificates=client_only))


async def test_the_folder_of_another_cluster_is_told(person: Person, tmp_path: Path) -> None:
    """Its ca.pem did not sign etcd's certificate. With the right ca.pem beside it, etcd does not take one's own."""
    foreign = CertificateAuthority.create(tmp_path / "foreign").issue("me")
    assert "its certificate is not signed by this side's ca.pem" in await person.reads(foreign)
    (foreign / CA_FILE).write_bytes((person.authority.directory / CA_FILE).read_bytes())
    assert "does not take this side's certificate: it is of another authority" in await person.reads(foreign)


async def test_a_server_of_ours_that_is_not_etcd_or_not_as_expected_is_told(person: Person) -> None:
    """A daemon's port instead of etcd's; certificates that are expired, early, not for servers, of another name."""
    me, node = issued(person.authority, "me"), issued(person.authority, "node")
    cases = {
        node: "the server there is not etcd, perhaps a daemon",
        issued(person.authority, "s-late", begins=-10 * DAY): "its certificate has expired, by this machine's clock",
        issued(person.authority, "s-early", begins=10 * DAY): "its certificate is not valid yet",
        issued(person.authority, "s-client", purposes=BOTH[1:]): "its certificate may not be used by servers",
    }
    for folder, sentence in cases.items():
        async with listening(TlsIdentity.read(folder)) as port:
            assert sentence in await person.reads(me, endpoint=f"127.0.0.1:{port}")
    async with listening(TlsIdentity.read(node)) as port:
        line = await person.reads(me, endpoint=f"127.1.2.3:{port}")
        assert "its certificate does not carry the expected name" in line


class listening:  # noqa: N801 (reads as a statement)
    """A gRPC server with a certificate and nothing to say."""

    def __init__(self, identity: TlsIdentity) -> None:
        self._identity = identity
        self._server = grpc.aio.server()

    async def __aenter__(self) -> int:
        pair = (self._identity.key, self._identity.certificate)
        credentials = grpc.ssl_server_credentials([pair], root_certificates=self._identity.ca, require_client_auth=True)
        port = self._server.add_secure_port("0.0.0.0:0", credentials)
        await self._server.start()
        return port

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)
