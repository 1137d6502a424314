"""Machines at several places: hosts with public addresses, and hosts behind routers that translate addresses.

Each machine is a network, a host name and a view of mounts of its own: home folder, /tmp,
shared memory, /mnt, /etc/hosts. Each has a
firewall by nftables that drops what it does not name. Needs root, iproute2 and nftables. Nothing outside of these
namespaces is touched; they end with the test.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final, Self

from tests.machines.network import TIMEOUT_S, ip

HOME = "/srv"
"""The home folder of a machine; this machine's own may hold the interpreter."""
INNER, GATEWAY = "192.168.1.10", "192.168.1.1"
"""Every private network has the same addresses, as those of homes have."""
FIREWALL = """\
table inet firewall {{
  chain input {{
    type filter hook input priority filter; policy drop;
    iif lo accept
    ct state established,related accept
    {accepted}
  }}
}}
table inet faults {{
  chain arriving {{
    type filter hook prerouting priority raw;
  }}
  chain leaving {{
    type filter hook output priority raw;
  }}
}}
"""
TRANSLATION = """\
table ip translation {{
  chain arriving {{
    type nat hook prerouting priority dstnat;
    {mapped}
  }}
  chain leaving {{
    type nat hook postrouting priority srcnat;
    oifname "wan" masquerade
  }}
}}
"""
ENTER = """\
set -e
echo "$1" > /proc/sys/kernel/hostname
mount --bind "$2/home" /srv
mount --bind "$3" /mnt
mount --bind "$2/hosts" /etc/hosts
mount -t tmpfs tmpfs /dev/shm
exec 9< "$4"
mount -t tmpfs tmpfs /tmp
case "$4" in /tmp/*) mkdir -p "$4"; mount --no-canonicalize --bind /proc/self/fd/9 "$4" ;; esac
exec 9<&-
ip link set lo up
echo up
exec cat
"""
CHECKOUT: Final = Path(__file__).resolve().parents[2]
"""Every machine sees it, also where it lies in this machine's own /tmp."""
_numbers = count()


def why_impossible() -> str:
    """Return what this machine or user lacks; empty: nothing."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in ("ip", "nft", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (iproute2, nftables, util-linux)"
    probe = ["unshare", "--net", "nft", FIREWALL.format(accepted="") + TRANSLATION.format(mapped="")]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=TIMEOUT_S)
    return f"nftables does not work in this kernel: {done.stderr.strip()[:200]}" if done.returncode else ""


@dataclass(frozen=True, slots=True)
class Host:
    """A machine to be made."""

    name: str
    address: str
    """Its public address, or its router's."""
    ports: tuple[int, ...] = ()
    """What its firewall lets in."""
    is_behind_router: bool = False
    mapped: tuple[int, int] | None = None
    """The router's port, and the one inside that it leads to."""


@dataclass
class Internet:
    """A context manager; afterwards all is gone."""

    hosts: Mapping[str, Host]
    folder: Path
    """A folder for each machine, and `shared`, which all see at /mnt."""
    _tag: str = ""
    _holders: dict[str, "subprocess.Popen[str]"] = field(default_factory=dict)
    _namespaces: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, hosts: Iterable[Host], folder: Path) -> Self:
        """Machines that are made on entry."""
        return cls({host.name: host for host in hosts}, folder, f"hwi{os.getpid()}-{next(_numbers)}")

    def __enter__(self) -> Self:
        (self.folder / "shared").mkdir()
        self._add("switch")
        self._ip("switch", "link", "add", "br0", "type", "bridge")
        self._ip("switch", "link", "set", "br0", "up")
        try:
            for number, host in enumerate(self.hosts.values(), 1):
                self._make(host, f"p{number}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for holder in self._holders.values():
            holder.kill()
            holder.communicate(timeout=TIMEOUT_S)
        for namespace in self._namespaces:
            subprocess.run(["ip", "netns", "delete", namespace], check=False, timeout=TIMEOUT_S, capture_output=True)

    def home(self, name: str) -> Path:
        """Return what is `~` on a machine."""
        return self.folder / name / "home"

    def inside(self, name: str, *command: str) -> list[str]:
        """Return the command on a machine, in its home folder; it is one process throughout."""
        number = str(self._holders[name].pid)
        enter = [
            "nsenter",
            "--target",
            number,
            "--net",
            "--uts",
            "--mount",
            "--",
            "env",
            f"--chdir={HOME}",
            f"HOME={HOME}",
        ]
        return [*enter, *command]

    def nft(self, name: str, rules: str) -> None:
        """Give rules to a machine's firewall. Raises CalledProcessError."""
        self._nft(self._space(name), rules)

    def cut(self, name: str) -> None:
        """From now on nothing leaves or reaches a machine."""
        self.nft(name, 'add rule inet faults arriving iifname "eth0" drop')
        self.nft(name, 'add rule inet faults leaving oifname "eth0" drop')

    def drop_from(self, name: str, source: str) -> None:
        """From now on a machine hears nothing from an address; what it says arrives there."""
        self.nft(name, f"add rule inet faults arriving ip saddr {source} drop")

    def heal(self, name: str) -> None:
        """End every fault at a machine."""
        self.nft(name, "flush chain inet faults arriving")
        self.nft(name, "flush chain inet faults leaving")

    def move(self, name: str, address: str) -> None:
        """Give a router another public address, as providers do at night: its connections are gone."""
        router = self._router(name)
        self._ip(router, "addr", "flush", "dev", "wan")
        self._ip(router, "addr", "add", f"{address}/32", "dev", "wan")
        self._ip(router, "route", "replace", "default", "dev", "wan")

    def _make(self, host: Host, port: str) -> None:
        own = self.folder / host.name
        (own / "home").mkdir(parents=True)
        (own / "hosts").write_text("127.0.0.1 localhost\n")
        command = ["unshare", "--net", "--uts", "--mount", "--propagation", "private"]
        command += ["sh", "-c", ENTER, "sh", host.name, str(own), str(self.folder / "shared"), str(CHECKOUT)]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # ends with us
        self._holders[host.name] = holder
        assert holder.stdout is not None
        assert holder.stdout.readline() == "up\n", f"{host.name} cannot be made"
        ip("netns", "attach", self._space(host.name), str(holder.pid))
        self._namespaces.append(self._space(host.name))
        if host.is_behind_router:
            self._make_router(host, port)
            self._ip(host.name, "addr", "add", f"{INNER}/24", "dev", "eth0")
            self._ip(host.name, "route", "add", "default", "via", GATEWAY)
        else:
            self._plug(host.name, "eth0", "switch", port)
            self._ip("switch", "link", "set", port, "master", "br0")
            self._public(host.name, "eth0", host.address)
        accepted = [f"tcp dport {number} accept" for number in host.ports]
        self.nft(host.name, FIREWALL.format(accepted="\n    ".join(accepted)))

    def _make_router(self, host: Host, port: str) -> None:
        router = self._router(host.name)
        self._add(router)
        self._plug(router, "wan", "switch", port)
        self._ip("switch", "link", "set", port, "master", "br0")
        self._public(router, "wan", host.address)
        self._plug(host.name, "eth0", router, "lan")
        self._ip(router, "addr", "add", f"{GATEWAY}/24", "dev", "lan")
        command = ["ip", "netns", "exec", self._space(router), "sysctl", "-qw", "net.ipv4.ip_forward=1"]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)
        outside, within = host.mapped or (0, 0)
        mapped = f'iifname "wan" tcp dport {outside} dnat to {INNER}:{within}' if outside else ""
        self._nft(self._space(router), FIREWALL.format(accepted="") + TRANSLATION.format(mapped=mapped))
        only_answers = (
            "add chain inet firewall forward { type filter hook forward priority filter; policy accept; }\n"
            'add rule inet firewall forward iifname "wan" ct status dnat accept\n'
            'add rule inet firewall forward iifname "wan" ct state new drop'
        )
        self._nft(self._space(router), only_answers)

    def _public(self, name: str, device: str, address: str) -> None:
        """Everybody with a public address is on one wire."""
        self._ip(name, "addr", "add", f"{address}/32", "dev", device)
        self._ip(name, "route", "add", "default", "dev", device)

    def _plug(self, one: str, device: str, other: str, other_device: str) -> None:
        ip("link", "add", "name", device, "netns", self._space(one), "type", "veth",
           *("peer", "name", other_device), "netns", self._space(other))  # fmt: skip
        self._ip(one, "link", "set", device, "up")
        self._ip(other, "link", "set", other_device, "up")

    def _add(self, name: str) -> None:
        ip("netns", "add", self._space(name))
        self._namespaces.append(self._space(name))
        self._ip(name, "link", "set", "lo", "up")

    def _ip(self, name: str, *arguments: str) -> None:
        ip("-n", self._space(name), *arguments)

    def _nft(self, namespace: str, rules: str) -> None:
        command = ["ip", "netns", "exec", namespace, "nft", "-f", "-"]
        subprocess.run(command, input=f"{rules}\n", text=True, check=True, timeout=TIMEOUT_S)

    def _space(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def _router(self, name: str) -> str:
        return f"{name}-router"
