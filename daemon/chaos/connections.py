"""Destroys TCP connections of processes: the kernel lists and destroys sockets over netlink (sock_diag(7)).

A round takes one or two milliseconds, less than a TLS handshake. So rounds without pause let no connection through.
"""

import os
import re
import socket
import struct
import threading
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

TIMEOUT_S = 5.0
PAUSE_S = 0.0005
"""Pause between two rounds while nodes are cut off. A longer pause would let a process say hello and renew
its lease.
"""

_SOCK_DIAG: Final = 4  # NETLINK_SOCK_DIAG
_BY_FAMILY, _DESTROY = 20, 21  # SOCK_DIAG_BY_FAMILY, SOCK_DESTROY
_ERROR, _DONE = 2, 3  # NLMSG_ERROR, NLMSG_DONE
_REQUEST, _ACK, _DUMP = 0x1, 0x4, 0x300  # NLM_F_*
_ESTABLISHED, _SYN_SENT, _LISTEN = 1, 2, 10
_STATES: Final = 1 << _ESTABLISHED | 1 << _SYN_SENT | 1 << _LISTEN
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, sender
_QUESTION = struct.Struct("=BBBxI48s")  # inet_diag_req_v2: family, protocol, extensions, states, socket
_ANSWER = struct.Struct("=BBBB48s4xII4xI")  # inet_diag_msg: family, state, -, -, socket, -, queues, user, inode
_PORTS = struct.Struct("!HH")  # inet_diag_sockid begins with them
_INODE = re.compile(r"socket:\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class _Socket:
    """A socket in the kernel's list."""

    family: int
    state: int
    identity: bytes
    """Addresses, ports and cookie, in the kernel's form."""
    inode: int
    """Inode; 0 until the connection is accepted."""

    @property
    def ports(self) -> tuple[int, int]:
        """Return the local and the remote port."""
        local, remote = _PORTS.unpack_from(self.identity)
        return local, remote


def can_destroy() -> bool:
    """Return whether this user may destroy connections: the kernel reserves it for root."""
    return os.geteuid() == 0


def destroy_connections(pids: Collection[int], *, others: Collection[int] | None = None) -> int:
    """Reset TCP connections of these processes, including half-open ones; return their number.

    others: only connections with these processes; None: all. Both ends are reset. An ended process has none. Raises
    OSError if the kernel cannot destroy sockets.

    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(TIMEOUT_S)
        known = [found for family in (socket.AF_INET, socket.AF_INET6) for found in _listed(kernel, family)]
        theirs = _connections(known, pids)
        if others is not None:
            # Ports distinguish the ends of one machine's connections.
            ports = {found.ports[0] for found in _connections(known, others)}
            theirs = [found for found in theirs if found.ports[1] in ports]
        for found in theirs:
            _destroy(kernel, found)
    return len(theirs)


def _connections(known: Collection[_Socket], pids: Collection[int]) -> list[_Socket]:
    """Return the connections of these processes. An unaccepted one belongs to the process that listens at its port."""
    inodes = {inode for pid in pids for inode in _inodes(pid)}
    listening = {found.ports[0] for found in known if found.state == _LISTEN and found.inode in inodes}
    return [
        found for found in known if found.state != _LISTEN and (found.inode in inodes or found.ports[0] in listening)
    ]


class Parting:
    """Keeps destroying new connections of some processes, in a thread, while the context lasts."""

    def __init__(self) -> None:
        self.pids: Collection[int] = ()
        """The processes; may be replaced at any time."""
        self.others: Collection[int] | None = None
        """Destroy only connections with these processes; None: all. May be replaced at any time."""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-parting", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(TIMEOUT_S)

    def _run(self) -> None:
        while not self._end.wait(PAUSE_S):
            destroy_connections(self.pids, others=self.others)


def _inodes(pid: int) -> Iterator[int]:
    """Yield the inodes of a process's sockets."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if found := _INODE.fullmatch(str(entry.readlink())):
                    yield int(found.group(1))


def _listed(kernel: socket.socket, family: int) -> Iterator[_Socket]:
    _ask(kernel, _BY_FAMILY, _DUMP, _QUESTION.pack(family, socket.IPPROTO_TCP, 0, _STATES, bytes(48)))
    while True:
        for kind, body in _messages(kernel.recv(1 << 16)):
            if kind == _DONE:
                return
            _raise_error(kind, body)
            family, state, _, _, identity, _, _, inode = _ANSWER.unpack_from(body)
            yield _Socket(family, state, identity, inode)


def _destroy(kernel: socket.socket, found: _Socket) -> None:
    """Destroy a socket. A socket that is already gone is no error."""
    states = 1 << found.state
    _ask(kernel, _DESTROY, _ACK, _QUESTION.pack(found.family, socket.IPPROTO_TCP, 0, states, found.identity))
    for kind, body in _messages(kernel.recv(1 << 16)):
        with suppress(FileNotFoundError):
            _raise_error(kind, body)


def _ask(kernel: socket.socket, kind: int, flags: int, question: bytes) -> None:
    kernel.send(_HEADER.pack(_HEADER.size + len(question), kind, _REQUEST | flags, 1, 0) + question)


def _messages(received: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (kind, body) of each message."""
    offset = 0
    while offset + _HEADER.size <= len(received):
        length, kind, *_ = _HEADER.unpack_from(received, offset)
        yield kind, received[offset + _HEADER.size : offset + length]
        offset += -(-length // 4) * 4


def _raise_error(kind: int, body: bytes) -> None:
    if kind == _ERROR and (number := -int.from_bytes(body[:4], "little", signed=True)):
        raise OSError(number, os.strerror(number))
