"""Messages of the collective link: what is packed is unpacked, and small frames keep no large buffer alive."""

import pytest
import torch

from headway.stages.ids import Batch, Generation, MicrobatchIndex
from headway.stages.links.collective.header import FOLLOWED, INLINE_BYTES, HeaderReader, Route, announce
from headway.stages.links.collective.message import (
    HEADER_BYTES,
    MAX_TOGETHER,
    TOGETHER_BYTES,
    Message,
    frame_bytes,
    max_message_bytes,
    sizes_of,
)
from headway.stages.links.frame_contract import ALIGNMENT_BYTES, FrameContract, TensorForm
from headway.stages.links.link import Frame, FrameKind

GENERATION = Generation(3)
FORMS = {
    FrameKind.ACTIVATION: (TensorForm(torch.bfloat16, (3, 7)), TensorForm(torch.int64, (3,))),
    FrameKind.NORM_SQUARES: (TensorForm(torch.float64, (1000,), may_be_shorter=True),),
    FrameKind.SUMS: (TensorForm(torch.uint8, (INLINE_BYTES + 1,)),),
}
CONTRACT = FrameContract(FORMS, max_unacknowledged_frames=4)
MESSAGE_BYTES = max_message_bytes(CONTRACT)
SMALL = torch.rand(3, 7).to(torch.bfloat16), torch.tensor([1, 2, 3])
FULL = (torch.rand(1000, dtype=torch.float64),)


def reader() -> HeaderReader:
    """Return a reader of all kinds."""
    return HeaderReader("stage 1", generation=GENERATION, contract=CONTRACT, kinds=frozenset(FORMS))


def frame(kind: FrameKind, tensors: tuple[torch.Tensor, ...]) -> Frame:
    """Return a frame of the first batch."""
    return Frame(kind, GENERATION, Batch(0), MicrobatchIndex(0), tensors)


@pytest.mark.parametrize(
    ("tensors", "is_part"),
    [
        ([SMALL], False),
        ([FULL] * 4, True),
        ([SMALL, FULL, SMALL], False),
        ([FULL, SMALL, FULL, FULL, (torch.rand(999, dtype=torch.float64),)], True),
        ([(torch.rand(0, dtype=torch.float64),)], False),
        ([FULL] * MAX_TOGETHER, True),
    ],
    ids=["small", "half", "few", "mixed", "empty", "all"],
)
def test_what_is_written_is_read(tensors: list[tuple[torch.Tensor, ...]], is_part: bool) -> None:
    """Every value of every frame comes out, aligned; few bytes as copies of their own, many as parts of the message."""
    kinds = [FrameKind.ACTIVATION if len(each) == 2 else FrameKind.NORM_SQUARES for each in tensors]
    frames = [frame(*pair) for pair in zip(kinds, tensors, strict=True)]
    headers = [announce(each, sequence=k, route=Route.INLINE) for k, each in enumerate(frames)]
    message = Message(MESSAGE_BYTES)
    message.tensor.fill_(255)
    sent = message.write([(header, each.tensors) for header, each in zip(headers, frames, strict=True)])
    assert sent.data_ptr() == message.tensor.data_ptr()
    assert sent.numel() == sum(frame_bytes(tensor.nbytes for tensor in each) for each in tensors)
    reads, offset, announced = reader(), 0, []
    for number in range(len(frames)):
        announcement = reads.read(message.header(offset))
        assert announcement is not None
        assert announcement.is_followed is (number + 1 < len(frames))
        announced.append(announcement.tensors)
        offset += frame_bytes(sizes_of(announcement.tensors))
    received, parts = message.read(announced)
    assert parts is is_part
    assert all(torch.equal(*pair) for each in zip(received, tensors, strict=True) for pair in zip(*each, strict=True))
    flat = [tensor for each in received for tensor in each if tensor.numel()]
    assert all(tensor.data_ptr() % ALIGNMENT_BYTES == 0 for tensor in flat)
    message.tensor.zero_()
    assert all(bool(tensor.any()) is not is_part for tensor in flat)


def test_a_message_that_is_used_again_forgets_what_followed() -> None:
    """Two frames, then one in the same memory: it is the last of its message."""
    message, one = Message(MESSAGE_BYTES), frame(FrameKind.NORM_SQUARES, FULL)
    header = announce(one, sequence=0, route=Route.INLINE)
    message.write([(header, FULL), (header, FULL)])
    assert message.header()[FOLLOWED]
    message.write([(header, FULL)])
    assert not message.header()[FOLLOWED]
    message.clear()
    assert not message.has_begun


def test_messages_have_room_for_several_of_the_largest_frames_that_travel_in_one() -> None:
    """Up to a bound; a kind whose frames are larger than the bound does not count."""
    largest = HEADER_BYTES + 8000
    assert MAX_TOGETHER * largest == MESSAGE_BYTES
    assert Message(MESSAGE_BYTES).has_room(7 * largest, [8000])
    assert not Message(MESSAGE_BYTES).has_room(7 * largest + 64, [8000])
    only_large = FrameContract({FrameKind.SUMS: FORMS[FrameKind.SUMS]}, max_unacknowledged_frames=4)
    assert max_message_bytes(only_large) == MAX_TOGETHER * HEADER_BYTES
    limit = FrameContract({FrameKind.SUMS: (TensorForm(torch.uint8, (INLINE_BYTES,)),)}, max_unacknowledged_frames=4)
    assert max_message_bytes(limit) == TOGETHER_BYTES
