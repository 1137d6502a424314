"""Links whose values travel beside the stream, on a fake NCCL that hangs, fails, and is aborted late: what breaks costs
the attachment, the link resumes with a new one, and the process goes on."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import structlog
import torch

from headway.stages.ids import Batch, MicrobatchIndex
from headway.stages.links import attachment
from headway.stages.links.endpoint import LinkEndpoint
from headway.stages.links.frame_contract import FrameContract, TensorForm
from headway.stages.links.link import Frame, FrameKind, LinkLost
from headway.stages.links.loop_thread import LoopThread
from headway.stages.links.stream_link import StreamLink
from headway.stages.sockets.tls_identity import TlsIdentity
from tests.rigs.fake_nccl import FakeAttach, FakeCard, FakeNccl
from tests.rigs.two_sides import (
    DEADLINE_S,
    GENERATION,
    Endpoints,
    Inbox,
    heard,
    lost,
    lower_terms,
    new_job,
    total,
    upper_terms,
)

UPPER, LOWER = 0, 1
"""The ranks, and the sides."""
VALUES = TensorForm(torch.float32, (3, 5))
CONTRACT = FrameContract(
    forms={
        FrameKind.ACTIVATION: (VALUES,),
        FrameKind.GRADIENT: (VALUES,),
        FrameKind.NORM_TOTAL: (TensorForm(torch.float64, ()),),
    },
    max_unacknowledged_frames=20,
)


def on_card(kind: FrameKind, batch: int) -> Frame:
    """A frame whose values are its batch."""
    return Frame(kind, GENERATION, Batch(batch), MicrobatchIndex(0), (torch.full(VALUES.shape, float(batch)),))


def wait_until(is_so: Callable[[], bool], *, within_s: float = DEADLINE_S) -> None:
    """Raises AssertionError when it is not so in time."""
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline, "not in time"
        threading.Event().wait(0.01)


@dataclass
class Sides:
    """Both ends of a link between two cards, in this process."""

    endpoints: Endpoints
    nccl: FakeNccl = field(default_factory=FakeNccl)
    inboxes: tuple[Inbox, Inbox] = field(default_factory=lambda: (Inbox(), Inbox()))
    links: list[StreamLink] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.attaches = FakeAttach(self.nccl), FakeAttach(self.nccl)

    def meet(self, *, is_swapped: bool = False, **terms: Any) -> tuple[StreamLink, StreamLink]:
        """Return the links of stage 0, which dials, and of stage 1. is_swapped: in the other order in the plan."""
        _, above, below = self.endpoints
        job, port = new_job("cards"), below.port
        one, other = ({"attach": attach, "contract": CONTRACT, **terms} for attach in self.attaches)
        if is_swapped:
            one |= {"worker": 1, "peer_worker": 0}
            other |= {"worker": 0, "peer_worker": 1}
        self.links.append(above.dial(upper_terms(job, port, inbox=self.inboxes[UPPER], **one)))
        self.links.append(below.accept(lower_terms(job, inbox=self.inboxes[LOWER], **other)))
        return self.links[-2], self.links[-1]

    def exchange(self, numbers: range) -> None:
        """Frames of cards both ways, and of hosts between them one way; all arrive, in order and whole."""
        above, below = self.links[-2:]
        for number in numbers:
            above.send(on_card(FrameKind.ACTIVATION, number) if number % 3 else total(number))
            below.send(on_card(FrameKind.GRADIENT, number))
        for number in numbers:
            frame = heard(self.inboxes[LOWER])
            assert frame.batch == number
            assert number % 3 == 0 or bool((frame.tensors[0] == number).all())
            frame = heard(self.inboxes[UPPER])
            assert frame.batch == number
            assert bool((frame.tensors[0] == number).all())

    def end(self) -> None:
        """Close both, with all aborts let go."""
        self.nccl.may_open.set()
        for communicator in self.nccl.all_communicators:
            communicator.let_go.set()
        for link in self.links:
            link.close()
        self.forget_pairs()

    def forget_pairs(self) -> None:
        """Neither side keeps a pair, as a worker without a job."""
        for attach in self.attaches:
            attach.kept.want_only(())

    def close_both(self) -> None:
        """End the link from both sides, and all its threads. The slower side may hear of it first."""
        for link in self.links[-2:]:
            link.close()
        wait_until(lambda: own_threads() == 0)
        for inbox in self.inboxes:
            while not inbox.empty():
                assert isinstance(inbox.get_nowait(), LinkLost)


@pytest.fixture
def sides(endpoints: Endpoints) -> Iterator[Sides]:
    """Over TCP with TLS."""
    both = Sides(endpoints)
    yield both
    both.end()
    wait_until(lambda: own_threads() == 0)


def own_threads() -> int:
    """Threads of attachments."""
    names = ("headway-send", "headway-receive", "headway-abort")
    return sum(thread.name.startswith(names) for thread in threading.enumerate())


def test_cards_talk_directly_and_frames_of_hosts_keep_their_place(sides: Sides) -> None:
    """Hidden states and gradients go by NCCL, totals of the norm over the stream; after the end nothing is left."""
    sides.meet()
    sides.exchange(range(6))
    # one more by each direction for the greeting
    assert [sides.nccl.wires[rank].num_sent for rank in (UPPER, LOWER)] == [5, 7]
    assert [sides.nccl.wires[rank].num_received for rank in (UPPER, LOWER)] == [5, 7]
    sides.close_both()
    sides.forget_pairs()
    wait_until(lambda: own_threads() == 0)
    assert [each.num_aborts for each in sides.nccl.all_communicators] == [1] * 4
    assert not any(attach.stuck for attach in sides.attaches)


@pytest.mark.parametrize("refused", [UPPER, LOWER])
@pytest.mark.parametrize("sender", [UPPER, LOWER])
def test_cards_that_cannot_be_linked_on_one_side_go_through_their_hosts(
    sides: Sides, refused: int, sender: int
) -> None:
    """NCCL refuses one side's card in one direction: both sides agree on the stream, log the reason, and go on."""
    sides.nccl.refused = {(refused, sender)}
    with structlog.testing.capture_logs() as logs:
        links = sides.meet(silence=timedelta(seconds=30))
        sides.exchange(range(6))
    told = [(entry["peer"], entry["reason"]) for entry in logs if entry["event"] == "cards_not_linked"]
    assert sorted({peer for peer, _ in told}) == sorted(link.peer for link in links)
    assert any(reason == "Duplicate GPU detected" for _, reason in told)
    wait_until(lambda: all(each.num_aborts == 1 for each in sides.nccl.all_communicators))


def test_a_frame_is_announced_when_its_send_is_launched(sides: Sides) -> None:
    """The launch is late → the peer hears of nothing and launches no receive, which would spin on its card meanwhile.

    So each receive waits for a send that is launched already, and no cards wait for each other in a circle.
    """
    above, _ = sides.meet()
    sides.exchange(range(3))
    wire = sides.nccl.wires[UPPER]
    for number in range(3, 6):
        num_before = len(wire.launched)
        wire.may_send.clear()
        above.send(on_card(FrameKind.ACTIVATION, number))
        time.sleep(0.3)
        assert len(wire.launched) == num_before
        wire.may_send.set()
        assert heard(sides.inboxes[LOWER]).batch == number
        assert wire.launched[num_before:] == [True, False]


class OnCard(torch.Tensor):
    """A tensor that notes, when it is copied to the host, whether that is in a stream beside the computation."""

    beside: ClassVar[FakeCard]
    noted: ClassVar[list[bool]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "cpu":
            cls.noted.append(cls.beside.num_inside > 0)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_two_workers_on_one_card_are_found_before_nccl_is_asked(sides: Sides) -> None:
    """Both say so, no communicator is made, and their frames go through the host, beside what the card computes."""
    sides.attaches[LOWER].card = sides.attaches[UPPER].card
    with structlog.testing.capture_logs() as logs:
        links = sides.meet()
        sides.exchange(range(6))
    told = {(entry["peer"], entry["reason"]) for entry in logs if entry["event"] == "cards_not_linked"}
    assert told == {(link.peer, "both workers are on one card") for link in links}
    assert not sides.nccl.all_communicators
    OnCard.beside = sides.attaches[UPPER].beside
    frame = on_card(FrameKind.ACTIVATION, 7)
    links[UPPER].send(replace(frame, tensors=(frame.tensors[0].as_subclass(OnCard),)))
    assert bool((heard(sides.inboxes[LOWER]).tensors[0] == 7).all())
    assert OnCard.noted == [True]


@pytest.mark.parametrize("cut", ["cut", "deafen"])
def test_a_link_that_resumes_has_a_new_attachment(sides: Sides, cut: str) -> None:
    """The stream breaks amid frames, or one side hears nothing for a while: every frame comes once, in order, whole."""
    above, _ = sides.meet()
    sides.exchange(range(6))
    old = sides.nccl.all_communicators
    end = sides.endpoints[2]
    (end.cut if cut == "cut" else end.deafen)(timedelta(seconds=0.2 if cut == "cut" else 3))
    sides.exchange(range(6, 18))
    wait_until(lambda: above.num_resumed >= 1)
    sides.exchange(range(18, 24))
    wait_until(lambda: all(each.num_aborts == 1 for each in old))
    assert sides.nccl.wires[UPPER].num_sent > 1
    assert not any(attach.stuck for attach in sides.attaches)


def test_many_cuts_at_random_moments_lose_and_double_nothing(sides: Sides) -> None:
    """Twenty resets while frames go both ways, some with their values under way."""
    sides.meet()
    sides.exchange(range(1))
    stop = threading.Event()

    def cut_again() -> None:
        number = 0
        while not stop.wait(0.05 + 0.013 * (number % 7)):
            number += 1
            (sides.endpoints[1] if number % 2 else sides.endpoints[2]).cut(timedelta(0))

    cutter = threading.Thread(target=cut_again)
    cutter.start()
    try:
        start = 1
        while start < 301 or sides.links[UPPER].num_resumed < 10:
            sides.exchange(range(start, start + 10))
            start += 10
    finally:
        stop.set()
        cutter.join()


@pytest.mark.parametrize("how", ["hangs", "fails"])
def test_a_transfer_that_fails_breaks_the_stream_and_is_made_up_for(
    sides: Sides, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """NCCL never completes a transfer, or ends it with an error: nothing of it is delivered, and it comes again."""
    monkeypatch.setattr(attachment, "LEAST_BYTES_PER_S", 1e9)
    above, _ = sides.meet(silence=timedelta(seconds=1.5))
    sides.exchange(range(3))
    sides.nccl.wires[UPPER].hangs = True
    receiving = sides.nccl.communicators[LOWER, UPPER][-1]
    num_before = len(receiving.works)
    above.send(on_card(FrameKind.ACTIVATION, 7))
    wait_until(lambda: len(receiving.works) > num_before)
    if how == "fails":
        receiving.works[-1].complete("NCCL error: unhandled cuda error")
    frame = heard(sides.inboxes[LOWER])
    assert bool((frame.tensors[0] == 7).all())
    assert above.num_resumed >= 1


def test_an_attachment_that_breaks_each_time_is_the_reason_of_the_loss(sides: Sides, monkeypatch: Any) -> None:
    """Every transfer hangs, after every forming: the link is lost by name, and every thread of it ends."""
    above, below = sides.meet(silence=timedelta(seconds=0.3))
    sides.exchange(range(3))

    def open_hanging(*arguments: Any, **fields: Any) -> Any:
        direction = sides.nccl.open(*arguments, **fields)
        for wire in sides.nccl.wires.values():
            wire.hangs = fields["sender"] == LOWER
        return direction

    for attach in sides.attaches:
        monkeypatch.setattr(attach, "open", open_hanging)
    for wire in sides.nccl.wires.values():
        wire.hangs = True
    above.send(on_card(FrameKind.ACTIVATION, 1))
    told = [lost(sides.inboxes[side]) for side in (UPPER, LOWER)]
    assert [each.peer for each in told] == [above.peer, below.peer]
    assert any("attachment broken 3 times: the peer's device sent nothing of 60 bytes" in each.reason for each in told)
    wait_until(lambda: own_threads() == 0)


@pytest.mark.parametrize(("grace_s", "launched_s", "is_late"), [(30, 0, True), (0.3, 30, True), (0.3, 0, False)])
def test_only_an_abort_that_never_ends_asks_for_the_end_of_the_process(
    sides: Sides, monkeypatch: pytest.MonkeyPatch, grace_s: float, launched_s: float, is_late: bool
) -> None:
    """A late abort frees the card, and the worker goes on; one that never returns holds it, so the worker must end. An
    abort may be as late as the work that its card was given before.
    """
    monkeypatch.setattr(attachment, "ABORT_GRACE", timedelta(seconds=grace_s))
    above, below = sides.meet(launched_s=lambda: launched_s)
    sides.exchange(range(3))
    sides.forget_pairs()
    held = sides.nccl.communicators[UPPER, UPPER][0]
    held.let_go.clear()
    above.close()
    below.close()
    wait_until(lambda: held.num_aborts == 1)
    if is_late:
        time.sleep(1)
        held.let_go.set()
        wait_until(lambda: own_threads() == 0)
        assert not sides.attaches[UPPER].stuck
    else:
        wait_until(lambda: sides.attaches[UPPER].stuck == [above.peer])
    assert not sides.attaches[LOWER].stuck


def test_the_next_link_of_two_workers_goes_on_with_their_pair(sides: Sides) -> None:
    """A link that ended with nothing under way leaves its communicators: no later one of the two waits for new ones,
    wherever a plan has them.
    """
    for start in (0, 10, 20):
        sides.meet(is_swapped=start == 10)
        sides.exchange(range(start, start + 10))
        sides.close_both()
    assert [each.num_aborts for each in sides.nccl.all_communicators] == [0] * 4
    sides.forget_pairs()
    wait_until(lambda: own_threads() == 0)
    assert [each.num_aborts for each in sides.nccl.all_communicators] == [1] * 4


@pytest.mark.parametrize("side", [UPPER, LOWER])
def test_a_pair_that_one_side_has_not_kept_is_not_taken_up(sides: Sides, side: int) -> None:
    """It is aborted, and both open a new one, which is then taken up."""
    sides.meet()
    sides.exchange(range(3))
    sides.close_both()
    sides.attaches[side].kept.take(("below", "above")[side])
    for start in (3, 6):
        sides.meet()
        sides.exchange(range(start, start + 3))
        sides.close_both()
    made = [sides.nccl.communicators[rank, sender] for rank in (UPPER, LOWER) for sender in (UPPER, LOWER)]
    assert [len(each) for each in made] == [2] * 4
    assert [first.num_aborts for rank in (1 - side,) for first, _ in (made[2 * rank], made[2 * rank + 1])] == [1, 1]


@pytest.mark.parametrize("what", ["its values do not arrive", "it is not launched"])
def test_a_link_that_ends_with_a_frame_under_way_leaves_no_pair(sides: Sides, what: str) -> None:
    """What is in the wire would come out of it as the first frame of the next link."""
    above, below = sides.meet()
    sides.exchange(range(3))
    wire = sides.nccl.wires[UPPER]
    if what == "it is not launched":
        wire.may_send.clear()
    else:
        wire.hangs = True
    above.send(on_card(FrameKind.ACTIVATION, 7))
    time.sleep(0.3)
    below.close()
    assert isinstance(lost(sides.inboxes[UPPER]), LinkLost)
    wire.hangs = False
    wire.may_send.set()
    wait_until(lambda: own_threads() == 0)
    sides.meet()
    sides.exchange(range(8, 14))
    assert all(len(each) == 2 for each in sides.nccl.communicators.values())


def test_an_attachment_that_is_not_wanted_any_more_frees_its_cards(sides: Sides) -> None:
    """The stream breaks while the attachment forms: what comes of it is aborted, not left to the interpreter."""
    sides.nccl.may_open.clear()
    above, below = sides.meet()
    above.send(total(0))
    heard(sides.inboxes[LOWER])
    above.close()
    below.close()
    time.sleep(0.3)
    assert own_threads() > 0
    sides.nccl.may_open.set()
    wait_until(lambda: own_threads() == 0)
    assert {each.num_aborts for each in sides.nccl.all_communicators} <= {1}
    assert not any(attach.stuck for attach in sides.attaches)


def test_an_error_that_nobody_expects_loses_the_link_and_is_told(identity: TlsIdentity) -> None:
    """Forming raises what it must not → the stage hears of a lost link, and the process of the error."""
    errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    loop = LoopThread("cards", on_failure=errors.put)
    loop.start()
    about: dict[str, Any] = {"loop": loop, "identity": identity, "host": "127.0.0.1", "protocol": 1}
    above, below = (LinkEndpoint(**about, incarnation=name) for name in ("above", "below"))
    for end in (above, below):
        end.start()
    both = Sides((loop, above, below))

    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("a bug")

    for attach in both.attaches:
        attach.open = fail
    both.meet(silence=timedelta(seconds=2))  # of the side whose peer gives up first
    assert "a bug" in lost(both.inboxes[UPPER]).reason + lost(both.inboxes[LOWER]).reason
    assert isinstance(errors.get(timeout=DEADLINE_S), ValueError)
    both.end()
    for end in (above, below):
        end.stop()
    loop.stop()


def test_values_for_a_link_without_an_attachment_are_a_violation(endpoints: Endpoints) -> None:
    """One side alone links its device: the other one names what it cannot take, and nobody waits."""
    _, above, below = endpoints
    upper, lower = Inbox(), Inbox()
    job = new_job("alone")
    attach = FakeAttach(FakeNccl())
    link = above.dial(upper_terms(job, below.port, inbox=upper, contract=CONTRACT, attach=attach))
    accepted = below.accept(lower_terms(job, inbox=lower, contract=CONTRACT))
    assert "something for an attachment, on a link without one" in lost(lower).reason
    link.close()
    accepted.close()
