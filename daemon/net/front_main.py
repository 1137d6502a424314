"""`python -m headway.daemon.net.front_main`: the process that serves a node's shared port. The daemon starts it."""

import argparse
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from headway.daemon.base.own_process import die_with_parent
from headway.daemon.net.front import FILES_A_PASSAGE, Front, Passage
from headway.daemon.net.outpost import BEAT, BEAT_S, OrderReader, Outposts
from headway.stages.sockets.local_socket import TLS_SUFFIX, socket_path
from headway.stages.sockets.open_files import most_connections, raise_open_file_limit


def main() -> None:
    """Serve until the daemon is gone."""
    die_with_parent()
    # As for workers: the daemon still needs its port while it leaves.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="headway.daemon.net.front_main", description=__doc__)
    parser.add_argument("--listener", type=int, required=True, help="file number of the listening socket")
    parser.add_argument("--daemon-port", type=int, required=True, help="the daemon's port on the loopback")
    parser.add_argument("--folder", type=Path, required=True, help="where the workers' sockets are")
    parser.add_argument("--most-passages", type=int, default=0, help="0: as many as files allow")
    parser.add_argument("--most-bytes-per-s", type=float, default=0.0, help="of all together; 0: no limit")
    parser.add_argument("--tells", action="store_true", help="log each passage at its end")
    options = parser.parse_args()

    def connect(name: str) -> socket.socket | None:
        if not name:
            return _begun(socket.socket(socket.AF_INET), ("127.0.0.1", options.daemon_port))
        path = socket_path(options.folder, name, TLS_SUFFIX)
        return None if path is None else _begun(socket.socket(socket.AF_UNIX), str(path))

    most = max(1, most_connections(raise_open_file_limit()) * 2 // FILES_A_PASSAGE)
    front = Front(
        socket.socket(fileno=options.listener),
        connect,
        most_passages=min(most, options.most_passages or most),
        most_bytes_per_s=options.most_bytes_per_s,
        passed=_teller() if options.tells else lambda _: None,
    )
    outposts = Outposts(front, connect)
    orders = OrderReader(front, outposts)
    os.set_blocking(sys.stdin.fileno(), False)
    os.set_blocking(sys.stdout.fileno(), False)
    front.watch(sys.stdin.fileno(), lambda: orders.read(sys.stdin.fileno()))
    next_beat_at = 0.0
    while True:
        if time.monotonic() >= next_beat_at:
            next_beat_at = time.monotonic() + BEAT_S
            with suppress(BlockingIOError):  # a daemon that is busy for long reads them later
                os.write(sys.stdout.fileno(), BEAT)
        outposts.turn()
        front.turn()


def _teller() -> Callable[[Passage], None]:
    """Return what logs a passage. Only a relay's process needs its imports."""
    import structlog

    from headway.daemon.base.logging import configure_logs

    configure_logs("info", "auto", node="")
    log = structlog.get_logger()

    def tell(passage: Passage) -> None:
        seconds = round(time.monotonic() - passage.began_at, 1)
        log.info("passed", server=passage.name, num_bytes=passage.num_bytes, seconds=seconds)

    return tell


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
