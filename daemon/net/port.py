"""`python -m headway.daemon.net.port`: the process that serves a node's one port. The daemon starts it.

It learns whom a connection wants, and passes its bytes on, with one thread for each direction. It decrypts nothing and
knows no key: TLS is between the two ends, and so is the question who may do what. What strangers may take is limited:
connections, and the time to say what they want. A client that began TLS is a stranger until the server accepts it.
When all connections are taken, the oldest stranger goes.

A node that can only dial out keeps some connections standing by at a relay, which is the port of another node. Whoever
wants that node gets one of them: a line tells the node which of its servers is meant, and from then on bytes are passed
on. The relay passes TLS on as well: it sees ciphertext only.
"""

import argparse
import fcntl
import os
import re
import signal
import socket
import sys
import threading
import time
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from headway.daemon.base.own_process import die_with_parent
from headway.stages.sockets.local_socket import TLS_SUFFIX, socket_path
from headway.stages.sockets.open_files import most_connections, raise_open_file_limit

TLS_HANDSHAKE: Final = 0x16
MAX_HEAD_BYTES: Final = 1024
"""Maximum size of a head; gRPC's CONNECT has about 100 bytes and the server's name twice."""
HEAD_END: Final = b"\r\n\r\n"
VIA: Final = "~"
"""Stands between a node that can only dial out and the name of a server there, empty for its daemon."""
_HEAD: Final = re.compile(rb"(CONNECT|STANDBY) ([0-9A-Za-z._~-]{1,300}):\d{1,5} HTTP/1\.[01]\r\n")
_METHODS: Final = (b"CONNECT ", b"STANDBY ")
OPENING_S: Final = 10.0
"""Time to say what a connection is for."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What a connection is for."""

    name: str
    """The server's name, of this node or of one that stands by here; empty for the daemon."""
    token: str = ""
    """That of a node which offers the connection, to whoever wants it."""


def read_opening(connection: socket.socket) -> Opening:
    """Return what a connection asks for. Reads its head, and nothing that is for others.

    TLS begins with a record of type 22 (RFC 8446, section 5.1) and is meant for the daemon. HTTP's CONNECT (RFC 9110,
    section 9.3.6) names another server; TLS with that one follows. STANDBY, in the same form, is of a node that can
    only dial out: it offers the connection to whoever wants that node.

    Raises ValueError for anything else, and OSError when it ends or takes too long.
    """
    until, head = time.monotonic() + OPENING_S, b""
    while True:
        connection.settimeout(max(until - time.monotonic(), 0.001))
        raw = connection.recv(MAX_HEAD_BYTES - len(head), socket.MSG_PEEK)
        if not raw:
            raise ConnectionError("it has ended")
        if not head and raw[0] == TLS_HANDSHAKE:
            return Opening("")
        end = (head + raw).find(HEAD_END)
        head += connection.recv(len(raw) if end < 0 else end + len(HEAD_END) - len(head))
        if not any(method.startswith(head[: len(method)]) for method in _METHODS):
            raise ValueError("neither TLS nor CONNECT")
        if end >= 0:
            break
        if len(head) >= MAX_HEAD_BYTES:
            raise ValueError(f"a head of {MAX_HEAD_BYTES} bytes or more")
    found = _HEAD.match(head)
    if found is None:
        raise ValueError("a CONNECT without a server's name")
    return Opening("", found[2].decode()) if found[1] == b"STANDBY" else Opening(found[2].decode())


PIPE_BYTES: Final = 256 << 10
"""Room between two sockets for each direction; the kernel may allow less."""
MAX_ALERT_BYTES: Final = 64
"""Room for the record with which TLS refuses a client (RFC 8446, section 6), however it is encrypted."""
MAX_RETRY_BYTES: Final = 256
"""Room for the record with which a server asks a client to begin again (RFC 8446, section 4.1.4). A server's first real
words are longer, because its certificate is among them.
"""


class Passage:
    """A connection, and once it is known whom it wants, the other one: their bytes go to each other until both have
    ended, or one is gone.

    A stranger gets one answer of a server that speaks TLS, and then at most an alert. The passage is proven when the
    server answers the outer side's second words at greater length. Nothing is decrypted to see that.
    """

    def __init__(self, outer: socket.socket, inner: socket.socket | None = None) -> None:
        self.outer, self.inner = outer, inner
        self.name = ""
        """Of the server that was wanted."""
        self.began_at = time.monotonic()
        self.is_proven = False
        self.num_inward = self.num_outward = 0
        """Bytes that have come from the outer and from the inner side. Each is counted before it is passed on."""
        self._num_heard = 0
        """Bytes of the outer side when the server first answered with its certificate; 0: it has not."""
        self._num_answered = 0
        """Bytes of the server when the outer side spoke again; 0: it has not."""
        self._has_ended = False

    def run(self, pace: Callable[[int], None]) -> bool:
        """Pass all bytes on; return True at the end. pace: called with each number of bytes; it may block.

        Raises RuntimeError when no thread is left.
        """
        outer, inner = self.outer, self.inner
        assert inner is not None, "nobody is wanted"
        for each in (outer, inner):
            each.settimeout(None)
        if self._has_ended:  # before the other one was known
            self.end()
        back = threading.Thread(target=self._move, args=(inner, outer, self._told, pace), daemon=True)
        back.start()
        self._move(outer, inner, self._heard, pace)
        back.join()
        return True

    def end(self) -> None:
        """Let every thread that waits for one of the two sockets go on, to the end."""
        self._has_ended = True
        for each in (self.outer, self.inner):
            with suppress(OSError):
                if each is not None:
                    each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close both sockets, once no thread uses them."""
        self.outer.close()
        if self.inner is not None:
            self.inner.close()

    def _move(
        self, source: socket.socket, target: socket.socket, count: Callable[[int], None], pace: Callable[[int], None]
    ) -> None:
        """Pass one side's bytes on, through a pipe, as splice(2) wants it."""
        try:
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
        except OSError:  # no file is left
            self.end()
            return
        try:
            with suppress(OSError):  # the user's pipes have too many pages already
                fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            while num_held := os.splice(source.fileno(), write_end, PIPE_BYTES, flags=os.SPLICE_F_MOVE):
                count(num_held)
                pace(num_held)
                while num_held:
                    num_held -= os.splice(read_end, target.fileno(), num_held, flags=os.SPLICE_F_MOVE)
            target.shutdown(socket.SHUT_WR)
        except OSError:  # an end is gone, and the other one learns it
            self.end()
        finally:
            os.close(read_end)
            os.close(write_end)

    def _heard(self, num_bytes: int) -> None:
        if self._num_heard and not self._num_answered:
            self._num_answered = self.num_outward
        self.num_inward += num_bytes

    def _told(self, num_bytes: int) -> None:
        self.num_outward += num_bytes
        if self.num_outward > MAX_RETRY_BYTES and not self._num_heard:
            self._num_heard = self.num_inward
        if self._num_answered and self.num_outward > self._num_answered + MAX_ALERT_BYTES:
            self.is_proven = True


MOST_PASSAGES: Final = 2000
"""Each has two threads."""
MAX_OPENINGS: Final = 512
"""Maximum number of connections that have not said what they are for; beyond, the oldest is closed."""
MAX_STANDING_BY: Final = 64
"""Maximum number of connections that stand by for one node; beyond, the oldest is closed."""
NUM_STANDING_BY: Final = 8
"""Number of connections that a node has standing by at each relay: so many can be taken at once."""
ANSWER_S: Final = 10.0
"""Time for a relay to take a connection that shall stand by, and for a server to take one."""
PAUSE_S: Final = 1.0
"""Pause after a connection to a relay failed, before another one is dialled."""
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
STACK_BYTES: Final = 256 << 10
MAX_LINE_BYTES: Final = 128
TAKEN: Final = b"HTTP/1.1 200 OK\r\n\r\n"
OPEN: Final = b"OPEN %s\r\n"
"""What a node that stands by is told: the name of the server that is wanted, empty for its daemon."""
_OPEN: Final = re.compile(rb"OPEN ([0-9A-Za-z._-]{0,64})\r\n")
_UNKNOWN: Final = b"HTTP/1.1 404 Not Found\r\n\r\n"
_MALFORMED: Final = b"HTTP/1.1 400 Bad Request\r\n\r\n"

Connect = Callable[[str], socket.socket | None]
"""Connects to a server of this node by its name, empty for the daemon; None: there is none. Raises OSError."""


@dataclass(frozen=True, slots=True)
class Relay:
    """Where a node stands by."""

    host: str
    port: int
    token: str


class SharedPort:
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
        self._lock = threading.Lock()
        """Holds for all that follows. No thread that has it waits for a connection."""
        self._may_pass_at = 0.0
        """When what has passed is within the limit again."""
        self._passages: dict[Passage, None] = {}
        """The oldest first. Each has a thread, which closes it."""
        self._tokens: dict[str, str] = {}
        """Node by the token with which it stands by here."""
        self._standing_by: dict[str, deque[socket.socket]] = {}
        """By token, the oldest first. Only of known tokens; nobody reads from them."""
        self._relays: dict[Relay, set[socket.socket]] = {}
        """Where this node stands by, with the connections that nobody has taken."""

    @property
    def num_passages(self) -> int:
        """Return the number of connections, without those that stand by."""
        return len(self._passages)

    @property
    def num_standing_by(self) -> int:
        """Return the number of connections that stand by here."""
        return sum(map(len, self._standing_by.values()))

    def turn(self, *, most_s: float = 1.0) -> None:
        """Take one connection; wait for it at most this long."""
        self._listener.settimeout(most_s)
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            return
        except OSError:  # no file is left, or the connection is gone: those that wait stay in the kernel's queue
            time.sleep(REST_S)
            return
        prepare(connection)
        passage = Passage(connection)
        self._begin(passage, partial(self._served, passage))

    def expect(self, tokens: Mapping[str, str]) -> None:
        """Let these nodes stand by, by token, and no others."""
        with self._lock:
            gone = [self._standing_by.pop(token, ()) for token in self._tokens.keys() - tokens.keys()]
            self._tokens = dict(tokens)
        for connection in (each for queue in gone for each in queue):
            connection.close()

    def stand_by_at(self, relays: Iterable[Relay]) -> None:
        """Stand by at these from now on, and nowhere else."""
        wanted = set(relays)
        with self._lock:
            gone = [self._relays.pop(relay) for relay in self._relays.keys() - wanted]
            new = {relay: set[socket.socket]() for relay in wanted - self._relays.keys()}
            self._relays |= new
            for connection in (each for standing in gone for each in [*standing]):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for relay, standing in new.items():
            for _ in range(NUM_STANDING_BY):
                threading.Thread(target=self._stand_by, args=(relay, standing), daemon=True).start()

    def close(self) -> None:
        """End every connection; their threads close them."""
        self.expect({})
        self.stand_by_at(())
        with self._lock:
            for passage in self._passages:
                passage.end()

    def _begin(self, passage: Passage, serve: Callable[[], bool]) -> None:
        """Serve a connection in a thread of its own, if there is room. serve: returns whether it is to be closed."""

        def work() -> None:
            is_over = True
            try:
                with suppress(OSError, RuntimeError):  # it is gone, or no file or thread is left
                    is_over = serve()
            finally:
                with self._lock:
                    self._passages.pop(passage, None)
                if is_over:
                    if passage.inner is not None:
                        self._passed(passage)
                    passage.close()

        try:
            if self._admit(passage):
                start_new_thread(work, ())  # a Thread's start would wait until it runs, and delay all others
                return
        except RuntimeError:  # no thread is left
            with self._lock:
                self._passages.pop(passage, None)
        passage.close()

    def _admit(self, passage: Passage) -> bool:
        """Make room by the oldest stranger, if there is need. Return whether there is room."""
        with self._lock:
            is_full = len(self._passages) + self.num_standing_by >= self._most
            unheard = [each for each in self._passages if each.inner is None]
            strangers = [each for each in self._passages if not each.is_proven] if is_full else unheard
            if is_full or len(unheard) >= MAX_OPENINGS:
                if not strangers:
                    return False
                del self._passages[strangers[0]]
                strangers[0].end()
            self._passages[passage] = None
            return True

    def _served(self, passage: Passage) -> bool:
        """Do what a connection wants, or send it away. Return whether it is to be closed. Raises OSError."""
        connection = passage.outer
        try:
            opening = read_opening(connection)
        except ValueError:
            _dismiss(connection, _MALFORMED)
            return True
        if opening.token:
            if self._keep_standing_by(connection, opening.token):
                return False
            _dismiss(connection, _UNKNOWN)
            return True
        inner = self._inner(opening.name)
        if inner is None:
            if opening.name:
                _dismiss(connection, _UNKNOWN)
            return True
        passage.name, passage.inner = opening.name, inner
        if opening.name:
            connection.sendall(TAKEN)
        return passage.run(self._pace)

    def _inner(self, name: str) -> socket.socket | None:
        """Return a connection to a server of this node, or of one that stands by. Raises OSError."""
        node, via, server = name.partition(VIA)
        if not via:
            return self._connect(name)
        while True:
            with self._lock:
                queues = [queue for token, queue in self._standing_by.items() if self._tokens.get(token) == node]
                connection = next((queue.popleft() for queue in queues if queue), None)
            if connection is None:
                return None
            with suppress(OSError):
                if _is_idle(connection):
                    connection.sendall(OPEN % server.encode())
                    return connection
            connection.close()

    def _keep_standing_by(self, connection: socket.socket, token: str) -> bool:
        """Return False for an unknown token. Raises OSError."""
        with self._lock:
            if token not in self._tokens:
                return False
            queue = self._standing_by.get(token, deque())
            for gone in [each for each in queue if not _is_idle(each)]:
                queue.remove(gone)
                gone.close()
            connection.sendall(TAKEN)  # a few bytes, which the kernel takes at once
            queue.append(connection)
            self._standing_by[token] = queue
            if len(queue) > MAX_STANDING_BY:
                queue.popleft().close()
        return True

    def _stand_by(self, relay: Relay, standing: set[socket.socket]) -> None:
        """Keep one connection standing by at a relay, as long as that is one of them."""
        while self._relays.get(relay) is standing:
            connection = socket.socket(socket.AF_INET6 if ":" in relay.host else socket.AF_INET)
            standing.add(connection)
            try:
                inner = self._connect(_called(connection, relay))
                if inner is None:
                    raise ConnectionRefusedError
            except (OSError, ValueError, OverflowError):  # the latter two: nonsense, or no address at all
                connection.close()
                time.sleep(PAUSE_S)
                continue
            finally:
                standing.discard(connection)
            passage = Passage(connection, inner)
            self._begin(passage, partial(passage.run, self._pace))

    def _pace(self, num_bytes: int) -> None:
        """Wait until all passages together may pass these bytes on."""
        if not self._most_bytes_per_s:
            return
        with self._lock:
            now = time.monotonic()
            self._may_pass_at = max(self._may_pass_at, now - BURST_S) + num_bytes / self._most_bytes_per_s
            wait_s = self._may_pass_at - now
        time.sleep(max(wait_s, 0.0))


def prepare(connection: socket.socket) -> None:
    """Let a connection hold no bytes back, and end when the other machine is silent.

    A router forgets idle connections without a word. What stands by is idle until somebody wants it.
    """
    with suppress(OSError):  # a unix socket has no such options
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ASK_AFTER_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_AGAIN_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, MOST_ASKS)


def _is_idle(connection: socket.socket) -> bool:
    """Return whether a connection has neither ended nor spoken before it was spoken to."""
    connection.setblocking(False)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _dismiss(connection: socket.socket, answer: bytes) -> None:
    """Say why a connection ends. Raises OSError."""
    connection.setblocking(False)
    with suppress(BlockingIOError):
        connection.recv(MAX_HEAD_BYTES)  # unread, it would cut the answer off
    connection.send(answer)


def _called(connection: socket.socket, relay: Relay) -> str:
    """Stand by at a relay; return the name of the server that somebody wants. What follows is left unread.

    Raises OSError, ValueError, OverflowError.
    """
    prepare(connection)
    connection.settimeout(ANSWER_S)
    connection.connect((relay.host, relay.port))
    connection.sendall(f"STANDBY {relay.token}:0 HTTP/1.1\r\n\r\n".encode())
    raw = b""
    while not raw.endswith(b"\n") or TAKEN.startswith(raw):
        if raw == TAKEN:
            connection.settimeout(None)
        piece = connection.recv(1)
        raw += piece
        if not piece or len(raw) > MAX_LINE_BYTES or not raw.startswith(TAKEN[: len(raw)]):
            raise ValueError("the relay says nonsense, or has ended")
    found = _OPEN.fullmatch(raw.removeprefix(TAKEN))
    if found is None:
        raise ValueError("the relay says nonsense")
    return found[1].decode()


BEAT: Final = b"."
"""What the process writes to its standard output, to show that it does not stand still."""
BEAT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class PortOrder:
    """All that holds from now on: a line from the daemon."""

    tokens: dict[str, str] = field(default_factory=dict)
    """Node by token, of the nodes that stand by here."""
    relays: tuple[Relay, ...] = ()
    """Where this node stands by; none: others dial it directly."""


def obey(port: SharedPort, lines: Iterable[bytes]) -> None:
    """Do what the daemon wants, line by line."""
    for line in lines:
        try:
            order = msgspec.json.decode(line, type=PortOrder)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            sys.stderr.write(f"an order that cannot be read changes nothing: {error}\n")
        else:
            port.expect(order.tokens)
            port.stand_by_at(order.relays)


def main() -> None:
    """Serve until the daemon is gone."""
    die_with_parent()
    # As for workers: the daemon still needs its port while it leaves.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="headway.daemon.net.port", description=__doc__)
    parser.add_argument("--listener", type=int, required=True, help="file number of the listening socket")
    parser.add_argument("--daemon-port", type=int, required=True, help="the daemon's port on the loopback")
    parser.add_argument("--folder", type=Path, required=True, help="where the workers' sockets are")
    parser.add_argument("--most-passages", type=int, default=0, help="0: as many as files allow")
    parser.add_argument("--most-bytes-per-s", type=float, default=0.0, help="of all together; 0: no limit")
    parser.add_argument("--tells", action="store_true", help="log each passage at its end")
    options = parser.parse_args()

    def connect(name: str) -> socket.socket | None:
        path = socket_path(options.folder, name, TLS_SUFFIX) if name else None
        if name and path is None:
            return None
        connection = socket.socket(socket.AF_UNIX if name else socket.AF_INET)
        connection.settimeout(ANSWER_S)
        try:
            connection.connect(str(path) if name else ("127.0.0.1", options.daemon_port))
        except OSError:  # nobody listens
            connection.close()
            return None
        prepare(connection)
        return connection

    threading.stack_size(STACK_BYTES)
    most = min(MOST_PASSAGES, max(1, most_connections(raise_open_file_limit()) * 2 // FILES_A_PASSAGE))
    port = SharedPort(
        socket.socket(fileno=options.listener),
        connect,
        most_passages=min(most, options.most_passages or most),
        most_bytes_per_s=options.most_bytes_per_s,
        passed=_teller() if options.tells else lambda _: None,
    )
    threading.Thread(target=obey, args=(port, sys.stdin.buffer), daemon=True).start()
    os.set_blocking(sys.stdout.fileno(), False)
    next_beat_at = 0.0
    while True:
        if time.monotonic() >= next_beat_at:
            next_beat_at = time.monotonic() + BEAT_S
            with suppress(BlockingIOError):  # a daemon that is busy for long reads them later
                os.write(sys.stdout.fileno(), BEAT)
        port.turn(most_s=BEAT_S)


def _teller() -> Callable[[Passage], None]:
    """Return what logs a passage. Only a relay's process needs its imports."""
    import structlog

    from headway.daemon.base.logging import configure_logs

    configure_logs("info", "auto", node="")
    log = structlog.get_logger()

    def tell(passage: Passage) -> None:
        seconds = round(time.monotonic() - passage.began_at, 1)
        num_bytes = passage.num_inward + passage.num_outward
        log.info("passed", server=passage.name, num_bytes=num_bytes, seconds=seconds)

    return tell


if __name__ == "__main__":
    main()
