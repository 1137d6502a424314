"""The snapshot that systemd/etcd-backup.service takes, by the unit's own command, and its restore."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from headway.daemon.cluster.client import EtcdClient
from headway.daemon.local.processes import EtcdServer, EtcdServerConfig
from headway.stages.sockets.tls_identity import TlsIdentity
from tests.rigs.backup import restore_backup

UNIT = Path(__file__).resolve().parents[3] / "systemd/etcd-backup.service"


def script() -> str:
    """The command of the unit, as systemd hands it to the shell."""
    found = re.search(r"^ExecStart=/bin/sh -euc '(.*?)'$", UNIT.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1].replace("\\\n", " ").replace("$$", "$").replace("%%", "%")


async def test_a_snapshot_of_the_unit_is_restored(own_server_config: EtcdServerConfig, tmp_path: Path) -> None:
    """The newest two are kept; etcd dies with a later write, is restored, and has what it had at the snapshot."""
    if not (control := own_server_config.binary.with_name("etcdctl")).exists():
        pytest.skip("there is no etcdctl beside etcd")
    kept, keys = tmp_path / "kept", own_server_config.certificates
    kept.mkdir()
    for name in ("2020-01-01T000000Z.db", "2021-01-01T000000Z.db", "notes.txt", "half.db.new.part"):
        (kept / name).touch()
    server = await EtcdServer.start(own_server_config)
    try:
        async with EtcdClient(server.access(TlsIdentity.read(keys))) as client:
            await client.put("/headway/before", b"1")
            environment = {
                "PATH": f"{control.parent}:{os.environ['PATH']}",
                "ETCDCTL_API": "3",
                "ETCD_ADVERTISE_CLIENT_URLS": f"https://{server.endpoint},https://10.0.0.9:1",
                "STATE_DIRECTORY": str(kept),
                "CREDENTIALS_DIRECTORY": str(keys),
                "BACKUPS_KEPT": "2",
            }
            subprocess.run(["/bin/sh", "-euc", script()], check=True, timeout=60, capture_output=True, env=environment)
            await client.put("/headway/after", b"2")
        old, new, notes = sorted(kept.iterdir())
        assert (old.name, notes.name) == ("2021-01-01T000000Z.db", "notes.txt")
        await restore_backup(server, new)
        async with EtcdClient(server.access(TlsIdentity.read(keys))) as client:
            assert await client.get("/headway/before") is not None
            assert await client.get("/headway/after") is None
    finally:
        await server.stop()
