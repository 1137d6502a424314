"""The container image: its steps build, and what they build is a node that runs without root and drains on SIGTERM."""

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from headway.daemon.cluster.binary import find_etcd_binary
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.keys import Keys
from headway.daemon.local.processes import EtcdServer, EtcdServerConfig
from headway.daemon.net.certificates import CertificateAuthority
from headway.stages.sockets.tls_identity import TlsIdentity
from tests.image.build import HIDDEN, PYTHON, SHARED, Image, why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

BUILD_S: Final = 900.0
STOP_S: Final = 60.0
WITHOUT_CUDA: Final = "https://download.pytorch.org/whl/cpu"
OUTSIDE: Final = {
    name: value for name, value in os.environ.items() if name.startswith("PIP_") or name.lower().endswith("_proxy")
}
SETTINGS: Final = """\
etcd = ["{etcd}"]
certificates = "{shared}/certificates"
name = "a"
listen = "127.0.0.1:0"
advertise_host = "127.0.0.1"
state_dir = "/var/lib/headway"
num_devices = 1
num_spares = 0
"""


@contextmanager
def container(script: str, shared: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a script whose last command is the container's first process, and whose end is the end of all others."""
    room = shared.parent / "room"
    room.mkdir()
    spaces = ["--mount", "--mount-proc", "--pid", "--fork", "--kill-child"]
    command = ["unshare", *spaces, "sh", "-c", script, "sh", str(room), str(shared)]
    environment = {"PATH": os.environ["PATH"], "HIDDEN": " ".join(HIDDEN), "PYTHON": PYTHON}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def test_the_image_is_a_node(tmp_path: Path) -> None:
    """By its own entry point and default command, with a folder for its settings as on the page."""
    if reason := why_not():
        pytest.skip(reason)
    authority = CertificateAuthority.create(tmp_path / "authority")
    config = EtcdServerConfig(
        binary=find_etcd_binary(),
        data_dir=tmp_path / "etcd",
        log_file=tmp_path / "etcd.log",
        certificates=authority.issue("etcd"),
    )
    shared, log = tmp_path / "etc", tmp_path / "container.log"
    shutil.copytree(authority.issue("a"), shared / "certificates")
    image = Image({"TORCH_INDEX": os.environ.get("TORCH_INDEX", WITHOUT_CUDA)}, OUTSIDE)
    number, _, _ = image.last.user.partition(":")
    identity = TlsIdentity.read(authority.issue("me"))
    async with await EtcdServer.start(config) as etcd, EtcdClient(etcd.access(identity)) as client:
        (shared / "daemon.toml").write_text(SETTINGS.format(etcd=etcd.endpoint, shared=SHARED))
        for path in (shared, *shared.rglob("*")):
            os.chown(path, int(number), int(number))
        with container(image.script(), shared, log) as process:
            until = time.monotonic() + BUILD_S
            while await client.get(Keys.node("a")) is None:
                assert process.poll() is None, log.read_text(errors="replace")[-3000:]
                assert time.monotonic() < until, log.read_text(errors="replace")[-3000:]
                await asyncio.sleep(0.5)
            (daemon,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            status = Path(f"/proc/{daemon}/status").read_text()
            users = next(line for line in status.splitlines() if line.startswith("Uid:")).split()[1:]
            assert users == [number] * 4, "neither root nor able to become root"
            os.kill(int(daemon), signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, STOP_S) == 0, log.read_text(errors="replace")[-3000:]
            assert await client.get(Keys.node("a")) is None
            assert "node_drained" in log.read_text()
