"""Transfers between two devices: each wait ends by its deadline, an error, or an abort, and never with wrong values."""

import threading
from datetime import timedelta

import pytest
import torch

from headway.stages.links.attachment import MOST_KEYS, Direction, LinkStore, payload_patience
from headway.stages.links.frame_codec import Key
from headway.stages.links.nccl import OLD_NAMES, SETTINGS, outlive_peers
from tests.rigs.fake_nccl import GARBAGE, FakeNccl, FakeWire

SOON = timedelta(seconds=20)
LITTLE = timedelta(seconds=0.05)
Ends = tuple[Direction, Direction]


@pytest.fixture
def nccl() -> FakeNccl:
    """Two cards."""
    return FakeNccl()


@pytest.fixture
def wire() -> FakeWire:
    """What is between both ends."""
    return FakeWire()


@pytest.fixture
def ends(nccl: FakeNccl, wire: FakeWire) -> Ends:
    """Return both ends of the direction from rank 0."""
    return nccl.direction(0, 0, wire), nccl.direction(1, 0, wire)


def test_what_is_sent_arrives(ends: Ends) -> None:
    """Three tensors, in order, each complete when its wait returns."""
    sent = [torch.rand(4) for _ in range(3)]
    sends = [ends[0].send(tensor) for tensor in sent]
    for expected in sent:
        tensor, transfer = ends[1].receive(torch.float32, (4,))
        transfer.wait(SOON)
        assert torch.equal(tensor, expected)
    for transfer in sends:
        transfer.wait(SOON)


def test_a_peer_that_never_comes_is_told_by_bytes_and_seconds(ends: Ends) -> None:
    """Both sides give up after their own deadline, whatever torch or NCCL would wait for."""
    with pytest.raises(RuntimeError, match=r"^the peer's device took nothing of 16 bytes for 0.05 s$"):
        ends[0].send(torch.rand(4)).wait(LITTLE)
    nothing = FakeNccl().direction(1, 0, FakeWire()).receive(torch.float32, (8,))[1]
    with pytest.raises(RuntimeError, match=r"^the peer's device sent nothing of 32 bytes for 0.05 s$"):
        nothing.wait(LITTLE)


def test_an_error_of_nccl_is_raised(nccl: FakeNccl, ends: Ends) -> None:
    """The kernel has ended, but by an error: nothing of the tensor may be used."""
    _, transfer = ends[1].receive(torch.float32, (4,))
    nccl.communicators[1, 0][0].works[0].complete("NCCL error: remote process exited")
    with pytest.raises(RuntimeError, match="remote process exited"):
        transfer.wait(SOON)


def test_an_abort_ends_every_wait_at_once_even_if_it_never_returns(nccl: FakeNccl, wire: FakeWire, ends: Ends) -> None:
    """A thread waits for a transfer that hangs, and NCCL's abort hangs as well: the thread is free."""
    wire.hangs = True
    nccl.communicators[1, 0][0].let_go.clear()
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
    nccl.communicators[1, 0][0].let_go.set()
    assert [str(error) for error in errors] == ["the attachment was aborted"]


def test_nothing_is_asked_of_a_communicator_during_its_abort(nccl: FakeNccl, wire: FakeWire, ends: Ends) -> None:
    """An abort comes in the middle of a question: it begins when that is answered, and no other question follows. torch
    would keep the interpreter, and so the heartbeats, for the whole abort.
    """
    wire.hangs = True
    communicator = nccl.communicators[1, 0][0]
    communicator.let_go.clear()
    _, transfer = ends[1].receive(torch.float32, (4,))
    work, begun = communicator.works[0], []
    aborting = threading.Thread(target=ends[1].abort, daemon=True)

    def is_completed() -> bool:
        if not aborting.ident:
            aborting.start()
            aborting.join(0.3)
        begun.append(communicator.num_aborts)
        return False

    work.is_completed = is_completed  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the attachment was aborted"):
        transfer.wait(SOON)
    communicator.let_go.set()
    aborting.join()
    assert begun == [0]
    assert communicator.num_aborts == 1


def test_an_aborted_transfer_is_not_taken_for_complete(nccl: FakeNccl, ends: Ends) -> None:
    """The abort ends the kernel, which looks like success to CUDA: the values are garbage, and the wait says so."""
    tensor, transfer = ends[1].receive(torch.float32, (4,))
    ends[1].abort()
    assert nccl.communicators[1, 0][0].works[0].is_completed()
    with pytest.raises(RuntimeError, match="the attachment was aborted"):
        transfer.wait(SOON)
    assert bool((tensor == GARBAGE).all())


def test_the_first_transfer_is_part_of_forming(wire: FakeWire, ends: Ends) -> None:
    """Both ends greet; a peer that does not is an error, and its direction is aborted."""
    other = threading.Thread(target=ends[1].greet, kwargs={"is_sender": False, "timeout": SOON})
    other.start()
    ends[0].greet(is_sender=True, timeout=SOON)
    other.join(SOON.total_seconds())
    assert (wire.num_sent, wire.num_received) == (1, 1)
    with pytest.raises(RuntimeError, match="took nothing of 4 bytes"):
        ends[0].greet(is_sender=True, timeout=LITTLE)
    with pytest.raises(RuntimeError, match="the attachment was aborted"):
        ends[0].send(torch.rand(1)).wait(SOON)


def test_what_one_side_writes_the_other_reads() -> None:
    """Keys cross; whoever waits for one that never comes is told in time, or at once when the link is gone."""
    said: list[Key] = []
    store = LinkStore(said.append)
    store.set("mine", "here")
    assert (said, store.get("mine")) == ([Key("mine", b"here")], b"here")
    assert (store.add("sum", 2), store.add("sum", 3)) == (2, 5)
    store.hear(Key("theirs", b"there"))
    store.wait(["mine", "theirs"], LITTLE)
    assert store.check(["theirs"])
    assert not store.check(["mine", "never"])
    with pytest.raises(RuntimeError, match=r"has not written \['never'\] within 0.05 s"):
        store.wait(["never"], LITTLE)
    threading.Timer(0.05, store.close).start()
    with pytest.raises(RuntimeError, match="the other side is gone"):
        store.get("never")


def test_a_peer_cannot_fill_the_memory_with_keys() -> None:
    """Few are taken; each is smaller than a header."""
    store = LinkStore(lambda _: None)
    for number in range(MOST_KEYS):
        store.hear(Key(str(number), b""))
    with pytest.raises(OverflowError, match=f"more than {MOST_KEYS} keys"):
        store.hear(Key("more", b""))


def test_a_large_frame_has_the_time_that_a_slow_network_takes() -> None:
    """Four GB of gradient sums at 1 Gbit/s are 32 s, more than the usual silence; a small frame has the silence."""
    silence = timedelta(seconds=30)
    assert payload_patience(silence, 4 << 30) > timedelta(seconds=32) + silence
    assert payload_patience(silence, 4 << 10) < silence + timedelta(milliseconds=1)


def test_a_worker_outlives_its_peers_whatever_the_administrator_has_set() -> None:
    """Torch's watchdog and its monitor end no process, in either spelling of the setting; NCCL's own settings stay."""
    environment = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "NCCL_ASYNC_ERROR_HANDLING": "1",
        "NCCL_SOCKET_IFNAME": "eth0",
    }
    outlive_peers(environment)
    assert environment == {**SETTINGS, "NCCL_SOCKET_IFNAME": "eth0"}
    assert environment["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    assert environment["TORCH_NCCL_ENABLE_MONITORING"] == environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert not environment.keys() & set(OLD_NAMES)
