"""Certificates of invited machines are renewed while their daemons run, and for nobody else."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import submit
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.cluster_records import IssuedRecord, RevokedRecord
from headway.daemon.cluster.format import decode, encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.transaction import Put
from headway.daemon.jobs.job import PlacementSpec
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.net.certificates import CertificateAuthority, certificate_pem, names_in
from headway.daemon.net.invitation import RefusedError
from headway.daemon.net.join_token import JoinToken
from headway.daemon.net.signing_request import new_key, signing_request
from headway.stages.sockets.roles import Role
from tests.integration.conftest import Etcd
from tests.integration.exactness.training import Oracle, assert_same_bits, finished, small_job, until_batch
from tests.rigs.join_place import JoinPlace, invitation, join_place
from tests.rigs.paces import paced_layers

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
