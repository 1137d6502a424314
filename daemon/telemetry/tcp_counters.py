"""Reads the kernel's counters of this process's TCP connections: segments sent, and sent again because they were lost.

Works on Linux alone, which gives the counters to the owner of the socket.
"""

import socket
import struct
from dataclasses import dataclass
from typing import Final

from headway.stages.sockets.own_sockets import address_of, grpc_address, own_sockets

INFO_BYTES: Final = 220
SENT_AGAIN_AT, SENT_AT, NEEDLESS_AT = 100, 156, 216
"""Offsets in Linux's `struct tcp_info`, which only grows at its end (include/uapi/linux/tcp.h): tcpi_total_retrans,
tcpi_data_segs_out and tcpi_dsack_dups, segments that the other end had already; 32 bits each.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentSegments:
    """The segments of one connection, since it was made."""

    number: int
    """Segments with data, with those that were sent again."""
    num_lost: int
    """Segments that were sent again, and that the other end did not have."""


def sent_segments(peer: str) -> SentSegments | None:
    """Return the segments sent by this end to a peer, as gRPC names it; None: unknown peer, or the system does not
    count.

    peer: `ipv4:10.0.0.7:4711` or `ipv6:[::1]:4711`, the brackets perhaps escaped.
    """
    wanted = grpc_address(peer)
    for copy in own_sockets() if wanted is not None else ():
        if address_of(copy, is_peer=True) == wanted:
            return _counted(copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES))
    return None


def _counted(info: bytes) -> SentSegments | None:
    if len(info) < INFO_BYTES:  # an old kernel
        return None
    sent_again, sent, needless = (struct.unpack_from("I", info, at)[0] for at in (SENT_AGAIN_AT, SENT_AT, NEEDLESS_AT))
    return SentSegments(number=sent, num_lost=max(0, sent_again - needless))
