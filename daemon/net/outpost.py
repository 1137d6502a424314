"""Keeps connections of a node that can only dial out standing by at another node's port, and answers what comes there.

Each of them waits for a line that names a server of this node. Then its bytes are passed on to that server, and another
one takes its place. The other node passes TLS on as well: it sees ciphertext only.
"""

import os
import re
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec

from headway.daemon.net.front import TAKEN, Connect, Front, prepare

NUM_STANDING_BY: Final = 8
"""Number of connections that stand by: so many can be taken at once."""
PAUSE_S: Final = 1.0
"""Pause after a connection failed, before others are dialled."""
ANSWER_S: Final = 10.0
"""Time for the other node to take a connection."""
MAX_LINE_BYTES: Final = 128
_ORDER: Final = re.compile(rb"OPEN ([0-9A-Za-z._-]{0,64})\r\n")


@dataclass(frozen=True, slots=True)
class Post:
    """Where a node stands by."""

    host: str
    port: int
    token: str


@dataclass(eq=False, slots=True)
class _Standby:
    """One connection."""

    connection: socket.socket
    until: float
    """When it is given up, unless it was taken."""
    unsent: bytes
    is_taken: bool = False


class Outpost:
    """The connections of one node at one other. `turn` again and again, before the front's own."""

    def __init__(self, front: Front, connect: Connect) -> None:
        self._front = front
        self._connect = connect
        self._address: tuple[str, int] | None = None
        self._token = ""
        self._standing: set[_Standby] = set()
        self._dials_again_at = 0.0

    @property
    def num_taken(self) -> int:
        """Return the number of connections that the other node has taken."""
        return sum(standby.is_taken for standby in self._standing)

    def stand_by(self, address: tuple[str, int] | None, token: str = "") -> None:
        """Stand by at a port with a token from now on; None: nowhere."""
        if (address, token) != (self._address, self._token):
            for standby in list(self._standing):
                self._drop(standby)
            self._address, self._token, self._dials_again_at = address, token, 0.0

    def turn(self) -> None:
        """Dial what is missing, and give up what was not taken."""
        now = time.monotonic()
        for standby in [each for each in self._standing if not each.is_taken and each.until <= now]:
            self._failed(standby)
        if self._address is None or now < self._dials_again_at:
            return
        while len(self._standing) < NUM_STANDING_BY and now >= self._dials_again_at:
            self._dial(self._address)

    def _dial(self, address: tuple[str, int]) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        connection = socket.socket(family)
        prepare(connection)
        head = f"STANDBY {self._token}:0 HTTP/1.1\r\n\r\n".encode()
        standby = _Standby(connection, time.monotonic() + ANSWER_S, head)
        self._standing.add(standby)
        try:
            with suppress(BlockingIOError):
                connection.connect(address)
            self._front.watch(connection.fileno(), lambda: self._go_on(standby))
        except (OSError, ValueError, OverflowError):  # the latter two: no address at all
            self._standing.discard(standby)
            connection.close()
            self._dials_again_at = time.monotonic() + PAUSE_S

    def _go_on(self, standby: _Standby) -> None:
        """Say what is to be said, and hear what has come. What follows a line is not ours, so it is left unread."""
        connection = standby.connection
        try:
            if standby.unsent:
                standby.unsent = standby.unsent[connection.send(standby.unsent) :]
            raw = connection.recv(MAX_LINE_BYTES, socket.MSG_PEEK)
            if not standby.is_taken and raw.startswith(TAKEN):
                connection.recv(len(TAKEN))
                standby.is_taken = True
                raw = connection.recv(MAX_LINE_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            self._failed(standby)
            return
        if not standby.is_taken:
            if not raw or not TAKEN.startswith(raw):
                self._failed(standby)
            return
        found = _ORDER.match(raw)
        if found is not None:
            connection.recv(found.end())
            self._open(standby, found[1].decode())
        elif not raw or b"\n" in raw or len(raw) == MAX_LINE_BYTES:
            self._failed(standby)

    def _open(self, standby: _Standby, name: str) -> None:
        self._standing.discard(standby)
        self._front.forget(standby.connection.fileno())
        inner = self._connect(name)
        try:
            if inner is None:
                raise ConnectionRefusedError(name)
            self._front.join(standby.connection, inner)
        except OSError:
            standby.connection.close()
            if inner is not None:
                inner.close()

    def _failed(self, standby: _Standby) -> None:
        self._drop(standby)
        self._dials_again_at = time.monotonic() + PAUSE_S

    def _drop(self, standby: _Standby) -> None:
        self._standing.discard(standby)
        self._front.forget(standby.connection.fileno())
        standby.connection.close()


class Outposts:
    """The connections of one node at all that it stands by at. `turn` again and again, before the front's own."""

    def __init__(self, front: Front, connect: Connect) -> None:
        self._front = front
        self._connect = connect
        self._outposts: dict[Post, Outpost] = {}

    def stand_by(self, posts: Iterable[Post]) -> None:
        """Stand by at these from now on, and nowhere else."""
        posts = tuple(posts)
        for gone in self._outposts.keys() - set(posts):
            self._outposts.pop(gone).stand_by(None)
        for post in posts:
            if post not in self._outposts:
                self._outposts[post] = Outpost(self._front, self._connect)
                self._outposts[post].stand_by((post.host, post.port), post.token)

    def turn(self) -> None:
        """Let each one dial what is missing."""
        for outpost in self._outposts.values():
            outpost.turn()


PIECE_BYTES = 64 << 10
BEAT = b"."
"""What the process writes to its standard output, to show that it does not stand still."""
BEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class FrontOrder:
    """All that holds from now on."""

    tokens: dict[str, str] = field(default_factory=dict)
    """Node by token, of the nodes that stand by here."""
    posts: tuple[Post, ...] = ()
    """Where this node stands by; none: others dial it directly."""


class OrderReader:
    """The process's side."""

    def __init__(self, front: Front, outposts: Outposts) -> None:
        self._front, self._outposts = front, outposts
        self._raw = b""

    def read(self, number: int) -> None:
        """Read what has come, and obey the last whole line of it."""
        with suppress(BlockingIOError):
            while piece := os.read(number, PIECE_BYTES):
                self._raw += piece
        *lines, self._raw = self._raw.split(b"\n")
        if lines:
            try:
                order = msgspec.json.decode(lines[-1], type=FrontOrder)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                sys.stderr.write(f"an order that cannot be read changes nothing: {error}\n")
                return
            self._front.expect(order.tokens)
            self._outposts.stand_by(order.posts)
