"""What comes to a node's one port, to a node that stands by at another one's, and to the process that serves both."""

import atexit
import socket
import time
from contextlib import redirect_stderr, suppress
from functools import cache
from io import StringIO
from pathlib import Path

from headway.daemon.net import port as port_module
from headway.daemon.net.port import TAKEN, Relay, SharedPort, obey, read_opening

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
SOON_S = 10.0


def opening(data: bytes) -> None:
    """The first bytes of a connection, and its end: what is for others is left."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data[: 64 << 10])
        theirs.shutdown(socket.SHUT_WR)
        with suppress(ValueError, OSError):
            found = read_opening(ours)
            assert found.name or found.token or data[:1] == b"\x16"


class _Port:
    """A port with one server behind it, `worker`, that says nothing and ends with its other end."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.inner: list[socket.socket] = []
        self.port = SharedPort(self.listener, self.connect, most_passages=20)
        self.port.expect({TOKEN: "far"})

    def connect(self, name: str) -> socket.socket | None:
        """Return a way to the server."""
        if name not in ("", "worker"):
            return None
        ours, theirs = socket.socketpair()
        self.inner.append(theirs)
        return ours

    def close(self) -> None:
        """Leave nothing open when the process ends."""
        self.port.close()
        self.listener.close()

    def settle(self) -> None:
        """End the server's connections, and wait until nothing is left of anybody."""
        until = time.monotonic() + SOON_S
        while self.port.num_passages:
            assert time.monotonic() < until, "a passage without ends"
            while self.inner:
                self.inner.pop().close()
            time.sleep(0.001)
        assert len([*Path("/proc/self/fd").iterdir()]) < MOST_FILES, "files stay open"


@cache
def _port() -> _Port:
    made = _Port()
    atexit.register(made.close)
    return made


def port(data: bytes) -> None:
    """A connection that says these bytes in two pieces, and goes; then nothing of it is left."""
    made = _port()
    with socket.create_connection(made.listener.getsockname()) as stranger:
        made.port.turn(most_s=SOON_S)
        for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
            with suppress(OSError):  # it was sent away
                stranger.sendall(piece)
    made.settle()


class _Outside:
    """A node that stands by at a port of ours, which says to it what it likes."""

    def __init__(self) -> None:
        self.own = _Port()
        self.relay = socket.create_server(("127.0.0.1", 0))
        port_module.PAUSE_S = 0.001  # type: ignore[misc]
        self.own.port.stand_by_at([Relay("127.0.0.1", self.relay.getsockname()[1], TOKEN)])

    def called(self, data: bytes) -> None:
        """Say these bytes on a connection that stands by, and end it."""
        with self.relay.accept()[0] as taken:
            for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
                with suppress(OSError):
                    taken.sendall(piece)
        self.own.settle()


@cache
def _outside() -> _Outside:
    made = _Outside()
    atexit.register(made.own.close)
    atexit.register(made.relay.close)
    return made


def relayed(data: bytes) -> None:
    """What a relay says to a node that stands by there."""
    _outside().called(data)


class _Anything:
    """Takes orders, and only looks at their kinds."""

    def expect(self, tokens: dict[str, str]) -> None:
        assert all(isinstance(text, str) for pair in tokens.items() for text in pair)

    def stand_by_at(self, *_: object) -> None:
        """Nothing is dialled."""


def orders(data: bytes) -> None:
    """What the daemon writes to the process of its port."""
    with redirect_stderr(StringIO()):
        obey(_Anything(), data.split(b"\n"))  # type: ignore[arg-type]


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
    relays = b'{"tokens":{"a":"node-b"},"relays":[{"host":"10.0.0.7","port":7070,"token":"c"}]}\n'
    return [relays, b'{"tokens":{}}\n{"tokens":{']


def messages() -> list[bytes]:
    """Valid messages."""
    from headway.proto import control_pb2

    return [control_pb2.StandByRequest(node="far").SerializeToString(), b"\x0a\x03far\x10\x01\x1a\x00"]
