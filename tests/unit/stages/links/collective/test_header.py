"""Headers of the collective link: what is announced is what is read, and nothing a peer says exceeds the contract."""

from dataclasses import replace

import pytest
import torch

from headway.stages.errors import ProtocolError
from headway.stages.ids import Batch, Generation, MicrobatchIndex
from headway.stages.links.codec import Codec
from headway.stages.links.collective.header import (
    CODEC,
    FOLLOWED,
    HEADER_LENGTH,
    Announcement,
    HeaderReader,
    Route,
    Signal,
    announce,
    signal,
)
from headway.stages.links.compression import encode
from headway.stages.links.frame_contract import FrameContract, TensorForm
from headway.stages.links.link import Frame, FrameKind
from headway.stages.spec import ModelSpec, TrainSpec

GENERATION = Generation(5)
CONTRACT = FrameContract(
    forms={
        FrameKind.ACTIVATION: (TensorForm(torch.float32, (2, 3)), TensorForm(torch.int64, (2,))),
        FrameKind.NORM_SQUARES: (TensorForm(torch.float64, (6,), may_be_shorter=True),),
        FrameKind.NORM_TOTAL: (TensorForm(torch.float64, ()),),
    },
    max_unacknowledged_frames=4,
)


def reader() -> HeaderReader:
    """Return a reader of frames of all kinds that the contract knows."""
    return HeaderReader("stage 1", generation=GENERATION, contract=CONTRACT, kinds=frozenset(CONTRACT.forms))


def frame(kind: FrameKind, *tensors: torch.Tensor) -> Frame:
    """Return a frame of batch 9, microbatch 4."""
    return Frame(kind, GENERATION, Batch(9), MicrobatchIndex(4), tensors)


def test_what_is_announced_is_read() -> None:
    """Each kind comes out with its place and its tensors' forms; heartbeats between them take no number."""
    frames = [
        frame(FrameKind.ACTIVATION, torch.ones(2, 3), torch.ones(2, dtype=torch.int64)),
        frame(FrameKind.NORM_SQUARES, torch.ones(4, dtype=torch.float64)),
        frame(FrameKind.NORM_SQUARES, torch.ones(0, dtype=torch.float64)),
        frame(FrameKind.NORM_TOTAL, torch.tensor(1.0, dtype=torch.float64)),
    ]
    reads = reader()
    for sequence, sent in enumerate(frames):
        assert reads.read(signal(Signal.HEARTBEAT, GENERATION, sequence=sequence)) is None
        header = announce(sent, sequence=sequence, route=Route.INLINE if sequence else Route.DEVICE)
        assert len(header) == HEADER_LENGTH
        announced = reads.read(header)
        assert isinstance(announced, Announcement)
        assert announced.route is (Route.INLINE if sequence else Route.DEVICE)
        assert announced.tensors == tuple((tensor.dtype, tuple(tensor.shape)) for tensor in sent.tensors)
        assert announced.frame(sent.tensors) == sent
    assert reads.read(signal(Signal.GOODBYE, GENERATION, sequence=4)) is None
    assert reads.is_ended


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        (1, 99, "a frame of kind 99 in this direction"),
        (4, -1, "a frame of batch -1"),
        (5, -7, "microbatch -7"),
        (6, 3, "a payload that travels by way 3"),
        (6, 0, "NORM_SQUARES by way of HOST"),
        (7, 3, "NORM_SQUARES with 3 tensors instead of 1"),
        (8, 7, r"NORM_SQUARES tensor 0 is torch.float64 \[7\]"),
        (8, 1 << 60, "NORM_SQUARES tensor 0"),
        (8, -1, "NORM_SQUARES tensor 0"),
        (FOLLOWED, 2, "NORM_SQUARES by way of INLINE, followed by 2"),
    ],
)
def test_a_header_that_says_more_than_the_contract_is_refused(field: int, value: int, reason: str) -> None:
    """A kind, a place, a number of tensors or a size that cannot be: the reason, before any memory is taken."""
    header = announce(frame(FrameKind.NORM_SQUARES, torch.ones(6, dtype=torch.float64)), sequence=0, route=Route.INLINE)
    header[field] = value
    with pytest.raises(ProtocolError, match=reason):
        reader().read(header)


@pytest.mark.parametrize(("codec", "said"), [(1, "bf16"), (2, "int8"), (3, "number 3"), (-1, "number -1")])
def test_a_codec_that_the_plan_does_not_have_is_refused(codec: int, said: str) -> None:
    """A neighbour that codes what this side takes as it is → one line that names both."""
    sent = frame(FrameKind.ACTIVATION, torch.ones(2, 3), torch.ones(2, dtype=torch.int64))
    header = announce(sent, sequence=0, route=Route.INLINE)
    header[CODEC] = codec
    with pytest.raises(ProtocolError, match=f"ACTIVATION with codec {said}, the plan has none here"):
        reader().read(header)


def test_a_coded_frame_is_read_as_it_was_announced() -> None:
    """int8 values and their scales, on a link whose contract says so → all of it arrives."""
    contract = FrameContract.of(
        ModelSpec(hidden_size=8), TrainSpec(microbatch_size=2, sequence_length=5), gradients=Codec.INT8
    )
    reads = HeaderReader("stage 1", generation=GENERATION, contract=contract, kinds=frozenset({FrameKind.GRADIENT}))
    coded = replace(frame(FrameKind.GRADIENT, *encode(torch.randn(2, 5, 8), Codec.INT8)), codec=Codec.INT8)
    announced = reads.read(announce(coded, sequence=0, route=Route.INLINE))
    assert announced is not None
    assert announced.frame(coded.tensors) == coded
    assert [dtype for dtype, _ in announced.tensors] == [torch.int8, torch.float32]


def test_only_small_frames_are_followed_by_others_in_their_message() -> None:
    """A payload that travels alone is announced alone."""
    sent = frame(FrameKind.ACTIVATION, torch.ones(2, 3), torch.ones(2, dtype=torch.int64))
    header = announce(sent, sequence=0, route=Route.DEVICE)
    header[FOLLOWED] = 1
    with pytest.raises(ProtocolError, match="ACTIVATION by way of DEVICE, followed by 1"):
        reader().read(header)


def test_nothing_follows_a_goodbye() -> None:
    """Whoever has said goodbye has nothing more to say."""
    reads = reader()
    reads.read(signal(Signal.GOODBYE, GENERATION, sequence=0))
    with pytest.raises(ProtocolError, match="a frame after the goodbye"):
        reads.read(signal(Signal.HEARTBEAT, GENERATION, sequence=1))
