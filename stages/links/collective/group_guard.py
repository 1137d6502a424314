"""Restricts connections to the ports of a process group: only the peer's machine while the group forms, then nobody.

gloo listens on its own port as long as the group lives, and checks nobody's identity. So its sockets get a filter of
the kernel (SO_ATTACH_FILTER), which drops every packet that does not come from the peer's address. Once the group is
formed, every attempt to connect is dropped. Then both sides compare their connections over mTLS: a connection that the
peer does not know is not the peer's.
"""

import ctypes
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final, TypeVar

from torch._C._distributed_c10d import Store

from headway.stages.sockets.own_sockets import Address, address_of, own_sockets, unmapped

T = TypeVar("T")

SO_ATTACH_FILTER: Final = 26
_NETWORK_HEADER: Final = 0xFFF00000
"""Offset of the IP header for a filter."""
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALL: Final = 0xFFFFFFFF

_MAKING_DEVICES = threading.Lock()
"""Lock for forming: of two groups that form at once, each has to know its own sockets."""

Instruction = tuple[int, int, int, int]
End = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The meeting point of the two ranks."""

    store: Store
    host: str
    """This side's own address."""
    peer_host: str
    rank: int


@contextmanager
def new_listeners(make: Callable[[], T]) -> Iterator[tuple[T, list[socket.socket]]]:
    """Yield what `make` returns, and copies of the listening sockets that it made, closed to everybody.

    Raises RuntimeError when it made none.
    """
    with ExitStack() as stack:
        with _MAKING_DEVICES:
            before = {address for address, _ in _listeners()}
            made = make()
            found = []
            for address, copy in _listeners():
                if address not in before:
                    # `copy.dup()` would make gloo's own socket a blocking one
                    found.append(stack.enter_context(socket.socket(fileno=os.dup(copy.fileno()))))
                    admit(found[-1], None)
        if not found:
            raise RuntimeError("the process group listens at no socket that this process can see")
        yield made, found


def admit(listener: socket.socket, source: IPv4Address | IPv6Address | None) -> None:
    """Let the kernel drop packets that do not come from there; None: all packets."""
    program = _program(source)
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code)
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(buffer)))


def _program(source: IPv4Address | IPv6Address | None) -> list[Instruction]:
    if source is None:
        return [(_RETURN, 0, 0, 0)]
    offset = 12 if source.version == 4 else 8
    words = struct.unpack(f"!{len(source.packed) // 4}I", source.packed)
    program: list[Instruction] = []
    for index, word in enumerate(words):
        num_left = 2 * (len(words) - index - 1)
        program += [(_LOAD, 0, 0, _NETWORK_HEADER + offset + 4 * index), (_EQUAL, 0, num_left + 1, word)]
    return [*program, (_RETURN, 0, 0, _ALL), (_RETURN, 0, 0, 0)]


def source_towards(host: str) -> str:
    """Return the address from which this machine reaches a host."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # nothing is sent
        return str(probe.getsockname()[0])


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """One side's addresses, sent to the other before the group forms."""

    source: str
    """Address from which it connects to the other side."""
    listeners: frozenset[End]

    def encode(self) -> str:
        """Encode the addresses for the store."""
        return json.dumps({"source": self.source, "listeners": sorted(self.listeners)})

    @classmethod
    def decode(cls, text: bytes) -> "Whereabouts":
        """Decode addresses. Raises RuntimeError when the bytes are invalid."""
        try:
            told = json.loads(text)
            return cls(
                str(unmapped(told["source"])), frozenset((str(host), int(port)) for host, port in told["listeners"])
            )
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise RuntimeError("the other side says something unreadable of its addresses") from error


class GroupGuard:
    """Guards the ports of one process group while it forms. Do the steps in order, each on both sides."""

    def __init__(self, meeting: Rendezvous, listeners: Sequence[socket.socket], *, timeout: timedelta) -> None:
        self._store = meeting.store
        self._rank = meeting.rank
        self._peer_host = meeting.peer_host
        self._listeners = listeners
        self._timeout = timeout
        self._own: frozenset[End] = frozenset()
        self._theirs = Whereabouts("", frozenset())

    def open(self) -> None:
        """Send the peer our listening addresses, and let only its machine connect. Raises RuntimeError."""
        self._own = frozenset(_text(address_of(one, is_peer=False)) for one in self._listeners)
        own = Whereabouts(source_towards(self._peer_host), self._own)
        self._store.set(f"where-{self._rank}", own.encode())
        self._theirs = Whereabouts.decode(self._read(f"where-{1 - self._rank}"))
        for listener in self._listeners:
            admit(listener, ip_address(self._theirs.source))

    def close(self) -> None:
        """Let nobody connect any more, and compare connections with the peer. Raises RuntimeError when they differ."""
        for listener in self._listeners:
            admit(listener, None)
        mine = sorted(set(self._connections()))  # another thread that looks has its own copies
        self._store.set(f"connections-{self._rank}", json.dumps(mine))
        try:
            told = json.loads(self._read(f"connections-{1 - self._rank}"))
            mirrored = sorted((there, at, here, by) for here, by, there, at in told)
        except (ValueError, TypeError, RecursionError) as error:
            raise RuntimeError("the other side says something unreadable of its connections") from error
        if mirrored != mine:
            raise RuntimeError("somebody else has connected to the group: its connections are not those of the peer")

    def _connections(self) -> Iterator[tuple[str, int, str, int]]:
        """Yield the group's connections: to one of our listeners, or to one of the peer's."""
        for copy in own_sockets():
            own, peer = address_of(copy, is_peer=False), address_of(copy, is_peer=True)
            if own is not None and peer is not None:
                here, there = _text(own), _text(peer)
                if here in self._own or there in self._theirs.listeners:
                    yield (*here, *there)

    def _read(self, key: str) -> bytes:
        self._store.wait([key], self._timeout)
        return self._store.get(key)


def _listeners() -> Iterator[tuple[Address, socket.socket]]:
    for copy in own_sockets():
        address = address_of(copy, is_peer=False)
        if address is not None and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            yield address, copy


def _text(address: Address | None) -> End:
    assert address is not None, "a listening socket has an address"
    return str(address[0]), address[1]
