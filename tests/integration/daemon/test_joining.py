"""Machines join with tokens, and what strangers do at the port for it harms nobody."""

import asyncio
import errno
import os
import ssl
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from headway.daemon.base.errors import ConfigError
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.cluster_records import InvitationRecord
from headway.daemon.cluster.format import decode, encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.net.certificates import CertificateAuthority, names_in
from headway.daemon.net.invitation import NO_INVITATION, RefusedError
from headway.daemon.net.join_client import join
from headway.daemon.net.join_port import JoinLimits
from headway.daemon.net.join_token import MAX_REQUEST_BYTES, AskCertificate, JoinAnswer, JoinToken
from headway.daemon.net.signer import open_authority
from headway.daemon.net.signing_request import new_key, signing_request
from headway.stages.errors import UnavailableError
from headway.stages.sockets.roles import ROLE_URI, Role
from headway.stages.sockets.shared_port import shared_address
from headway.stages.sockets.tls_identity import TlsIdentity
from tests.integration.conftest import Etcd
from tests.integration.daemon.conftest import Playground
from tests.rigs.join_place import JoinPlace, invitation, join_place
from tests.rigs.joining import program

NOT_INVITED = f"token: {NO_INVITATION}"


async def test_a_token_gives_one_certificate_of_its_name_and_role(place: JoinPlace) -> None:
    """A reader of ten minutes is invited and joins: the certificate has name, role and life, for the machine's key."""
    token, key = await place.invited("ann", role="reader"), new_key()
    joined = await place.join(token, signing_request("ann", key))
    certificate = x509.load_pem_x509_certificate(joined.answer.certificate.encode())
    assert certificate.public_key() == key.public_key()
    assert names_in(certificate)[0] == "ann"
    assert names_in(certificate)[-1] == "urn:headway:role:reader"
    assert 590 < certificate.not_valid_after_utc.timestamp() - time.time() <= 600
    assert (joined.answer.role, joined.answer.etcd) == ("reader", ("10.0.0.5:2379",))
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(joined.answer.authority.encode()))


async def test_a_used_token_is_refused(place: JoinPlace) -> None:
    """The same line on a second machine gives nothing."""
    token = await place.invited("n")
    await place.join(token)
    with pytest.raises(ConfigError) as caught:
        await place.join(token)
    assert str(caught.value) == NOT_INVITED


async def test_the_same_machine_may_ask_again_and_nobody_else(place: JoinPlace, client: EtcdClient) -> None:
    """The answer was lost on its way: the same key gets a certificate, which can be renewed. Another key gets none,
    before or after, and neither does the same key with another secret, later than the token lasts, or after a renewal.
    """
    token, key = await place.invited("n"), new_key()
    asked = signing_request("n", key)
    lost = (await place.join(token, asked)).answer.certificate
    refused = [(token, signing_request("n", new_key())), (replace(token, secret=bytes(24)), asked)]
    for told, request in refused:
        with pytest.raises(ConfigError) as caught:
            await place.join(told, request)
        assert str(caught.value) == NOT_INVITED
    again = (await place.join(token, asked)).answer
    first, second = (x509.load_pem_x509_certificate(pem.encode()) for pem in (lost, again.certificate))
    assert second.public_key() == first.public_key() == key.public_key()
    assert (names_in(second), again.role) == (names_in(first), "node")
    entry = await client.get(Keys.invitation("n"))
    assert entry is not None
    assert entry.lease_id, "it ends with the token"
    place.ahead_s = 60.0
    with pytest.raises(ConfigError, match="has expired"):
        await place.join(token, asked)
    place.ahead_s = 0.0
    assert await place.signer.renew(again.certificate.encode(), signing_request("n", new_key()))
    with pytest.raises(ConfigError) as caught:
        await place.join(token, asked)
    assert str(caught.value) == NOT_INVITED


async def test_a_revoked_machine_does_not_ask_again(place: JoinPlace, client: EtcdClient) -> None:
    """Its name was revoked after it had joined, or its operator's was."""
    wish = replace(invitation("n"), invited_by=("thief",))
    token = replace(await place.invited("other"), name="n", secret=await place.signer.invite(wish, lasts_s=60.0))
    asked = signing_request("n", new_key())
    await place.join(token, asked)
    for name in ("n", "thief"):
        await client.put(Keys.revoked(name), b"{}")
        with pytest.raises(ConfigError):
            await place.join(token, asked)
        await client.delete(Keys.revoked(name))
    assert (await place.join(token, asked)).answer.certificate


async def test_a_connection_that_is_cut_before_the_answer_costs_nothing(
    place: JoinPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The authority has signed and dies before it answers: the machine asks again by itself and gets a certificate."""
    token, signed = await place.invited("n"), []
    join_at_authority = place.signer.join

    async def dying(asked: AskCertificate) -> JoinAnswer:
        signed.append(await join_at_authority(asked))
        if len(signed) == 1:
            raise EOFError
        return signed[-1]

    monkeypatch.setattr(place.signer, "join", dying)
    joined = await asyncio.to_thread(join, token, signing_request("n", new_key()), patience_s=20.0)
    assert (joined.answer.certificate, len(signed)) == (signed[1].certificate, 2)


async def test_two_machines_with_one_token_at_once_get_one_certificate(place: JoinPlace) -> None:
    """Both ask at the same moment: etcd lets one of them have the invitation."""
    token = await place.invited("n")
    results = await asyncio.gather(*(place.join(token) for _ in range(6)), return_exceptions=True)
    assert sum(not isinstance(result, BaseException) for result in results) == 1
    for result in results:
        if isinstance(result, BaseException):
            assert str(result) == NOT_INVITED or "n has a certificate" in str(result)


async def test_an_expired_token_is_refused(place: JoinPlace) -> None:
    """The signer's own clock ends it too: etcd may have been away when the lease should have ended."""
    token = await place.invited("n", lasts_s=60.0)
    place.ahead_s = 60.0
    with pytest.raises(ConfigError, match="has expired"):
        await place.join(token)


async def test_the_lease_ends_an_invitation(place: JoinPlace, client: EtcdClient) -> None:
    """No signer has to be there when it expires."""
    await place.invited("n", lasts_s=10.0)
    entry = await client.get(Keys.invitation("N"))
    assert entry is not None
    assert entry.lease_id
    assert b"secret_sha256" in entry.value


async def test_a_wrong_secret_is_refused_and_the_invitation_stands(place: JoinPlace) -> None:
    """A guess costs the invited machine nothing."""
    token = await place.invited("n")
    for secret in (bytes(24), b"", token.secret[:-1]):
        with pytest.raises(ConfigError) as caught:
            await place.join(replace(token, secret=secret))
        assert str(caught.value) == NOT_INVITED
    assert (await place.join(token)).answer.certificate


async def test_another_invitation_replaces_the_first(place: JoinPlace) -> None:
    """The operator prints a second line: the first one, which somebody may have seen, is void."""
    first, second = await place.invited("n"), await place.invited("n")
    with pytest.raises(ConfigError) as caught:
        await place.join(first)
    assert str(caught.value) == NOT_INVITED
    assert (await place.join(second)).answer.certificate


async def test_another_authority_never_sees_the_secret(client: EtcdClient, tmp_path: Path, place: JoinPlace) -> None:
    """Somebody else's authority answers at the address: the digest differs, and no secret has come there."""
    token = await place.invited("n")
    (tmp_path / "other").mkdir()
    other = CertificateAuthority.create(tmp_path / "other-ca")
    async with join_place(other, client, tmp_path / "other") as false:
        with pytest.raises(ConfigError, match="is not the token's: somebody else answers there"):
            await false.join(replace(token, addresses=(false.address,)))
        assert false.asked == []


async def test_a_node_that_answers_as_the_authority_never_sees_the_secret(
    etcd: Etcd, place: JoinPlace, tmp_path: Path
) -> None:
    """A node shows the true authority's certificate, which is public, but has no certificate of the join port."""
    token = await place.invited("n")
    heard: list[bytes] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    folder = etcd.authority.issue("evil", role=Role.NODE)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readline())
        writer.write(b'{"authority":' + encode_text(place.signer.ca) + b"}\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    try:
        with pytest.raises(UnavailableError, match="Hostname mismatch"):
            await place.join(replace(token, addresses=(f"127.0.0.1:{port}",)))
    finally:
        server.close()
    assert len(heard) == 1
    assert b"secret" not in heard[0]


def encode_text(text: str) -> bytes:
    """A text in JSON."""
    import json

    return json.dumps(text).encode()


async def test_a_request_for_another_name_or_role_is_refused(place: JoinPlace) -> None:
    """The invited machine asks to be another node, or an operator: refused, and it may still join as itself."""
    token = await place.invited("n")
    for other in ("node-a", "urn:headway:role:operator"):
        with pytest.raises(ConfigError) as caught:
            await place.join(token, request_for("n", other))
        assert str(caught.value) == f"token: the request is for {other}, and the invitation for node n"
    with pytest.raises(ConfigError, match="the request is for node-a"):
        await place.join(token, signing_request("node-a", new_key()))
    assert (await place.join(token)).answer.role == "node"


def request_for(name: str, other: str, *, is_authority: bool = False) -> str:
    """A request that asks for more than its own name."""
    kind = x509.UniformResourceIdentifier if other.startswith("urn:") else x509.DNSName
    builder = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .add_extension(x509.SubjectAlternativeName([kind(other)]), critical=False)
    )
    if is_authority:
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    return builder.sign(new_key(), hashes.SHA256()).public_bytes(Encoding.PEM).decode()


async def test_a_request_that_is_no_request_is_refused(place: JoinPlace) -> None:
    """To be an authority, with another kind of key, with somebody else's key, garbage."""
    token = await place.invited("n")
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "n")])
    builder = x509.CertificateSigningRequestBuilder().subject_name(name)
    weak = builder.sign(rsa.generate_private_key(65537, 2048), hashes.SHA256())
    curve = builder.sign(ec.generate_private_key(ec.SECP384R1()), hashes.SHA256())
    pem = builder.sign(new_key(), hashes.SHA256())
    changed = bytearray(pem.public_bytes(Encoding.DER))
    changed[-1] ^= 1
    told = {
        request_for("n", "n", is_authority=True): "asks for more than names",
        weak.public_bytes(Encoding.PEM).decode(): "on the curve P-256",
        curve.public_bytes(Encoding.PEM).decode(): "on the curve P-256",
        ssl.DER_cert_to_PEM_cert(bytes(changed)).replace("CERTIFICATE", "CERTIFICATE REQUEST"): "own key|be read",
        "no request": "cannot be read",
    }
    for request, reason in told.items():
        with pytest.raises(ConfigError, match=reason):
            await place.join(token, request)


async def test_a_name_is_given_once(place: JoinPlace) -> None:
    """A living node's name and the name of a valid certificate are taken, in whatever case, and also at the join."""
    await place.join(await place.invited("n"))
    with pytest.raises(RefusedError, match="N has a certificate: invite it with --again"):
        await place.invited("N")
    token = await place.invited("m")
    place.members.add("M")
    with pytest.raises(ConfigError, match="node m is in the cluster"):
        await place.join(token)
    with pytest.raises(RefusedError, match="node m is in the cluster"):
        await place.invited("m")
    place.ahead_s = 601.0
    assert await place.invited("n")


async def test_a_lost_machine_is_invited_again(place: JoinPlace) -> None:
    """A machine is set up anew under its name. Two such lines are out, and one of them is used: the other is void."""
    await place.join(await place.invited("n"))
    secret = await place.signer.invite(invitation("n"), lasts_s=60.0, again=True)
    token = replace(await place.invited("other"), name="n", secret=secret)
    assert (await place.join(token)).answer.certificate
    with pytest.raises(RefusedError):
        await place.invited("n")


async def test_nodes_who_write_to_etcd_cannot_invite(place: JoinPlace, client: EtcdClient) -> None:
    """A node makes itself an operator in an invitation that it has: its seal is broken, and nobody joins with it."""
    token = await place.invited("n")
    entry = await client.get(Keys.invitation("n"))
    assert entry is not None
    true = decode(entry.value, InvitationRecord)
    for false in (
        replace(true, role="operator"),
        replace(true, expires_at=true.expires_at + 9),
        replace(true, seal=""),
    ):
        await client.put(entry.key, encode(false))
        with pytest.raises(ConfigError) as caught:
            await place.join(token)
        assert str(caught.value) == NOT_INVITED
    await client.put(entry.key, b"garbage")
    with pytest.raises(ConfigError):
        await place.join(token)
    await client.put(entry.key, encode(true))
    assert (await place.join(token)).answer.role == "node"


@pytest.mark.parametrize("name", ["localhost", "Authority.headway", "", "a/b", "ä", "-x", "n.", "authority.headway."])
async def test_some_names_are_nobodys(place: JoinPlace, name: str) -> None:
    """Names that every certificate bears, that the join port has, or that no node can have."""
    with pytest.raises(RefusedError):
        await place.invited(name)
    with pytest.raises(RefusedError):
        await place.signer.invite(replace(invitation("n"), hosts=("a", "authority.headway")), lasts_s=60.0)


@pytest.mark.parametrize(
    "host",
    ["*.headway", "*", "a.", "authority.headway.", f"{ROLE_URI}operator", "a\0.b", "a\n", "a b", "ä", "a,b", "::1"],
)
async def test_a_host_is_one_name_or_address(place: JoinPlace, host: str) -> None:
    """None stands for several, says a role, or is read in two ways; TLS would take `*.headway` for the join port."""
    with pytest.raises(RefusedError, match=r"is neither a host's name|cannot be a name in a certificate"):
        await place.signer.invite(replace(invitation("n"), hosts=("10.0.0.7", "n.example", host)), lasts_s=60.0)


async def test_a_host_is_no_other_certificates_name(place: JoinPlace) -> None:
    """Peers check a node by its name: a certificate with another one's among its hosts would pass for that one."""
    await place.join(await place.invited("ann"))
    place.members.add("node-b")
    for host in ("Node-B", "Ann"):
        with pytest.raises(RefusedError, match=f"{host} is the name of another certificate: leave it out"):
            await place.signer.invite(replace(invitation("n"), hosts=(host,)), lasts_s=60.0)
    assert await place.signer.invite(replace(invitation("n"), hosts=("N", "fd00::7", "n_1.example")), lasts_s=60.0)


async def test_a_revoked_operators_invitations_end(place: JoinPlace, client: EtcdClient) -> None:
    """A thief has made them in time: nobody joins with one, under whatever name of the certificate it is revoked."""
    wish = replace(invitation("n", role="operator"), invited_by=("thief", "laptop.example"))
    token = replace(await place.invited("other"), name="n", secret=await place.signer.invite(wish, lasts_s=60.0))
    await client.put(Keys.revoked("Laptop.example"), b"{}")
    with pytest.raises(ConfigError) as caught:
        await place.join(token)
    assert str(caught.value) == NOT_INVITED
    await client.delete(Keys.revoked("laptop.example"))
    assert (await place.join(token)).answer.role == "operator"
    many = replace(wish, name="m", invited_by=tuple(f"name-{number}" for number in range(18)))
    with pytest.raises(RefusedError, match="a certificate of more than 17 names invites nobody"):
        await place.signer.invite(many, lasts_s=60.0)


def test_the_authority_of_a_node_is_its_own_and_private(tmp_path: Path) -> None:
    """A folder of another authority, and one whose key others may read, are refused with one line."""
    authority = CertificateAuthority.create(tmp_path / "ca")
    ca = TlsIdentity.read(authority.issue("n")).ca
    with pytest.raises(ConfigError, match=r"is not the authority in this node's ca\.pem"):
        open_authority(CertificateAuthority.create(tmp_path / "other").directory, ca)
    assert open_authority(tmp_path / "ca", ca)
    (tmp_path / "ca/ca-key.pem").chmod(0o640)
    with pytest.raises(ConfigError, match="others may open it"):
        open_authority(tmp_path / "ca", ca)


@pytest.mark.timeout(120)
async def test_a_machine_joins_by_one_line_within_ten_seconds(playground: Playground, tmp_path: Path) -> None:
    """`headway invite` prints a line, a new machine runs it, its daemon starts: the cluster has the node."""
    authority, me = playground.etcd.authority, tmp_path / "me"
    authority.issue("me", role=Role.OPERATOR).rename(me)
    playground.start("first", environment={"HEADWAY_ONE_PORT": "true"}, authority=authority.directory)
    await playground.until(lambda view: "first" in view.nodes or None, "the first node")
    began = time.monotonic()
    line = await program(tmp_path, "invite", "second", "--etcd", playground.etcd.endpoint, "--certs", str(me))
    words = line.split()
    assert words[:2] == ["headway", "join"]
    assert len(words) == 3
    assert len(line.splitlines()) == 1
    entry = await playground.client.get(Keys.invitation("second"))
    assert entry is not None
    assert decode(entry.value, InvitationRecord).invited_by == ("me",)
    told = await program(tmp_path, *words[1:], "--listen", "127.0.0.1:0", "--dir", str(tmp_path / "new"))
    joined_s = time.monotonic() - began
    given = f"--config {tmp_path}/new/daemon.toml --certs {tmp_path}/new"
    assert f"headway daemon {given}" in told
    playground.start(
        "second",
        config=tmp_path / "new/daemon.toml",
        certificates=tmp_path / "new",
        etcd=None,
        listen=None,
    )
    await playground.until(lambda view: "second" in view.nodes or None, "the new node")
    told_s = f"invite and join {joined_s:.1f} s, with the daemon's start {time.monotonic() - began:.1f} s"
    sys.stdout.write(f"{told_s}\n")
    assert joined_s < 10, "invite and join, on a busy machine too"
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"ca.pem", "cert.pem", "key.pem", "daemon.toml"}
    assert (tmp_path / "new/key.pem").stat().st_mode & 0o077 == 0


async def test_a_port_that_gets_no_certificate_says_so(place: JoinPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when the first machine comes; it joins when there is room."""
    token = await place.invited("b")
    with monkeypatch.context() as full:
        full.setattr(tempfile, "NamedTemporaryFile", _full_disk)
        with pytest.raises(UnavailableError, match="does not answer"):
            await place.join(token)
    assert set(place.told) == {"nobody can join: its port gets no certificate: No space left on device"}
    assert (await place.join(token)).answer.certificate
    assert place.told[-1] == ""


def _full_disk(**_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_a_port_that_says_a_byte_now_and_then_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What listens at the token's address drips its answer: the machine gives up after the time of one connection."""
    monkeypatch.setattr("headway.daemon.net.join_client.CALL_S", 1.0)
    gone = asyncio.Event()

    async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(b"H")
                await writer.drain()
                await asyncio.sleep(0.1)
        except ConnectionError:
            gone.set()
            writer.close()

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        token = JoinToken("n", (shared_address(f"127.0.0.1:{port}", "join"),), bytes(32), b"s" * 24)
        with pytest.raises(UnavailableError, match="does not answer"):
            async with asyncio.timeout(20.0):
                await asyncio.to_thread(join, token, signing_request("n", new_key()), patience_s=0.0)
        async with asyncio.timeout(20.0):
            await gone.wait()


async def test_garbage_and_too_much_are_answered_in_a_line(place: JoinPlace) -> None:
    """Bytes of no kind, JSON of another kind, deep JSON, a megabyte: each gets a refusal, and the port lives on."""
    assert await asyncio.to_thread(place.sent, b"\x00\xff\n") == {"refusal": "is not a request"}
    assert await asyncio.to_thread(place.sent, b'{"ask":"certificate","name":7}\n') == {"refusal": "is not a request"}
    assert await asyncio.to_thread(place.sent, b"[" * 10_000 + b"\n") == {"refusal": "is not a request"}
    too_much = {"refusal": f"a request has at most {MAX_REQUEST_BYTES} bytes"}
    assert await asyncio.to_thread(place.sent, b"x" * (20 << 10)) == too_much
    # The port does not read the rest of more, so the connection may break before the answer has come.
    assert await asyncio.to_thread(place.sent, b"x" * (1 << 20)) in (too_much, {})
    name = b'{"ask":"certificate","name":"../jobs/j/spec","secret":"","request":""}\n'
    assert await asyncio.to_thread(place.sent, name) == {"refusal": NO_INVITATION}
    assert (await place.join(await place.invited("n"))).answer.certificate


async def test_strangers_who_say_nothing_are_closed(etcd: Etcd, client: EtcdClient, tmp_path: Path) -> None:
    """Three connections are silent after the handshake, where two may be open: all are closed, and a machine joins."""
    limits = JoinLimits(most_open=2, deadline_s=3.0, per_s=1000.0, burst=1000)
    async with join_place(etcd.authority, client, tmp_path, limits=limits) as place:
        began = time.monotonic()
        silent = [await asyncio.to_thread(place.dialled) for _ in range(3)]
        token = await place.invited("n")
        assert (await place.join(token)).answer.certificate
        for connection in silent:
            with connection:
                assert await asyncio.to_thread(end_of, connection)
        assert time.monotonic() - began < 20


def end_of(connection: ssl.SSLSocket) -> bool:
    """Whether the other side ends the connection before the deadline."""
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


async def test_a_flood_is_not_heard_and_a_machine_joins_after_it(
    etcd: Etcd, client: EtcdClient, tmp_path: Path
) -> None:
    """Of fifty strangers at once five are heard. When the flood is over, a machine joins at once."""
    limits = JoinLimits(per_s=1.0, burst=5)
    async with join_place(etcd.authority, client, tmp_path, limits=limits) as place:

        def stranger() -> bool:
            try:
                return bool(place.sent(b'{"ask":"authority"}\n'))
            except OSError:
                return False

        heard = await asyncio.gather(*(asyncio.to_thread(stranger) for _ in range(50)))
        assert 1 <= sum(heard) <= 8
        token = await place.invited("n")
        request = signing_request("n", new_key())
        assert (await asyncio.to_thread(join, token, request, patience_s=20.0)).answer.certificate
