"""Who is revoked, or has another role, is refused: by daemons, by commands, by etcd's own users."""

import asyncio
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.base.errors import ConfigError, StoreError
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.client.certificate_requests import etcd_commands, known_certificates, restore, revoke
from headway.daemon.client.cluster_access import ClusterAddress, ClusterSession
from headway.daemon.client.job_requests import cancel, submit, submitter
from headway.daemon.client.node_requests import set_share
from headway.daemon.cluster.binary import find_etcd_binary
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.cluster_records import RevokedRecord
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import PREFIX, Keys
from headway.daemon.cluster.records import PhaseRecord, SpecRecord
from headway.daemon.cluster.transaction import Delete
from headway.daemon.decide.cluster_watch import ClusterWatch
from headway.daemon.jobs.job import JobSection, JobSpec, PlacementSpec
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.local.processes import EtcdServer, EtcdServerConfig
from headway.daemon.net.certificates import CertificateAuthority
from headway.daemon.net.invitation import RefusedError
from headway.daemon.node.revocations import Revocations
from headway.stages.errors import ProtocolError, UnavailableError
from headway.stages.sockets.roles import Role
from headway.stages.sockets.tls_identity import TlsIdentity
from tests.integration.conftest import Etcd
from tests.integration.daemon.conftest import Playground
from tests.integration.exactness.training import assert_same_bits, finished, small_job, until_batch
from tests.rigs.join_place import join_place
from tests.rigs.paces import paced_layers
from tests.rigs.running import running

if TYPE_CHECKING:
    from tests.integration.exactness.training import Oracle

SOON_S = 20.0


@pytest.mark.slow
async def test_a_job_goes_on_without_a_revoked_node_to_the_same_bits(tmp_path: Path, oracle: "Oracle") -> None:
    """Three nodes train, one is revoked: its daemon ends with a line, two go on, losses and weights are the loop's."""
    spec = small_job("three", batches=60)
    settings, paces = {"num_spares": 1, "devices": "cpu"}, paced_layers(tmp_path, 0.005)
    async with (
        LocalCluster(tmp_path / "state", num_nodes=3, node_settings=settings, environment=paces) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        await submit(session, replace(spec, placement=PlacementSpec(min_nodes=2, max_nodes=3)))
        job = await until_batch(session, "three", 5)
        assert job.plan is not None
        out = job.plan.workers[-1].node
        said, _ = await revoke(session, [out])
        began = time.monotonic()
        assert said == f"{out}: revoked"
        process = next(node for node in cluster.nodes if node.name == out)
        while f"has revoked {out}" not in process.log_path.read_text():
            assert time.monotonic() - began < SOON_S
            await asyncio.sleep(0.05)
        paced_layers(tmp_path, 0)
        piped = await finished(session, "three", tmp_path / "out")
        view = await session.view()
        reasons = [event.text for event in view.jobs["three"].events.values()]
        assert any(f"Node {out} was lost (its certificate is revoked)" in reason for reason in reasons), reasons
        assert out not in view.nodes
    assert_same_bits(piped, oracle(spec))


async def test_a_revoked_holders_calls_end_and_are_refused(playground: Playground) -> None:
    """An operator's running stream is cut within seconds, the next call is refused; once restored, all is well."""
    authority = playground.etcd.authority
    playground.role = Role.NODE
    await playground.started("n1")
    me = authority.issue("me", role=Role.OPERATOR)
    authority.issue("thief", role=Role.OPERATOR)
    endpoint = NodeEndpoint("n1", (await playground.view()).nodes["n1"].address)
    client = NodeClient(TlsIdentity.read(authority.directory / "thief"))
    address = ClusterAddress(etcd=(playground.etcd.endpoint,), certificates=me)
    try:
        async with ClusterSession(address) as session:
            stream = client.accompany(endpoint, "n1")
            assert await anext(stream)
            said, _ = await revoke(session, ["Thief"])
            assert said == "Thief: revoked; no node and no invited certificate bears this name: is it spelled right?"
            with pytest.raises(UnavailableError):
                async with asyncio.timeout(SOON_S):
                    await anext(stream)
            with pytest.raises(ProtocolError, match="the certificate of thief is revoked"):
                await client.status(endpoint)
            own = ClusterAddress(etcd=(playground.etcd.endpoint,), certificates=authority.directory / "thief")
            async with ClusterSession(own) as holder:
                with pytest.raises(ConfigError, match="an operator of another name restores it"):
                    await restore(holder, ["THIEF"])
            assert [(one.name, bool(one.revoked_at)) for one in await known_certificates(session)] == [
                ("n1", False),
                ("Thief", True),
            ]
            assert await restore(session, ["thief"]) == ["thief: its certificates count again"]
            with pytest.raises(ConfigError, match="is not revoked"):
                await restore(session, ["thief"])
            async with asyncio.timeout(SOON_S):
                while not await answers(client, endpoint):
                    await asyncio.sleep(0.05)
    finally:
        await client.close()


async def answers(client: NodeClient, endpoint: NodeEndpoint) -> bool:
    """Return whether a daemon answers."""
    try:
        await client.status(endpoint)
    except ProtocolError:
        return False
    return True


async def test_who_is_revoked_is_known_before_anybody_is_answered(etcd: Etcd, client: EtcdClient) -> None:
    """A daemon that starts serves when etcd has told it, and not while etcd is still silent."""
    await client.put(Keys.revoked("thief"), encode(RevokedRecord(name="thief", revoked_at=1.0)))
    cluster, told = ClusterWatch(client), list[frozenset[str]]()
    revocations = Revocations(
        cluster,
        names=["n"],
        where="cert.pem",
        revoke=lambda names: told.append(frozenset(names)),
        on_own=lambda error: pytest.fail(str(error)),
    )
    async with running(revocations.run()):
        await asyncio.sleep(0)  # it has looked once, at a view of nothing
        assert not revocations.known.is_set()
        async with running(cluster.run()):
            async with asyncio.timeout(SOON_S):
                await revocations.known.wait()
            assert told == [frozenset({"thief"})]


async def test_nobody_revokes_the_own_name(etcd: Etcd) -> None:
    """The last operator would be locked out, in whatever letters the name is written; nothing is revoked then."""
    me = etcd.authority.issue("me", role=Role.OPERATOR, hosts=["laptop.example"])
    async with ClusterSession(ClusterAddress(etcd=(etcd.endpoint,), certificates=me)) as session:
        for name in ("Me", "laptop.example"):
            with pytest.raises(ConfigError, match=f"{name}: is in your own certificate: another operator revokes it"):
                await revoke(session, ["thief", name])
        assert not (await session.view()).revoked


async def test_a_revoked_operators_commands_change_nothing(etcd: Etcd) -> None:
    """etcd without users would take the write: the command says who is revoked instead, until the name is restored."""
    me, ann = (etcd.authority.issue(name, role=Role.OPERATOR) for name in ("me", "ann"))
    async with (
        etcd.client() as administrator,
        ClusterSession(ClusterAddress(etcd=(etcd.endpoint,), certificates=me)) as mine,
        ClusterSession(ClusterAddress(etcd=(etcd.endpoint,), certificates=ann)) as hers,
    ):
        await administrator.put(Keys.of("j", "spec"), encode(SpecRecord(spec=JobSpec(job=JobSection(name="j")))))
        await administrator.put(Keys.of("j", "phase"), encode(PhaseRecord()))
        _, in_etcd = await revoke(mine, ["Ann"])
        assert in_etcd == "this etcd has no users: Ann can still write to it; see docs/security.md#etcd"
        before = (await administrator.get_prefix(PREFIX)).entries
        told = "ann is revoked, and changes nothing: another operator may `headway certs restore ann`"
        other = JobSpec(job=JobSection(name="other"))
        for change in (cancel(hers, "j"), submit(hers, other), revoke(hers, ["me"]), set_share(hers, "ann", 2.0)):
            with pytest.raises(ConfigError) as caught:
                await change
            assert str(caught.value) == f"{ann}/cert.pem: {told}"
        assert (await administrator.get_prefix(PREFIX)).entries == before
        (one,) = (one for one in await known_certificates(mine) if one.name == "Ann")
        assert one.revoked_by == f"me ({submitter()})"
        await restore(mine, ["ann"])
        await cancel(hers, "j")
        assert (await administrator.get_prefix(PREFIX)).entries != before


async def test_a_revoked_name_is_not_invited(etcd: Etcd, tmp_path: Path) -> None:
    """Neither anew nor with an invitation from before; when it is restored, its machine joins."""
    me = etcd.authority.issue("me", role=Role.OPERATOR)
    async with (
        etcd.client() as client,
        join_place(etcd.authority, client, tmp_path) as place,
        ClusterSession(ClusterAddress(etcd=(etcd.endpoint,), certificates=me)) as session,
    ):
        token = await place.invited("n")
        await revoke(session, ["n"])
        with pytest.raises(RefusedError, match="n is revoked: take another name"):
            await place.invited("n")
        with pytest.raises(ConfigError, match="n is revoked"):
            await place.join(token)
        await restore(session, ["n"])
        assert (await place.join(token)).answer.certificate


@pytest.mark.parametrize("role", [Role.READER, Role.NODE])
async def test_only_an_operator_changes_a_job(etcd: Etcd, role: Role) -> None:
    """A reader and a node read everything, and their `cancel` is refused before anything is written."""
    name, folder = f"holder-{role}", etcd.authority.issue(f"holder-{role}", role=role)
    async with etcd.client() as administrator:
        await administrator.put(Keys.of("j", "spec"), encode(SpecRecord(spec=JobSpec(job=JobSection(name="j")))))
        await administrator.put(Keys.of("j", "phase"), encode(PhaseRecord()))
        before = (await administrator.get_prefix(PREFIX)).entries
        async with ClusterSession(ClusterAddress(etcd=(etcd.endpoint,), certificates=folder)) as session:
            assert "j" in (await session.view()).jobs
            with pytest.raises(ConfigError) as caught:
                await cancel(session, "j")
        told = "only an operator may change anything: `headway certs` makes a certificate of one with --operator"
        assert str(caught.value) == f"{folder}/cert.pem: is of {name} ({role}), and {told}"
        assert (await administrator.get_prefix(PREFIX)).entries == before
        me = etcd.authority.issue("me", role=Role.OPERATOR)
        async with ClusterSession(ClusterAddress(etcd=(etcd.endpoint,), certificates=me)) as session:
            await cancel(session, "j")
        assert (await administrator.get_prefix(PREFIX)).entries != before


@dataclass(frozen=True, slots=True)
class Control:
    """etcdctl with one certificate."""

    binary: Path
    endpoint: str
    folder: Path

    def __call__(self, *words: str) -> None:
        files = (("--cacert", "ca.pem"), ("--cert", "cert.pem"), ("--key", "key.pem"))
        told = [word for flag, name in files for word in (flag, str(self.folder / name))]
        done = subprocess.run(
            [self.binary, "--endpoints", f"https://{self.endpoint}", *told, *words],
            check=False,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert not done.returncode, done.stderr


async def test_etcds_own_users_are_the_certificates_names(tmp_path: Path) -> None:
    """With what `headway certs etcd-users` prints, etcd itself refuses a reader's write, and whatever a stranger asks.

    A node has its lease and its records, and cannot invite, certify or revoke. A user who is deleted is out at once.
    """
    binary = find_etcd_binary()
    if not (control := binary.with_name("etcdctl")).exists():
        pytest.skip("there is no etcdctl beside etcd")
    authority = CertificateAuthority.create(tmp_path / "ca")
    server = await EtcdServer.start(
        EtcdServerConfig(
            binary=binary,
            data_dir=tmp_path / "data",
            log_file=tmp_path / "log",
            certificates=authority.issue("etcd"),
            fsync=False,
        )
    )
    try:
        run = Control(control, server.endpoint, authority.issue("root", role=Role.OPERATOR))
        async with EtcdClient(server.access(TlsIdentity.read(authority.directory / "root"))) as root:
            assert not await root.has_users()
        for line in etcd_commands({"node-a": Role.NODE, "me": Role.OPERATOR, "ann": Role.READER}):
            run(*line.split()[1:])
        for line in etcd_commands({"node-b": Role.NODE}, has_users=True):
            run(*line.split()[1:])
        identities = {
            name: TlsIdentity.read(authority.issue(name, role=role))
            for name, role in (("node-a", Role.NODE), ("me", Role.OPERATOR), ("ann", Role.READER), ("eve", Role.READER))
        }
        async with EtcdClient(server.access(identities["node-a"])) as node:
            assert await node.has_users(), "whoever asks"
            lease = await node.grant_lease(5)
            await node.put(f"{PREFIX}nodes/a", b"here", lease_id=lease.id)
            for key in ("/others/a", Keys.invitation("b"), Keys.issued("b"), Keys.revoked("b")):
                with pytest.raises(StoreError, match="permission denied"):
                    await node.put(key, b"")
            for key in (Keys.of("j", "plan"), Keys.reach("node-a"), Keys.LEADER, Keys.probes("node-a")):
                await node.put(key, b"")
        async with EtcdClient(server.access(identities["me"])) as operator:
            await operator.put(Keys.revoked("b"), b"")
            await operator.transaction([], [Delete(PREFIX, is_prefix=True)])
            await operator.put(f"{PREFIX}nodes/a", b"here")
        async with EtcdClient(server.access(identities["ann"])) as reader:
            assert [entry.value for entry in (await reader.get_prefix(PREFIX)).entries] == [b"here"]
            with pytest.raises(StoreError, match="permission denied"):
                await reader.put(f"{PREFIX}nodes/a", b"gone")
            await reader.get(f"{PREFIX}nodes/a")
            run("user", "delete", "ann")
            with pytest.raises(StoreError, match=r"permission denied|user name not found"):
                await reader.get(f"{PREFIX}nodes/a")
        async with EtcdClient(server.access(identities["eve"])) as stranger:
            with pytest.raises(StoreError, match=r"permission denied|user name not found"):
                await stranger.get_prefix(PREFIX)
    finally:
        await server.stop()
