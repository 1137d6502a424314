"""What the first bytes of a connection ask for: the daemon, or a server by its name. Pure.

TLS begins with a record of type 22 (RFC 8446, section 5.1) and is meant for the daemon. HTTP's CONNECT (RFC 9110,
section 9.3.6) names another server; TLS with that one follows. Nobody sends anything else.
"""

import re
from dataclasses import dataclass
from typing import Final

TLS_HANDSHAKE: Final = 0x16
MAX_HEAD_BYTES: Final = 1024
"""Maximum size of a CONNECT with its headers; gRPC's has about 100 bytes."""
MAX_NAME: Final = 64
HEAD_END: Final = b"\r\n\r\n"
_CONNECT: Final = re.compile(rb"CONNECT ([0-9A-Za-z._-]{1,%d}):\d{1,5} HTTP/1\.[01]\r\n" % MAX_NAME)
_BEGIN: Final = b"CONNECT "


@dataclass(frozen=True, slots=True)
class Opening:
    """A connection that has said what it is for."""

    name: str
    """The server's name; empty: the daemon."""
    num_bytes: int
    """Bytes that were for this port alone, and are not passed on."""


def read_opening(raw: bytes) -> Opening | None:
    """Return what the first bytes ask for; None: more are needed. Raises ValueError for anything else."""
    if not raw:
        return None
    if raw[0] == TLS_HANDSHAKE:
        return Opening("", 0)
    if not _BEGIN.startswith(raw[: len(_BEGIN)]):
        raise ValueError("neither TLS nor CONNECT")
    head, end, _ = raw.partition(HEAD_END)
    if not end:
        if len(raw) >= MAX_HEAD_BYTES:
            raise ValueError(f"a head of {MAX_HEAD_BYTES} bytes or more")
        return None
    found = _CONNECT.match(head + b"\r\n")
    if found is None:
        raise ValueError("a CONNECT without a server's name")
    return Opening(found[1].decode(), len(head) + len(end))
