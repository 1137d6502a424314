"""Certificates are renewed, of nodes while a job trains, of people and of relays; and nobody gets more than before."""

import asyncio
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.base.errors import ConfigError
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.cli import program as cli
from headway.daemon.client import certificate_requests as own_renewal
from headway.daemon.client.cluster_access import ClusterAddress, ClusterSession
from headway.daemon.client.job_requests import submit
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.cluster_records import IssuedRecord, RevokedRecord
from headway.daemon.cluster.format import decode, encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import NodeRecord
from headway.daemon.cluster.transaction import Put
from headway.daemon.jobs.job import PlacementSpec
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.net.certificates import CertificateAuthority, certificate_pem, key_pem, names_in, write_private
from headway.daemon.net.invitation import RefusedError
from headway.daemon.net.join_token import JoinToken
from headway.daemon.net.renewals import asked_of_authority
from headway.daemon.net.signing_request import new_key, signing_request
from headway.stages.errors import ProtocolError
from headway.stages.sockets.roles import Role
from headway.stages.sockets.tls_identity import Identity, TlsIdentity
from tests.integration.conftest import Etcd
from tests.integration.daemon.conftest import Playground
from tests.integration.exactness.training import Oracle, assert_same_bits, finished, small_job, until_batch
from tests.rigs.join_place import JoinPlace, invitation, join_place
from tests.rigs.joining import program
from tests.rigs.paces import paced_layers
from tests.rigs.relays import HOST, free_ports

VALID_S = 20.0
"""Of a short life, in which the node also begins again."""
SOON_S = 60.0


@pytest.fixture
async def place(etcd: Etcd, client: EtcdClient, tmp_path: Path) -> AsyncIterator[JoinPlace]:
    """A join port of the authority that etcd trusts."""
    async with join_place(etcd.authority, client, tmp_path) as found:
        yield found


async def joined(place: JoinPlace, name: str = "n", role: str = "node") -> bytes:
    """The certificate of a machine that was invited."""
    answer = (await place.join(await place.invited(name, role=role))).answer
    return answer.certificate.encode()


def request(name: str = "n") -> str:
    """What a machine asks for with a new key."""
    return signing_request(name, new_key())


async def test_a_certificate_is_renewed_once_for_its_own_name_and_role(place: JoinPlace) -> None:
    """The next one has another key and serial; with it the one after that is had, and with the first no more."""
    first, key = await joined(place, "ann", "reader"), new_key()
    second = x509.load_pem_x509_certificate((await place.signer.renew(first, signing_request("ann", key))).encode())
    before = x509.load_pem_x509_certificate(first)
    assert (second.public_key(), names_in(second)) == (key.public_key(), names_in(before))
    assert second.serial_number != before.serial_number
    assert await place.signer.renew(certificate_pem(second), request("ann"))
    with pytest.raises(RefusedError, match="ann has a newer certificate than this one"):
        await place.signer.renew(first, request("ann"))


@pytest.mark.parametrize("name", ["10.0.0.7", "Node-B"])
async def test_a_node_is_renewed_whatever_other_names_it_bears(place: JoinPlace, name: str) -> None:
    """Its certificate has the names of hosts before its own, if that is an address."""
    secret = await place.signer.invite(replace(invitation(name), hosts=("a.example", "10.0.0.8")), lasts_s=60.0)
    token = JoinToken(name, (place.address,), place.signer.ca_sha256, secret)
    first = (await place.join(token)).answer.certificate.encode()
    second = (await place.signer.renew(first, request(name))).encode()
    assert names_in(x509.load_pem_x509_certificate(second)) == names_in(x509.load_pem_x509_certificate(first))


async def test_a_lost_answer_is_asked_for_again_with_the_same_key(place: JoinPlace) -> None:
    """The renewal was noted and its answer lost: the same request gives a certificate, and another key gives none."""
    first, asked = await joined(place), request()
    lost = await place.signer.renew(first, asked)
    again = await place.signer.renew(first, asked)
    assert x509.load_pem_x509_certificate(again.encode()).public_key() == (
        x509.load_pem_x509_certificate(lost.encode()).public_key()
    )
    with pytest.raises(RefusedError, match="newer certificate"):
        await place.signer.renew(first, request())
    assert await place.signer.renew(again.encode(), request())


async def test_of_many_at_once_one_is_renewed(place: JoinPlace) -> None:
    """Somebody who has copied the key asks at the same moment: etcd lets one of them have it."""
    first = await joined(place)
    results = await asyncio.gather(*(place.signer.renew(first, request()) for _ in range(6)), return_exceptions=True)
    assert sum(isinstance(result, str) for result in results) == 1
    assert all(isinstance(result, str | RefusedError) for result in results)


async def test_who_may_not_renew_is_told_why(place: JoinPlace, client: EtcdClient, tmp_path: Path, etcd: Etcd) -> None:
    """No invitation, another authority, garbage, revoked, expired."""
    first = await joined(place)

    async def refusal(shown: bytes, asked: str) -> str:
        with pytest.raises(RefusedError) as caught:
            await place.signer.renew(shown, asked)
        return caught.value.reason

    by_hand = (etcd.authority.issue("m", role=Role.NODE) / "cert.pem").read_bytes()
    assert "came by no invitation" in await refusal(by_hand, request("m"))
    other = CertificateAuthority.create(tmp_path / "other").issue("n", role=Role.NODE)
    assert await refusal((other / "cert.pem").read_bytes(), request()) == "the certificate is not of this authority"
    assert await refusal(b"garbage", request()) == "the certificate is not of this authority"
    assert await refusal(first, "garbage") == "the request cannot be read"
    await client.transaction([], [Put(Keys.revoked("n"), encode(RevokedRecord(name="n", revoked_at=time.time())))])
    assert "n is revoked" in await refusal(first, request())
    late = await joined(place, "late")
    place.ahead_s = 600.0
    assert "has expired: invite it again" in await refusal(late, request("late"))


@pytest.mark.parametrize("forged", [{"role": "operator"}, {"name": "victim"}, {"expires_at": 1e12}])
async def test_a_renewal_has_no_more_than_the_certificate_that_asks(
    place: JoinPlace, client: EtcdClient, forged: dict[str, object]
) -> None:
    """Every node writes to etcd, and a request may name anybody: names, role and life are those of the certificate."""
    first = await joined(place)
    entry = await client.get(Keys.issued("n"))
    assert entry is not None
    await client.put(Keys.issued("n"), encode(replace(decode(entry.value, IssuedRecord), **forged)))  # type: ignore[arg-type]
    before, after = map(
        x509.load_pem_x509_certificate, (first, (await place.signer.renew(first, request("victim"))).encode())
    )
    assert names_in(after) == names_in(before)
    lives = [each.not_valid_after_utc - each.not_valid_before_utc for each in (before, after)]
    assert lives[0] == lives[1]


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_certificates_end_while_a_job_trains_and_nobody_notices(tmp_path: Path, oracle: Oracle) -> None:
    """A node's certificates last twenty seconds. After some of them another node's worker dies and dials the long-lived
    one anew: no daemon restarts, and losses and weights are the plain loop's.
    """
    spec = replace(small_job("renewed", batches=80, microbatches=8), placement=PlacementSpec(min_nodes=2, max_nodes=2))
    settings = {"num_spares": 1, "devices": "cpu", "authority": tmp_path / "state" / "authority"}
    paces = paced_layers(tmp_path, 0.005) | {"HEADWAY_ONE_PORT": "true"}
    async with (
        LocalCluster(tmp_path / "state", num_nodes=2, node_settings=settings, environment=paces) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        other, short = (node.name for node in cluster.nodes)
        await shorten(cluster, session, short)
        pids = cluster.node_pids
        await submit(session, spec)
        job = await until_batch(session, "renewed", 2)
        assert job.plan is not None
        first = await issued(session, short)
        renewed = await until_issued(session, short, after=first.expires_at + 1.0)
        worker = next(one for one in job.workers.values() if one.node == other and one.pid)
        paced_layers(tmp_path, 0.0)  # the rest goes as fast as it can
        os.kill(worker.pid, signal.SIGKILL)
        result = await finished(session, "renewed", tmp_path / "out")
        assert cluster.node_pids == pids, "a daemon has restarted"
        assert (await session.view()).nodes[short].ailments == {}
        assert renewed.serial != first.serial
    assert_same_bits(result, oracle(spec))
    assert result.generations[-1] > job.phase.generation, "the worker's death came too late"


async def shorten(cluster: LocalCluster, session: ClusterSession, name: str) -> None:
    """Let a node begin again with a certificate of a short life, as if it had joined so: the renewals count before the
    folder of the settings.
    """
    folder = cluster.address.certificates
    assert folder is not None
    authority = CertificateAuthority.kept_in(cluster.state_dir / "authority").issuing_into(folder.parent)
    cluster.kill_node(name)
    pair = authority.issue(name, role=Role.NODE, validity=timedelta(seconds=VALID_S))
    certificate = x509.load_pem_x509_certificate((pair / "cert.pem").read_bytes())
    record = IssuedRecord(
        name=name,
        role="node",
        serial=f"{certificate.serial_number:X}",
        issued_at=time.time(),
        expires_at=certificate.not_valid_after_utc.timestamp(),
    )
    await session.client.put(Keys.issued(name), encode(record))
    await until_issued(session, name, after=record.expires_at - VALID_S / 2)


async def issued(session: ClusterSession, name: str) -> IssuedRecord:
    """What the authority has noted last."""
    entry = await session.client.get(Keys.issued(name))
    assert entry is not None
    return decode(entry.value, IssuedRecord)


async def until_issued(session: ClusterSession, name: str, *, after: float) -> IssuedRecord:
    """Wait until a moment, and then for a certificate that is valid."""
    async with asyncio.timeout(SOON_S):
        while time.time() < after or (found := await issued(session, name)).expires_at < time.time():
            await asyncio.sleep(0.2)
    return found


RELAY_VALID_S = 24


@pytest.fixture
async def reached(playground: Playground, tmp_path: Path) -> tuple[str, ...]:
    """A node with the authority runs; the flags of an operator."""
    authority, me = playground.etcd.authority, tmp_path / "me"
    authority.issue("me", role=Role.OPERATOR).rename(me)
    playground.start("first", environment={"HEADWAY_ONE_PORT": "true"}, authority=authority.directory)
    await playground.until(lambda view: "first" in view.nodes or None, "the first node")
    return ("--etcd", playground.etcd.endpoint, "--certs", str(me))


async def joined_folder(folder: Path, reached: tuple[str, ...], name: str, *options: str) -> Path:
    """The folder of somebody who was invited."""
    line = await program(folder, "invite", name, *options, *reached)
    await program(folder, *line.split()[1:], "--dir", name)
    return folder / name


def certificate_in(folder: Path) -> x509.Certificate:
    """The certificate of a folder."""
    return x509.load_pem_x509_certificate((folder / "cert.pem").read_bytes())


@pytest.mark.timeout(180)
async def test_a_person_renews_by_one_command_and_never_gets_more(
    reached: tuple[str, ...], playground: Playground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader renews twice: other keys, the same names and role. The answer to the third one is lost on the way: the
    same command brings it. A copy of an earlier pair, and a certificate made by hand, are not renewed.
    """
    ann = await joined_folder(tmp_path, reached, "ann", "--role", "reader")
    address = ClusterAddress(etcd=(playground.etcd.endpoint,), certificates=ann)
    first, stolen = certificate_in(ann), TlsIdentity.read(ann)
    for _ in range(2):
        before = certificate_in(ann)
        told = await program(tmp_path, "certs", "renew", "--etcd", playground.etcd.endpoint, "--certs", str(ann))
        now = certificate_in(ann)
        assert told.startswith(f"{ann}/cert.pem: renewed, until {now.not_valid_after_utc:%Y-%m-%d}")
        assert now.public_key() != before.public_key()
        assert names_in(now) == names_in(first)
        assert names_in(now)[-1] == "urn:headway:role:reader"
        assert sorted(path.name for path in ann.iterdir()) == ["ca.pem", "cert.pem", "key.pem"]
        assert (ann / "key.pem").stat().st_mode & 0o077 == 0

    async def lost(nodes: Iterable[NodeRecord], identity: Identity, request: str) -> str:
        await asked_of_authority(nodes, identity, request)
        raise OSError(5, "the connection is cut")

    with monkeypatch.context() as patch:
        patch.setattr(own_renewal, "asked_of_authority", lost)
        async with ClusterSession(address) as session:
            with pytest.raises(ConfigError, match="the connection is cut"):
                await own_renewal.renew(session)
    async with ClusterSession(address) as session:
        assert "renewed" in await own_renewal.renew(session)
    await program(tmp_path, "nodes", "--etcd", playground.etcd.endpoint, "--certs", str(ann))
    thief = tmp_path / "thief"
    thief.mkdir()
    for name, pem in (("ca", stolen.ca), ("cert", stolen.certificate), ("key", stolen.key)):
        write_private(thief / f"{name}.pem", pem)
    for folder, reason in ((thief, "ann has a newer certificate"), (tmp_path / "me", "came by no invitation")):
        async with ClusterSession(ClusterAddress(etcd=address.etcd, certificates=folder)) as session:
            with pytest.raises(ConfigError, match=reason):
                await own_renewal.renew(session)
    by_hand = playground.etcd.authority.issue("n", role=Role.NODE)
    async with ClusterSession(ClusterAddress(etcd=address.etcd, certificates=by_hand)) as session:
        with pytest.raises(ConfigError, match="is a node's"):
            await own_renewal.renew(session)


async def test_an_authority_that_answers_with_more_is_not_believed(
    playground: Playground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another role, another name or another key in the answer: the folder stays as it is."""
    authority = playground.etcd.authority
    folder = authority.issue("ann", role=Role.READER)
    before = TlsIdentity.read(folder)
    wrong: tuple[dict[str, Any], ...] = ({"role": Role.OPERATOR}, {"hosts": ("bob",)}, {})

    async with ClusterSession(ClusterAddress(etcd=(playground.etcd.endpoint,), certificates=folder)) as session:
        for more in wrong:

            async def answer(_: object, __: object, request: str, more: dict[str, Any] = more) -> str:
                key = x509.load_pem_x509_csr(request.encode()).public_key() if more else new_key().public_key()
                made = authority.certify(key, "ann", **{"role": Role.READER, **more})
                return certificate_pem(made).decode()

            monkeypatch.setattr(own_renewal, "asked_of_authority", answer)
            with pytest.raises(ConfigError, match="is not for this key, name and role"):
                await own_renewal.renew(session)
    assert TlsIdentity.read(folder) == before


def test_a_process_that_died_between_the_two_files_is_finished(playground: Playground, tmp_path: Path) -> None:
    """The certificate is the new one, and its key is still the next one; a key that fits nothing stays where it is."""
    folder = playground.etcd.authority.issue("ann", role=Role.READER)
    old, key = (folder / "key.pem").read_bytes(), new_key()
    write_private(folder / "next-key.pem", key_pem(key))
    own_renewal.finish(folder)
    assert (folder / "key.pem").read_bytes() == old
    made = playground.etcd.authority.certify(key.public_key(), "ann", role=Role.READER)
    write_private(folder / "cert.pem", certificate_pem(made))
    with pytest.raises(ConfigError, match="a renewal was cut off: `headway certs renew` ends it"):
        ClusterAddress(etcd=(playground.etcd.endpoint,), certificates=folder).identity()
    own_renewal.finish(folder)
    assert (folder / "key.pem").read_bytes() == key_pem(key)
    assert not (folder / "next-key.pem").exists()


def test_a_person_is_told_two_weeks_before_the_end(
    playground: Playground, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line on stderr, whatever the command prints; nothing earlier, and nothing of a node's."""
    monkeypatch.delenv("HEADWAY_DEBUG", raising=False)
    authority, now = playground.etcd.authority, datetime.now(UTC)
    cases = [
        (Role.READER, 50, 60, 1),
        (Role.READER, 40, 60, 0),
        (Role.READER, 7, 10, 1),
        (Role.READER, 2, 10, 0),
        (Role.NODE, 50, 60, 0),
    ]
    for role, age, life, num_lines in cases:
        folder, key = authority.issue("ann", role=role), new_key()
        began = now - timedelta(days=age)
        made = authority.certify(key.public_key(), "ann", role=role, now=began, validity=timedelta(days=life))
        (folder / "cert.pem").write_bytes(certificate_pem(made))
        (folder / "key.pem").write_bytes(key_pem(key))
        assert cli.run(["nodes", "--json", "--etcd", playground.etcd.endpoint, "--certs", str(folder)]) == 0
        told = capsys.readouterr()
        assert told.out.startswith(("[", "{"))
        ends = f"headway: {folder}/cert.pem: ends on {made.not_valid_after_utc:%Y-%m-%d %H:%M} UTC: "
        assert told.err == (f"{ends}`headway certs renew` gets the next one\n" if num_lines else "")


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_relay_renews_its_certificate_and_hears_no_revoked_node(
    reached: tuple[str, ...], playground: Playground, tmp_path: Path
) -> None:
    """Its certificate lasts 24 s. The process, which is never restarted, shows the next one at its port in time. A node
    that is revoked then stands by no more.
    """
    folder = await joined_folder(tmp_path, reached, "relay", "--valid", f"{RELAY_VALID_S}s")
    first = certificate_in(folder)
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "headway.daemon.cli.main", "relay", "--listen", f"{HOST}:{port}"]
    command += ["--certs", str(folder), "--etcd", playground.etcd.endpoint]
    node = TlsIdentity.read(playground.etcd.authority.issue("node", role=Role.NODE))
    with (tmp_path / "relay.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            shown = await asyncio.to_thread(shown_until, port, node.ca, after=first.serial_number)
            assert shown.not_valid_after_utc > first.not_valid_after_utc
            assert names_in(shown) == names_in(first)
            issued = (await playground.view()).issued["relay"]
            assert f"{shown.serial_number:X}" == issued.serial
            assert await stands_by(port, node) == ""
            record = RevokedRecord(name="node", revoked_at=time.time())
            await playground.client.transaction([], [Put(Keys.revoked("node"), encode(record))])
            async with asyncio.timeout(20.0):
                while "the certificate of node is revoked" not in await stands_by(port, node):
                    await asyncio.sleep(0.1)
        finally:
            process.terminate()
    assert process.returncode == 0, (tmp_path / "relay.log").read_text()


async def stands_by(port: int, identity: TlsIdentity) -> str:
    """Why a node may not stand by at a relay; empty: it may."""
    client = NodeClient(identity)
    try:
        async for _ in client.stand_by(NodeEndpoint("", f"{HOST}:{port}"), "node"):
            return ""
    except ProtocolError as error:
        return error.reason
    finally:
        await client.close()
    return "the stream has ended"


def shown_until(port: int, ca: bytes, *, after: int) -> x509.Certificate:
    """The certificate that a port shows once it is another one than that of a serial number."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=ca.decode())
    deadline = time.monotonic() + 3 * RELAY_VALID_S
    while time.monotonic() < deadline:
        with suppress(OSError):
            pem = ssl.get_server_certificate((HOST, port), timeout=5.0)
            found = x509.load_pem_x509_certificate(pem.encode())
            if found.serial_number != after:
                return found
        time.sleep(0.2)
    raise AssertionError("the relay shows its first certificate still")
