"""One thread takes connections, learns whom they want, and passes their bytes on; all over real sockets."""

import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import pytest

from headway.daemon.net import front as front_module
from headway.daemon.net.certificates import CertificateAuthority
from headway.daemon.net.front import MAX_RETRY_BYTES, Front, Passage

CONNECT = b"CONNECT %s:443 HTTP/1.1\r\n\r\n"
SOON_S = 10.0


@dataclass
class Node:
    """A front with two servers behind it that say who they are, and then echo until the end."""

    port: int
    folder: Path
    front: Front
    opened: list[socket.socket] = field(default_factory=list)

    def dial(self) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port), timeout=SOON_S)
        self.opened.append(made)
        return made

    def asking(self, name: bytes) -> socket.socket:
        made = self.dial()
        made.sendall(CONNECT % name)
        return made


def echo(server: socket.socket, greeting: bytes) -> None:
    """Serve each connection in a thread: the greeting, then what comes, to its end."""

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.sendall(greeting)
            while piece := connection.recv(1 << 16):
                connection.sendall(piece)

    with suppress(OSError):
        while True:
            connection, _ = server.accept()
            threading.Thread(target=serve, args=(connection,), daemon=True).start()


@pytest.fixture
def most_passages() -> int:
    return 100


@pytest.fixture
def node(tmp_path: Path, most_passages: int) -> Iterator[Node]:
    servers = {"": socket.create_server(("127.0.0.1", 0)), "worker": socket.socket(socket.AF_UNIX)}
    servers["worker"].bind(str(tmp_path / "worker"))
    servers["worker"].listen(64)
    for name, server in servers.items():
        threading.Thread(target=echo, args=(server, name.encode() or b"daemon"), daemon=True).start()

    def connect(name: str) -> socket.socket | None:
        made = socket.socket(servers[name].family) if name in servers else None
        if made is not None:
            made.setblocking(False)
            made.connect_ex(servers[name].getsockname())
        return made

    listener = socket.create_server(("127.0.0.1", 0))
    front, is_over = Front(listener, connect, most_passages=most_passages), threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            front.turn(most_s=0.02)

    thread = threading.Thread(target=serve)
    thread.start()
    made = Node(listener.getsockname()[1], tmp_path, front)
    yield made
    is_over.set()
    thread.join()
    front.close()
    for each in (*servers.values(), listener, *made.opened):
        each.close()


def heard(connection: socket.socket, num_bytes: int) -> bytes:
    """What comes, up to so many bytes or the end, which is a reset if the other side has not read everything."""
    raw = b""
    with suppress(ConnectionResetError):
        while len(raw) < num_bytes and (piece := connection.recv(num_bytes - len(raw))):
            raw += piece
    return raw


def accept(connection: socket.socket) -> None:
    """Hear the worker's greeting, then let it answer twice, at a length of a certificate."""
    assert heard(connection, 25).endswith(b"worker")
    words = b"x" * (MAX_RETRY_BYTES + 1)
    for _ in range(2):
        connection.sendall(words)
        assert heard(connection, len(words)) == words


def test_tls_reaches_the_daemon_with_every_byte(node: Node) -> None:
    one = node.dial()
    one.sendall(b"\x16hello")
    assert heard(one, 12) == b"daemon\x16hello"


def test_a_name_reaches_its_server_behind_one_answer(node: Node) -> None:
    """The head is for the port alone; what comes behind it, even at once, is the server's."""
    one = node.dial()
    one.sendall(CONNECT % b"worker" + b"more")
    assert heard(one, 29) == b"HTTP/1.1 200 OK\r\n\r\nworkermore"


def test_a_head_may_come_in_pieces(node: Node) -> None:
    one = node.dial()
    for piece in (b"CONN", b"ECT worker:443 HTTP/1.1\r\n", b"\r\n"):
        one.sendall(piece)
        time.sleep(0.05)
    assert heard(one, 25).endswith(b"worker")


@pytest.mark.parametrize(("said", "answer"), [(CONNECT % b"nobody", b"404"), (b"GET / HTTP/1.1\r\n\r\n", b"400")])
def test_who_wants_nobody_of_this_node_is_told(node: Node, said: bytes, answer: bytes) -> None:
    one = node.dial()
    one.sendall(said)
    assert heard(one, 1000).startswith(b"HTTP/1.1 " + answer)


def test_bytes_of_both_ways_arrive_in_order(node: Node) -> None:
    """64 MiB there and back, while the reader is slower than the writer, and an end of one way after the last byte."""
    content, back = os.urandom(1 << 20), sha256()
    one = node.asking(b"worker")
    assert heard(one, 25)

    def write() -> None:
        for _ in range(64):
            one.sendall(content)
        one.shutdown(socket.SHUT_WR)

    writer = threading.Thread(target=write)
    writer.start()
    num_bytes = 0
    while piece := one.recv(1 << 20):
        num_bytes += len(piece)
        back.update(piece)
    writer.join()
    assert (num_bytes, back.digest()) == (64 << 20, sha256(content * 64).digest())


def test_a_slow_reader_delays_no_other(node: Node) -> None:
    """One writes and does not read: its bytes wait in the kernel, and another's pass."""
    slow = node.asking(b"worker")
    slow.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            slow.send(bytes(1 << 20))
    quick = node.asking(b"worker")
    quick.sendall(b"quick")
    assert heard(quick, 30).endswith(b"workerquick")


def test_an_end_that_is_gone_ends_the_other(node: Node) -> None:
    one = node.asking(b"worker")
    assert heard(one, 25)
    one.close()
    until = time.monotonic() + SOON_S
    while node.front.num_passages and time.monotonic() < until:
        time.sleep(0.01)
    assert not node.front.num_passages


def test_who_says_nothing_is_closed_in_time(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "OPENING_S", 0.1)
    silent, half = node.dial(), node.dial()
    half.sendall(b"CONNECT wor")
    assert (heard(silent, 1), heard(half, 1)) == (b"", b"")


@pytest.mark.parametrize("most_passages", [3])
def test_strangers_take_only_what_is_left(node: Node) -> None:
    """At the limit the oldest that has not said what it wants gives way, and proven passages stay."""
    passages = [node.asking(b"worker") for _ in range(2)]
    for each in passages:
        accept(each)
    silent = node.dial()
    time.sleep(0.1)
    late = node.asking(b"worker")
    assert heard(silent, 1) == b""
    accept(late)
    assert heard(node.dial(), 1) == b"", "all are taken"
    passages[0].sendall(b"still")
    assert heard(passages[0], 5) == b"still"


@pytest.mark.parametrize("most_passages", [20])
def test_friends_come_through_a_flood_that_begins_like_tls(node: Node) -> None:
    """Each of 500 openings is passed on to the daemon and then says nothing. Old friends stay, and new ones come."""
    friends = [node.asking(b"worker") for _ in range(3)]
    for each in friends:
        accept(each)
    for number in range(500):
        stranger = node.dial()
        stranger.sendall(b"\x16")
        if number % 100 == 99:
            friends.append(node.asking(b"worker"))
            accept(friends[-1])
    for each in friends:
        each.sendall(b"still")
        assert heard(each, 5) == b"still"


@pytest.mark.parametrize(
    ("release", "is_retried"),
    [(ssl.TLSVersion.TLSv1_2, False), (ssl.TLSVersion.TLSv1_3, False), (ssl.TLSVersion.TLSv1_3, True)],
)
@pytest.mark.parametrize("has_certificate", [True, False])
def test_a_client_that_tls_refuses_proves_nothing(
    tmp_path: Path, release: ssl.TLSVersion, is_retried: bool, has_certificate: bool
) -> None:
    """A whole handshake and an answer prove a passage; one without the certificate that is asked for does not.

    Nor does a client that begins with a kind of key that the server does not have, so that it is asked to begin again.
    """
    authority = CertificateAuthority.create(tmp_path / "ca")
    chains = {name: authority.issue(name) for name in ("server", "client")}
    serves, asks = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    serves.verify_mode, asks.check_hostname, asks.verify_mode = ssl.CERT_REQUIRED, False, ssl.CERT_NONE
    asks.minimum_version = asks.maximum_version = release
    if is_retried:
        serves.set_ecdh_curve("secp521r1")  # no client's first offer
    serves.load_verify_locations(chains["server"] / "ca.pem")
    for context, name in [(serves, "server")] + [(asks, "client")] * has_certificate:
        context.load_cert_chain(chains[name] / "cert.pem", chains[name] / "key.pem")
    (outside, outer), (inner, inside) = socket.socketpair(), socket.socketpair()
    for each in (outer, inner):
        each.setblocking(False)
    passage, is_over = Passage(outer, inner), threading.Event()

    def serve() -> None:
        with serves.wrap_socket(inside, server_side=True, do_handshake_on_connect=False) as made:
            with suppress(OSError):
                made.do_handshake()
                made.sendall(made.recv(100) * 20)
            is_over.wait(SOON_S)  # an end that is gone would end the passage, and the alert with it

    def ask() -> None:
        with suppress(OSError), asks.wrap_socket(outside) as made:
            made.sendall(b"hello")
            made.recv(100)
        is_over.set()

    threads = [threading.Thread(target=each) for each in (serve, ask)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + SOON_S
    with suppress(OSError):  # an end is gone, so it is over
        while not (is_over.is_set() and not threads[0].is_alive()) and time.monotonic() < until:
            passage.move()
            time.sleep(0.001)
        passage.move()
    passage.close()
    for thread in threads:
        thread.join()
    assert passage.is_proven == has_certificate


def test_all_passages_together_keep_to_a_rate_and_each_is_told_of() -> None:
    """Two senders and a limit of 4 MB/s: 2 MB, counted both ways, take about half a second."""
    server, listener = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    threading.Thread(target=echo, args=(server, b"worker"), daemon=True).start()
    told: list[Passage] = []

    def connect(_: str) -> socket.socket:
        made = socket.socket()
        made.setblocking(False)
        made.connect_ex(server.getsockname())
        return made

    front = Front(listener, connect, most_passages=9, most_bytes_per_s=4e6, passed=told.append)
    content, began = os.urandom(500_000), time.monotonic()
    received: list[bytes] = []

    def send() -> None:
        with socket.create_connection(listener.getsockname(), timeout=SOON_S) as made:
            made.sendall(CONNECT % b"worker" + content)
            made.shutdown(socket.SHUT_WR)
            raw = b""
            while piece := made.recv(1 << 16):
                raw += piece
            received.append(raw)

    senders = [threading.Thread(target=send) for _ in range(2)]
    for sender in senders:
        sender.start()
    while len(told) < 2 and time.monotonic() < began + SOON_S:
        front.turn(most_s=0.01)
    took_s = time.monotonic() - began
    for sender in senders:
        sender.join()
    front.close()
    server.close()
    listener.close()
    assert all(raw.endswith(b"worker" + content) for raw in received)
    assert [(each.name, each.num_bytes) for each in told] == [("worker", 2 * len(content) + len(b"worker"))] * 2
    assert took_s > 0.3, f"2 MB took {took_s:.2f} s"
