"""Limits how many files a process may have open, and how many of them strangers may take.

Every connection is an open file, also one that never sends anything. A process without free files cannot write its
records, start a worker or answer a peer. So each process raises its limit to what the system allows. Servers give at
most half of it to connections, and a few are reserved for records that must be written even then.

gRPC counts a connection from its first packet on and closes further ones at once. A connection that has not finished
its handshakes (TCP, TLS, HTTP/2) in time is closed as well, and so is one that makes no call for long.
"""

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

T = TypeVar("T")

MOST_CONNECTIONS: Final = 8192
"""Maximum number of connections. One before its handshake costs a server about 50 KB: 400 MB at most."""
NUM_RESERVED: Final = 4
HANDSHAKE_TIMEOUT_S: Final = 10.0
IDLE_CONNECTION_S: Final = 300.0
_USED_UP: Final = frozenset({errno.EMFILE, errno.ENFILE})

Options = tuple[tuple[str, int], ...]


def raise_open_file_limit() -> int:
    """Raise this process's soft limit to the hard one, for its children too. Returns the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # a hard limit above the kernel's own: the soft one stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return open_file_limit()


def open_file_limit() -> int:
    """Return the soft limit of this process; the system's limit for a process if it has none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return os.sysconf("SC_OPEN_MAX") if soft == resource.RLIM_INFINITY else soft


def most_connections(limit: int) -> int:
    """Return how many incoming connections a server of a process with this limit may hold."""
    return max(1, min(MOST_CONNECTIONS, limit // 2)) if limit > 0 else MOST_CONNECTIONS


def server_limits(
    *,
    streams_per_connection: int,
    num_connections: int | None = None,
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
) -> Options:
    """Return options of a server that listens at TCP. num_connections: as many as the process's open files allow if
    None.
    """
    if num_connections is None:
        num_connections = most_connections(open_file_limit())
    return (
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", num_connections),
        ("grpc.server_handshake_timeout_ms", round(1000 * handshake_timeout_s)),
        ("grpc.max_connection_idle_ms", round(1000 * IDLE_CONNECTION_S)),
        ("grpc.max_concurrent_streams", streams_per_connection),
    )


class ReservedFiles:
    """A few open files that are released for a moment when there are no others. For one thread."""

    def __init__(self, count: int = NUM_RESERVED) -> None:
        self._count = count
        self._held: list[int] = []
        self._fill()

    def run(self, step: Callable[[], T]) -> T:
        """Run a step that opens files; if no file can be opened, run it again with the reserve."""
        try:
            return step()
        except OSError as error:
            if error.errno not in _USED_UP or not self._held:
                raise
        with self._given_up():
            return step()

    def close(self) -> None:
        """Release the reserve for good."""
        held, self._held = self._held, []
        for number in held:
            os.close(number)

    @contextmanager
    def _given_up(self) -> Iterator[None]:
        self.close()
        try:
            yield
        finally:
            self._fill()

    def _fill(self) -> None:
        with suppress(OSError):
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
