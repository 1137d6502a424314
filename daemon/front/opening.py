"""What the first bytes of a connection ask for: the daemon, a server by its name, or to stand by for a node. Pure.

TLS begins with a record of type 22 (RFC 8446, section 5.1) and is meant for the daemon. HTTP's CONNECT (RFC 9110,
section 9.3.6) names another server; TLS with that one follows. STANDBY, in the same form, comes from a node that can
only dial out: it offers the connection to whoever wants that node. Nobody sends anything else.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

TLS_HANDSHAKE: Final = 0x16
MAX_HEAD_BYTES: Final = 1024
"""Maximum size of a head; gRPC's CONNECT has about 100 bytes and the server's name twice."""
HEAD_END: Final = b"\r\n\r\n"
VIA: Final = "~"
"""Stands between a node that can only dial out and the name of a server there, empty for its daemon."""
_HEAD: Final = re.compile(rb"(CONNECT|STANDBY) ([0-9A-Za-z._~-]{1,300}):\d{1,5} HTTP/1\.[01]\r\n")
_METHODS: Final = (b"CONNECT ", b"STANDBY ")


class Wish(StrEnum):
    """The kinds of connections."""

    DAEMON = "daemon"
    SERVER = "server"
    """A server of this node, or of one that stands by here."""
    STANDBY = "standby"


@dataclass(frozen=True, slots=True)
class Opening:
    """A connection that has said what it is for."""

    wish: Wish
    name: str
    """The server's name, or the token of a node that stands by; empty for the daemon."""
    num_bytes: int
    """Bytes that were for this port alone, and are not passed on."""


def read_opening(raw: bytes) -> Opening | None:
    """Return what the first bytes ask for; None: more are needed. Raises ValueError for anything else."""
    if not raw:
        return None
    if raw[0] == TLS_HANDSHAKE:
        return Opening(Wish.DAEMON, "", 0)
    if not any(method.startswith(raw[: len(method)]) for method in _METHODS):
        raise ValueError("neither TLS nor CONNECT")
    head, end, _ = raw.partition(HEAD_END)
    if not end:
        if len(raw) >= MAX_HEAD_BYTES:
            raise ValueError(f"a head of {MAX_HEAD_BYTES} bytes or more")
        return None
    found = _HEAD.match(head + b"\r\n")
    if found is None:
        raise ValueError("a CONNECT without a server's name")
    wish = Wish.STANDBY if found[1] == b"STANDBY" else Wish.SERVER
    return Opening(wish, found[2].decode(), len(head) + len(end))
