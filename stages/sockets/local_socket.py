"""Connects the processes of one node over unix sockets in the node's private folder.

The kernel protects such a connection, so it needs no TLS. A socket has mode 0600, and each side asks the kernel for the
other side's user (SO_PEERCRED): only this process's own user is accepted, in both directions. The socket's name follows
from the process's incarnation, so no record has to announce it.
"""

import os
import socket
import stat
import struct
import time
from contextlib import suppress
from pathlib import Path

MAX_PATH_BYTES = 107
"""The kernel's limit for the path of a unix socket."""
NAME_LENGTH = 16
"""Characters of an incarnation in the name; the hello compares all of them."""
SUFFIX = ".link"
TLS_SUFFIX = ".tls"
"""Of the sockets to which a node's shared port passes connections of other nodes on, with TLS."""
STALE_AFTER_S = 60.0
"""Age from which a socket where nobody listens is deleted. A younger one may belong to a process between bind and
listen.
"""
BUFFER_BYTES = 1 << 20
"""Size of the kernel's buffer for each direction: about a chunk of a frame. The kernel may allow less."""
_BACKLOG = 16
_CREDENTIALS = struct.Struct("3i")


def socket_path(folder: Path, incarnation: str, suffix: str = SUFFIX) -> Path | None:
    """Return where a process listens; None: the path is too long for a socket."""
    path = folder / f"{incarnation[:NAME_LENGTH]}{suffix}"
    return path if len(os.fsencode(path)) <= MAX_PATH_BYTES else None


def listen_locally(folder: Path, incarnation: str) -> socket.socket | None:
    """Listen for the processes of this node, and delete the sockets of dead ones. None: no socket is possible here.

    Raises OSError when the folder refuses a socket.
    """
    path = socket_path(folder, incarnation)
    if path is None:
        return None
    _delete_stale(folder)
    listener = socket.socket(socket.AF_UNIX)
    try:
        os.fchmod(listener.fileno(), 0o600)  # the file that bind makes has this mode from its first moment
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def connect_locally(folder: Path, incarnation: str) -> socket.socket | None:
    """Connect to a process of this node.

    None: it does not listen here, is another user's, or this process has no socket to spare; TCP is left then.
    """
    path = socket_path(folder, incarnation)
    if path is None:
        return None
    try:
        connection = socket.socket(socket.AF_UNIX)
    except OSError:  # for example, every file descriptor is in use
        return None
    connection.setblocking(False)  # a full backlog is an error, not a wait
    with suppress(OSError):
        connection.connect(str(path))
        if is_own_user(connection):
            return enlarged(connection)
    connection.close()
    return None


def is_own_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end runs as this process's user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == _own_user())


def _own_user() -> int:
    return os.geteuid()


def enlarged(connection: socket.socket) -> socket.socket:
    """Return the connection, with room in the kernel for a chunk."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    return connection


def _delete_stale(folder: Path) -> None:
    """Delete old sockets of this folder where nobody listens any more."""
    for path in (*folder.glob(f"*{SUFFIX}"), *folder.glob(f"*{TLS_SUFFIX}")):
        with suppress(OSError):
            about = path.lstat()
            if stat.S_ISSOCK(about.st_mode) and time.time() - about.st_mtime > STALE_AFTER_S and not _listens(path):
                path.unlink()


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True
