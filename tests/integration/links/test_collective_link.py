"""The collective link's additions to the contract: meeting, breaks, silence, groups that hang, and no leaks."""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from headway.daemon.net.certificates import CertificateAuthority
from headway.stages.errors import LinkOverflowError
from headway.stages.ids import Batch, Generation, MicrobatchIndex, StageIndex
from headway.stages.links.collective.endpoint import CollectiveEndpoint
from headway.stages.links.collective.group import ACCEPTOR, DIALLER, GroupOfTwo
from headway.stages.links.collective.group_guard import Rendezvous
from headway.stages.links.collective.header import INLINE_BYTES, Route, Signal, announce
from headway.stages.links.collective.header import signal as make_signal
from headway.stages.links.collective.link import CollectiveLink
from headway.stages.links.collective.sender import MAX_UNDER_WAY
from headway.stages.links.frame_contract import ALIGNMENT_BYTES, FrameContract, TensorForm
from headway.stages.links.link import Frame, FrameKind, LinkLost
from headway.stages.links.loop_thread import LoopThread
from headway.stages.sockets.tls_identity import TlsIdentity
from headway.stages.spec import ModelSpec, TrainSpec, layer_names
from tests.integration.links.collective_peer import CONTRACT, EXIT_STUCK, JOB, gradient, total
from tests.integration.links.conftest import Workers
from tests.integration.links.two_sides import GENERATION, lower_terms, upper_terms

DEADLINE_S = 20.0
ROOT = Path(__file__).resolve().parents[3]
Inbox = queue.SimpleQueue[Frame | LinkLost]


def lost(inbox: Inbox) -> LinkLost:
    """What must come next."""
    item = inbox.get(timeout=DEADLINE_S)
    assert isinstance(item, LinkLost), item
    return item


def wait_until(is_so: Callable[[], bool], *, within_s: float = DEADLINE_S) -> None:
    """Raises AssertionError when it is not so in time."""
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline, "not in time"
        threading.Event().wait(0.01)


@dataclass
class Ends:
    """Both ends of links in this process."""

    workers: Workers
    upper: Inbox
    lower: Inbox

    def dial(self, job: str, **changes: Any) -> Any:
        """Stage 0 dials stage 1."""
        port = changes.pop("port", self.workers.grpc[2].port)
        return self.workers.collective[0].dial(upper_terms(job, port, inbox=self.upper, contract=CONTRACT, **changes))

    def accept(self, job: str, **changes: Any) -> Any:
        """Stage 1 awaits stage 0."""
        return self.workers.collective[1].accept(lower_terms(job, inbox=self.lower, contract=CONTRACT, **changes))


@pytest.fixture
def ends(workers: Workers) -> Ends:
    """With empty inboxes."""
    return Ends(workers, Inbox(), Inbox())


def test_a_dial_that_is_too_early_is_repeated(ends: Ends) -> None:
    """Stage 1 still runs the generation before when it is dialled, and accepts as soon as it is there."""
    old = ends.accept("early", generation=Generation(GENERATION - 1))
    link = ends.dial("early")
    link.send(total())
    with pytest.raises(queue.Empty):
        ends.lower.get(timeout=0.3)
    old.close()
    accepted = ends.accept("early")
    assert isinstance(ends.lower.get(timeout=DEADLINE_S), Frame)
    link.close()
    accepted.close()


def test_two_replicas_say_all_that_replicas_say(ends: Ends) -> None:
    """Both compute a whole model: sums, slices and losses one way, the lead's stop and totals the other, to the bit."""
    model, train = ModelSpec(num_hidden_layers=1), TrainSpec(microbatches=3, reduction_groups=2)
    contracts = [
        FrameContract.between_replicas(
            model, train, layers=layer_names(model), replica_groups=((0,), (1,)), own=own, sibling=1 - own
        )
        for own in (0, 1)
    ]
    stage = {"stage": StageIndex(0), "peer_stage": StageIndex(0)}
    workers, port = ends.workers.collective, ends.workers.grpc[2].port
    lead = workers[0].dial(upper_terms("replicas", port, inbox=ends.upper, contract=contracts[0], **stage))
    follower = workers[1].accept(lower_terms("replicas", inbox=ends.lower, contract=contracts[1], **stage))
    said = [{FrameKind.SUMS, FrameKind.REDUCED, FrameKind.NORM_TOTAL, FrameKind.STOP}]
    said.append({FrameKind.SUMS, FrameKind.REDUCED, FrameKind.LOSSES})
    for link, inbox, contract, kinds in zip((lead, follower), (ends.lower, ends.upper), contracts, said, strict=True):
        assert contract.sent_forms.keys() == kinds
        for kind, [form] in contract.sent_forms.items():
            tensor = (torch.rand(form.shape, dtype=torch.float64) * 1e6).to(form.dtype)
            link.send(Frame(kind, GENERATION, Batch(5), MicrobatchIndex(0), (tensor,)))
            arrived = inbox.get(timeout=DEADLINE_S)
            assert isinstance(arrived, Frame), arrived
            assert arrived.kind is kind
            assert arrived.tensors[0].dtype == form.dtype
            assert torch.equal(arrived.tensors[0], tensor)
    lead.close()
    follower.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"generation": Generation(GENERATION - 1)}, "STALE: generation 7 is in force here"),
        ({"peer_incarnation": "another"}, "WRONG_PEER: another process listens here now"),
        ({"stage": StageIndex(3)}, "WRONG_PEER: stage 3 of process above is not the one that is awaited"),
        ({"worker": 5}, "WRONG_PEER: stage 0 of process above is not the one that is awaited"),
    ],
    ids=["stale", "process", "stage", "worker"],
)
def test_a_wrong_neighbour_is_refused(ends: Ends, changes: dict[str, Any], reason: str) -> None:
    """An old generation, another process, a stage or worker that is no neighbour: told so at once, nobody waits."""
    job = f"wrong {changes}"
    awaited = ends.accept(job)
    link = ends.dial(job, **changes)
    assert lost(ends.upper).reason == reason
    assert ends.lower.empty()
    link.close()
    awaited.close()


def test_a_neighbour_that_never_comes_is_named_at_the_deadline(ends: Ends) -> None:
    """Nobody dials, nobody listens: both sides' LinkLost say whom they waited for and how long."""
    awaited = ends.accept("lonely", first_contact=timedelta(seconds=0.2), peer_address="10.9.8.7:65")
    assert lost(ends.lower) == LinkLost("stage 0 at 10.9.8.7:65", "did not dial within 0.2 s")
    link = ends.dial("lonely", port=1, first_contact=timedelta(seconds=0.3))
    told = lost(ends.upper)
    assert told.peer == "stage 1 at 127.0.0.1:1"
    assert told.reason.startswith("not connected within 0.3 s: UNAVAILABLE")
    link.close()
    awaited.close()


def test_a_stranger_is_not_told_the_keys(ends: Ends, stranger: TlsIdentity) -> None:
    """A process with a certificate of another authority never gets to say hello."""
    loop, _, below = ends.workers.grpc
    outsider = CollectiveEndpoint(
        loop=loop, identity=stranger, host="127.0.0.1", incarnation="above", protocol=1, on_stuck=print
    )
    awaited = ends.accept("secret")
    terms = upper_terms("secret", below.port, inbox=ends.upper, contract=CONTRACT, first_contact=timedelta(seconds=0.5))
    link = outsider.dial(terms)
    assert "UNAVAILABLE" in lost(ends.upper).reason
    assert not awaited.was_connected
    link.close()
    awaited.close()


def test_memory_is_bounded(ends: Ends) -> None:
    """Three of the largest frames are this contract's limit while nobody takes them; taken ones make room again."""
    accepted = ends.accept("bounded")
    for _ in range(3):
        accepted.send(gradient())
    with pytest.raises(LinkOverflowError, match=r"256 bytes unacknowledged, the limit is 192"):
        accepted.send(gradient())
    link = ends.dial("bounded")
    for _ in range(3):
        assert isinstance(ends.upper.get(timeout=DEADLINE_S), Frame)

    def is_sent() -> bool:
        with suppress(LinkOverflowError):  # that a frame has left is noticed a moment after its arrival
            accepted.send(gradient())
            return True
        return False

    for _ in range(50):
        wait_until(is_sent)
        assert isinstance(ends.upper.get(timeout=DEADLINE_S), Frame)
    link.close()
    accepted.close()


def test_frames_of_all_sizes_keep_their_order_and_their_values(ends: Ends) -> None:
    """Large frames, which travel alone, between small and tiny ones, which travel with their headers: nothing that
    arrived is written over by what arrives later."""
    large, small = (TensorForm(torch.float32, (3, INLINE_BYTES // 8)),), (TensorForm(torch.float64, (4096,)),)
    forms = {
        FrameKind.SUMS: (*large, TensorForm(torch.int64, (5,))),
        FrameKind.REDUCED: small,
        FrameKind.NORM_TOTAL: (TensorForm(torch.float64, ()),),
    }
    contract = FrameContract(forms, max_unacknowledged_frames=40)
    stage = {"stage": StageIndex(0), "peer_stage": StageIndex(0)}
    accepted = ends.workers.collective[1].accept(lower_terms("sizes", inbox=ends.lower, contract=contract, **stage))
    port = ends.workers.grpc[2].port
    link = ends.workers.collective[0].dial(upper_terms("sizes", port, inbox=ends.upper, contract=contract, **stage))
    kinds = [FrameKind.SUMS, FrameKind.NORM_TOTAL, FrameKind.SUMS, FrameKind.REDUCED] * 6
    sent = [
        Frame(
            kind,
            GENERATION,
            Batch(number),
            MicrobatchIndex(0),
            tuple(torch.full(form.shape, number, dtype=form.dtype) for form in forms[kind]),
        )
        for number, kind in enumerate(kinds)
    ]
    for frame in sent:
        link.send(frame)
    received = [ends.lower.get(timeout=DEADLINE_S) for _ in sent]
    for expected, got in zip(sent, received, strict=True):
        assert isinstance(got, Frame), got
        assert (got.kind, got.batch) == (expected.kind, expected.batch)
        assert all(torch.equal(*tensors) for tensors in zip(got.tensors, expected.tensors, strict=True))
        assert all(tensor.data_ptr() % ALIGNMENT_BYTES == 0 for tensor in got.tensors)
    link.close()
    accepted.close()


def test_a_goodbye_behind_large_frames_waits_for_them(ends: Ends) -> None:
    """More frames that travel alone than are under way at a time, and the end right behind them: all arrive before the
    link is lost."""
    num_frames = 4 * MAX_UNDER_WAY
    forms = {FrameKind.ACTIVATION: (TensorForm(torch.float32, (INLINE_BYTES,)),)}
    contract = FrameContract(forms, max_unacknowledged_frames=num_frames)
    terms = lower_terms("goodbye", inbox=ends.lower, contract=contract)
    accepted = ends.workers.collective[1].accept(terms)
    port = ends.workers.grpc[2].port
    link = ends.workers.collective[0].dial(upper_terms("goodbye", port, inbox=ends.upper, contract=contract))
    for number in range(num_frames):
        values = torch.full((INLINE_BYTES,), number, dtype=torch.float32)
        link.send(Frame(FrameKind.ACTIVATION, GENERATION, Batch(number), MicrobatchIndex(0), (values,)))
    wait_until(lambda: bool(link.was_connected))
    link.close()
    for number in range(num_frames):
        frame = ends.lower.get(timeout=DEADLINE_S)
        assert isinstance(frame, Frame), frame
        assert frame.batch == number
        assert bool((frame.tensors[0] == number).all())
    assert lost(ends.lower).reason == "the peer closed the link"
    accepted.close()


def test_a_quiet_link_stays(ends: Ends) -> None:
    """Nobody sends anything for longer than a peer may be silent: heartbeats keep the link."""
    silence = timedelta(seconds=1)
    link, accepted = ends.dial("quiet", silence=silence), ends.accept("quiet", silence=silence)
    with pytest.raises(queue.Empty):
        ends.upper.get(timeout=3)
    link.send(total())
    assert isinstance(ends.lower.get(timeout=DEADLINE_S), Frame)
    link.close()
    accepted.close()


def test_a_link_that_is_cut_is_lost_on_both_sides(ends: Ends) -> None:
    """The group of one side is aborted: both sides are told at once, and their threads end."""
    link, accepted = ends.dial("cut"), ends.accept("cut")
    link.send(total())
    assert isinstance(ends.lower.get(timeout=DEADLINE_S), Frame)
    link.interrupt()
    for inbox, end in ((ends.upper, link), (ends.lower, accepted)):
        assert lost(inbox).peer == end.peer
    wait_until(lambda: link.is_ended and accepted.is_ended, within_s=3)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ([-1] * 16, "something that is no header"),
        (announce(total(Generation(3)), sequence=0, route=Route.INLINE), "a frame of generation 3 on a link of 7"),
        (announce(total(), sequence=1, route=Route.INLINE), "frame 1 where 0 was due"),
        (announce(gradient(), sequence=0, route=Route.INLINE), "a frame of kind 2 in this direction"),
        (announce(total(), sequence=0, route=Route.DEVICE), "a tensor for an accelerator, on a link between hosts"),
        (announce(total(), sequence=0, route=Route.HOST), "NORM_TOTAL by way of HOST"),
        (make_signal(Signal.HEARTBEAT, GENERATION, sequence=5), "frame 5 where 0 was due"),
    ],
    ids=["noise", "generation", "gap", "direction", "device", "way", "heartbeat"],
)
def test_a_hostile_peer_is_named(ends: Ends, header: list[int], reason: str) -> None:
    """Whoever has got into the group says something impossible: the link is lost with the reason, nothing is taken."""
    store, soon = HashStore(), timedelta(seconds=DEADLINE_S)
    groups: list[GroupOfTwo] = []

    def accept() -> None:
        groups.append(GroupOfTwo(Rendezvous(store, "127.0.0.1", "127.0.0.1", ACCEPTOR), timeout=soon))

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    terms = lower_terms("hostile", inbox=ends.lower, contract=CONTRACT, peer_address="10.0.0.1:1")
    link = CollectiveLink(ends.workers.grpc[0], terms, ends.workers.stuck.peers.append)
    link.meet(lambda: GroupOfTwo(Rendezvous(store, "127.0.0.1", "127.0.0.1", DIALLER), timeout=soon))
    acceptor.join()
    groups[0].send_message(torch.tensor(header).view(torch.uint8)).wait(timedelta(seconds=DEADLINE_S))
    told = lost(ends.lower)
    assert told.peer == "stage 0 at 10.0.0.1:1"
    assert reason in told.reason
    wait_until(lambda: bool(link.is_ended), within_s=3)


def test_links_leave_nothing_behind(workers: Workers) -> None:
    """Ten generations of links, closed in one way or another: no thread and no file is left of them."""

    def round_of(number: int) -> None:
        ends = Ends(workers, Inbox(), Inbox())
        link, accepted = ends.dial(f"round {number}"), ends.accept(f"round {number}")
        link.send(total())
        assert isinstance(ends.lower.get(timeout=DEADLINE_S), Frame)
        if number % 3 == 0:
            link.interrupt()
        elif number % 3 == 1:
            link.close()
            accepted.close()
        else:
            accepted.close()
        wait_until(lambda: link.is_ended and accepted.is_ended)
        link.close()
        accepted.close()

    def own_threads() -> int:
        return sum(thread.name.startswith(("headway-send", "headway-receive")) for thread in threading.enumerate())

    round_of(0)
    num_files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for number in range(1, 11):
        round_of(number)
    assert own_threads() == 0
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= num_files)  # noqa: PTH208


# --- Other processes --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all processes here."""
    return CertificateAuthority.create(tmp_path_factory.mktemp("processes")).issue("node")


@contextmanager
def process(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A peer and what it says; killed at the end."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    with subprocess.Popen(
        [sys.executable, "-m", "tests.integration.links.collective_peer", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as started:
        assert started.stdout is not None
        try:
            yield started, started.stdout
        finally:
            started.kill()


@pytest.fixture
def above(certificates: Path) -> Iterator[CollectiveEndpoint]:
    """The dialling worker, here, for peers of other processes."""
    loop = LoopThread("dialler")
    loop.start()
    identity = TlsIdentity.read(certificates)
    yield CollectiveEndpoint(
        loop=loop, identity=identity, host="127.0.0.1", incarnation="above", protocol=1, on_stuck=print
    )
    loop.stop()


@pytest.mark.parametrize(
    ("how", "earliest_s", "latest_s", "reason"),
    [
        (signal.SIGKILL, 0.0, 0.9, r"Connection (closed|reset) by peer"),
        (signal.SIGSTOP, 1.9, 6.0, r"^silent for 2 s$"),
    ],
    ids=["killed", "stopped"],
)
def test_a_peer_that_is_gone_is_lost(
    above: CollectiveEndpoint,
    certificates: Path,
    how: signal.Signals,
    earliest_s: float,
    latest_s: float,
    reason: str,
) -> None:
    """The process at the other end is killed: lost at once. It stands still: lost after the time of silence."""
    with process(certificates, "below", "below") as (peer, says):
        inbox = Inbox()
        port = int(says.readline())
        silence = timedelta(seconds=2)
        link = above.dial(upper_terms(JOB, port, inbox=inbox, contract=CONTRACT, silence=silence))
        link.send(total())
        assert says.readline() == "heard: NORM_TOTAL\n"
        assert isinstance(inbox.get(timeout=DEADLINE_S), Frame)
        began = time.monotonic()
        peer.send_signal(how)
        told = lost(inbox)
        assert earliest_s < time.monotonic() - began < latest_s
        assert told.peer == f"stage 1 at 127.0.0.1:{port}"
        assert re.search(reason, told.reason), told.reason
        wait_until(lambda: link.is_ended, within_s=3)
        link.close()


def test_a_link_to_a_peer_that_stands_still_is_closed_within_seconds(
    above: CollectiveEndpoint, certificates: Path
) -> None:
    """The peer is stopped, and a new plan closes the link long before the silence is over: its threads are freed."""
    with process(certificates, "below", "below") as (peer, says):
        inbox = Inbox()
        port = int(says.readline())
        silence = timedelta(minutes=5)
        link = above.dial(upper_terms(JOB, port, inbox=inbox, contract=CONTRACT, silence=silence))
        link.send(total())
        assert says.readline() == "heard: NORM_TOTAL\n"
        assert isinstance(inbox.get(timeout=DEADLINE_S), Frame)
        peer.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        link.close()
        assert time.monotonic() - began < 2.0
        wait_until(lambda: link.is_ended, within_s=8)
        assert inbox.empty()


def test_a_group_that_does_not_let_go_ends_its_process(certificates: Path) -> None:
    """No abort reaches the group, as NCCL's may not: the worker that closed the link ends itself, with its own code."""
    with process(certificates, "below", "below") as (frozen, frozen_says):
        port = int(frozen_says.readline())
        with process(certificates, "above", "stuck", port) as (stuck, stuck_says):
            assert stuck_says.readline().strip().isdigit()
            assert stuck_says.readline() == "heard: GRADIENT\n"
            frozen.send_signal(signal.SIGSTOP)
            assert stuck.stdin is not None
            stuck.stdin.write("close\n")
            stuck.stdin.flush()
            assert stuck_says.readline() == "closed\n"
            assert stuck.wait(timeout=DEADLINE_S) == EXIT_STUCK
            assert stuck_says.readline() == f"stuck: stage 1 at 127.0.0.1:{port}\n"
