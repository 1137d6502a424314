"""A node that can only dial out: its connections stand by at another node's port, and lead to its servers."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from headway.daemon.net.front import MAX_STANDING_BY, Front
from headway.daemon.net.outpost import NUM_STANDING_BY, Outpost

SOON_S = 10.0
CONNECT = b"CONNECT %s:443 HTTP/1.1\r\n\r\n"
TAKEN = b"HTTP/1.1 200 OK\r\n\r\n"


@dataclass
class Relayed:
    """A relay, and a node `far` that stands by there with a server that says who is wanted and echoes."""

    port: int
    relay: Front
    outpost: Outpost
    calls: "list[Callable[[], None]]"
    opened: list[socket.socket] = field(default_factory=list)

    def do(self, call: Callable[[], None]) -> None:
        """Do something in the thread of both."""
        done = threading.Event()

        def work() -> None:
            call()
            done.set()

        self.calls.append(work)
        assert done.wait(SOON_S)

    def dial(self, said: bytes = b"") -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port), timeout=SOON_S)
        self.opened.append(made)
        made.sendall(said)
        return made

    def until(self, condition: Callable[[], bool]) -> None:
        limit = time.monotonic() + SOON_S
        while not condition():
            assert time.monotonic() < limit
            time.sleep(0.01)


@pytest.fixture
def relayed() -> Iterator[Relayed]:
    server = socket.create_server(("127.0.0.1", 0))
    wanted: list[str] = []

    def echo() -> None:
        def serve(connection: socket.socket, greeting: bytes) -> None:
            with connection, suppress(OSError):
                connection.sendall(greeting)
                while piece := connection.recv(1 << 16):
                    connection.sendall(piece)

        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                greeting = f"<{wanted.pop(0)}>".encode()
                threading.Thread(target=serve, args=(connection, greeting), daemon=True).start()

    def connect(name: str) -> socket.socket | None:
        if name == "nobody":
            return None
        wanted.append(name)
        made = socket.socket()
        made.setblocking(False)
        made.connect_ex(server.getsockname())
        return made

    threading.Thread(target=echo, daemon=True).start()
    at_relay, at_far = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    relay, far = Front(at_relay, lambda _: None, most_passages=200), Front(at_far, connect, most_passages=200)
    outpost, is_over, calls = Outpost(far, connect), threading.Event(), list[Callable[[], None]]()

    def work() -> None:
        while not is_over.is_set():
            while calls:
                calls.pop(0)()
            outpost.turn()
            far.turn(most_s=0.005)
            relay.turn(most_s=0.005)

    thread = threading.Thread(target=work)
    thread.start()
    found = Relayed(at_relay.getsockname()[1], relay, outpost, calls)
    found.do(lambda: relay.expect({"token": "far"}))
    yield found
    is_over.set()
    thread.join()
    outpost.stand_by(None)
    for front in (relay, far):
        front.close()
    for each in (server, at_relay, at_far, *found.opened):
        each.close()


@pytest.fixture
def standing(relayed: Relayed) -> Relayed:
    relayed.do(lambda: relayed.outpost.stand_by(("127.0.0.1", relayed.port), "token"))
    relayed.until(lambda: relayed.outpost.num_taken == NUM_STANDING_BY)
    return relayed


def heard(connection: socket.socket, num_bytes: int) -> bytes:
    raw = b""
    with suppress(ConnectionResetError):
        while len(raw) < num_bytes and (piece := connection.recv(num_bytes - len(raw))):
            raw += piece
    return raw


def test_whoever_wants_the_node_reaches_its_servers(standing: Relayed) -> None:
    """Its daemon and a worker, with bytes that come at once; others take the places of those that left."""
    for name in (b"", b"worker") * NUM_STANDING_BY:
        standing.until(lambda: standing.outpost.num_taken > 0)
        one = standing.dial(CONNECT % (b"far~" + name) + b"hello")
        assert heard(one, len(TAKEN) + len(name) + 7) == TAKEN + b"<" + name + b">hello"
    standing.until(lambda: standing.outpost.num_taken == NUM_STANDING_BY)


def test_large_content_arrives_both_ways(standing: Relayed) -> None:
    one, content = standing.dial(CONNECT % b"far~worker"), os.urandom(8 << 20)
    assert heard(one, len(TAKEN) + 8) == TAKEN + b"<worker>"

    def write() -> None:
        one.sendall(content)
        one.shutdown(socket.SHUT_WR)

    writer = threading.Thread(target=write)
    writer.start()
    assert heard(one, len(content) + 1) == content
    writer.join()


@pytest.mark.parametrize("name", [b"near~worker", b"far~nobody"])
def test_what_is_not_there_is_closed(standing: Relayed, name: bytes) -> None:
    """A node that does not stand by, and a server that the node does not have."""
    one = standing.dial(CONNECT % name)
    assert heard(one, 1000).removeprefix(TAKEN) in (b"", b"HTTP/1.1 404 Not Found\r\n\r\n")


def test_only_a_token_lets_stand_by(relayed: Relayed) -> None:
    """A stranger cannot take the place of a node, and a token that is withdrawn ends what it let in."""
    assert heard(relayed.dial(b"STANDBY guessed:0 HTTP/1.1\r\n\r\n"), 1000).startswith(b"HTTP/1.1 404")
    one = relayed.dial(b"STANDBY token:0 HTTP/1.1\r\n\r\n")
    assert heard(one, len(TAKEN)) == TAKEN
    relayed.do(lambda: relayed.relay.expect({}))
    assert heard(one, 1) == b""
    assert heard(relayed.dial(CONNECT % b"far~worker"), 1000).startswith(b"HTTP/1.1 404")


def test_a_connection_that_has_ended_is_not_given_to_anybody(relayed: Relayed) -> None:
    gone = relayed.dial(b"STANDBY token:0 HTTP/1.1\r\n\r\n")
    assert heard(gone, len(TAKEN)) == TAKEN
    gone.close()
    there = relayed.dial(b"STANDBY token:0 HTTP/1.1\r\n\r\n")
    assert heard(there, len(TAKEN)) == TAKEN
    relayed.dial(CONNECT % b"far~worker")
    assert heard(there, 13) == b"OPEN worker\r\n"


def test_a_node_takes_a_limited_number_of_places(relayed: Relayed) -> None:
    first = relayed.dial(b"STANDBY token:0 HTTP/1.1\r\n\r\n")
    assert heard(first, len(TAKEN)) == TAKEN
    for _ in range(MAX_STANDING_BY):
        assert heard(relayed.dial(b"STANDBY token:0 HTTP/1.1\r\n\r\n"), len(TAKEN)) == TAKEN
    assert heard(first, 1) == b""


def test_a_relay_that_comes_back_is_dialled_again(standing: Relayed) -> None:
    """All connections end, as if the relay had been replaced; soon as many stand by again."""
    standing.do(lambda: standing.relay.expect({}))
    standing.until(lambda: standing.outpost.num_taken == 0)
    standing.do(lambda: standing.relay.expect({"token": "far"}))
    standing.until(lambda: standing.outpost.num_taken == NUM_STANDING_BY)


@pytest.mark.parametrize(
    "said", [b"nonsense", TAKEN + b"GO worker\r\n", TAKEN + b"OPEN ../x\r\n", TAKEN + b"OPEN " + b"a" * 200]
)
def test_a_relay_that_says_nonsense_is_left(relayed: Relayed, said: bytes) -> None:
    """Each connection is closed, and another one dialled after a pause."""
    with socket.create_server(("127.0.0.1", 0)) as wrong:
        wrong.settimeout(SOON_S)
        address = wrong.getsockname()
        relayed.do(lambda: relayed.outpost.stand_by(address, "token"))
        for _ in range(2):
            connection, _ = wrong.accept()
            with connection:
                connection.sendall(said)
                assert b"STANDBY token:0" in heard(connection, 1000)
        relayed.do(lambda: relayed.outpost.stand_by(None))
