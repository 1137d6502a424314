"""The link's additions to the contract: hellos, deadlines, hostile peers, bounded memory, several links of one job."""

import queue
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import grpc
import pytest
import torch

from headway.proto.data_pb2 import FrameHeader, Hello, HelloReply
from headway.stages.errors import LinkOverflowError, NotListeningError, PortsTakenError
from headway.stages.ids import Batch, Generation, MicrobatchIndex, StageIndex
from headway.stages.links.endpoint import LinkEndpoint
from headway.stages.links.frame_codec import LENGTH, bundle, heartbeat
from headway.stages.links.frame_contract import FrameContract, TensorForm
from headway.stages.links.link import Frame, FrameKind, LinkLost
from headway.stages.links.stream_link import StreamLink
from headway.stages.sockets.tls_identity import TlsIdentity, expecting
from tests.rigs.two_sides import (
    DEADLINE_S,
    GENERATION,
    SOON,
    Endpoints,
    Inbox,
    accept,
    dial,
    heard,
    lost,
    lower_terms,
    total,
    upper_terms,
)

LITTLE = timedelta(seconds=1)


def test_a_neighbour_that_never_comes_is_named_at_the_deadline(endpoints: Endpoints) -> None:
    """Nobody dials, nobody listens: both sides' LinkLost say whom they waited for and how long."""
    _, above, below = endpoints
    upper, lower = Inbox(), Inbox()
    awaited = accept(below, "lonely", lower, timeout=timedelta(seconds=0.2), peer_address="10.9.8.7:65")
    assert lost(lower) == LinkLost("stage 0 at 10.9.8.7:65", "did not dial within 0.2 s")
    link = dial(above, 1, "lonely", upper, timeout=timedelta(seconds=0.3))
    told = lost(upper)
    assert (told.peer, told.was_unreached) == ("stage 1 at 127.0.0.1:1", True)
    assert told.reason.startswith("not connected within 0.3 s: UNAVAILABLE")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # any port that swallows what it is told
        dial(above, silent.getsockname()[1], "silent", upper, timeout=LITTLE)
        told = lost(upper)
    assert told.was_unreached
    assert "not connected within 1 s" in told.reason
    link.close()
    awaited.close()


def test_a_neighbour_that_refuses_was_reached(endpoints: Endpoints) -> None:
    """Another process has its port by now: told at once, and no fact about two machines."""
    _, above, below = endpoints
    inbox = Inbox()
    awaited = accept(below, "refused", Inbox())
    dial(above, below.port, "refused", inbox, peer_incarnation="who was here before")
    told = lost(inbox)
    assert "another process listens here" in told.reason
    assert not told.was_unreached
    awaited.close()


def test_a_neighbour_that_is_not_ready_is_waited_for(endpoints: Endpoints) -> None:
    """It still runs generation 3, for longer than a silent one would be waited for, then accepts."""
    _, above, below = endpoints
    inbox, at_lower = Inbox(), Inbox()
    old = accept(below, "slow", Inbox(), generation=Generation(3))
    link = dial(above, below.port, "slow", inbox, first_contact=LITTLE)
    link.send(total())
    with pytest.raises(queue.Empty):
        inbox.get(timeout=2.5 * LITTLE.total_seconds())
    old.close()
    accepted = accept(below, "slow", at_lower)
    heard(at_lower)
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
        heard(lower)
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


SHARED = FrameContract(
    forms={
        FrameKind.NORM_TOTAL: (TensorForm(torch.float64, ()),),
        FrameKind.REDUCED: (TensorForm(torch.float32, (3,)),),
    },
    max_unacknowledged_frames=8,
)


class Job:
    """One job's links, all from endpoint `above` to endpoint `below`."""

    def __init__(self, endpoints: Endpoints, name: str) -> None:
        _, self.above, self.below = endpoints
        self.name = name
        self.inbox = Inbox()
        """Of everybody at `below`."""
        self.links: list[StreamLink] = []

    def accept(self, worker: int, *, is_last: bool = True, **changes: Any) -> StreamLink:
        """Await a worker of the stage before, at stage 1."""
        fields: dict[str, Any] = {"peer_worker": worker, "peer_name": f"worker {worker}"}
        terms = lower_terms(self.name, inbox=self.inbox, contract=SHARED, **fields | changes)
        self.links.append(self.below.accept(terms, is_last=is_last))
        return self.links[-1]

    def dial(self, worker: int, inbox: Inbox, **changes: Any) -> StreamLink:
        """From a worker of stage 0."""
        terms = upper_terms(self.name, self.below.port, inbox=inbox, contract=SHARED, **{"worker": worker, **changes})
        self.links.append(self.above.dial(terms))
        return self.links[-1]

    def received(self) -> list[int]:
        """The batches of the next two frames, sorted: frames of two links come in either order."""
        return sorted(heard(self.inbox).batch for _ in range(2))


@pytest.fixture
def job(endpoints: Endpoints, request: pytest.FixtureRequest) -> Iterator[Job]:
    """A job of the test's own."""
    job = Job(endpoints, request.node.name)
    yield job
    for link in job.links:
        link.close()


def reduced(batch: int) -> Frame:
    """A frame from a replica."""
    return Frame(FrameKind.REDUCED, GENERATION, Batch(batch), MicrobatchIndex(0), (torch.ones(3),))


def test_two_workers_of_one_stage_dial_and_both_survive_a_cut(job: Job) -> None:
    """Frames of both arrive in one inbox, before and after the listener's streams are dropped for a while."""
    for worker in (0, 1):
        job.accept(worker, is_last=worker == 1)
    uppers = [job.dial(worker, Inbox()) for worker in (0, 1)]
    for worker, link in enumerate(uppers):
        link.send(total(worker))
    assert job.received() == [0, 1]
    job.below.cut(timedelta(seconds=0.3), dialled=False)
    for worker, link in enumerate(uppers):
        link.send(total(10 + worker))
    assert job.received() == [10, 11]
    deadline = time.monotonic() + DEADLINE_S
    while not all(link.num_resumed for link in uppers):  # what was sent may have been just before the cut
        assert time.monotonic() < deadline, "not resumed"
        time.sleep(0.01)


def test_nobody_is_refused_while_links_are_still_being_opened(job: Job) -> None:
    """The second of two workers dials when only the first is awaited: it comes again, and is let in."""
    job.accept(0, is_last=False)
    told = Inbox()
    link = job.dial(1, told)
    link.send(total(1))
    with pytest.raises(queue.Empty):
        told.get(timeout=0.3)
    job.accept(1)
    job.dial(0, Inbox()).send(total(0))
    assert job.received() == [0, 1]


def test_a_worker_that_is_not_awaited_is_refused(job: Job) -> None:
    """Worker 2 dials where 0 and 1 are expected, or 1's place in another stage: told at once."""
    for worker in (0, 1):
        job.accept(worker, is_last=worker == 1)
    for worker, stage in ((2, 0), (1, 3)):
        told = Inbox()
        job.dial(worker, told, stage=StageIndex(stage))
        assert f"stage {stage} of process above is not the one that is awaited" in lost(told).reason


def test_replicas_speak_their_own_kinds(job: Job) -> None:
    """Two workers of stage 1 join: slices go both ways, and the link has the name that was given to it."""
    at_upper = Inbox()
    lower = job.accept(0, peer_stage=StageIndex(1), peer_name="stage 1 worker 0")
    upper = job.dial(0, at_upper, stage=StageIndex(1), peer_stage=StageIndex(1), peer_name="stage 1 worker 1")
    assert lower.peer.startswith("stage 1 worker 0 at ")
    assert upper.peer == f"stage 1 worker 1 at 127.0.0.1:{job.below.port}"
    upper.send(reduced(5))
    lower.send(reduced(6))
    for inbox, batch in ((job.inbox, 5), (at_upper, 6)):
        item = heard(inbox)
        assert (item.kind, item.batch) == (FrameKind.REDUCED, batch)


def test_a_newer_generation_with_fewer_workers_forgets_the_others(job: Job) -> None:
    """Generation 5 has one worker upstream: worker 1 of generation 4 is told that it is over, whoever it is."""
    for worker in (0, 1):
        job.accept(worker, is_last=worker == 1)
    newer = Generation(GENERATION + 1)
    job.accept(0, generation=newer)
    told = Inbox()
    job.dial(1, told)
    assert "STALE: generation 5 is in force here" in lost(told).reason
    job.dial(0, Inbox(), generation=newer).send(total(7, generation=newer))
    assert heard(job.inbox).batch == 7
