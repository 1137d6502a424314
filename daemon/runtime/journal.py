"""Lines of the log as entries of systemd's journal, with fields to search by: HEADWAY_JOB=small, HEADWAY_NODE=gpu-7.

The protocol is systemd's own (https://systemd.io/JOURNAL_NATIVE_PROTOCOL): a datagram of FIELD=value lines, and for a
value with a line break FIELD, its length in 8 little-endian bytes, and the value. The message stays the line of JSON
that a pipe gets, so whatever reads `journalctl -o cat` reads the same as before.
"""

import os
import socket
import struct
from collections.abc import Mapping
from typing import IO, Final

from structlog.typing import EventDict

SOCKET: Final = "/run/systemd/journal/socket"
FIELDS: Final = ("node", "job", "event", "generation", "stage", "worker", "peer")
"""Keys of a line that become fields; each has few values, by which one searches."""
PRIORITIES: Final = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
IDENTIFIER: Final = "headway"


def is_journal(stream: IO[str], environment: Mapping[str, str]) -> bool:
    """Whether a stream leads to the journal: systemd names it in JOURNAL_STREAM, and a child's pipe is another one."""
    try:
        told = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environment.get("JOURNAL_STREAM") == f"{told.st_dev}:{told.st_ino}"


def fields_of(event: EventDict) -> dict[str, str]:
    """Return the fields of a line, without its message."""
    fields = {f"HEADWAY_{key.upper()}": str(event[key]) for key in FIELDS if event.get(key) not in (None, "")}
    priority = PRIORITIES.get(str(event.get("level")), PRIORITIES["info"])
    return {"PRIORITY": str(priority), "SYSLOG_IDENTIFIER": IDENTIFIER, **fields}


def datagram(fields: Mapping[str, str]) -> bytes:
    """Return one entry. A value's line breaks and = begin no other field."""
    entry = bytearray()
    for name, value in fields.items():
        content = value.encode(errors="replace")
        if b"\n" in content:
            entry += name.encode() + b"\n" + struct.pack("<Q", len(content)) + content + b"\n"
        else:
            entry += name.encode() + b"=" + content + b"\n"
    return bytes(entry)


class JournalSocket:
    """Sends entries and never waits. It says which it could not send, so that the caller writes them elsewhere."""

    def __init__(self, path: str = SOCKET) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)

    def send(self, fields: Mapping[str, str]) -> bool:
        """Send an entry. False: the journal is full or away, or the entry is too large for a datagram."""
        try:
            self._socket.sendto(datagram(fields), self._path)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Free the socket; later entries are not sent."""
        self._socket.close()
