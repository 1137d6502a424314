"""Passes the bytes of two sockets on to each other, in the kernel: they are never copied into this process."""

import fcntl
import os
import socket
import time
from contextlib import suppress
from typing import Final

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
