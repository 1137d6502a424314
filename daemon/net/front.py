"""Serves the node's one port: takes connections, learns whom they want, and passes their bytes on.

One thread with epoll serves all of them. It decrypts nothing and knows no key: TLS is between the two ends, and so is
the question who may do what. What strangers may take is limited: connections, and the time to say what they want. A
client that began TLS is a stranger until the server accepts it. When all connections are taken, the oldest stranger
goes.

A node that can only dial out keeps some connections standing by here. Whoever wants that node gets one of them: a line
tells the node which of its servers is meant, and from then on bytes are passed on.
"""

import fcntl
import os
import re
import select
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
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
    """Return what the first bytes ask for; None: more are needed. Raises ValueError for anything else.

    TLS begins with a record of type 22 (RFC 8446, section 5.1) and is meant for the daemon. HTTP's CONNECT (RFC 9110,
    section 9.3.6) names another server; TLS with that one follows. STANDBY, in the same form, is of a node that can
    only dial out: it offers the connection to whoever wants that node.
    """
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


PIPE_BYTES: Final = 256 << 10
"""Room between two sockets for each direction; the kernel may allow less."""
MOST_TURNS: Final = 64
"""Number of moves in a row before other connections have their turn."""
MAX_ALERT_BYTES: Final = 64
"""Room for the record with which TLS refuses a client (RFC 8446, section 6), however it is encrypted."""
MAX_RETRY_BYTES: Final = 256
"""Room for the record with which a server asks a client to begin again (RFC 8446, section 4.1.4). A server's first real
words are longer, because its certificate is among them.
"""
_FLAGS: Final = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK


class _Direction:
    """Bytes from one socket to the other, through a pipe, as splice(2) wants it."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self._source, self._target = source, target
        self._read_end, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with suppress(OSError):  # the user's pipes have too many pages already
            fcntl.fcntl(self._write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._num_held = 0
        self._has_source_ended = False
        self.is_over = False
        self.num_bytes = 0
        """Number of bytes that have come."""

    def move(self, most_turns: int) -> bool:
        """Move what can be moved now. Return whether there may be more. Raises OSError when an end is gone."""
        for _ in range(most_turns):
            if self.is_over or not (self._give() if self._num_held or self._has_source_ended else self._take()):
                return False
        return True

    def close(self) -> None:
        os.close(self._read_end)
        os.close(self._write_end)

    def _take(self) -> bool:
        try:
            self._num_held = os.splice(self._source.fileno(), self._write_end, PIPE_BYTES, flags=_FLAGS)
        except BlockingIOError:
            return False
        self.num_bytes += self._num_held
        self._has_source_ended = not self._num_held
        return True

    def _give(self) -> bool:
        if not self._num_held:
            self._target.shutdown(socket.SHUT_WR)
            self.is_over = True
            return False
        try:
            self._num_held -= os.splice(self._read_end, self._target.fileno(), self._num_held, flags=_FLAGS)
        except BlockingIOError:
            return False
        return True


class Passage:
    """Two sockets whose bytes go to each other until both have ended, or one is gone.

    A stranger gets one answer of a server that speaks TLS, and then at most an alert. The passage is proven when the
    server answers the outer side's second words at greater length. Nothing is decrypted to see that.
    """

    def __init__(self, outer: socket.socket, inner: socket.socket, *, name: str = "") -> None:
        """Own both sockets, which do not block. Raises OSError when there are no files for the pipes.

        name: of the server that was wanted.
        """
        self.sockets = (outer, inner)
        self.name = name
        self.began_at = time.monotonic()
        inward = _Direction(outer, inner)
        try:
            self._directions = (inward, _Direction(inner, outer))
        except OSError:
            inward.close()
            raise
        self.is_proven = False
        self._num_heard = 0
        """Number of bytes of the outer side when the server first answered with its certificate; 0: it has not."""
        self._num_answered = 0
        """Number of bytes of the server when the outer side spoke again; 0: it has not."""

    def move(self, most_turns: int = MOST_TURNS) -> bool:
        """Move what can be moved now, both ways. Return whether there may be more. Raises OSError: it is over."""
        inward, outward = self._directions
        has_more = inward.move(most_turns)
        if self._num_heard and not self._num_answered and inward.num_bytes > self._num_heard:
            self._num_answered = outward.num_bytes
        has_more = outward.move(most_turns) or has_more
        if outward.num_bytes > MAX_RETRY_BYTES and not self._num_heard:
            self._num_heard = inward.num_bytes
        if self._num_answered:
            self.is_proven = outward.num_bytes > self._num_answered + MAX_ALERT_BYTES
        return has_more

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes that have come, from both ends."""
        return sum(direction.num_bytes for direction in self._directions)

    @property
    def is_over(self) -> bool:
        """Return whether both ends have said all that they have to say."""
        return all(direction.is_over for direction in self._directions)

    def close(self) -> None:
        """Close both sockets."""
        for direction in self._directions:
            direction.close()
        for each in self.sockets:
            each.close()


OPENING_S: Final = 10.0
"""Time to say what a connection is for."""
MAX_OPENINGS: Final = 512
"""Maximum number of connections that have not said it; beyond, the oldest is closed."""
MAX_STANDING_BY: Final = 64
"""Maximum number of connections that stand by for one node; beyond, the oldest is closed."""
ASK_AFTER_S: Final = 15
"""Idle time after which a kernel asks the other one whether a connection is still there."""
ASK_AGAIN_S: Final = 5
MOST_ASKS: Final = 3
"""Number of questions without an answer after which a connection ends."""
REST_S: Final = 0.5
"""Pause after the process had no file left for a connection."""
BACKLOG: Final = 512
BURST_S: Final = 0.05
"""Time of silence that may be made up for beyond the rate."""
FILES_A_PASSAGE: Final = 6
TAKEN: Final = b"HTTP/1.1 200 OK\r\n\r\n"
OPEN: Final = b"OPEN %s\r\n"
"""What a node that stands by is told: the name of the server that is wanted, empty for its daemon."""
_EVERYTHING: Final = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
_UNKNOWN: Final = b"HTTP/1.1 404 Not Found\r\n\r\n"
_MALFORMED: Final = b"HTTP/1.1 400 Bad Request\r\n\r\n"

Connect = Callable[[str], socket.socket | None]
"""Connects to a server of this node by its name, empty for the daemon, without blocking; None: there is none."""


@dataclass(slots=True)
class _Newcomer:
    """A connection that has not said what it is for."""

    connection: socket.socket
    until: float

    @property
    def began_at(self) -> float:
        """Return when it came."""
        return self.until - OPENING_S


class Front:
    """`turn` again and again, in a thread of its own, or as a process's only work."""

    def __init__(
        self,
        listener: socket.socket,
        connect: Connect,
        *,
        most_passages: int,
        most_bytes_per_s: float = 0.0,
        passed: Callable[[Passage], None] = lambda _: None,
    ) -> None:
        """listener: bound and listening; it is not closed here.

        most_bytes_per_s: of all passages together; 0: no limit. passed: told of each passage at its end.
        """
        self._listener = listener
        self._connect = connect
        self._most = most_passages
        self._most_bytes_per_s = most_bytes_per_s
        self._passed = passed
        self._may_pass_at = 0.0
        """When what has passed is within the limit again."""
        self._epoll = select.epoll()
        self._newcomers: OrderedDict[int, _Newcomer] = OrderedDict()
        """By file number, the oldest first."""
        self._passages: dict[int, Passage] = {}
        """By the file number of each of its sockets."""
        self._unproven: dict[Passage, None] = {}
        """Those whose server has not accepted the other end, the oldest first."""
        self._unfinished: dict[Passage, None] = {}
        """Those that may have more to move without another event."""
        self._watched: dict[int, Callable[[], None]] = {}
        """What others want to know, by file number."""
        self._tokens: dict[str, str] = {}
        """Node by the token with which it stands by."""
        self._standing_by: dict[str, deque[socket.socket]] = {}
        """By token, the oldest first."""
        self._listens_again_at = 0.0
        listener.setblocking(False)
        self._epoll.register(listener, select.EPOLLIN)

    @property
    def num_passages(self) -> int:
        """Return the number of connections that are passed on."""
        return len(self._passages) // 2

    def turn(self, *, most_s: float = 1.0) -> None:
        """Do what there is to do now; wait for it at most this long."""
        now = time.monotonic()
        self._close_late(now)
        if self._listens_again_at and now >= self._listens_again_at:
            self._listens_again_at = 0.0
            self._epoll.register(self._listener, select.EPOLLIN)
        for number, _ in self._epoll.poll(self._patience(now, most_s)):
            if number == self._listener.fileno():
                self._accept()
            elif number in self._newcomers:
                self._hear(number)
            elif number in self._passages:
                self._unfinished[self._passages[number]] = None
            elif number in self._watched:
                self._watched[number]()
        for passage in list(self._unfinished):
            if time.monotonic() >= self._may_pass_at:
                self._move(passage)

    def watch(self, number: int, on_event: Callable[[], None]) -> None:
        """Call on_event whenever a file can be read or written again."""
        self._watched[number] = on_event
        self._epoll.register(number, _EVERYTHING)

    def forget(self, number: int) -> None:
        """Watch a file no more."""
        del self._watched[number]
        self._epoll.unregister(number)

    def join(self, outer: socket.socket, inner: socket.socket, name: str = "") -> None:
        """Pass the bytes of two sockets on to each other, from now on. Raises OSError; then both are still open."""
        passage = Passage(outer, inner, name=name)
        self._passages |= {outer.fileno(): passage, inner.fileno(): passage}
        for each in (outer, inner):
            self._epoll.register(each, _EVERYTHING)
        self._unfinished[passage] = self._unproven[passage] = None

    def expect(self, tokens: Mapping[str, str]) -> None:
        """Let these nodes stand by, by token, and no others."""
        for token in self._tokens.keys() - tokens.keys():
            for connection in self._standing_by.pop(token, ()):
                self.forget(connection.fileno())
                connection.close()
        self._tokens = dict(tokens)

    def close(self) -> None:
        """Close every connection."""
        self.expect({})
        for newcomer in self._newcomers.values():
            newcomer.connection.close()
        for passage in set(self._passages.values()):
            passage.close()
        self._newcomers.clear()
        self._passages.clear()
        self._unproven.clear()
        self._unfinished.clear()
        self._epoll.close()

    def _patience(self, now: float, most_s: float) -> float:
        oldest = next(iter(self._newcomers.values()), None)
        moments = [now + most_s, *([oldest.until] if oldest else []), *filter(None, [self._listens_again_at])]
        moments += [self._may_pass_at] if self._unfinished else []
        return max(min(moments) - now, 0.0)

    def _accept(self) -> None:
        for _ in range(BACKLOG):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no file is left, or the connection is gone: those that wait stay in the kernel's queue
                self._epoll.unregister(self._listener)
                self._listens_again_at = time.monotonic() + REST_S
                return
            if self._is_full and not self._make_room():
                connection.close()
                continue
            self._welcome(connection)

    @property
    def _is_full(self) -> bool:
        return self.num_passages + len(self._newcomers) + len(self._watched) >= self._most

    def _make_room(self) -> bool:
        """Close the oldest stranger. Return whether there was one."""
        newcomer = next(iter(self._newcomers), None)
        passage = next(iter(self._unproven), None)
        if passage is not None and (newcomer is None or passage.began_at < self._newcomers[newcomer].began_at):
            self._end(passage)
        elif newcomer is not None:
            self._dismiss(newcomer)
        return newcomer is not None or passage is not None

    def _welcome(self, connection: socket.socket) -> None:
        prepare(connection)
        if len(self._newcomers) >= MAX_OPENINGS:
            self._dismiss(next(iter(self._newcomers)))
        self._newcomers[connection.fileno()] = _Newcomer(connection, time.monotonic() + OPENING_S)
        self._epoll.register(connection, select.EPOLLIN)

    def _hear(self, number: int) -> None:
        connection = self._newcomers[number].connection
        try:
            raw = connection.recv(MAX_HEAD_BYTES, socket.MSG_PEEK)
            opening = read_opening(raw)
        except BlockingIOError:
            return
        except ValueError:
            self._dismiss(number, _MALFORMED)
        except OSError:
            self._dismiss(number)
        else:
            if opening is not None:
                self._answer(number, opening)
            elif raw:
                # Level-triggered, the same bytes would wake this thread at once: wait for the next ones.
                self._epoll.modify(connection, select.EPOLLIN | select.EPOLLET)
            else:
                self._dismiss(number)

    def _answer(self, number: int, opening: Opening) -> None:
        """Do what a newcomer wants, or send it away."""
        connection = self._newcomers[number].connection
        if opening.wish is Wish.STANDBY and opening.name not in self._tokens:
            self._dismiss(number, _UNKNOWN)
            return
        inner = None if opening.wish is Wish.STANDBY else self._inner(opening.name)
        if opening.wish is not Wish.STANDBY and inner is None:
            self._dismiss(number, _UNKNOWN if opening.name else b"")
            return
        try:
            if opening.num_bytes:
                connection.recv(opening.num_bytes)
                connection.send(TAKEN)
            self._epoll.unregister(connection)
            if inner is None:
                self._keep_standing_by(connection, opening.name)
            else:
                self.join(connection, inner, opening.name)
        except OSError:  # the newcomer is gone, or no file is left
            connection.close()
            if inner is not None:
                inner.close()
        del self._newcomers[number]

    def _inner(self, name: str) -> socket.socket | None:
        """Return a connection to a server of this node, or of one that stands by."""
        node, via, server = name.partition(VIA)
        if not via:
            try:
                return self._connect(name)
            except OSError:
                return None
        queues = [self._standing_by.get(token, deque()) for token, known in self._tokens.items() if known == node]
        for queue in queues:
            while queue:
                connection = queue.popleft()
                self.forget(connection.fileno())
                with suppress(OSError):
                    connection.send(OPEN % server.encode())
                    return connection
                connection.close()
        return None

    def _keep_standing_by(self, connection: socket.socket, token: str) -> None:
        queue = self._standing_by.setdefault(token, deque())

        def drop(one: socket.socket) -> None:
            queue.remove(one)
            self.forget(one.fileno())
            one.close()

        def look() -> None:
            """Drop it if it has ended, or speaks before it is spoken to."""
            with suppress(BlockingIOError):
                with suppress(ConnectionError):
                    connection.recv(1, socket.MSG_PEEK)
                drop(connection)

        queue.append(connection)
        self.watch(connection.fileno(), look)
        if len(queue) > MAX_STANDING_BY:
            drop(queue[0])

    def _move(self, passage: Passage) -> None:
        before = passage.num_bytes
        del self._unfinished[passage]
        try:
            if passage.move(1 if self._most_bytes_per_s else MOST_TURNS):
                self._unfinished[passage] = None  # behind the others
            if passage.is_proven:
                self._unproven.pop(passage, None)
            if not passage.is_over:
                return
        except OSError:  # an end is gone, and the other one learns it by the close
            pass
        finally:
            if self._most_bytes_per_s:
                used_s = (passage.num_bytes - before) / self._most_bytes_per_s
                self._may_pass_at = max(self._may_pass_at, time.monotonic() - BURST_S) + used_s
        self._end(passage)

    def _end(self, passage: Passage) -> None:
        self._unproven.pop(passage, None)
        self._unfinished.pop(passage, None)
        self._passed(passage)
        for each in passage.sockets:
            del self._passages[each.fileno()]
        passage.close()

    def _close_late(self, now: float) -> None:
        while self._newcomers and (first := next(iter(self._newcomers))) and self._newcomers[first].until <= now:
            self._dismiss(first)

    def _dismiss(self, number: int, answer: bytes = b"") -> None:
        connection = self._newcomers.pop(number).connection
        if answer:
            with suppress(OSError):
                connection.recv(MAX_HEAD_BYTES)  # unread, it would cut the answer off
                connection.send(answer)
        connection.close()


def prepare(connection: socket.socket) -> None:
    """Let a connection neither block nor hold bytes back, and end when the other machine is silent.

    A router forgets idle connections without a word. What stands by is idle until somebody wants it.
    """
    connection.setblocking(False)
    with suppress(OSError):  # a unix socket has no such options
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ASK_AFTER_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_AGAIN_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, MOST_ASKS)
