"""The gRPC link's additions to the contract: hellos, deadlines, hostile peers, dead processes, bounded memory."""

import os
import queue
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from headway.daemon.net.certificates import CertificateAuthority
from headway.proto.data_pb2 import FrameHeader, Hello, HelloReply
from headway.stages.errors import LinkOverflowError, NotListeningError, PortsTakenError
from headway.stages.ids import Generation, StageIndex
from headway.stages.links.endpoint import LinkEndpoint
from headway.stages.links.frame_codec import LENGTH, bundle, heartbeat
from headway.stages.links.link import Frame, LinkLost
from headway.stages.links.loop_thread import LoopThread
from headway.stages.sockets.tls_identity import TlsIdentity, expecting
from tests.integration.links.conftest import Endpoints
from tests.rigs.grpc_link import DEADLINE_S, GENERATION, SOON, Inbox, accept, dial, lost, total

LITTLE = timedelta(seconds=1)


def test_a_dial_that_is_too_early_is_repeated(endpoints: Endpoints) -> None:
    """Stage 1 still runs generation 3 when it is dialled for 4, and accepts as soon as it is there."""
    _, above, below = endpoints
    old_inbox, upper, lower = Inbox(), Inbox(), Inbox()
    old = accept(below, "early", old_inbox, generation=Generation(3))
    link = dial(above, below.port, "early", upper)
    link.send(total())
    with pytest.raises(queue.Empty):
        lower.get(timeout=0.3)
    old.close()
    accepted = accept(below, "early", lower)
    assert isinstance(lower.get(timeout=DEADLINE_S), Frame)
    link.close()
    accepted.close()


def test_a_dial_that_is_too_late_is_refused(endpoints: Endpoints) -> None:
    """Generation 5 is in force at stage 1: a dialler of 4 gives up at once, and says why."""
    _, above, below = endpoints
    upper, lower = Inbox(), Inbox()
    newer = accept(below, "late", lower, generation=Generation(5))
    link = dial(above, below.port, "late", upper)
    assert "STALE: generation 5 is in force here" in lost(upper).reason
    assert lower.empty()
    link.close()
    newer.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peer_incarnation": "another"}, "another process listens here"),
        ({"stage": StageIndex(3)}, "stage 3 of process above is not the one that is awaited"),
    ],
)
def test_a_wrong_neighbour_is_refused(endpoints: Endpoints, changes: dict[str, Any], reason: str) -> None:
    """Another process took over the port, or a stage that is no neighbour dials: both are told so, nobody waits."""
    _, above, below = endpoints
    upper, lower = Inbox(), Inbox()
    job = f"wrong {changes}"
    awaited = accept(below, job, lower)
    link = dial(above, below.port, job, upper, **changes)
    assert reason in lost(upper).reason
    link.close()
    awaited.close()


def test_a_neighbour_that_never_comes_is_named_at_the_deadline(endpoints: Endpoints) -> None:
    """Nobody dials, nobody listens: both sides' LinkLost say whom they waited for and how long."""
    _, above, below = endpoints
    upper, lower = Inbox(), Inbox()
    awaited = accept(below, "lonely", lower, timeout=timedelta(seconds=0.2), peer_address="10.9.8.7:65")
    assert lost(lower) == LinkLost("stage 0 at 10.9.8.7:65", "did not dial within 0.2 s")
    link = dial(above, 1, "lonely", upper, timeout=timedelta(seconds=0.3))
    told = lost(upper)
    assert told.peer == "stage 1 at 127.0.0.1:1"
    assert told.reason.startswith("not connected within 0.3 s: UNAVAILABLE")
    link.close()
    awaited.close()


def test_a_neighbour_that_says_nothing_was_unreached(endpoints: Endpoints) -> None:
    """A listener without TLS stands for any port that swallows what it is told."""
    inbox = Inbox()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dial(endpoints[1], silent.getsockname()[1], "silent", inbox, timeout=LITTLE)
        found = lost(inbox)
    assert found.was_unreached
    assert "not connected within 1 s" in found.reason


def test_a_neighbour_that_refuses_was_reached(endpoints: Endpoints) -> None:
    """Another process has its port by now: that is no fact about two machines."""
    inbox = Inbox()
    dial(endpoints[1], endpoints[2].port, "refused", inbox, peer_incarnation="who was here before")
    assert not lost(inbox).was_unreached


def test_a_neighbour_that_is_not_ready_is_waited_for(endpoints: Endpoints) -> None:
    """It answers `not yet` for longer than a silent one would be waited for, then accepts: the link is not lost."""
    inbox = Inbox()
    heard = Inbox()
    link = dial(endpoints[1], endpoints[2].port, "slow", inbox, first_contact=LITTLE)
    with pytest.raises(queue.Empty):
        inbox.get(timeout=2.5 * LITTLE.total_seconds())
    accepted = accept(endpoints[2], "slow", heard)
    link.send(total())
    assert isinstance(heard.get(timeout=20), Frame)
    assert inbox.empty()
    link.close()
    accepted.close()


def test_a_stranger_is_not_let_in(endpoints: Endpoints, stranger: TlsIdentity) -> None:
    """A process with a certificate of another authority never gets to say hello."""
    loop, _, below = endpoints
    outsider = LinkEndpoint(loop=loop, identity=stranger, host="127.0.0.1", incarnation="above", protocol=1)
    upper, lower = Inbox(), Inbox()
    awaited = accept(below, "secret", lower)
    link = dial(outsider, below.port, "secret", upper, timeout=timedelta(seconds=0.5))
    assert "UNAVAILABLE" in lost(upper).reason
    assert lower.empty()
    link.close()
    awaited.close()


def test_a_worker_listens_at_the_first_of_its_ports_that_is_free(endpoints: Endpoints, identity: TlsIdentity) -> None:
    """The first port is somebody's, so it takes the second; the next worker has none left, and says which."""
    loop, _, _ = endpoints
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as lent:
        ports = (taken.getsockname()[1], lent.getsockname()[1])
        lent.close()
        about: dict[str, Any] = {"loop": loop, "identity": identity, "host": "127.0.0.1", "protocol": 1}
        first = LinkEndpoint(**about, incarnation="first", ports=ports)
        first.start()
        second = LinkEndpoint(**about, incarnation="second", ports=ports)
        with pytest.raises(PortsTakenError) as caught:
            second.start()
        first.stop()
    assert first.port == ports[1]
    told = f"each of the ports {ports[0]} to {ports[1]} at 127.0.0.1 is in use"
    assert str(caught.value) == f"{told}: free one, or name more of them as worker_ports"


def test_a_worker_that_cannot_listen_at_its_host_does_not_blame_its_ports(
    endpoints: Endpoints, identity: TlsIdentity
) -> None:
    """Its machine has lost the address, 192.0.2.1: no port is in use, and freeing one would not help."""
    loop, _, _ = endpoints
    lost = LinkEndpoint(loop=loop, identity=identity, host="192.0.2.1", incarnation="lost", protocol=1, ports=(7100,))
    with pytest.raises(NotListeningError, match=r"cannot listen at 192\.0\.2\.1:7100: Cannot assign requested address"):
        lost.start()


def test_memory_is_bounded(endpoints: Endpoints) -> None:
    """Three unacknowledged frames of the largest size are this contract's limit; acknowledged ones make room again."""
    _, above, below = endpoints
    upper, lower = Inbox(), Inbox()
    link = dial(above, below.port, "bounded", upper)
    for _ in range(3):
        link.send(total())
    with pytest.raises(LinkOverflowError, match=r"256 bytes unacknowledged, the limit is 192"):
        link.send(total())
    accepted = accept(below, "bounded", lower)
    for _ in range(20):
        assert isinstance(lower.get(timeout=DEADLINE_S), Frame)
        while link.unacknowledged_bytes > 128:
            with pytest.raises(queue.Empty):
                upper.get(timeout=0.005)
        link.send(total())
    link.close()
    accepted.close()


async def speak(port: int, identity: TlsIdentity, first: bytes, *rest: bytes) -> tuple[HelloReply, str]:
    """A peer that writes what it likes: the answer to its hello, and how its call ended."""
    credentials = grpc.ssl_channel_credentials(identity.ca, identity.key, identity.certificate)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=expecting("node")) as channel:
        method: Any = channel.stream_stream("/headway.data.Link/Stream")
        call = method(timeout=DEADLINE_S)
        await call.write(first)
        reply = HelloReply.FromString(await call.read())
        for message in rest:
            await call.write(bundle(message))
        if reply.verdict != HelloReply.ACCEPTED:
            await call.done_writing()
        return reply, f"{(await call.code()).name}: {await call.details()}"


def hello(**changes: Any) -> bytes:
    """Stage 0 dials stage 1."""
    fields = {"protocol": 1, "job": "hostile", "generation": GENERATION, "incarnation": "above"}
    return Hello(**{**fields, "expected_incarnation": "below", **changes}).SerializeToString()


def raw_total(payload: bytes = bytes(64), **changes: Any) -> bytes:
    """A clip total, or what is to look like one."""
    fields = {"kind": FrameHeader.NORM_TOTAL, "generation": GENERATION, "payload_bytes": 64, **changes}
    header = FrameHeader(**fields)
    header.tensors.add(dtype=3)
    raw = header.SerializeToString()
    return LENGTH.pack(len(raw)) + raw + payload


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"\xff" * 64, "a header of 4294967295 bytes"),
        (raw_total(generation=3), "a frame of generation 3 on a link of 4"),
        (raw_total(sequence=1), "frame 1 where 0 was due"),
        (raw_total(payload_bytes=1 << 40), "a payload of"),
        (heartbeat(GENERATION, sequence=0, acknowledged=9), "acknowledgement 9 of frames not yet sent"),
    ],
    ids=["length", "generation", "gap", "payload", "acknowledgement"],
)
def test_a_hostile_peer_is_named_and_told(
    endpoints: Endpoints, identity: TlsIdentity, message: bytes, reason: str
) -> None:
    """A process with a good certificate says something impossible: it is told so each time, its stream is dropped, and
    after the third time the link is lost with the reason."""
    loop, _, below = endpoints
    lower = Inbox()
    awaited = accept(below, "hostile", lower, peer_address="10.0.0.1:1")
    for attempt in range(3):
        assert lower.empty()
        first = hello(attempt=attempt)
        reply, end = loop.run(speak(below.port, identity, first, message), timeout=SOON, what="the hostile peer")
        assert reply.verdict == HelloReply.ACCEPTED
        assert reason in end
    told = lost(lower)
    assert told.peer == "stage 0 at 10.0.0.1:1"
    assert told.reason.startswith("protocol violated 3 times")
    assert reason in told.reason
    awaited.close()


def test_a_hello_must_be_one(endpoints: Endpoints, identity: TlsIdentity) -> None:
    """Random bytes or another protocol instead of a hello are answered with the reason, and touch no link."""
    loop, _, below = endpoints
    for first, reason in ((b"\xff\xff\xff", "not a hello"), (hello(protocol=9), "protocol 9 instead of 1")):
        reply, _ = loop.run(speak(below.port, identity, first), timeout=SOON, what="the hello")
        assert reply.verdict == HelloReply.WRONG_PROTOCOL
        assert reason in reply.reason


PEER = """
import queue, sys, time
from datetime import timedelta
from pathlib import Path
from headway.stages.links.endpoint import LinkEndpoint
from headway.stages.links.loop_thread import LoopThread
from headway.stages.sockets.tls_identity import TlsIdentity
from tests.rigs.grpc_link import accept
loop = LoopThread(); loop.start()
identity = TlsIdentity.read(Path(sys.argv[1]))
end = LinkEndpoint(loop=loop, identity=identity, host="127.0.0.1", incarnation="below", protocol=1)
end.start()
inbox = queue.SimpleQueue()
accept(end, "killed", inbox)
print(end.port, flush=True)
inbox.get()
print("connected", flush=True)
time.sleep(60)
"""


def test_a_killed_peer_is_lost_after_the_timeout(tmp_path: Path) -> None:
    """The process at the other end is killed: LinkLost names it after the timeout, and never if the link is closed."""
    certificates = CertificateAuthority.create(tmp_path / "authority").issue("node")
    loop = LoopThread("dialler")
    loop.start()
    above = LinkEndpoint(
        loop=loop, identity=TlsIdentity.read(certificates), host="127.0.0.1", incarnation="above", protocol=1
    )
    root = Path(__file__).resolve().parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", PEER, str(certificates)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(root))))},
    ) as process:
        assert process.stdout is not None
        try:
            upper = Inbox()
            port = int(process.stdout.readline())
            link = dial(above, port, "killed", upper, silence=timedelta(seconds=1))
            link.send(total())
            assert process.stdout.readline() == "connected\n"
        finally:
            process.kill()
        killed_at = time.monotonic()
        told = lost(upper)
        assert 0.9 < time.monotonic() - killed_at < 20
        assert told.peer == f"stage 1 at 127.0.0.1:{port}"
        assert told.reason.startswith("not resumed within 1 s: UNAVAILABLE")
        link.close()
    loop.stop()
