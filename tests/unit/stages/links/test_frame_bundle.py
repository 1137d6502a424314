"""Messages to bundles and back."""

from collections import deque
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.stages.ids import Batch, Generation, MicrobatchIndex
from headway.stages.links.frame_codec import (
    CHUNK_BYTES,
    MAX_BUNDLE_BYTES,
    MAX_OVERHEAD_BYTES,
    FrameAssembler,
    OutgoingFrame,
    bundle,
    bundles,
    heartbeat,
    unbundle,
)
from headway.stages.links.frame_contract import DOWNSTREAM_KINDS, FrameContract, TensorForm
from headway.stages.links.link import Frame, FrameKind

GENERATION = Generation(4)
CONTRACT = FrameContract(
    forms={
        FrameKind.ACTIVATION: (TensorForm(torch.uint8, (3 * CHUNK_BYTES,), may_be_shorter=True),),
        FrameKind.NORM_TOTAL: (TensorForm(torch.float64, ()),),
    },
    max_unacknowledged_frames=8,
)


def frames(sizes: Sequence[int]) -> list[Frame]:
    """Activations of so many bytes, in their order."""
    values = [(torch.arange(size) % 251).to(torch.uint8) for size in sizes]
    return [Frame(FrameKind.ACTIVATION, GENERATION, Batch(i), MicrobatchIndex(0), (v,)) for i, v in enumerate(values)]


def bundled(sent: Sequence[Frame], *, chunk_bytes: int = CHUNK_BYTES) -> list[bytes]:
    """Return the bundles of frames with a goodbye after them."""
    outgoing = [OutgoingFrame(frame, GENERATION, sequence=sequence) for sequence, frame in enumerate(sent)]
    waiting: deque[OutgoingFrame] = deque([*outgoing, OutgoingFrame(None, GENERATION, sequence=len(sent))])
    return list(map(b"".join, bundles(lambda: waiting.popleft() if waiting else None, lambda: 0, lambda: chunk_bytes)))


@given(sizes=st.lists(st.integers(0, 5000), max_size=12), chunk_bytes=st.integers(1, 6000))
def test_frames_of_any_size_come_out_of_bundles_of_any_size(sizes: list[int], chunk_bytes: int) -> None:
    """Some frames fill several bundles, some bundles hold several frames → all arrive, in order, bit for bit."""
    sent = frames(sizes)
    receiver = FrameAssembler("stage 0", generation=GENERATION, contract=CONTRACT, kinds=DOWNSTREAM_KINDS)
    received = []
    for each in bundled(sent, chunk_bytes=chunk_bytes):
        assert len(each) <= chunk_bytes + MAX_OVERHEAD_BYTES
        received += [frame for message in unbundle(each) if isinstance(frame := receiver.feed(message), Frame)]
    assert [frame.batch for frame in received] == [frame.batch for frame in sent]
    assert all(torch.equal(got.tensors[0], want.tensors[0]) for got, want in zip(received, sent, strict=True))
    assert receiver.is_ended


def test_frames_that_wait_together_travel_together() -> None:
    """Four frames of a quarter of a chunk, and a large one: the four share a bundle, the large one fills its own."""
    quarter = CHUNK_BYTES // 4
    sizes = [len(each) for each in bundled(frames([quarter] * 4 + [2 * CHUNK_BYTES]))]
    assert len(sizes) == 3
    assert all(CHUNK_BYTES < size <= MAX_BUNDLE_BYTES for size in sizes)


def test_what_waits_is_cut_by_the_size_of_the_moment() -> None:
    """The second frame is asked for after the line has become slow → it goes in smaller pieces."""
    sizes = iter([1000, 100])
    waiting = deque(OutgoingFrame(frame, GENERATION, sequence=i) for i, frame in enumerate(frames([900, 900])))
    made = list(map(b"".join, bundles(lambda: waiting.popleft() if waiting else None, lambda: 0, lambda: next(sizes))))
    assert sum(len(list(unbundle(each))) for each in made) == 1 + -(-960 // 100)


@pytest.mark.parametrize(
    ("received", "num_good", "reason"),
    [
        (b"", 0, "ends with 0 bytes"),
        (b"\x01\x00", 0, "ends with 2 bytes"),
        (b"\xff" * 64, 0, "a message of 4294967295 bytes in a bundle with 60 left"),
        (bundle(b"good") + b"\x05\x00\x00\x00four", 1, "a message of 5 bytes in a bundle with 4 left"),
        (bundle(heartbeat(GENERATION, sequence=0, acknowledged=0)) + b"x", 1, "ends with 1 bytes"),
    ],
    ids=["empty", "short", "noise", "cut", "more"],
)
def test_a_bundle_that_ends_too_early_is_told(received: bytes, num_good: int, reason: str) -> None:
    """What came whole before it is taken; then the reason."""
    messages = unbundle(received)
    assert len([next(messages) for _ in range(num_good)]) == num_good
    with pytest.raises(ValueError, match=reason):
        next(messages)
