"""Connections are destroyed, those of the named processes and no others: real sockets, the kernel's own means."""

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from headway.daemon.chaos.connections import Parting, can_destroy, destroy_connections

pytestmark = pytest.mark.skipif(not can_destroy(), reason="needs root")

_NODE = """
import socket, sys
calls = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(3)]
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
accepted = server.accept()
print("accepted", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        yield server


@pytest.fixture
def node(listener: socket.socket) -> Iterator[subprocess.Popen[str]]:
    """Another process, which called the listener three times and awaits one call; it tells the port."""
    command = [sys.executable, "-c", _NODE, str(listener.getsockname()[1])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_a_process_is_parted_and_no_other(listener: socket.socket, node: subprocess.Popen[str]) -> None:
    """Its three calls and the one that it took are reset; a connection that this process has with itself stays."""
    assert node.stdout is not None
    call = socket.create_connection(("127.0.0.1", int(node.stdout.readline())), timeout=10)
    assert node.stdout.readline() == "accepted\n"
    ends = [call, *(listener.accept()[0] for _ in range(3))]
    own = socket.create_connection(listener.getsockname(), timeout=10)
    answered, _ = listener.accept()
    assert destroy_connections([node.pid]) == 4
    for end in ends:
        end.settimeout(10)
        with pytest.raises(ConnectionResetError):
            end.recv(1)
    own.sendall(b"x")
    assert answered.recv(1) == b"x"
    assert destroy_connections([node.pid]) == 0
    for end in (*ends, own, answered):
        end.close()


def test_a_parted_process_stays_so_until_the_end(listener: socket.socket, node: subprocess.Popen[str]) -> None:
    """Calls during the parting are reset; afterwards calls succeed again."""
    assert node.stdout is not None
    address = ("127.0.0.1", int(node.stdout.readline()))
    for _ in range(3):
        listener.accept()[0].close()
    with Parting() as parting:
        parting.pids = [node.pid]
        for _ in range(5):
            with pytest.raises(ConnectionError):
                _call(address, wait_s=10)
    with pytest.raises(TimeoutError):
        _call(address, wait_s=0.5)


def _call(address: tuple[str, int], *, wait_s: float) -> None:
    """Connect and wait for a word, which never comes."""
    with socket.create_connection(address, timeout=wait_s) as connection:
        connection.recv(1)
