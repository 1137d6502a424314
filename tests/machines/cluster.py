"""A cluster of several machines on one network: an etcd, a daemon on each, certificates by name."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.daemon.cluster.binary import find_etcd_binary
from headway.daemon.net.certificates import CertificateAuthority
from tests.machines.network import Network
from tests.machines.observer import Observer

DAEMON_PORT, WORKER_PORTS, ETCD_PORT = 7070, "7100-7107", 2379


@dataclass
class Cluster(Observer):
    """etcd and the person live on the first machine, which has a daemon as every other."""

    network: Network

    def __post_init__(self) -> None:
        self.authority = CertificateAuthority.create(self.folder / "ca")
        for machine in self.network.machines.values():
            self.authority.issue(machine.name, hosts=(machine.address,))
        first = self.network.machines[self.names[0]]
        self.authority.issue("etcd", hosts=(first.address,))
        self.authority.issue("me")
        self.etcd = f"{first.address}:{ETCD_PORT}"

    @property
    def names(self) -> list[str]:
        """Return the names of the machines, which are those of their daemons."""
        return list(self.network.machines)

    @property
    def desk(self) -> str:
        """Return the first machine."""
        return self.names[0]

    @property
    def own_certificates(self) -> Path:
        """Return the person's certificates."""
        return self.folder / "ca" / "me"

    def inside(self, machine: str, *command: str) -> list[str]:
        """Return the command on a machine: `ip netns exec` becomes what it runs."""
        return ["ip", "netns", "exec", self.network.machines[machine].namespace, *command]

    def start(self) -> None:
        """etcd, then every daemon behind its firewall; returns when all are registered with a worker each."""
        for name in self.names:
            self.network.allow_only(name, [str(DAEMON_PORT), WORKER_PORTS])
        self.network.allow_always(self.names[0], ETCD_PORT)
        self._start_etcd()
        for name in self.names:
            self.start_daemon(name)
        self.meet()
        self.all_up()

    def start_daemon(self, name: str, *, certificate: str = "", **flags: object) -> "subprocess.Popen[bytes]":
        """Start as the deployment page says. certificate: another one than its own."""
        machine = self.network.machines[name]
        told = {
            "etcd": self.etcd,
            "certs": self.folder / "ca" / (certificate or name),
            "name": name,
            "listen": f"0.0.0.0:{DAEMON_PORT}",
            "advertise-host": machine.address,
            "worker-ports": WORKER_PORTS,
            "site": name,
            "state-dir": self.folder / name,
            "store-dir": self.folder / name / "store",
            "num-spares": 0,
            "num-devices": 1,
        } | {key.replace("_", "-"): value for key, value in flags.items()}
        arguments = [f"--{key}={value}" for key, value in told.items()]
        command = self.inside(name, sys.executable, "-m", "headway.daemon.cli.main", "daemon", *arguments)
        return self.spawn(name, command)

    def _start_etcd(self) -> None:
        host, certificates = self.network.machines[self.names[0]].address, self.folder / "ca" / "etcd"
        urls = f"https://{host}:{ETCD_PORT}"
        command = [
            str(find_etcd_binary()), "--data-dir", str(self.folder / "etcd"), "--listen-client-urls", urls,
            "--advertise-client-urls", urls, "--client-cert-auth", "--trusted-ca-file", f"{certificates}/ca.pem",
            "--cert-file", f"{certificates}/cert.pem", "--key-file", f"{certificates}/key.pem", "--unsafe-no-fsync",
        ]  # fmt: skip
        self.spawn("etcd", self.inside(self.names[0], *command))


def stop_worker(told: Any, name: str) -> None:
    """SIGKILL to a node's only worker, wherever it is in its life."""
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        is_worker = b"headway.daemon.worker" in words
        if is_worker and words[words.index(b"--host") + 1].decode() == told["nodes"][name]["host"]:
            os.kill(int(entry.name), signal.SIGKILL)
