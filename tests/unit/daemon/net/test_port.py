"""A node's one port learns whom a connection wants, and passes its bytes on. A node that can only dial out stands by at
another one's. All over real sockets.
"""

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from headway.daemon.net import port as port_module
from headway.daemon.net.certificates import CertificateAuthority
from headway.daemon.net.port import (
    MAX_HEAD_BYTES,
    MAX_RETRY_BYTES,
    MAX_STANDING_BY,
    NUM_STANDING_BY,
    TAKEN,
    Opening,
    Passage,
    PortOrder,
    Relay,
    SharedPort,
    obey,
    read_opening,
)

CONNECT = b"CONNECT %s:443 HTTP/1.1\r\n\r\n"
STANDBY = b"STANDBY %s:0 HTTP/1.1\r\n\r\n"
GRPC = b"CONNECT 0123456789abcdef:443 HTTP/1.1\r\nHost: 0123456789abcdef:443\r\nUser-Agent: grpc-httpcli/0.0\r\n\r\n"
SOON_S = 10.0


def until(is_so: Callable[[], bool]) -> None:
    """Wait for something that comes soon."""
    end = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


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


@dataclass
class Node:
    """A port with two servers behind it, the daemon and `worker`, that say who they are, and then echo."""

    port: SharedPort
    listener: socket.socket
    opened: list[socket.socket] = field(default_factory=list)

    @property
    def number(self) -> int:
        return int(self.listener.getsockname()[1])

    def dial(self, said: bytes = b"") -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.number), timeout=SOON_S)
        self.opened.append(made)
        made.sendall(said)
        return made

    def asking(self, name: bytes) -> socket.socket:
        return self.dial(CONNECT % name)


@pytest.fixture
def most_passages() -> int:
    return 100


@pytest.fixture
def nodes(tmp_path: Path, most_passages: int) -> Iterator[Callable[..., Node]]:
    """Make nodes with the same two servers."""
    servers = {"": socket.create_server(("127.0.0.1", 0)), "worker": socket.socket(socket.AF_UNIX)}
    servers["worker"].bind(str(tmp_path / "worker"))
    servers["worker"].listen(64)
    for name, server in servers.items():
        threading.Thread(target=echo, args=(server, name.encode() or b"daemon"), daemon=True).start()
    is_over, made = threading.Event(), list[Node]()

    def connect(name: str) -> socket.socket | None:
        if name not in servers:
            return None
        connection = socket.socket(servers[name].family)
        connection.connect(servers[name].getsockname())
        return connection

    def serve(port: SharedPort) -> None:
        while not is_over.is_set():
            port.turn(most_s=0.02)

    threads = []

    def make(**limits: object) -> Node:
        listener = socket.create_server(("127.0.0.1", 0))
        told: dict[str, object] = {"most_passages": most_passages} | limits
        made.append(Node(SharedPort(listener, connect, **told), listener))  # type: ignore[arg-type]
        threads.append(threading.Thread(target=serve, args=(made[-1].port,)))
        threads[-1].start()
        return made[-1]

    yield make
    is_over.set()
    for thread in threads:
        thread.join()
    for node in made:
        node.port.close()
        until(lambda node=node: not node.port.num_passages)  # type: ignore[misc]
        for each in (node.listener, *node.opened):
            each.close()
    for server in servers.values():
        server.close()


@pytest.fixture
def node(nodes: Callable[..., Node]) -> Node:
    return nodes()


@pytest.fixture
def relay(nodes: Callable[..., Node]) -> Node:
    """A port at which `far` may stand by."""
    made = nodes()
    made.port.expect({"token": "far"})
    return made


@pytest.fixture
def standing(relay: Node, node: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    """The relay, while `far` stands by there."""
    monkeypatch.setattr(port_module, "PAUSE_S", 0.1)
    node.port.stand_by_at([Relay("127.0.0.1", relay.number, "token")])
    until(lambda: relay.port.num_standing_by == NUM_STANDING_BY)
    return relay


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


# --- what a connection says first ---


def opened_by(*pieces: bytes) -> tuple[Opening, bytes]:
    """Return what a connection asks for that says this, and what is left for others."""
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def say() -> None:
            for piece in pieces:
                theirs.sendall(piece)
                time.sleep(0.01 if len(pieces) > 1 else 0)
            theirs.shutdown(socket.SHUT_WR)

        saying = threading.Thread(target=say)
        saying.start()
        try:
            found = read_opening(ours)
        finally:
            saying.join()
        return found, heard(ours, 10_000)


@pytest.mark.parametrize(
    ("pieces", "opening", "rest"),
    [
        ((b"\x16\x03\x01\x02",), Opening(""), b"\x16\x03\x01\x02"),
        ((GRPC + b"\x16\x03",), Opening("0123456789abcdef"), b"\x16\x03"),
        ((GRPC[:5], GRPC[5:-3], GRPC[-3:-2], GRPC[-2:] + b"m"), Opening("0123456789abcdef"), b"m"),
        ((CONNECT % b"node-1.x~abc",), Opening("node-1.x~abc"), b""),
        ((STANDBY % b"00ff",), Opening("", "00ff"), b""),
    ],
)
def test_a_connection_says_whom_it_wants(pieces: tuple[bytes, ...], opening: Opening, rest: bytes) -> None:
    """TLS is for the daemon, a CONNECT for a server by its name; what follows the head belongs to the server."""
    assert opened_by(*pieces) == (opening, rest)


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x00",
        b"PRI * HTTP/2.0\r\n\r\n",
        CONNECT % b"a/b",
        CONNECT % b"../daemon",
        b"CONNECT name HTTP/1.1\r\n\r\n",
        CONNECT % (b"a" * 301),
        b"CONNECT a:443 HTTP/1.1\nHost: a\r\n\r\n",
        GRPC[:-2] + b"X: " + b"y" * MAX_HEAD_BYTES,
    ],
)
def test_anything_else_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"TLS|head|name"):
        opened_by(raw)


@pytest.mark.parametrize("length", [0, 1, 7, 30, len(GRPC) - 1])
def test_a_head_that_ends_early_asks_for_nothing(length: int) -> None:
    with pytest.raises(OSError, match="ended"):
        opened_by(GRPC[:length])


def test_who_says_nothing_is_closed_in_time(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_module, "OPENING_S", 0.1)
    silent, half = node.dial(), node.dial(b"CONNECT wor")
    assert (heard(silent, 1), heard(half, 1)) == (b"", b"")


# --- what is passed on ---


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (b"\x16hello", b"daemon\x16hello"),
        (CONNECT % b"worker" + b"more", TAKEN + b"workermore"),
        (CONNECT % b"nobody", b"HTTP/1.1 404"),
        (b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 400"),
    ],
)
def test_each_reaches_whom_it_wants_with_every_byte_or_is_told(node: Node, said: bytes, answer: bytes) -> None:
    """The head is for the port alone; what comes behind it, even at once, is the server's."""
    assert heard(node.dial(said), len(answer)) == answer


@pytest.mark.parametrize("is_relayed", [False, True])
def test_bytes_of_both_ways_arrive_in_order(request: pytest.FixtureRequest, is_relayed: bool) -> None:
    """64 MiB there and back, while the reader is slower than the writer, and an end of one way after the last byte."""
    content, back = os.urandom(1 << 20), sha256()
    dialled: Node = request.getfixturevalue("standing" if is_relayed else "node")
    one = dialled.asking(b"far~worker" if is_relayed else b"worker")
    assert heard(one, 25) == TAKEN + b"worker"

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


def test_an_end_that_is_gone_ends_the_other_and_leaves_no_file_open(node: Node) -> None:
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(3):
        one = node.asking(b"worker")
        assert heard(one, 25)
        one.close()
    until(lambda: not node.port.num_passages)
    until(lambda: len([*Path("/proc/self/fd").iterdir()]) <= before)


@pytest.mark.parametrize("most_passages", [3])
def test_strangers_take_only_what_is_left(node: Node) -> None:
    """At the limit the oldest that has not said what it wants gives way, and proven passages stay."""
    passages = [node.asking(b"worker") for _ in range(2)]
    for each in passages:
        accept(each)
    silent = node.dial()
    until(lambda: node.port.num_passages == 3)
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
        node.dial(b"\x16")
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

    threads = [threading.Thread(target=each) for each in (serve, ask, lambda: passage.run(lambda _: None))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    passage.close()
    assert passage.is_proven == has_certificate


def test_all_passages_together_keep_to_a_rate_and_each_is_told_of(nodes: Callable[..., Node]) -> None:
    """Two senders and a limit of 4 MB/s: 2 MB, counted both ways, take about half a second."""
    told: list[Passage] = []
    node = nodes(most_bytes_per_s=4e6, passed=told.append)
    content, began, received = os.urandom(500_000), time.monotonic(), list[bytes]()

    def send() -> None:
        made = node.dial(CONNECT % b"worker" + content)
        made.shutdown(socket.SHUT_WR)
        received.append(heard(made, 1 << 20))

    senders = [threading.Thread(target=send) for _ in range(2)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    took_s = time.monotonic() - began
    until(lambda: len(told) == 2)
    assert all(raw.endswith(b"worker" + content) for raw in received)
    expected = ("worker", len(content), len(content) + len(b"worker"))
    assert [(each.name, each.num_inward, each.num_outward) for each in told] == [expected] * 2
    assert took_s > 0.3, f"2 MB took {took_s:.2f} s"


def test_a_connection_ends_when_the_other_machine_is_silent() -> None:
    """The kernel asks; a unix socket has nobody to ask."""
    with socket.socket() as one, socket.socket(socket.AF_UNIX) as other:
        port_module.prepare(one)
        port_module.prepare(other)
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 15


# --- a node that can only dial out ---


def test_whoever_wants_a_node_that_stands_by_reaches_its_servers(standing: Node) -> None:
    """Its daemon and a worker, with bytes that come at once; others take the places of those that left."""
    for name, greeting in ((b"", b"daemon"), (b"worker", b"worker")) * NUM_STANDING_BY:
        until(lambda: standing.port.num_standing_by > 0)
        one = standing.dial(CONNECT % (b"far~" + name) + b"hello")
        assert heard(one, len(TAKEN) + 11) == TAKEN + greeting + b"hello"
    until(lambda: standing.port.num_standing_by == NUM_STANDING_BY)


@pytest.mark.parametrize("name", [b"near~worker", b"far~nobody"])
def test_what_is_not_there_is_closed(standing: Node, name: bytes) -> None:
    """A node that does not stand by, and a server that the node does not have."""
    assert heard(standing.asking(name), 1000).removeprefix(TAKEN) in (b"", b"HTTP/1.1 404 Not Found\r\n\r\n")


def test_only_a_token_lets_stand_by(relay: Node) -> None:
    """A stranger cannot take the place of a node, and a token that is withdrawn ends what it let in."""
    assert heard(relay.dial(STANDBY % b"guessed"), 1000).startswith(b"HTTP/1.1 404")
    one = relay.dial(STANDBY % b"token")
    assert heard(one, len(TAKEN)) == TAKEN
    relay.port.expect({})
    assert heard(one, 1) == b""
    assert heard(relay.asking(b"far~worker"), 1000).startswith(b"HTTP/1.1 404")


def test_a_connection_that_has_ended_or_speaks_is_not_given_to_anybody(relay: Node) -> None:
    gone, loud, there = (relay.dial(STANDBY % b"token") for _ in range(3))
    for each in (gone, loud, there):
        assert heard(each, len(TAKEN)) == TAKEN
    gone.close()
    loud.sendall(b"!")
    relay.asking(b"far~worker")
    assert heard(there, 13) == b"OPEN worker\r\n"


def test_a_node_takes_a_limited_number_of_places(relay: Node) -> None:
    first = relay.dial(STANDBY % b"token")
    assert heard(first, len(TAKEN)) == TAKEN
    for _ in range(MAX_STANDING_BY):
        assert heard(relay.dial(STANDBY % b"token"), len(TAKEN)) == TAKEN
    assert heard(first, 1) == b""


def test_a_relay_that_comes_back_is_dialled_again(standing: Node) -> None:
    """All connections end, as if the relay had been replaced; soon as many stand by again."""
    standing.port.expect({})
    assert standing.port.num_standing_by == 0
    standing.port.expect({"token": "far"})
    until(lambda: standing.port.num_standing_by == NUM_STANDING_BY)


@pytest.mark.parametrize(
    "said",
    [b"nonsense", TAKEN + b"GO worker\r\n", TAKEN + b"OPEN ../x\r\n", TAKEN + b"OPEN " + b"a" * 200, TAKEN[:-1] + b"x"],
)
def test_a_relay_that_says_nonsense_is_left(node: Node, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    """Each connection is closed, and another one dialled after a pause."""
    monkeypatch.setattr(port_module, "PAUSE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as wrong:
        wrong.settimeout(SOON_S)
        node.port.stand_by_at([Relay("127.0.0.1", wrong.getsockname()[1], "token")])
        for _ in range(NUM_STANDING_BY + 1):
            connection, _ = wrong.accept()
            with connection:
                connection.sendall(said)
                assert b"STANDBY token:0" in heard(connection, 1000)
        node.port.stand_by_at([])


# --- what the daemon orders ---


def test_the_daemons_last_order_holds(relay: Node, node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """A line that cannot be read changes nothing."""
    order = PortOrder(relays=(Relay("127.0.0.1", relay.number, "token"),))
    obey(node.port, [msgspec.json.encode(order)])
    until(lambda: relay.port.num_standing_by == NUM_STANDING_BY)
    for nonsense in (b"nonsense\n", b"\xff{}\n", b'{"tokens":[]}\n', b'{"a":' * 2000 + b"\n"):
        obey(node.port, [nonsense])
        assert "cannot be read" in capsys.readouterr().err
    obey(relay.port, [b"{}"])
    assert relay.port.num_standing_by == 0
    obey(node.port, [b"{}"])
