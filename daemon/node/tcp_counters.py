"""What the kernel counts of this process's own TCP connections: segments sent, and sent again because they were lost.

Linux alone, which hands the counters to whoever has the socket. gRPC's sockets are its own, so a copy of the descriptor
is asked and closed again; the connection does not notice.
"""

import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Final
from urllib.parse import unquote

OWN_DESCRIPTORS: Final = Path("/proc/self/fd")
INFO_BYTES: Final = 220
SENT_AGAIN_AT, SENT_AT, NEEDLESS_AT = 100, 156, 216
"""In Linux's `struct tcp_info`, which only grows at its end (include/uapi/linux/tcp.h): tcpi_total_retrans,
tcpi_data_segs_out and tcpi_dsack_dups, which the other end had already; 32 bits each."""

Address = tuple[IPv4Address | IPv6Address, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SentSegments:
    """Of one connection, since it was made."""

    number: int
    """With data, those that were sent again among them."""
    num_lost: int
    """Those that were sent again, and that the other end had not."""


def sent_segments(peer: str) -> SentSegments | None:
    """By this end of the connection to a peer, as gRPC names it; None: there is none, or the system does not count.

    peer: `ipv4:10.0.0.7:4711` or `ipv6:[::1]:4711`, the brackets perhaps escaped.
    """
    wanted = _address(peer)
    if wanted is None or not OWN_DESCRIPTORS.is_dir():
        return None
    for entry in OWN_DESCRIPTORS.iterdir():
        with suppress(OSError, ValueError):  # no connected socket, or closed meanwhile
            if str(entry.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as copy:
                    host, port = copy.getpeername()[:2]
                    if (_unmapped(host), port) == wanted:
                        return _counted(copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES))
    return None


def _counted(info: bytes) -> SentSegments | None:
    if len(info) < INFO_BYTES:  # an old kernel
        return None
    sent_again, sent, needless = (struct.unpack_from("I", info, at)[0] for at in (SENT_AGAIN_AT, SENT_AT, NEEDLESS_AT))
    return SentSegments(number=sent, num_lost=max(0, sent_again - needless))


def _address(peer: str) -> Address | None:
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    try:
        return _unmapped(host.strip("[]")), int(port)
    except ValueError:
        return None


def _unmapped(host: str) -> IPv4Address | IPv6Address:
    """An IPv4 address as such, where a socket for both kinds has it as IPv6."""
    found = ip_address(host)
    return (isinstance(found, IPv6Address) and found.ipv4_mapped) or found
