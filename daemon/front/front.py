"""Serves the node's one port: takes connections, learns whom they want, and passes their bytes on.

One thread with epoll serves all of them. It decrypts nothing and knows no key: TLS is between the two ends, and so is
the question who may do what. What strangers may take is limited: connections, and the time to say what they want.
"""

import select
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from headway.daemon.front.opening import MAX_HEAD_BYTES, read_opening
from headway.daemon.front.passage import Passage

OPENING_S: Final = 10.0
"""Time to say what a connection is for."""
MAX_OPENINGS: Final = 512
"""Maximum number of connections that have not said it; beyond, the oldest is closed."""
REST_S: Final = 0.5
"""Pause after the process had no file left for a connection."""
BACKLOG: Final = 512
FILES_A_PASSAGE: Final = 6
_WATCHED: Final = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
_TAKEN: Final = b"HTTP/1.1 200 OK\r\n\r\n"
_UNKNOWN: Final = b"HTTP/1.1 404 Not Found\r\n\r\n"
_MALFORMED: Final = b"HTTP/1.1 400 Bad Request\r\n\r\n"

Connect = Callable[[str], socket.socket | None]
"""Connects to a server of this node by its name, empty for the daemon, without blocking; None: there is none."""


@dataclass(slots=True)
class _Newcomer:
    """A connection that has not said what it is for."""

    connection: socket.socket
    until: float


class Front:
    """`run` in a thread of its own, or as a process's only work, until `is_ending` returns True."""

    def __init__(self, listener: socket.socket, connect: Connect, *, most_passages: int) -> None:
        """listener: bound and listening; it is not closed here."""
        self._listener = listener
        self._connect = connect
        self._most = most_passages
        self._epoll = select.epoll()
        self._newcomers: OrderedDict[int, _Newcomer] = OrderedDict()
        """By file number, the oldest first."""
        self._passages: dict[int, Passage] = {}
        """By the file number of each of its sockets."""
        self._unfinished: dict[Passage, None] = {}
        """Those that may have more to move without another event."""
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
        for number, _ in self._epoll.poll(0 if self._unfinished else self._patience(now, most_s)):
            if number == self._listener.fileno():
                self._accept()
            elif number in self._newcomers:
                self._hear(number)
            elif number in self._passages:
                self._unfinished[self._passages[number]] = None
        for passage in list(self._unfinished):
            self._move(passage)

    def close(self) -> None:
        """Close every connection."""
        for newcomer in self._newcomers.values():
            newcomer.connection.close()
        for passage in set(self._passages.values()):
            passage.close()
        self._newcomers.clear()
        self._passages.clear()
        self._unfinished.clear()
        self._epoll.close()

    def _patience(self, now: float, most_s: float) -> float:
        oldest = next(iter(self._newcomers.values()), None)
        moments = [now + most_s, *([oldest.until] if oldest else []), *filter(None, [self._listens_again_at])]
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
            if self.num_passages + len(self._newcomers) >= self._most and not self._newcomers:
                connection.close()
                continue
            self._welcome(connection)

    def _welcome(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with suppress(OSError):  # a unix socket has no such option
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self._newcomers) >= MAX_OPENINGS or self.num_passages + len(self._newcomers) >= self._most:
            self._dismiss(next(iter(self._newcomers)))
        self._newcomers[connection.fileno()] = _Newcomer(connection, time.monotonic() + OPENING_S)
        self._epoll.register(connection, select.EPOLLIN)

    def _hear(self, number: int) -> None:
        connection = self._newcomers[number].connection
        try:
            raw = connection.recv(MAX_HEAD_BYTES, socket.MSG_PEEK)
            opening = read_opening(raw) if raw else None
        except BlockingIOError:
            return
        except ValueError:
            self._dismiss(number, _MALFORMED)
            return
        except OSError:
            self._dismiss(number)
            return
        if opening is None:
            if not raw:
                self._dismiss(number)
            else:
                # Level-triggered, the same bytes would wake this thread at once: wait for the next ones.
                self._epoll.modify(connection, select.EPOLLIN | select.EPOLLET)
            return
        try:
            inner = self._connect(opening.name)
        except OSError:
            inner = None
        if inner is None:
            self._dismiss(number, _UNKNOWN if opening.name else b"")
            return
        self._join(number, inner, opening.num_bytes)

    def _join(self, number: int, inner: socket.socket, num_bytes: int) -> None:
        """Make a passage of a newcomer and the server that it wants."""
        outer = self._newcomers[number].connection
        try:
            if num_bytes:
                outer.recv(num_bytes)
                outer.send(_TAKEN)
            passage = Passage(outer, inner)
        except OSError:  # the newcomer is gone, or no file is left
            inner.close()
            self._dismiss(number)
            return
        del self._newcomers[number]
        self._passages |= {outer.fileno(): passage, inner.fileno(): passage}
        self._epoll.modify(outer, _WATCHED)
        self._epoll.register(inner, _WATCHED)
        self._unfinished[passage] = None

    def _move(self, passage: Passage) -> None:
        try:
            if not passage.move():
                del self._unfinished[passage]
            if not passage.is_over:
                return
        except OSError:  # an end is gone, and the other one learns it by the close
            pass
        self._unfinished.pop(passage, None)
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
