"""Machines as network namespaces on one bridge, each with a firewall of its own.

Needs root and iproute2 alone: a firewall is a list of routing rules at the machine that is dialled, which drop what
they name without a word, as most firewalls do. Nothing outside of these namespaces is touched; they end with the test.
"""

import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Self

TIMEOUT_S = 20.0
SERVICE_PORTS = "1-32767"
"""Ports where servers listen; higher ports belong to dialling processes."""
ALLOWED, DROPPED, LOCAL = 90, 110, 500
"""Priorities of rules: the kernel's own for local addresses, 0, would come before each firewall."""
_numbers = count()


@dataclass(frozen=True)
class Machine:
    """One namespace with one network card."""

    name: str
    namespace: str
    address: str


@dataclass
class Network:
    """A context manager; afterwards all is gone, with every process that lived there having lost its network."""

    machines: dict[str, Machine] = field(default_factory=dict)
    _switch: str = ""
    _blocks: list[tuple[str, list[str]]] = field(default_factory=list)

    @classmethod
    def of(cls, names: Iterable[str]) -> Self:
        """Machines of these names, 10.78.0.1 and so on."""
        tag = f"hwm{os.getpid()}-{next(_numbers)}"
        machines = {name: Machine(name, f"{tag}-{name}", f"10.78.0.{n}") for n, name in enumerate(names, 1)}
        return cls(machines, f"{tag}-switch")

    def __enter__(self) -> Self:
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        ip("-n", self._switch, "link", "set", "br0", "up")
        for number, machine in enumerate(self.machines.values(), 1):
            self._plug_in(machine, f"p{number}")
        return self

    def __exit__(self, *_: object) -> None:
        for namespace in (self._switch, *(machine.namespace for machine in self.machines.values())):
            subprocess.run(["ip", "netns", "delete", namespace], check=False, timeout=TIMEOUT_S, capture_output=True)

    def allow_only(self, name: str, ports: Iterable[str]) -> None:
        """A firewall at a machine: from outside, these ports alone are dialled."""
        for port in ports:
            self._rule(name, ALLOWED, "iif", "eth0", "ipproto", "tcp", "dport", port, "lookup", "local")
        self._rule(name, DROPPED, "iif", "eth0", "ipproto", "tcp", "dport", SERVICE_PORTS, "blackhole")

    def allow_always(self, name: str, port: int) -> None:
        """Before every block too: what each machine reaches, whatever lies between them."""
        self._rule(name, ALLOWED - 2, "iif", "eth0", "ipproto", "tcp", "dport", str(port), "lookup", "local")

    def block(self, source: str, target: str) -> None:
        """From now on the source's packets to the target's servers vanish; the target dials the source as before."""
        about = ["from", self.machines[source].address, "ipproto", "tcp", "dport", SERVICE_PORTS, "blackhole"]
        self._rule(target, ALLOWED - 1, *about)
        self._blocks.append((target, [str(ALLOWED - 1), *about]))

    def part(self, one: str, other: str) -> None:
        """Neither reaches the other."""
        self.block(one, other)
        self.block(other, one)

    def heal(self) -> bool:
        """End every block; returns whether there was one. The firewalls stay."""
        blocks, self._blocks = self._blocks, []
        for name, (priority, *about) in blocks:
            ip("-n", self.machines[name].namespace, "rule", "del", "pref", priority, *about)
        return bool(blocks)

    def add_address(self, name: str, address: str, *, device: str = "eth0") -> None:
        """One more address of a machine, with its length."""
        ip("-n", self.machines[name].namespace, "addr", "add", address, "dev", device)

    def drop_address(self, name: str, address: str, *, device: str = "eth0") -> None:
        """An address that a machine has no more."""
        ip("-n", self.machines[name].namespace, "addr", "del", address, "dev", device)

    def _plug_in(self, machine: Machine, port: str) -> None:
        own = ("-n", machine.namespace)
        ip("netns", "add", machine.namespace)
        ip("link", "add", "name", port, "netns", self._switch, "type", "veth", *("peer", "name", "eth0"), "netns",
           machine.namespace)  # fmt: skip
        ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
        ip(*own, "link", "set", "lo", "up")
        ip(*own, "link", "set", "eth0", "up")
        ip(*own, "addr", "add", f"{machine.address}/24", "dev", "eth0")
        ip(*own, "rule", "add", "pref", str(LOCAL), "lookup", "local")
        ip(*own, "rule", "del", "pref", "0")
        # Each packet asks the rules anew, those of connections that are open too.
        command = ["ip", "netns", "exec", machine.namespace, "sysctl", "-qw", "net.ipv4.tcp_early_demux=0"]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)

    def _rule(self, name: str, priority: int, *about: str) -> None:
        ip("-n", self.machines[name].namespace, "rule", "add", "pref", str(priority), *about)


def ip(*arguments: str) -> None:
    """Run iproute2's `ip`. Raises CalledProcessError."""
    subprocess.run(["ip", *arguments], check=True, timeout=TIMEOUT_S)
