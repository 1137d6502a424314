"""One authority follows another while the cluster runs: real etcd, real daemons, real TLS, the commands of the page."""

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography import x509

from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.base.errors import StoreError
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.cluster.binary import find_etcd_binary
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.local.processes import EtcdServer, EtcdServerConfig
from headway.daemon.net import certificates
from headway.daemon.net.certificates import CertificateAuthority, issuer_of
from headway.daemon.net.invitation import NO_INVITATION, RefusedError
from headway.daemon.net.join_token import AskCertificate
from headway.daemon.net.renewals import LOOKED_AT_EVERY_S
from headway.daemon.net.signer import Signer
from headway.daemon.net.signing_request import new_key, signing_request
from headway.stages.errors import UnavailableError
from headway.stages.sockets.tls_identity import TlsIdentity
from tests.integration.conftest import Etcd
from tests.integration.daemon.conftest import Playground
from tests.rigs.join_place import invitation, join_place
from tests.rigs.joining import program

ONE_PORT = {"HEADWAY_ONE_PORT": "true"}


@pytest.fixture
async def cluster(tmp_path: Path, shards: Path) -> AsyncIterator[Playground]:
    """etcd, and a node with the authority in tmp_path/ca; an operator is `me`, and so is this test."""
    await program(tmp_path, "certs", "ca", "etcd=127.0.0.1", "first=127.0.0.1", "--operator", "me")
    authority = CertificateAuthority.open(tmp_path / "ca")
    identity = TlsIdentity.read(tmp_path / "ca/me")
    config = EtcdServerConfig(
        binary=find_etcd_binary(),
        data_dir=tmp_path / "etcd",
        log_file=tmp_path / "etcd.log",
        certificates=tmp_path / "ca/etcd",
        fsync=False,
    )
    async with await EtcdServer.start(config) as server:
        etcd = Etcd(server, authority.issuing_into(tmp_path / "unused"), identity)
        playground = Playground(etcd, etcd.client(), tmp_path, shards)
        start_first(playground)
        yield playground
        playground.end()
        await playground.client.close()


def start_first(playground: Playground) -> None:
    """Start the node with the authority."""
    ca = playground.folder / "ca"
    playground.start("first", environment=ONE_PORT, authority=ca, certificates=ca / "first", lease_ttl_s=20)


async def answers(playground: Playground, name: str, identity: TlsIdentity) -> bool:
    """Whether a daemon and etcd hear somebody."""
    client = NodeClient(identity)
    etcd = EtcdClient(playground.etcd.server.access(identity, timeout_s=2.0))
    heard = []
    try:
        node = (await playground.view()).nodes[name]
        for ask in (client.describe(NodeEndpoint(name, node.address), timeout_s=2.0), etcd.status()):
            try:
                await ask
                heard.append(True)
            except (UnavailableError, StoreError):
                heard.append(False)
    finally:
        await client.close()
        await etcd.close()
    assert heard[0] is heard[1], heard
    return heard[0]


@pytest.mark.timeout(300)
@pytest.mark.slow
async def test_one_authority_follows_another_while_the_cluster_runs(cluster: Playground, tmp_path: Path) -> None:
    """Both are trusted, the new one signs, an invited node renews by itself in its process, the old one is dropped."""
    server, reached = cluster.etcd.server, ("--etcd", cluster.etcd.endpoint, "--certs", str(tmp_path / "ca/me"))
    await cluster.until(lambda view: "first" in view.nodes or None, "the first node")
    line = await program(tmp_path, "invite", "second", *reached)
    await program(tmp_path, *line.split()[1:], "--listen", "127.0.0.1:0", "--dir", "new")
    new = tmp_path / "new"
    cluster.start("second", config=new / "daemon.toml", certificates=new, etcd=None, listen=None, lease_ttl_s=20)
    before = await cluster.until(lambda view: view.issued.get("second"), "the invited node's certificate")
    await cluster.until(lambda view: "second" in view.nodes or None, "the second node")
    pid = cluster.daemons["second"].pid
    # 1. Everybody trusts both. Daemons read ca.pem while they run; etcd is restarted.
    assert "copy ca/ca.pem to every node" in await program(tmp_path, "certs", "rotate", "ca")
    shutil.copyfile(tmp_path / "ca/ca.pem", new / "ca.pem")
    await server.restart()
    old = TlsIdentity.read(tmp_path / "ca/me")
    assert await answers(cluster, "second", old)
    # 2. The new one signs: for etcd, the first node and me by hand, for the second node by its renewal.
    told = await program(tmp_path, "certs", "rotate", "ca", "--sign")
    assert "make again what `headway certs` has made, and copy it: of etcd," in told
    await program(tmp_path, "certs", "ca", "etcd=127.0.0.1", "first=127.0.0.1", "--operator", "me")
    mine = TlsIdentity.read(tmp_path / "ca/me")
    assert await answers(cluster, "second", mine)
    cluster.signal("first", signal.SIGTERM)
    assert await cluster.ended("first") == 0
    start_first(cluster)
    renewed = await cluster.until(
        lambda view: found if (found := view.issued["second"]).serial != before.serial else None,
        f"the second node's renewal, {LOOKED_AT_EVERY_S:g} s after the first one's start",
    )
    assert await answers(cluster, "second", old), "both are trusted still"
    # 3. The old one is trusted no more.
    await program(tmp_path, "certs", "rotate", "ca", "--drop")
    shutil.copyfile(tmp_path / "ca/ca.pem", new / "ca.pem")
    await server.restart()
    async with asyncio.timeout(60.0):
        await cluster.client.close()
        cluster.client = EtcdClient(server.access(mine, timeout_s=10.0))
        while await answers(cluster, "second", old):
            await asyncio.sleep(0.1)
    assert await answers(cluster, "second", mine)
    assert await answers(cluster, "first", mine)
    assert cluster.daemons["second"].pid == pid
    assert cluster.daemons["second"].poll() is None
    (authority,) = x509.load_pem_x509_certificates((tmp_path / "ca/ca.pem").read_bytes())
    shown = x509.load_pem_x509_certificate((tmp_path / "second/certificates/newest/cert.pem").read_bytes())
    assert issuer_of(shown, (tmp_path / "ca/ca.pem").read_bytes()) == authority
    assert f"{shown.serial_number:X}" == renewed.serial
    # Each dials the other with what it trusts now, one starts again with what it has renewed, and a third joins.
    await program(tmp_path, "doctor", "--from", "second", "--to", "first", *reached)
    await program(tmp_path, "doctor", "--from", "first", "--to", "second", *reached)
    incarnation = (await cluster.view()).nodes["second"].incarnation
    cluster.signal("second", signal.SIGTERM)
    assert await cluster.ended("second") == 0
    cluster.start("second", config=new / "daemon.toml", certificates=new, etcd=None, listen=None, lease_ttl_s=20)
    await cluster.until(
        lambda view: ("second" in view.nodes and view.nodes["second"].incarnation != incarnation) or None,
        "the second node again, with its renewed certificate",
    )
    line = await program(tmp_path, "invite", "third", *reached)
    await program(tmp_path, *line.split()[1:], "--dir", "third")
    assert (tmp_path / "third/ca.pem").read_bytes() == (tmp_path / "ca/ca.pem").read_bytes()


async def test_what_the_old_authority_has_noted_is_believed_until_it_is_dropped(
    etcd: Etcd, client: EtcdClient, tmp_path: Path
) -> None:
    """A machine that joined under the old one is renewed by the new one, and then no more."""
    authority = CertificateAuthority.create(tmp_path / "ca")
    (tmp_path / "s").mkdir()
    async with join_place(authority, client, tmp_path / "s") as place:
        first = (await place.join(await place.invited("n"))).answer.certificate.encode()
        other = (await place.join(await place.invited("m"))).answer.certificate.encode()
    certificates.begin_rotation(authority.directory)
    signing = certificates.sign_rotation(authority.directory)
    assert await Signer(signing, client, is_member=lambda _: False).renew(first, signing_request("n", new_key()))
    last = certificates.drop_rotation(authority.directory)
    with pytest.raises(RefusedError, match="is not of this authority"):
        await Signer(last, client, is_member=lambda _: False).renew(other, signing_request("m", new_key()))


async def test_the_key_of_a_dropped_authority_invites_nobody(etcd: Etcd, client: EtcdClient, tmp_path: Path) -> None:
    """Somebody has stolen it, and may write to etcd. The daemon that signs knows the old key until it starts again."""
    stolen = CertificateAuthority.create(tmp_path / "ca")
    certificates.begin_rotation(stolen.directory)
    signing, ca = certificates.sign_rotation(stolen.directory), stolen.directory / "ca.pem"
    signer = Signer(signing, client, is_member=lambda _: False, trusted=ca.read_bytes)
    thief = Signer(stolen, client, is_member=lambda _: False)

    async def joined(name: str) -> str:
        secret = await thief.invite(invitation(name, role="operator"), lasts_s=60.0)
        asked = AskCertificate(name=name, secret=secret, request=signing_request(name, new_key()))
        return (await signer.join(asked)).role

    assert await joined("before") == "operator", "both are trusted"
    certificates.drop_rotation(stolen.directory)
    with pytest.raises(RefusedError, match=NO_INVITATION):
        await joined("after")
