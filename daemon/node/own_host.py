"""Checks that the host that others dial belongs to this machine: workers listen only there."""

import asyncio
import errno
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from headway.daemon.addresses import split_address
from headway.daemon.errors import ConfigError
from headway.daemon.node.config import advertised_host
from headway.daemon.node.settings import NodeConfig
from headway.stages.errors import UnavailableError

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
