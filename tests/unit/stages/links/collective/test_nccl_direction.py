"""Transfers between two cards: every wait ends by its deadline, an error, or an abort, and never with wrong values."""

import threading
from datetime import timedelta
from time import monotonic

import pytest
import torch

from headway.stages.links.collective.nccl_direction import NcclDirection, nccl_directions
from tests.rigs.fake_nccl import GARBAGE, FakeNccl

SOON = timedelta(seconds=20)
LITTLE = timedelta(seconds=0.05)


@pytest.fixture
def nccl() -> FakeNccl:
    """Two cards."""
    return FakeNccl()


@pytest.fixture
def ends(nccl: FakeNccl) -> tuple[NcclDirection, NcclDirection]:
    """Return both ends of the direction from rank 0."""
    return nccl.direction(0, 0), nccl.direction(1, 0)


def test_what_is_sent_arrives(ends: tuple[NcclDirection, NcclDirection]) -> None:
    """Three tensors, in order, each complete when its wait returns."""
    sent = [torch.rand(4) for _ in range(3)]
    sends = [ends[0].send(tensor) for tensor in sent]
    for expected in sent:
        tensor, transfer = ends[1].receive(torch.float32, (4,))
        transfer.wait(SOON)
        assert torch.equal(tensor, expected)
    for transfer in sends:
        transfer.wait(SOON)


def test_a_peer_that_never_comes_is_told_by_bytes_and_seconds(ends: tuple[NcclDirection, NcclDirection]) -> None:
    """Both sides give up after their own deadline, whatever torch or NCCL would wait for."""
    with pytest.raises(RuntimeError, match=r"^the peer's card took nothing of 16 bytes for 0.05 s$"):
        ends[0].send(torch.rand(4)).wait(LITTLE)
    nothing = FakeNccl().direction(1, 0).receive(torch.float32, (8,))[1]
    with pytest.raises(RuntimeError, match=r"^the peer's card sent nothing of 32 bytes for 0.05 s$"):
        nothing.wait(LITTLE)


def test_an_error_of_nccl_is_raised(nccl: FakeNccl, ends: tuple[NcclDirection, NcclDirection]) -> None:
    """The kernel has ended, but by an error: nothing of the tensor may be used."""
    _, transfer = ends[1].receive(torch.float32, (4,))
    nccl.communicators[1, 0].works[0].complete("NCCL error: remote process exited")
    with pytest.raises(RuntimeError, match="remote process exited"):
        transfer.wait(SOON)


def test_an_abort_ends_every_wait_at_once_even_if_it_never_returns(
    nccl: FakeNccl, ends: tuple[NcclDirection, NcclDirection]
) -> None:
    """A thread waits for a transfer that hangs, and NCCL's abort hangs as well: the thread is free."""
    nccl.wires[0].hangs = True
    nccl.communicators[1, 0].let_go.clear()
    _, transfer = ends[1].receive(torch.float32, (4,))
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            transfer.wait(SOON)
        except RuntimeError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    threading.Thread(target=ends[1].abort, daemon=True).start()
    waiting.join(SOON.total_seconds())
    nccl.communicators[1, 0].let_go.set()
    assert [str(error) for error in errors] == ["the group was aborted"]


def test_an_aborted_transfer_is_not_taken_for_complete(
    nccl: FakeNccl, ends: tuple[NcclDirection, NcclDirection]
) -> None:
    """The abort ends the kernel, which looks like success to CUDA: the values are garbage, and the wait says so."""
    tensor, transfer = ends[1].receive(torch.float32, (4,))
    ends[1].abort()
    assert nccl.communicators[1, 0].works[0].is_completed()
    with pytest.raises(RuntimeError, match="the group was aborted"):
        transfer.wait(SOON)
    assert bool((tensor == GARBAGE).all())


def test_who_waits_does_other_things_meanwhile(ends: tuple[NcclDirection, NcclDirection]) -> None:
    """What is done meanwhile is done again and again, and what it raises ends the wait."""
    num_calls = 0

    def meanwhile() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise RuntimeError("the connection is closed")

    began = monotonic()
    with pytest.raises(RuntimeError, match="the connection is closed"):
        ends[0].send(torch.rand(4)).wait(SOON, meanwhile=meanwhile)
    assert monotonic() - began < SOON.total_seconds() / 2


def test_the_first_transfer_is_part_of_forming(nccl: FakeNccl, ends: tuple[NcclDirection, NcclDirection]) -> None:
    """Both ends greet; a peer that does not is an error, and its direction is aborted."""
    other = threading.Thread(target=ends[1].greet, kwargs={"is_sender": False, "timeout": SOON})
    other.start()
    ends[0].greet(is_sender=True, timeout=SOON)
    other.join(SOON.total_seconds())
    assert (nccl.wires[0].num_sent, nccl.wires[0].num_received) == (1, 1)
    with pytest.raises(RuntimeError, match="took nothing of 4 bytes"):
        ends[0].greet(is_sender=True, timeout=LITTLE)
    with pytest.raises(RuntimeError, match="the group was aborted"):
        ends[0].send(torch.rand(1)).wait(SOON)


def test_hosts_have_no_direction_of_cards() -> None:
    """Workers on CPUs have gloo alone."""
    assert nccl_directions(torch.device("cpu"), timeout=SOON) is None
