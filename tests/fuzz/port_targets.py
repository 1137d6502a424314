"""What comes to a node's one port, to a node that stands by at another one's, and to the process that serves both."""

import atexit
import os
import select
import socket
from contextlib import redirect_stderr, suppress
from functools import cache
from io import StringIO
from pathlib import Path

from headway.daemon.net.front import MAX_HEAD_BYTES, TAKEN, Front, read_opening
from headway.daemon.net.outpost import OrderReader, Outpost

TOKEN = "0123456789abcdef0123456789abcdef"
OPENINGS = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
    b"CONNECT worker:443 HTTP/1.1\r\nhost: worker:443\r\n\r\nmore",
    b"CONNECT far~worker:443 HTTP/1.0\r\n\r\n",
    b"CONNECT far~:443 HTTP/1.1\r\n\r\n\x16\x03",
    f"STANDBY {TOKEN}:0 HTTP/1.1\r\n\r\n".encode(),
)
MOST_FILES = 200
"""Number of files that a process of these targets may have open."""


def opening(data: bytes) -> None:
    """The first bytes of a connection, as they come: nothing is read that has not come, and the wait has an end."""
    for end in {1, 2, 8, len(data) // 2, len(data)}:
        try:
            found = read_opening(data[:end][:MAX_HEAD_BYTES])
        except ValueError:
            return
        if found is not None:
            assert found.num_bytes <= min(end, MAX_HEAD_BYTES)
            return
        assert end < MAX_HEAD_BYTES, "endless"


class _Port:
    """A front with one server behind it, `worker`, that says nothing and ends with its other end."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.inner: list[socket.socket] = []
        self.front = Front(self.listener, self.connect, most_passages=20)
        self.front.expect({TOKEN: "far"})

    def connect(self, name: str) -> socket.socket | None:
        """Return a way to the server."""
        if name not in ("", "worker"):
            return None
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self.inner.append(theirs)
        return ours

    def close(self) -> None:
        """Leave nothing open when the process ends."""
        self.front.close()
        self.listener.close()

    def turns(self) -> None:
        """Do all there is to do."""
        for _ in range(4):
            self.front.turn(most_s=0)

    def hang_up(self) -> None:
        """End the server's connections."""
        for each in self.inner:
            each.close()
        self.inner.clear()


@cache
def _port() -> _Port:
    made = _Port()
    atexit.register(made.close)
    return made


def port(data: bytes) -> None:
    """A connection that says these bytes in two pieces, and goes; then nothing of it is left."""
    made = _port()
    with socket.create_connection(made.listener.getsockname()) as stranger:
        for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
            with suppress(OSError):  # it was sent away
                stranger.sendall(piece)
            made.turns()
    made.turns()
    made.hang_up()
    made.turns()
    assert made.front.num_passages <= 1, "a passage without ends"
    assert len([*Path("/proc/self/fd").iterdir()]) < MOST_FILES, "files stay open"


class _Post:
    """A node that stands by at a port of ours, which says to it what it likes."""

    def __init__(self) -> None:
        self.own = _Port()
        self.relay = socket.create_server(("127.0.0.1", 0))
        self.outpost = Outpost(self.own.front, self.own.connect)

    def called(self, data: bytes) -> None:
        """Say these bytes on the first connection, and end all of them."""
        self.outpost.stand_by(("127.0.0.1", self.relay.getsockname()[1]), TOKEN)
        self.outpost.turn()
        taken = []
        while select.select([self.relay], [], [], 0)[0]:
            taken.append(self.relay.accept()[0])
        assert taken
        self.own.turns()
        for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
            with suppress(OSError):
                taken[0].sendall(piece)
            self.own.turns()
        for each in taken:
            each.close()
        self.own.hang_up()
        self.outpost.stand_by(None)
        self.own.turns()


@cache
def _post() -> _Post:
    made = _Post()
    atexit.register(made.own.close)
    atexit.register(made.relay.close)
    return made


def outpost(data: bytes) -> None:
    """What a relay says to a node that stands by there."""
    _post().called(data)
    assert len([*Path("/proc/self/fd").iterdir()]) < MOST_FILES, "files stay open"


class _Anything:
    """Takes orders, and only looks at their kinds."""

    def expect(self, tokens: dict[str, str]) -> None:
        assert all(isinstance(text, str) for pair in tokens.items() for text in pair)

    def stand_by(self, *_: object) -> None:
        """Nothing is dialled."""


def orders(data: bytes) -> None:
    """What the daemon writes to the process of its port, in pieces."""
    read_end, write_end = os.pipe2(os.O_NONBLOCK)
    reader = OrderReader(_Anything(), _Anything())  # type: ignore[arg-type]
    try:
        with redirect_stderr(StringIO()):
            for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
                os.write(write_end, piece)
                reader.read(read_end)
    finally:
        os.close(read_end)
        os.close(write_end)


def control_messages(data: bytes) -> None:
    """Any message of the RPCs between daemons, workers and people."""
    from google.protobuf.message import DecodeError, Message
    from google.protobuf.message_factory import GetMessageClass

    from headway.proto import control_pb2, data_pb2

    for file in (control_pb2.DESCRIPTOR, data_pb2.DESCRIPTOR):
        for kind in file.message_types_by_name.values():
            made: type[Message] = GetMessageClass(kind)
            with suppress(DecodeError):
                str(made.FromString(data))


def openings() -> list[bytes]:
    """Valid openings."""
    return list(OPENINGS)


def calls() -> list[bytes]:
    """Valid words of a relay."""
    return [TAKEN, TAKEN + b"OPEN worker\r\n\x16\x03\x01", TAKEN + b"OPEN \r\nmore"]


def order_lines() -> list[bytes]:
    """Valid orders."""
    posts = b'{"tokens":{"a":"node-b"},"posts":[{"host":"10.0.0.7","port":7070,"token":"c"}]}\n'
    return [posts, b'{"tokens":{}}\n{"tokens":{']


def messages() -> list[bytes]:
    """Valid messages."""
    from headway.proto import control_pb2

    return [control_pb2.StandByRequest(node="far").SerializeToString(), b"\x0a\x03far\x10\x01\x1a\x00"]
