"""Finds this process's own sockets, also those of a library: Linux alone, which lists them under /proc.

A copy of the descriptor is read and closed again; the socket's owner does not notice.
"""

import os
import socket
from collections.abc import Collection, Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Final
from urllib.parse import unquote

OWN_DESCRIPTORS: Final = Path("/proc/self/fd")

Address = tuple[IPv4Address | IPv6Address, int]


def own_sockets() -> Iterator[socket.socket]:
    """Yield a copy of each socket, open until the next one is requested; none if the system lists none."""
    if not OWN_DESCRIPTORS.is_dir():
        return
    for entry in OWN_DESCRIPTORS.iterdir():
        with suppress(OSError, ValueError):  # closed meanwhile, or not a socket
            if str(entry.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as copy:
                    yield copy


def end_connection(peer: str) -> bool:
    """Shut the connection to a peer, as gRPC names it; return whether there is one. Its owner sees it closed."""
    wanted = grpc_address(peer)
    for copy in own_sockets() if wanted is not None else ():
        if address_of(copy, is_peer=True) == wanted:
            with suppress(OSError):
                copy.shutdown(socket.SHUT_RDWR)
            return True
    return False


def end_connections_from(hosts: Collection[IPv4Address | IPv6Address]) -> int:
    """Shut every connection whose own end is at one of these addresses; return their number. Owners see them closed."""
    num_ended = 0
    for copy in own_sockets():
        own = address_of(copy, is_peer=False)
        if own is not None and own[0] in hosts and address_of(copy, is_peer=True) is not None:
            with suppress(OSError):
                copy.shutdown(socket.SHUT_RDWR)
                num_ended += 1
    return num_ended


def address_of(one: socket.socket, *, is_peer: bool) -> Address | None:
    """Return this end's address of a TCP socket, or its peer's; None if it has none.

    Libraries open sockets of other families, whose addresses have other forms: CUDA's of netlink has two numbers.
    """
    if one.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        host, port = (one.getpeername() if is_peer else one.getsockname())[:2]
        return unmapped(host), port
    except (OSError, ValueError):
        return None


def grpc_address(peer: str) -> Address | None:
    """Return the address of `ipv4:10.0.0.7:4711` or `ipv6:[::1]:4711`, the brackets perhaps escaped; None: it is
    neither.
    """
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    try:
        return unmapped(host.strip("[]")), int(port)
    except ValueError:
        return None


def unmapped(host: str) -> IPv4Address | IPv6Address:
    """Return an IPv4 address as such, if a socket for both kinds has it as IPv6."""
    found = ip_address(host.partition("%")[0])
    return (isinstance(found, IPv6Address) and found.ipv4_mapped) or found
