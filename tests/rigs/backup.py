"""Backups of an etcd, as its operator makes them and puts them back, with etcd's own tools."""

import asyncio
import shutil
import subprocess
from pathlib import Path

from headway.daemon.local.cluster import LocalCluster
from headway.daemon.local.processes import MEMBER_NAME, EtcdServer
from headway.stages.sockets.tls_identity import CA_FILE, CERTIFICATE_FILE, KEY_FILE

TOOL_TIMEOUT_S = 30


def etcdctl(server: EtcdServer, *arguments: str) -> None:
    """etcd's own command line, for what Headway's client has no use for."""
    folder = server.config.certificates
    tls = [f"--cacert={folder / CA_FILE}", f"--cert={folder / CERTIFICATE_FILE}", f"--key={folder / KEY_FILE}"]
    command = [str(server.config.binary.with_name("etcdctl")), f"--endpoints=https://{server.endpoint}", *tls]
    environment = {"ETCDCTL_API": "3"}
    subprocess.run([*command, *arguments], check=True, timeout=TOOL_TIMEOUT_S, capture_output=True, env=environment)


def save_backup(server: EtcdServer, path: Path) -> None:
    """A file with everything that the running server has now."""
    etcdctl(server, "snapshot", "save", str(path))


async def restore_backup(server: EtcdServer, path: Path) -> None:
    """Kill the server and start it on the same ports from a backup: the same cluster, with an older history."""
    await server.kill()
    shutil.rmtree(server.config.data_dir)
    peer_url = f"https://{server.config.host}:{server.peer_port}"
    command = [
        str(server.config.binary.with_name("etcdutl")),
        "snapshot",
        "restore",
        str(path),
        f"--data-dir={server.config.data_dir}",
        f"--name={MEMBER_NAME}",
        f"--initial-cluster={MEMBER_NAME}={peer_url}",
        f"--initial-advertise-peer-urls={peer_url}",
    ]
    subprocess.run(command, check=True, timeout=TOOL_TIMEOUT_S, capture_output=True)
    await server.restart()


async def empty(server: EtcdServer) -> None:
    """Kill the server and start a new one in its place, on the same ports, with nothing in it."""
    await server.kill()
    shutil.rmtree(server.config.data_dir)
    await server.restart()


async def copy_data(cluster: LocalCluster, folder: Path) -> None:
    """Copy the data of a cluster's etcd, which is stopped for a moment."""
    await cluster.stop_etcd()
    await asyncio.to_thread(shutil.copytree, cluster.state_dir / "etcd", folder)
    await cluster.start_etcd()


async def put_data_back(cluster: LocalCluster, folder: Path) -> None:
    """Start etcd from an older copy of its data. Everything written since then is lost."""
    await cluster.stop_etcd()
    await asyncio.to_thread(shutil.rmtree, cluster.state_dir / "etcd")
    await asyncio.to_thread(shutil.copytree, folder, cluster.state_dir / "etcd")
    await cluster.start_etcd()
