"""`python -m headway.daemon.front`: the process that serves a node's shared port. The daemon starts it."""

import argparse
import errno
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from headway.daemon.front.front import FILES_A_PASSAGE, Front
from headway.daemon.front.front_orders import BEAT, BEAT_S, OrderReader
from headway.daemon.front.outpost import Outpost
from headway.daemon.runtime.parent_death import die_with_parent
from headway.stages.sockets.local_socket import TLS_SUFFIX, socket_path
from headway.stages.sockets.open_files import most_connections, raise_open_file_limit


def main() -> None:
    """Serve until the daemon is gone."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="headway.daemon.front", description=__doc__)
    parser.add_argument("--listener", type=int, required=True, help="file number of the listening socket")
    parser.add_argument("--daemon-port", type=int, required=True, help="the daemon's port on the loopback")
    parser.add_argument("--folder", type=Path, required=True, help="where the workers' sockets are")
    options = parser.parse_args()

    def connect(name: str) -> socket.socket | None:
        if not name:
            return _begun(socket.socket(socket.AF_INET), ("127.0.0.1", options.daemon_port))
        path = socket_path(options.folder, name, TLS_SUFFIX)
        return None if path is None else _begun(socket.socket(socket.AF_UNIX), str(path))

    most = max(1, most_connections(raise_open_file_limit()) * 2 // FILES_A_PASSAGE)
    front = Front(socket.socket(fileno=options.listener), connect, most_passages=most)
    outpost = Outpost(front, connect)
    orders = OrderReader(front, outpost)
    os.set_blocking(sys.stdin.fileno(), False)
    os.set_blocking(sys.stdout.fileno(), False)
    front.watch(sys.stdin.fileno(), lambda: orders.read(sys.stdin.fileno()))
    next_beat_at = 0.0
    while True:
        if time.monotonic() >= next_beat_at:
            next_beat_at = time.monotonic() + BEAT_S
            with suppress(BlockingIOError):  # a daemon that is busy for long reads them later
                os.write(sys.stdout.fileno(), BEAT)
        outpost.turn()
        front.turn()


def _begun(connection: socket.socket, address: tuple[str, int] | str) -> socket.socket | None:
    """Return a connection that is made, or is being made; None: nobody listens there."""
    connection.setblocking(False)
    error = connection.connect_ex(address)
    if error in (0, errno.EINPROGRESS):
        return connection
    connection.close()  # nobody listens, or the queue of a unix socket is full
    return None


if __name__ == "__main__":
    main()
