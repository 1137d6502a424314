"""Links between two cards, on a fake NCCL that hangs, fails, and is aborted late: a survivor's process goes on."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import pytest
import structlog
import torch
from torch._C._distributed_c10d import HashStore

from headway.stages.ids import Batch, MicrobatchIndex
from headway.stages.links.collective import link as collective_link
from headway.stages.links.collective.group import ACCEPTOR, DIALLER, GroupOfTwo
from headway.stages.links.collective.group_guard import Rendezvous
from headway.stages.links.collective.link import CollectiveLink
from headway.stages.links.collective.nccl_direction import NcclDirection
from headway.stages.links.frame_contract import FrameContract, TensorForm
from headway.stages.links.link import Frame, FrameKind, LinkLost
from headway.stages.links.loop_thread import LoopThread
from tests.integration.links.two_sides import GENERATION, lower_terms, upper_terms
from tests.rigs.fake_nccl import FakeNccl

DEADLINE_S = 20.0
SOON = timedelta(seconds=DEADLINE_S)
HOST = "127.0.0.1"
VALUES = TensorForm(torch.float32, (3, 5))
CONTRACT = FrameContract(
    forms={
        FrameKind.ACTIVATION: (VALUES,),
        FrameKind.GRADIENT: (VALUES,),
        FrameKind.NORM_TOTAL: (TensorForm(torch.float64, ()),),
        FrameKind.NORM_SQUARES: (TensorForm(torch.float64, (2,)),),
    },
    max_unacknowledged_frames=20,
)
Inbox = queue.SimpleQueue[Frame | LinkLost]


def on_card(kind: FrameKind, batch: int) -> Frame:
    """A frame whose values are its batch."""
    return Frame(kind, GENERATION, Batch(batch), MicrobatchIndex(0), (torch.full(VALUES.shape, float(batch)),))


def total(batch: int) -> Frame:
    """A frame in host memory."""
    return Frame(
        FrameKind.NORM_TOTAL, GENERATION, Batch(batch), MicrobatchIndex(0), (torch.tensor(1.0, dtype=torch.float64),)
    )


def wait_until(is_so: Callable[[], bool], *, within_s: float = DEADLINE_S) -> None:
    """Raises AssertionError when it is not so in time."""
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline, "not in time"
        threading.Event().wait(0.01)


@dataclass
class Sides:
    """Both ends of a link between two cards, in this process."""

    loop: LoopThread
    nccl: FakeNccl = field(default_factory=FakeNccl)
    inboxes: tuple[Inbox, Inbox] = field(default_factory=lambda: (Inbox(), Inbox()))
    stuck: list[str] = field(default_factory=list)
    links: list[CollectiveLink] = field(default_factory=list)

    def meet(self, **terms: Any) -> tuple[CollectiveLink, CollectiveLink]:
        """Return the links of stage 0, which dials, and of stage 1."""
        store = HashStore()
        above = upper_terms("cards", 1, inbox=self.inboxes[0], contract=CONTRACT, **terms)
        below = lower_terms("cards", inbox=self.inboxes[1], contract=CONTRACT, **terms)
        for side, rank in ((above, DIALLER), (below, ACCEPTOR)):
            device: Any = self.nccl.cards[rank]
            link = CollectiveLink(self.loop, side, self.stuck.append, device=device)
            meeting = Rendezvous(store, HOST, HOST, rank)
            link.meet(partial(GroupOfTwo, meeting, timeout=SOON, open_direction=self.nccl.open_direction))
            self.links.append(link)
        return self.links[0], self.links[1]

    def received(self, side: int) -> Frame:
        """What arrives next."""
        frame = self.inboxes[side].get(timeout=DEADLINE_S)
        assert isinstance(frame, Frame), frame
        return frame

    def lost(self, side: int, *, within_s: float = DEADLINE_S) -> LinkLost:
        """What arrives next."""
        item = self.inboxes[side].get(timeout=within_s)
        assert isinstance(item, LinkLost), item
        return item


@pytest.fixture
def sides() -> Iterator[Sides]:
    """Closed at the end, with all aborts let go."""
    loop = LoopThread("cards")
    loop.start()
    both = Sides(loop)
    yield both
    for communicator in both.nccl.communicators.values():
        communicator.let_go.set()
    for link in both.links:
        link.close()
        link.interrupt()
    loop.stop()


def test_cards_talk_directly_and_frames_of_hosts_keep_their_place(sides: Sides) -> None:
    """Hidden states and gradients go by NCCL, totals of the norm by gloo; all arrive in the order of their calls."""
    above, below = sides.meet()
    for number in range(6):
        above.send(on_card(FrameKind.ACTIVATION, number) if number % 3 else total(number))
        below.send(on_card(FrameKind.GRADIENT, number))
    for number in range(6):
        frame = sides.received(1)
        assert frame.batch == number
        assert number % 3 == 0 or bool((frame.tensors[0] == number).all())
        assert bool((sides.received(0).tensors[0] == number).all())
    # one more by each direction for the greeting
    assert [wire.num_sent for wire in sides.nccl.wires] == [7, 5]
    assert [wire.num_received for wire in sides.nccl.wires] == [7, 5]
    above.close()
    below.close()
    wait_until(lambda: above.is_ended and below.is_ended)
    assert all(each.num_aborts == 1 for each in sides.nccl.communicators.values())


@pytest.mark.parametrize("refused", [ACCEPTOR, DIALLER], ids=["acceptor", "dialler"])
def test_cards_that_cannot_be_linked_on_one_side_go_through_their_hosts(
    sides: Sides, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    """NCCL refuses one side's card in the second direction: both sides agree on gloo, log the reason, and go on."""
    open_direction = sides.nccl.open_direction

    def refuse(meeting: Rendezvous, sender: int) -> NcclDirection:
        if meeting.rank == refused and sender == DIALLER:
            raise RuntimeError("Duplicate GPU detected")
        if sender == DIALLER:
            return sides.nccl.direction(meeting.rank, sender)
        return open_direction(meeting, sender)

    monkeypatch.setattr(sides.nccl, "open_direction", refuse)
    with structlog.testing.capture_logs() as logs:
        above, below = sides.meet()
        for number in range(3):
            above.send(on_card(FrameKind.ACTIVATION, number))
            below.send(on_card(FrameKind.GRADIENT, number))
        for number in range(3):
            for side in (0, 1):
                assert bool((sides.received(side).tensors[0] == number).all())
    told = [(entry["peer"], entry["reason"]) for entry in logs if entry["event"] == "cards_not_linked"]
    assert sorted(told) == sorted((link.peer, "Duplicate GPU detected") for link in (above, below))
    assert [wire.num_sent for wire in sides.nccl.wires] == [1, 0]
    wait_until(lambda: all(sides.nccl.communicators[rank, ACCEPTOR].num_aborts == 1 for rank in (0, 1)))


def test_a_frame_is_announced_when_it_is_computed(sides: Sides) -> None:
    """The card is behind: the receiver launches nothing, and the link lives beyond its silence; then all goes on."""
    above, _ = sides.meet(silence=timedelta(seconds=0.6))
    card, wire = sides.nccl.cards[DIALLER], sides.nccl.wires[DIALLER]
    above.send(total(0))
    sides.received(1)
    card.is_held, card.num_launched = True, 5
    above.send(on_card(FrameKind.ACTIVATION, 1))
    assert card.marks == [(threading.get_ident(), 5)]
    card.num_launched = 6  # nothing that is launched later delays the frame
    above.send(total(2))
    with pytest.raises(queue.Empty):
        sides.inboxes[1].get(timeout=1.5)
    assert (wire.num_sent, wire.num_received) == (1, 1)  # the greeting
    card.compute()
    assert [sides.received(1).batch, sides.received(1).batch] == [1, 2]
    assert len(card.marks) == 1


def test_what_was_sent_before_the_close_is_delivered_once_it_is_computed(sides: Sides) -> None:
    """The end of a generation comes while the card is behind: the frame still arrives, and the goodbye after it."""
    above, _ = sides.meet()
    card = sides.nccl.cards[DIALLER]
    above.send(total(0))
    sides.received(1)
    card.is_held = True
    above.send(on_card(FrameKind.ACTIVATION, 1))
    above.close()
    card.compute()
    assert sides.received(1).batch == 1
    assert sides.lost(1).reason == "the peer closed the link"


def test_a_transfer_that_hangs_costs_the_link_alone(sides: Sides) -> None:
    """NCCL never completes: both sides lose the link after their silence, by name, and every thread of it ends."""
    above, below = sides.meet(silence=timedelta(seconds=1))
    above.send(total(0))
    sides.received(1)
    sides.nccl.wires[DIALLER].hangs = True
    above.send(on_card(FrameKind.ACTIVATION, 1))
    told = [sides.lost(side) for side in (0, 1)]
    assert [each.peer for each in told] == [above.peer, below.peer]
    assert any(re_said in told[0].reason + told[1].reason for re_said in ("took nothing of 60", "sent nothing of 60"))
    wait_until(lambda: above.is_ended and below.is_ended)
    assert not sides.stuck


def test_a_dead_peer_is_noticed_while_both_directions_wait_for_its_card(sides: Sides) -> None:
    """Both threads wait for NCCL, which tells nothing of the death: gloo does, long before the silence is over."""
    above, below = sides.meet(silence=timedelta(minutes=5))
    above.send(total(0))
    sides.received(1)
    for wire in sides.nccl.wires:
        wire.hangs = True
    above.send(on_card(FrameKind.ACTIVATION, 1))
    below.send(on_card(FrameKind.GRADIENT, 1))
    wait_until(lambda: all((wire.num_sent, wire.num_received) == (2, 2) for wire in sides.nccl.wires))
    below.interrupt()  # its connections are closed, as the kernel closes a dead process's
    assert "closed" in sides.lost(0, within_s=8).reason
    wait_until(lambda: bool(above.is_ended), within_s=3)
    assert sides.nccl.communicators[DIALLER, DIALLER].num_aborts == 1


def test_an_error_of_nccl_is_the_reason_of_the_loss(sides: Sides) -> None:
    """A transfer ends with an error: nothing of it is delivered."""
    above, _ = sides.meet()
    above.send(total(0))
    sides.received(1)
    sides.nccl.wires[DIALLER].hangs = True
    above.send(on_card(FrameKind.ACTIVATION, 1))
    receiving = sides.nccl.communicators[ACCEPTOR, DIALLER]
    wait_until(lambda: len(receiving.works) == 2)
    receiving.works[1].complete("NCCL error: unhandled cuda error")
    assert sides.lost(1).reason == "NCCL error: unhandled cuda error"
    sides.lost(0)


@pytest.mark.parametrize("is_late", [True, False], ids=["late", "never"])
def test_only_an_abort_that_never_ends_asks_for_the_end_of_the_process(
    sides: Sides, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """A late abort frees the card, and the worker goes on; one that never returns holds it, so the worker must end."""
    monkeypatch.setattr(collective_link, "CLOSE_GRACE", timedelta(seconds=0.3))
    monkeypatch.setattr(collective_link, "ABORT_GRACE", timedelta(seconds=0.3 if not is_late else 30))
    above, _ = sides.meet()
    above.send(total(0))
    sides.received(1)
    sides.nccl.communicators[DIALLER, DIALLER].let_go.clear()
    above.interrupt()
    sides.lost(0)
    if is_late:
        wait_until(lambda: sides.nccl.communicators[DIALLER, DIALLER].num_aborts == 1)
        assert not above.is_ended
        sides.nccl.communicators[DIALLER, DIALLER].let_go.set()
        wait_until(lambda: bool(above.is_ended))
        assert not sides.stuck
    else:
        wait_until(lambda: sides.stuck == [above.peer])


def test_a_group_that_is_not_wanted_any_more_frees_its_cards(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link is lost while its group forms: the communicators are aborted, not left to the interpreter."""
    monkeypatch.setattr(collective_link, "CLOSE_GRACE", timedelta(seconds=0.1))
    forming, may_form, open_direction = threading.Event(), threading.Event(), sides.nccl.open_direction

    def open_late(meeting: Rendezvous, sender: int) -> NcclDirection:
        forming.set()
        may_form.wait(DEADLINE_S)
        return open_direction(meeting, sender)

    monkeypatch.setattr(sides.nccl, "open_direction", open_late)
    above, below = sides.meet()
    assert forming.wait(DEADLINE_S)
    for link in (above, below):
        link.lose("the plan changed")
        wait_until(lambda link=link: link._is_broken)  # type: ignore[misc]
    assert not above.is_ended
    may_form.set()
    wait_until(lambda: above.is_ended and below.is_ended)
    assert all(each.num_aborts == 1 for each in sides.nccl.communicators.values())
    assert not sides.stuck


def test_an_error_that_nobody_expects_loses_the_link_and_is_told() -> None:
    """Forming raises what it must not → the stage hears of a lost link at once, and the process of the error."""
    errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    loop = LoopThread("cards", on_failure=errors.put)
    loop.start()
    both = Sides(loop)
    terms = lower_terms("cards", inbox=both.inboxes[1], contract=CONTRACT)
    link = CollectiveLink(loop, terms, both.stuck.append)

    def form() -> GroupOfTwo:
        raise ValueError("a bug")

    link.meet(form)
    assert "a bug" in both.lost(1).reason
    assert isinstance(errors.get(timeout=DEADLINE_S), ValueError)
    loop.stop()


class Noting(torch.Tensor):
    """A tensor that notes in which thread it is made contiguous."""

    threads: ClassVar[list[int]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "contiguous" and not args[0].is_contiguous():
            cls.threads.append(threading.get_ident())
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_a_frame_in_pieces_is_put_together_where_it_is_computed(sides: Sides) -> None:
    """The values are a transposed view → the thread that computes copies them, so the mark comes after the copy."""
    upper, _ = sides.meet()
    values = torch.arange(15.0).view(5, 3).t().as_subclass(Noting)
    upper.send(Frame(FrameKind.ACTIVATION, GENERATION, Batch(0), MicrobatchIndex(0), (values,)))
    assert torch.equal(sides.received(1).tensors[0], torch.arange(15.0).view(5, 3).t())
    assert Noting.threads == [threading.get_ident()]
