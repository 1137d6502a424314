"""Messages of the collective link: what is packed is unpacked, and small frames keep no large buffer alive."""

import pytest
import torch

from headway.stages.ids import Batch, Generation, Microbatch
from headway.stages.links.collective.header import INLINE_BYTES, HeaderReader, Route, announce
from headway.stages.links.collective.message import HEADER_BYTES, header_of, max_message_bytes, pack, unpack
from headway.stages.links.frame_contract import ALIGNMENT_BYTES, FrameContract, TensorForm
from headway.stages.links.link import Frame, FrameKind

GENERATION = Generation(3)
FORMS = {
    FrameKind.ACTIVATION: (TensorForm(torch.bfloat16, (3, 7)), TensorForm(torch.int64, (3,))),
    FrameKind.NORM_SQUARES: (TensorForm(torch.float64, (1000,), may_be_shorter=True),),
    FrameKind.SUMS: (TensorForm(torch.uint8, (INLINE_BYTES + 1,)),),
}
CONTRACT = FrameContract(FORMS, max_unacknowledged_frames=4)


@pytest.mark.parametrize(
    ("kind", "tensors", "is_part"),
    [
        (FrameKind.ACTIVATION, (torch.rand(3, 7).to(torch.bfloat16), torch.tensor([1, 2, 3])), False),
        (FrameKind.NORM_SQUARES, (torch.rand(1000, dtype=torch.float64),), True),
        (FrameKind.NORM_SQUARES, (torch.rand(0, dtype=torch.float64),), False),
    ],
    ids=["small", "full", "empty"],
)
def test_what_is_packed_is_unpacked(kind: FrameKind, tensors: tuple[torch.Tensor, ...], is_part: bool) -> None:
    """Every value comes out, aligned; a small frame as a copy of its own, a large one as a part of the message."""
    frame = Frame(kind, GENERATION, Batch(0), Microbatch(0), tensors)
    header = announce(frame, sequence=0, route=Route.INLINE)
    buffer = torch.full((max_message_bytes(CONTRACT),), 255, dtype=torch.uint8)
    assert pack(buffer, header, tensors).data_ptr() == buffer.data_ptr()
    reader = HeaderReader("stage 1", generation=GENERATION, contract=CONTRACT, kinds=frozenset(FORMS))
    announced = reader.read(header_of(buffer))
    assert announced is not None
    received, parts = unpack(buffer, announced.tensors)
    assert parts is is_part
    assert all(torch.equal(got, sent) for got, sent in zip(received, tensors, strict=True))
    assert all(tensor.data_ptr() % ALIGNMENT_BYTES == 0 for tensor in received if tensor.numel())
    buffer.zero_()
    assert all(bool(tensor.any()) is not is_part for tensor in received if tensor.numel())


def test_messages_are_as_large_as_the_largest_frame_that_travels_in_one() -> None:
    """A kind whose frames are larger than the bound does not count."""
    assert max_message_bytes(CONTRACT) == HEADER_BYTES + 8000
    only_large = FrameContract({FrameKind.SUMS: FORMS[FrameKind.SUMS]}, max_unacknowledged_frames=4)
    assert max_message_bytes(only_large) == HEADER_BYTES
