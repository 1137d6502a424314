"""Links between two workers of one node: unix sockets without TLS, for this user's processes only, else TCP."""

import asyncio
import contextlib
import errno
import os
import random
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import structlog

from headway.daemon.node.lifecycle import MAX_RUNTIME_DIR_BYTES
from headway.stages.links import endpoint, streams
from headway.stages.links.endpoint import LinkEndpoint
from headway.stages.links.frame_codec import LENGTH
from headway.stages.links.streams import MAX_CONNECTIONS, LocalPlace
from headway.stages.sockets import local_socket
from headway.stages.sockets.local_socket import connect_locally, listen_locally, socket_path
from headway.stages.sockets.tls_identity import TlsIdentity
from tests.integration.links.conftest import NOBODY_LISTENS
from tests.rigs.two_sides import DEADLINE_S, MAX_BYTES, Endpoints, Inbox, Pair, dial, lost

STRANGER = 65534


def test_a_cut_stream_resumes(node_endpoints: Endpoints) -> None:
    """The stream breaks amid large frames, again and again: every frame comes once, in order, unchanged."""
    _, above, below = node_endpoints
    with Pair(node_endpoints, port=NOBODY_LISTENS) as pair:
        pair.exchange([1])
        for number in range(6):
            (above, below)[number % 2].cut(timedelta(0))
            pair.exchange([MAX_BYTES] * 3)
        assert pair.upper.num_resumed > 0


def test_without_a_socket_the_link_goes_over_tcp(node_endpoints: Endpoints, node_folder: Path) -> None:
    """A process of the node that made no socket is dialled over TCP with TLS."""
    path = path_of(node_folder, "below")
    path.rename(path.with_suffix(".away"))
    try:
        with Pair(node_endpoints) as pair:
            pair.exchange([1, MAX_BYTES])
    finally:
        path.with_suffix(".away").rename(path)


def test_a_peer_of_another_node_is_dialled_over_tcp(node_endpoints: Endpoints) -> None:
    """A socket of the peer's name does not count when the peer is of another node: its certificate has to prove it."""
    inbox, soon = Inbox(), timedelta(seconds=0.3)
    link = dial(node_endpoints[1], NOBODY_LISTENS, "other", inbox, peer_node="elsewhere", first_contact=soon)
    assert "UNAVAILABLE" in lost(inbox).reason
    link.close()


def test_the_hello_stays_in_force(node_endpoints: Endpoints, node_folder: Path) -> None:
    """A link that is meant for another process is refused with the reason, at once."""
    another = path_of(node_folder, "another")
    another.symlink_to(path_of(node_folder, "below"))
    with Pair(node_endpoints, port=NOBODY_LISTENS, upper={"peer_incarnation": "another"}) as pair:
        assert "another process listens here now" in lost(pair.at_upper).reason
    another.unlink()


def test_another_user_is_neither_answered_nor_trusted(
    node_endpoints: Endpoints, node_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of another user: the dialling side takes TCP instead, the listening side hangs up."""
    assert node_endpoints[2].port
    with contextlib.closing(connect(node_folder)) as own:
        assert not is_hung_up(own, timeout_s=0.2), "a connection of our own waits for its hello"
    monkeypatch.setattr(local_socket, "_own_user", lambda: STRANGER)
    assert connect_locally(node_folder, "below") is None
    with contextlib.closing(connect(node_folder)) as stranger:
        assert is_hung_up(stranger, timeout_s=DEADLINE_S)


STRANGERS_CALL = """
import os, socket, sys
os.setgid({user}); os.setuid({user})
connection = socket.socket(socket.AF_UNIX)
try:
    connection.connect(sys.argv[1])
except PermissionError:
    print("refused by the kernel")
else:
    connection.settimeout({deadline_s})
    print("hung up" if connection.recv(1) == b"" else "answered")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("mode", "outcome"), [(0o600, "refused by the kernel"), (0o666, "hung up")])
def test_a_process_of_another_user_is_refused(
    node_endpoints: Endpoints, node_folder: Path, mode: int, outcome: str
) -> None:
    """A real process of another user is refused by the socket's mode, and by its credentials if the mode is wrong."""
    assert node_endpoints[2].port
    path = path_of(node_folder, "below")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    script = STRANGERS_CALL.format(user=STRANGER, deadline_s=DEADLINE_S)
    node_folder.chmod(0o711)  # the folder's own mode would end it even earlier
    path.chmod(mode)
    try:
        command = [sys.executable, "-I", "-c", script, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    finally:
        path.chmod(0o600)
        node_folder.chmod(0o700)
    assert done.stdout.strip() == outcome, done.stderr


def test_sockets_of_dead_processes_are_deleted() -> None:
    """An old socket where nobody listens goes with the next start; a young one and one in use stay."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        alive = listen_locally(folder, "alive")
        for dead in ("old", "young"):
            listener = listen_locally(folder, dead)
            assert listener is not None
            listener.close()
        for old in ("old", "alive"):
            os.utime(path_of(folder, old), (0, 0))
        fresh = listen_locally(folder, "fresh")
        assert alive is not None
        assert fresh is not None
        assert {path.stem for path in folder.iterdir()} == {"alive", "young", "fresh"}
        alive.close()
        fresh.close()


def test_a_path_that_is_too_long_means_tcp(tmp_path: Path) -> None:
    """No socket is made and none is dialled where its path would exceed the kernel's limit."""
    folder = tmp_path / ("x" * local_socket.MAX_PATH_BYTES)
    folder.mkdir()
    assert listen_locally(folder, "below") is None
    assert connect_locally(folder, "below") is None
    assert list(folder.iterdir()) == []


def test_the_longest_runtime_folder_has_room_for_a_socket() -> None:
    """The daemon's folder is at most this long; the name of a worker's socket fits behind it."""
    assert socket_path(Path("/" + "x" * (MAX_RUNTIME_DIR_BYTES - 1)), uuid.uuid4().hex) is not None


def test_a_stopped_endpoint_leaves_no_socket_and_what_is_not_its_own(
    identity: TlsIdentity, node_endpoints: Endpoints, node_folder: Path
) -> None:
    """Its file goes with it, so nobody dials it. A plain file that somebody has put in its place stays."""
    loop, path = node_endpoints[0], path_of(node_folder, "short-lived")
    for is_replaced in (False, True):
        place = LocalPlace("node", node_folder)
        end = LinkEndpoint(
            loop=loop, identity=identity, host="127.0.0.1", incarnation="short-lived", protocol=1, local=place
        )
        end.start()
        assert path.exists()
        if is_replaced:
            path.unlink()
            path.write_text("a note")
        end.stop()
        loop.run(asyncio.sleep(0), timeout=timedelta(seconds=DEADLINE_S), what="a turn of the loop")
        assert path.exists() == is_replaced
    path.unlink()


def test_a_connection_that_cannot_be_taken_costs_itself_alone(
    node_endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel has no memory for one accepted connection: the dialling side comes again, and is served."""
    refusals = [OSError(errno.ENOBUFS, "No buffer space available"), MemoryError()]

    def refuse(connection: socket.socket) -> socket.socket:
        if refusals:
            raise refusals.pop()
        return connection

    monkeypatch.setattr(streams, "enlarged", refuse)
    with Pair(node_endpoints, port=NOBODY_LISTENS) as pair:
        pair.exchange([1])
    assert not refusals


def test_without_a_descriptor_the_dialling_side_takes_tcp(node_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that cannot be made is no failure of the worker."""

    def refuse(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socket", refuse)
    assert connect_locally(node_folder, "below") is None


@contextlib.contextmanager
def in_place_of(folder: Path, incarnation: str) -> Iterator[socket.socket]:
    """Listen where a process listens, in its place."""
    path = path_of(folder, incarnation)
    path.rename(path.with_suffix(".away"))
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(16)
            yield listener
    finally:
        path.with_suffix(".away").rename(path)


@pytest.mark.parametrize("answer", [b"", b"\xff" * 64, LENGTH.pack(3) + b"\xff\xff\xff"])
def test_a_socket_without_an_answer_gives_way_to_tcp(
    node_endpoints: Endpoints, node_folder: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    """It accepts and says nothing, or garbage: the next attempt takes TCP, long before the link would be lost."""
    monkeypatch.setattr(endpoint, "LOCAL_ANSWER_S", 0.3)
    accepted: list[socket.socket] = []

    def accept(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        accepted.append(connection)
        if answer:
            connection.sendall(answer)

    with in_place_of(node_folder, "below") as listener:
        thread = threading.Thread(target=accept, args=(listener,), daemon=True)
        thread.start()
        with Pair(node_endpoints) as pair:
            pair.exchange([1])
        thread.join(DEADLINE_S)
    assert len(accepted) == 1
    accepted[0].close()


def test_a_thousand_connections_harm_no_link(node_endpoints: Endpoints, node_folder: Path) -> None:
    """A process of this user connects without end and says garbage: few are held, few lines are logged, links work."""
    with structlog.testing.capture_logs() as lines, Pair(node_endpoints, port=NOBODY_LISTENS) as before:
        before.exchange([1])
        attack: list[socket.socket] = []
        for number in range(1000):
            with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                attack.append(connect(node_folder))
                attack[-1].sendall(random.Random(number).randbytes(40) if number % 2 else b"")
        before.exchange([MAX_BYTES])
        with Pair(node_endpoints) as amid:
            amid.exchange([1])
        hung_up = [is_hung_up(connection, timeout_s=0.001) for connection in attack]
        for connection in attack:
            connection.close()
    assert hung_up.count(False) <= MAX_CONNECTIONS
    said = [line["event"] for line in lines]
    for event in ("local_link_refused", "local_link_ended", "local_link_failed"):
        assert said.count(event) <= 2, lines


def path_of(folder: Path, incarnation: str) -> Path:
    """Return where a process listens."""
    path = socket_path(folder, incarnation)
    assert path is not None
    return path


def connect(folder: Path) -> socket.socket:
    """Connect to the lower worker without looking who it is."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path_of(folder, "below")))
    except OSError:
        connection.close()
        raise
    return connection


def is_hung_up(connection: socket.socket, *, timeout_s: float) -> bool:
    """Return whether the other side closes the connection in this time."""
    connection.settimeout(timeout_s)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
