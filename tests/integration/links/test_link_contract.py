"""The one contract of `Link`, run against every transport: in one process, gRPC with mTLS, unix sockets, plain TCP, and
with the values over an attachment by gloo.

A link inside one process has no peer that could outlive it and copies nothing: what is said about closing, about limits
and about views of graphs is asked of the sockets alone.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import pytest
import structlog
import torch
from torch import Tensor

from headway.stages.ids import Batch, MicrobatchIndex
from headway.stages.links.frame_contract import FrameContract, TensorForm
from headway.stages.links.link import Frame, FrameKind, Link, LinkLost
from headway.stages.links.stream_link import MAX_VIOLATIONS
from headway.stages.links.window import SLACK
from tests.integration.links.conftest import NOBODY_LISTENS
from tests.rigs.gloo_attach import GlooAttach
from tests.rigs.local_link import LocalLink
from tests.rigs.two_sides import DEADLINE_S, GENERATION, Endpoints, Inbox, lost, total
from tests.rigs.two_sides import Pair as RemotePair


def contract(
    dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (2, 3, 5), *, frames: int = 64
) -> FrameContract:
    """Frames whose hidden states have this type and shape."""
    return FrameContract(
        forms={
            FrameKind.ACTIVATION: (TensorForm(dtype, shape), TensorForm(torch.int64, (2, 3))),
            FrameKind.GRADIENT: (TensorForm(dtype, shape),),
            FrameKind.NORM_SQUARES: (TensorForm(torch.float64, (6,), may_be_shorter=True),),
            FrameKind.NORM_TOTAL: (TensorForm(torch.float64, ()),),
        },
        max_unacknowledged_frames=frames,
    )


def pattern(dtype: torch.dtype, shape: tuple[int, ...], start: int = 0) -> Tensor:
    """Values that differ from place to place."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    return ((torch.arange(count) + start) % 97).to(dtype).reshape(shape)


def activation(
    batch: int, microbatch: int = 0, *, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (2, 3, 5)
) -> Frame:
    """A forward's frame with values that depend on its place."""
    tensors = (pattern(dtype, shape, batch + microbatch), pattern(torch.int64, (2, 3), batch))
    return Frame(FrameKind.ACTIVATION, GENERATION, Batch(batch), MicrobatchIndex(microbatch), tensors)


def gradient(batch: int, *, shape: tuple[int, ...] = (2, 3, 5)) -> Frame:
    """A backward's frame."""
    return Frame(
        FrameKind.GRADIENT, GENERATION, Batch(batch), MicrobatchIndex(0), (pattern(torch.float32, shape, batch),)
    )


def assert_same(received: object, sent: Frame) -> None:
    """Header and every bit of every tensor."""
    assert isinstance(received, Frame)
    assert (received.kind, received.generation) == (sent.kind, sent.generation)
    assert (received.batch, received.microbatch) == (sent.batch, sent.microbatch)
    assert len(received.tensors) == len(sent.tensors)
    for got, expected in zip(received.tensors, sent.tensors, strict=True):
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        assert torch.equal(got, expected)


@dataclass
class Pair:
    """Both ends of one link, and what arrived at each."""

    upstream: Link
    downstream: Link
    at_upstream: Inbox
    at_downstream: Inbox


class PairMaker(Protocol):
    """Makes pairs; the upstream side may have a contract of its own."""

    def __call__(self, frame_contract: FrameContract, upper: FrameContract | None = None) -> Pair: ...


def local_pair(frame_contract: FrameContract, upper: FrameContract | None = None) -> Pair:
    """Return both ends inside this process."""
    at_upstream, at_downstream = Inbox(), Inbox()
    return Pair(LocalLink("stage 1", at_downstream), LocalLink("stage 0", at_upstream), at_upstream, at_downstream)


WAYS = {"grpc": "TCP with TLS", "unix": "unix socket", "plain": "plain TCP", "attached": "TCP with TLS"}


@contextmanager
def remote_pairs(way: str, request: pytest.FixtureRequest) -> Iterator[PairMaker]:
    """Make both ends over sockets. `upstream` belongs to stage 0, `downstream` to stage 1."""
    endpoints: Endpoints = request.getfixturevalue("node_endpoints" if way == "unix" else "endpoints")
    # For unix sockets nobody listens at the TCP port.
    port = NOBODY_LISTENS if way == "unix" else None
    ways: dict[str, dict[str, Any]] = {"plain": {"is_plain": True}, "attached": {"attach": GlooAttach()}}
    with structlog.testing.capture_logs() as logs, ExitStack() as stack:

        def make(frame_contract: FrameContract, upper: FrameContract | None = None) -> Pair:
            terms, changes = {"contract": frame_contract, **ways.get(way, {})}, {"contract": upper or frame_contract}
            made = stack.enter_context(RemotePair(endpoints, port=port, upper=changes, **terms))
            return Pair(made.upper, made.lower, made.at_upper, made.at_lower)

        yield make
        stack.close()
    assert not any(entry["event"] == "cards_not_linked" for entry in logs)
    assert {entry["way"] for entry in logs if entry["event"] == "link_opened"} == {WAYS[way]}


@pytest.fixture(params=list(WAYS))
def make_remote_pair(request: pytest.FixtureRequest) -> Iterator[PairMaker]:
    """Both ends, over each transport with sockets."""
    with remote_pairs(request.param, request) as maker:
        yield maker


@pytest.fixture(params=["local", *WAYS])
def make_pair(request: pytest.FixtureRequest) -> Iterator[PairMaker]:
    """Both ends, over each transport."""
    if request.param == "local":
        yield local_pair
        return
    with remote_pairs(request.param, request) as maker:
        yield maker


def test_frames_arrive_in_order_and_unchanged(make_pair: PairMaker) -> None:
    """Fifty frames sent at once arrive in their order, bit for bit."""
    pair = make_pair(contract())
    sent = [activation(batch, microbatch) for batch in range(10) for microbatch in range(5)]
    for frame in sent:
        pair.upstream.send(frame)
    for frame in sent:
        assert_same(pair.at_downstream.get(timeout=DEADLINE_S), frame)
    assert pair.at_upstream.empty()


def test_every_kind_travels_its_way(make_pair: PairMaker) -> None:
    """Activations and clip totals go down, gradients and squares (of any number of layers) go up."""
    pair = make_pair(contract())
    squares = Frame(
        FrameKind.NORM_SQUARES, GENERATION, Batch(3), MicrobatchIndex(0), (torch.rand(4, dtype=torch.float64),)
    )
    for frame in (activation(3), total(3)):
        pair.upstream.send(frame)
        assert_same(pair.at_downstream.get(timeout=DEADLINE_S), frame)
    for frame in (gradient(3), squares):
        pair.downstream.send(frame)
        assert_same(pair.at_upstream.get(timeout=DEADLINE_S), frame)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.int8], ids=str
)
def test_every_type_of_tensor_travels(make_pair: PairMaker, dtype: torch.dtype) -> None:
    """An odd number of elements of each type comes out with type, shape and bits; the next tensor is not shifted."""
    pair = make_pair(contract(dtype, (3, 1, 7)))
    frame = activation(1, dtype=dtype, shape=(3, 1, 7))
    pair.upstream.send(frame)
    assert_same(pair.at_downstream.get(timeout=DEADLINE_S), frame)


def test_a_large_frame_arrives_whole(make_pair: PairMaker) -> None:
    """A frame of 16 MiB and a bit, followed by a small one."""
    shape = (4, 1024, 1025)
    pair = make_pair(contract(shape=shape))
    large = activation(0, shape=shape)
    pair.upstream.send(large)
    pair.upstream.send(total())
    assert_same(pair.at_downstream.get(timeout=DEADLINE_S), large)
    assert_same(pair.at_downstream.get(timeout=DEADLINE_S), total())


def test_tensors_that_are_not_contiguous_or_need_gradients_travel(make_remote_pair: PairMaker) -> None:
    """A transposed view, a leaf of a graph, and what is both arrive as plain values."""
    pair = make_remote_pair(contract())
    transposed = pattern(torch.float32, (5, 3, 2)).transpose(0, 2)
    leaf = pattern(torch.float32, (2, 3, 5)).requires_grad_()
    both = pattern(torch.float32, (5, 3, 2)).requires_grad_().transpose(0, 2)
    for batch, hidden in enumerate((transposed, leaf, both)):
        frame = Frame(FrameKind.GRADIENT, GENERATION, Batch(batch), MicrobatchIndex(0), (hidden,))
        pair.downstream.send(frame)
        received = pair.at_upstream.get(timeout=DEADLINE_S)
        assert_same(received, frame)
        assert isinstance(received, Frame)
        assert not received.tensors[0].requires_grad


def test_both_directions_at_once(make_pair: PairMaker) -> None:
    """Thirty frames each way, interleaved: each side receives the other's in order."""
    pair = make_pair(contract())
    for batch in range(30):
        pair.upstream.send(activation(batch))
        pair.downstream.send(gradient(batch))
    for batch in range(30):
        assert_same(pair.at_downstream.get(timeout=DEADLINE_S), activation(batch))
        assert_same(pair.at_upstream.get(timeout=DEADLINE_S), gradient(batch))


def test_close_delivers_what_was_sent_and_tells_the_peer(make_remote_pair: PairMaker) -> None:
    """Frames sent before close arrive; then the peer hears that the link is gone, by name. Closing twice is fine."""
    pair = make_remote_pair(contract())
    pair.upstream.send(activation(0))
    assert_same(pair.at_downstream.get(timeout=DEADLINE_S), activation(0))
    pair.upstream.send(activation(1))
    pair.upstream.close()
    pair.upstream.close()
    assert_same(pair.at_downstream.get(timeout=DEADLINE_S), activation(1))
    told = lost(pair.at_downstream)
    assert told.peer == pair.downstream.peer
    assert "stage 0" in told.peer
    assert told.reason


def test_nothing_arrives_after_close(make_remote_pair: PairMaker) -> None:
    """What the peer sends to a closed link disappears, and the closing side is not told of its own closing."""
    pair = make_remote_pair(contract())
    pair.upstream.send(activation(0))
    assert_same(pair.at_downstream.get(timeout=DEADLINE_S), activation(0))
    pair.upstream.close()
    pair.downstream.send(gradient(0))
    lost(pair.at_downstream)
    pair.downstream.close()
    assert pair.at_upstream.empty()


def test_a_neighbour_that_sends_without_end_is_lost(make_remote_pair: PairMaker) -> None:
    """Forty good frames where the contract has two under way, and nobody uses them: the link is lost with the reason
    after a few, and no more than those were taken. Their headers count, also while values beside them are under way."""
    pair = make_remote_pair(contract(frames=2), contract(frames=64))
    for batch in range(40):
        pair.upstream.send(activation(batch))
    arrived: list[Frame | LinkLost] = []
    while not (arrived and isinstance(arrived[-1], LinkLost)):
        arrived.append(pair.at_downstream.get(timeout=DEADLINE_S))
    *frames, last = arrived
    assert len(frames) <= 2 * SLACK + MAX_VIOLATIONS
    assert isinstance(last, LinkLost)
    assert "frames that nobody has used" in last.reason
