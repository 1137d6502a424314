"""The cluster of docs/deployment.md by its own commands: three members of etcd, five nodes at five places, a port each.

node-a has the authority, and every other node joins by the line of an invitation.

etcd-1, etcd-2, etcd-3   10.0.0.5, .6, .8
node-a                   10.0.0.7, plain
node-b                   behind 203.0.113.7, which maps port 41022
node-c                   behind 203.0.113.20, no mapped port; stands by at node-a
node-d                   behind 203.0.113.30, no mapped port; stands by at node-a
node-e                   behind 203.0.113.40, no mapped port; stands by at node-b's mapped port
"""

import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.daemon.cluster.binary import find_etcd_binary
from tests.machines import page
from tests.machines.internet import Host, Internet
from tests.machines.observer import TIMEOUT_S, Observer, blocked, environment

NODES = ("node-a", "node-b", "node-c", "node-d", "node-e")
MEMBERS = ("etcd-1", "etcd-2", "etcd-3")
PORT = 7070
PLAIN = "10.0.0.7"
ME = "me"
PATH = "export PATH=~/headway/bin:$PATH;"


def hosts(*, members: Sequence[str] = MEMBERS, nodes: Sequence[str] = NODES) -> list[Host]:
    """Return the machines, at the page's addresses."""
    outside, _, port = page.option("--announce").rpartition(":")
    known = [
        Host("etcd-1", "10.0.0.5", (2379, 2380)),
        Host("etcd-2", "10.0.0.6", (2379, 2380)),
        Host("etcd-3", "10.0.0.8", (2379, 2380)),
        Host("node-a", PLAIN, (PORT,)),
        Host("node-b", outside, (PORT,), is_behind_router=True, mapped=(int(port), PORT)),
        Host("node-c", "203.0.113.20", (PORT,), is_behind_router=True),
        Host("node-d", "203.0.113.30", (PORT,), is_behind_router=True),
        Host("node-e", "203.0.113.40", (PORT,), is_behind_router=True),
        Host(ME, "10.0.0.99"),
    ]
    return [host for host in known if host.name in {*members, *nodes, ME}]


@dataclass
class Sites(Observer):
    """Every process runs on its own machine; `ca/` is at home on node-a, and `ca/me` on the person's too."""

    internet: Internet
    daemons: dict[str, str] = field(default_factory=dict)
    """The line that starts each node's daemon."""

    @property
    def names(self) -> list[str]:
        """Return the names of the daemons."""
        return [name for name in NODES if name in self.internet.hosts]

    @property
    def members(self) -> list[str]:
        """Return the names of the members of etcd."""
        return [name for name in MEMBERS if name in self.internet.hosts]

    @property
    def desk(self) -> str:
        """Return the person's machine."""
        return ME

    @property
    def own_certificates(self) -> Path:
        """Return the person's certificates, as files here."""
        return self.internet.home(ME) / "ca" / "me"

    @property
    def checkpoints(self) -> Path:
        """Return the page's example."""
        return Path("/mnt/checkpoints")

    def inside(self, machine: str, *command: str) -> list[str]:
        """Return the command on a machine."""
        return self.internet.inside(machine, *command)

    def start(self) -> None:
        """Follow the page from certificates to the first commands; returns when all nodes are up."""
        for name in self.internet.hosts:
            self._install(name)
        self._make_certificates()
        self._start_etcd()
        first = page.command("headway daemon", "--name node-a")
        self.daemons["node-a"] = first.replace(page.flags(first)["etcd"], self.etcd) + " --site node-a"
        self.start_daemon("node-a")
        self.meet()
        self.until(lambda told: "node-a" in told["nodes"], "the node that invites")
        for name in self.names[1:]:
            self.daemons[name] = self._joined(name)
            self.start_daemon(name)
        self.all_up()

    def all_up(self) -> None:
        """Wait for all nodes, and let each dial the others again, as the page says, until no way is blocked."""

        def are_up(told: Any) -> bool:
            nodes = told["nodes"]
            return nodes.keys() >= set(self.names) and all(node["workers"] for node in nodes.values())

        deadline = time.monotonic() + TIMEOUT_S
        told = self.until(are_up, "all nodes up")
        while blocked(told):
            assert time.monotonic() < deadline, blocked(told)
            self.headway("doctor")
            told = self.look()

    def start_daemon(self, name: str, *, environment: dict[str, str] | None = None) -> None:
        """Start by the node's line. environment: beside the others' own."""
        told = {"HEADWAY_NUM_SPARES": "0", "HEADWAY_NUM_DEVICES": "1"} | (environment or {})
        words = [f"{key}={value}" for key, value in told.items()]
        self.spawn(name, self.inside(name, "env", *words, "sh", "-c", f"{PATH} exec {self.daemons[name]}"))

    def restart_daemon(self, name: str, *, environment: dict[str, str] | None = None) -> None:
        """Kill a daemon, let its lease end, and start it in another environment; returns when all are up."""
        self.stop_daemon(name)
        self.until(lambda told: name not in told["nodes"], f"the end of {name}'s lease")
        self.start_daemon(name, environment=environment)
        self.all_up()

    def typed(self, machine: str, line: str) -> str:
        """Run a line of the page on a machine, at home; return what it prints."""
        command = self.inside(machine, "sh", "-ec", f"{PATH} {line}")
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, f"{machine}$ {line}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def _install(self, name: str) -> None:
        """Stand in for the page's pip and its folder in /opt: the present environment."""
        programs = self.internet.home(name) / "headway" / "bin"
        programs.mkdir(parents=True)
        (programs / "headway").symlink_to(Path(sys.executable).parent / "headway")
        (programs / "etcd").symlink_to(find_etcd_binary())

    def _make_certificates(self) -> None:
        """Two commands of the page on the first node; then the copies."""
        self.typed("node-a", page.command("headway certs", "node-a="))
        self.typed("node-a", page.command("headway certs", "etcd-1="))
        made = self.internet.home("node-a") / "ca"
        for name in self.members:
            shutil.copytree(made / name, self.internet.home(name) / "certs")
        shutil.copytree(made / ME, self.own_certificates)

    def _start_etcd(self) -> None:
        first = page.command("etcd --name", "--initial-cluster")
        start, mark, members = first.partition("--initial-cluster ")
        everybody = ",".join(each for each in members.split(",") if each.partition("=")[0] in self.members)
        for name in self.members:
            own = start.replace(self.internet.hosts["etcd-1"].address, self.internet.hosts[name].address)
            own = own.replace("--name etcd-1", f"--name {name}")
            line = f"{PATH} exec {own}{mark}{everybody} --unsafe-no-fsync --log-level warn"
            self.spawn(name, self.inside(name, "sh", "-c", line))
        self.etcd = ",".join(f"{self.internet.hosts[name].address}:2379" for name in self.members)

    def _joined(self, name: str) -> str:
        """Invite a node, and let it join as its place demands; return the line that it is told to start by."""
        export = page.command("export HEADWAY_ETCD=").replace("10.0.0.5:2379", self.etcd)
        invite = page.command("headway invite node-b").replace("node-b", name)
        found = re.search(r"^headway join hw1-\S+$", self.typed(ME, f"{export}; {invite}"), re.MULTILINE)
        assert found, "no line to join by"
        more = ["--site", name]
        if name == "node-b":
            more += ["--announce", page.option("--announce")]
        else:
            assert "relay" in page.flags(page.command("headway join", "--relay"))
            more += ["--relay", f"{PLAIN}:{PORT}" if name != "node-e" else page.option("--announce")]
        told = self.typed(name, f"{found[0]} {shlex.join(more)}")
        start = page.command("headway daemon --config").replace("node-b", name)
        assert start in told, f"the page says {start}, and the program {told}"
        return start
