"""Who may do what, over real mTLS: a daemon asks callers for their role, a client knows its own, etcd has users."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from headway.daemon.base.errors import ConfigError, StoreError
from headway.daemon.client.cluster_access import ClusterAddress, ClusterSession
from headway.daemon.client.job_requests import cancel
from headway.daemon.cluster.binary import find_etcd_binary
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import PREFIX, Keys
from headway.daemon.cluster.records import PhaseRecord, SpecRecord
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.local.processes import EtcdServer, EtcdServerConfig
from headway.daemon.net.certificates import CertificateAuthority
from headway.stages.sockets.roles import Role
from headway.stages.sockets.tls_identity import TlsIdentity
from tests.integration.conftest import Etcd


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
    """With the commands of docs/security.md etcd itself refuses a reader's write, and whatever a stranger asks.

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
        for words in commands():
            run(*words)
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
            await operator.delete_prefix(PREFIX)
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


def commands() -> list[list[str]]:
    """The etcdctl commands of docs/security.md, without the connection."""
    text = (Path(__file__).parents[3] / "docs/security.md").read_text()
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    return [line.split()[1:] for line in lines if line.startswith("$E ")]
