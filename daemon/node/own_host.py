"""Checks that the host that others dial belongs to this machine: workers listen only there."""

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Final

import structlog

from headway.daemon.base.addresses import MAX_PORT, join_address, split_address
from headway.daemon.base.errors import ConfigError
from headway.daemon.node.config import advertised_host
from headway.daemon.node.settings import NodeConfig
from headway.stages.errors import UnavailableError
from headway.stages.sockets.own_sockets import end_connections_from, unmapped

log = structlog.get_logger()

SETTING = "advertise_host"
ADVICE = "set an address that this machine has itself and other nodes can dial; behind a router (NAT) that is a VPN's"
NOTHING_TO_SPARE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

_Addresses = list[tuple[socket.AddressFamily, tuple[Any, ...]]]


async def check_advertised_host(config: NodeConfig) -> None:
    """Raise ConfigError unless the advertised host means this machine, and no other.

    A peer that dials a name takes any of its addresses. A loopback address belongs to every machine. If a machine has
    no IPv6, a name may have ::1 besides a usable address. If all addresses are loopback, etcd's must be too. Raises
    UnavailableError for faults that a later start may cure: no name server answers, or the machine does not have the
    address yet.
    """
    host = advertised_host(config)
    told = repr(host) if config.advertise_host else f"not set, and {host!r} stands in for it"
    own: list[str] = []
    others: list[str] = []
    may_come = False
    for family, address in await _resolved(host, told):
        found = _without_zone(address[0])
        if found.is_unspecified:
            raise ConfigError(f"{told}: that is every address, and none to dial; {ADVICE}", SETTING)
        try:
            bind(family, address)
        except OSError as error:
            if not found.is_loopback:
                others.append(f"{address[0]} ({error.strerror})")
                may_come = error.errno == errno.EADDRNOTAVAIL and _is_address(host)
        else:
            own.append(address[0])
    if others or not own:
        where = ", ".join(others) or "any of its addresses"
        line = f"{told}: this machine cannot listen at {where}, where workers would; {ADVICE}"
        raise UnavailableError(SETTING, line) if may_come else ConfigError(line, SETTING)
    if all(_without_zone(address).is_loopback for address in own) and (member := await far_member(config.etcd)):
        what = f"that is {', '.join(own)}, where every machine dials itself, and etcd at {member} serves others too"
        raise ConfigError(f"{told}: {what}; {ADVICE}", SETTING)


def bind(family: socket.AddressFamily, address: tuple[Any, ...]) -> None:
    """Raise OSError unless this machine can listen at an address."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind(address)


def has_address(family: socket.AddressFamily, address: tuple[Any, ...]) -> bool:
    """Return whether an address belongs to this machine. Without a free file descriptor, assume that it does."""
    try:
        bind(family, address)
    except OSError as error:
        return error.errno in NOTHING_TO_SPARE
    return True


async def _resolved(host: str, told: str) -> _Addresses:
    """Return the addresses of a name, each once."""
    try:
        return await resolved(host)
    except (OSError, UnicodeError) as error:
        if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
            raise UnavailableError("the name server", f"no answer to what {host!r} means ({SETTING})") from error
        reason = (isinstance(error, OSError) and error.strerror) or "no host name"
        raise ConfigError(f"{told}: no address and no name that is known here ({reason}); {ADVICE}", SETTING) from error


async def far_member(members: Iterable[str]) -> str | None:
    """Return the first member of etcd with an address that is not loopback."""
    for member in members:
        host, _ = split_address(member, "etcd")
        try:
            found = [_without_zone(address[0]) for _, address in await resolved(host)]
        except (OSError, UnicodeError):
            continue  # the process that dials it reports the error
        if not all(address.is_loopback or address.is_unspecified for address in found):
            return member
    return None


async def resolved(host: str) -> _Addresses:
    """Return each address of a host once, resolved in a thread: name servers are slow. Raises OSError, UnicodeError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _is_address(host: str) -> bool:
    try:
        _without_zone(host)
    except ValueError:
        return False
    return True


def _without_zone(address: str) -> IPv4Address | IPv6Address:
    return ip_address(address.partition("%")[0])


PROVIDERS: Final = (("RUNPOD_PUBLIC_IP", "RUNPOD_TCP_PORT_"), ("PUBLIC_IPADDR", "VAST_TCP_PORT_"))
"""The variable with the public address, and the begin of those that name a port here and have the one outside."""


def mapped_address(environment: Mapping[str, str], port: int) -> str:
    """Return host:port outside of a port at which this node listens; empty: no provider says that it maps this port.

    A port that a provider maps to the same number has a variable of another name: a number above all ports.
    """
    for host_variable, prefix in PROVIDERS:
        host = environment.get(host_variable, "").strip()
        ports = {name.removeprefix(prefix): text for name, text in environment.items() if name.startswith(prefix)}
        is_same = any(text == str(port) for name, text in ports.items() if name.isdigit() and int(name) > MAX_PORT)
        outside = str(port) if is_same else ports.get(str(port), "")
        if host and outside.isascii() and outside.isdigit() and 0 < int(outside) <= MAX_PORT:
            return join_address(host, int(outside))
    return ""


GLANCE_EVERY_S: Final = 1.0
"""Interval of looks at the addresses of this process's connections: a lease is renewed with 3 s to spare."""
GLANCES_A_LOOK: Final = 3
"""Number of such looks per look at the host itself, which may ask a name server."""
NUM_LOOKS: Final = 2
"""Number of looks in a row after which an address counts as gone: DHCP may renew a lease between two looks."""


class AddressWatch:
    """Watches the address; `run` until cancelled."""

    def __init__(
        self,
        host: str,
        *,
        may_move: bool,
        towards_etcd: Callable[[], Awaitable[str]],
        moved: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        """host: the host that others dial. may_move: whether the daemon itself listens at every address.

        moved: receives another host, at which workers then listen. tell: receives the fault; empty: there is none.
        """
        self._host = host
        self._may_move = may_move
        self._towards_etcd = towards_etcd
        self._moved = moved
        self._tell = tell
        self._held: frozenset[str] = frozenset()
        """Addresses that the host resolves to and that this machine has."""
        self._num_gone = 0
        self._sources: frozenset[str] = frozenset()
        """Addresses from which this process has connections: those of the host, and the one towards etcd."""

    async def run(self) -> None:
        """Look repeatedly."""
        while True:
            await self.look()
            for _ in range(GLANCES_A_LOOK):
                await asyncio.sleep(GLANCE_EVERY_S)
                self.glance()

    def glance(self) -> None:
        """Shut the connections from addresses that this machine has lost."""
        gone = {address for address in self._sources if not is_here(address)}
        if gone and (num_ended := end_connections_from({unmapped(address) for address in gone})):
            log.warning("dead_connections_shut", addresses=sorted(gone), number=num_ended)

    async def look(self) -> None:
        """Check that this machine still has the address, and react if it does not."""
        now = await own_addresses(self._host)
        if now is None:
            return  # an outage of the name server changes no address
        self._held = self._held or now
        if now & self._held:
            self._num_gone = 0
            self._sources = now | ({await self._towards_etcd()} - {""})
            self._tell("")
            return
        self._num_gone += 1
        if self._num_gone < NUM_LOOKS:
            return
        other = self._host if now else await self._towards_etcd()
        if other and self._may_move:
            log.warning("address_changed", before=self._host, now=other)
            self._host, self._held, self._num_gone = other, now or frozenset({other}), 0
            self._tell("")
            self._moved(other)
            return
        why = "`listen` names it too" if other else "no other address of its own reaches etcd"
        self._tell(f"{self._host} is no longer an address of this machine, and {why}: set advertise_host, and restart")


def is_here(address: str) -> bool:
    """Return whether an address is this machine's. An address with a network card's name goes with the card."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except OSError:
        return False
    return any(has_address(family, where) for family, _, _, _, where in found)


async def own_addresses(host: str) -> frozenset[str] | None:
    """Return this machine's addresses that a host means; None while the name cannot be resolved."""
    try:
        found = await resolved(host)
    except (OSError, UnicodeError):
        return None
    return frozenset(str(address[0]) for family, address in found if has_address(family, address))


async def address_towards(members: Iterable[str]) -> str:
    """Return the address from which this machine would dial an etcd member; empty: no route exists."""
    for member in members:
        host, port = split_address(member, "etcd")
        try:
            found = await resolved(host)
        except (OSError, UnicodeError):
            continue
        for family, address in found:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                try:
                    probe.connect((address[0], port, *address[2:]))  # nothing is sent: the kernel chooses a route
                except OSError:
                    continue
                return str(probe.getsockname()[0])
    return ""
