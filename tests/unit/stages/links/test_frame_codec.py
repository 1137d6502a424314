"""Frames to messages and bundles and back, without a socket, and everything that a peer may not say."""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.proto.data_pb2 import FrameHeader, TensorSpec
from headway.stages.errors import ProtocolError
from headway.stages.ids import Batch, Generation, MicrobatchIndex
from headway.stages.links.codec import Codec
from headway.stages.links.compression import encode
from headway.stages.links.frame_codec import (
    CHUNK_BYTES,
    LENGTH,
    MAX_BUNDLE_BYTES,
    MAX_OVERHEAD_BYTES,
    Announced,
    FrameAssembler,
    Key,
    OutgoingFrame,
    bundle,
    bundles,
    heartbeat,
    unbundle,
)
from headway.stages.links.frame_contract import DOWNSTREAM_KINDS, FrameContract, TensorForm
from headway.stages.links.link import Frame, FrameKind
from headway.stages.spec import ModelSpec, TrainSpec

GENERATION = Generation(4)
PEER = "stage 0 at 10.0.0.7:4711"
HIDDEN = (2, 3, 8)
CONTRACT = FrameContract(
    forms={
        FrameKind.ACTIVATION: (TensorForm(torch.float32, HIDDEN), TensorForm(torch.int64, (2, 3))),
        FrameKind.NORM_TOTAL: (TensorForm(torch.float64, ()),),
    },
    max_unacknowledged_frames=8,
)


def assembler() -> FrameAssembler:
    """The downstream side of a fresh link."""
    return FrameAssembler(PEER, generation=GENERATION, contract=CONTRACT, kinds=DOWNSTREAM_KINDS)


def activation(*, generation: int = GENERATION, shape: tuple[int, ...] = HIDDEN) -> Frame:
    """A frame of random values."""
    tensors = (torch.rand(shape), torch.randint(0, 256, (2, 3)))
    return Frame(FrameKind.ACTIVATION, Generation(generation), Batch(5), MicrobatchIndex(1), tensors)


def messages(frame: Frame, *, sequence: int = 0, chunk_bytes: int = 1 << 20) -> list[bytes]:
    """All messages of a frame."""
    outgoing = OutgoingFrame(frame, frame.generation, sequence=sequence)
    return [b"".join(parts) for parts in outgoing.messages(lambda: 0, chunk_bytes=chunk_bytes)]


def said_goodbye(sequence: int = 0) -> bytes:
    """The last message of a direction."""
    (parts,) = OutgoingFrame(None, GENERATION, sequence=sequence).messages(lambda: 0)
    return b"".join(parts)


def message(payload: bytes = b"", **fields: object) -> bytes:
    """A message with any header."""
    header = FrameHeader(generation=GENERATION, **fields).SerializeToString()  # type: ignore[arg-type]
    return LENGTH.pack(len(header)) + header + payload


@pytest.mark.parametrize("chunk_bytes", [1, 64, 100, 192, 256, 1 << 20])
def test_chunks_of_any_size_make_the_same_frame(chunk_bytes: int) -> None:
    """A frame cut into chunks of any size, even through its padding, is put together bit for bit."""
    frame = activation()
    receiver = assembler()
    *early, last = [receiver.feed(chunk) for chunk in messages(frame, chunk_bytes=chunk_bytes)]
    assert early == [None] * len(early)
    assert isinstance(last, Frame)
    assert (last.kind, last.generation, last.batch, last.microbatch) == (FrameKind.ACTIVATION, GENERATION, 5, 1)
    assert all(torch.equal(got, sent) for got, sent in zip(last.tensors, frame.tensors, strict=True))
    assert receiver.next_sequence == 1


def test_received_tensors_are_aligned() -> None:
    """Each tensor of a frame begins at a multiple of 64 bytes, whatever the length of the one before it."""
    received = assembler().feed(messages(activation())[0])
    assert isinstance(received, Frame)
    assert [tensor.data_ptr() % 64 for tensor in received.tensors] == [0, 0]


def test_each_chunk_carries_the_newest_acknowledgement() -> None:
    """What has been received while a large frame is being sent is acknowledged by its later chunks."""
    counter = itertools.count()
    chunks = OutgoingFrame(activation(), GENERATION, sequence=0).messages(lambda: next(counter), chunk_bytes=64)
    receiver = assembler()
    seen = []
    for chunk in chunks:
        receiver.feed(b"".join(chunk))
        seen.append(receiver.acknowledged)
    assert seen == [0, 1, 2, 3]


def test_a_heartbeat_carries_an_acknowledgement_and_no_number() -> None:
    """A heartbeat between two frames delivers nothing and leaves the numbering alone."""
    receiver = assembler()
    assert receiver.feed(messages(activation())[0]) is not None
    assert receiver.feed(heartbeat(GENERATION, sequence=1, acknowledged=3)) is None
    assert receiver.acknowledged == 3
    assert receiver.feed(heartbeat(GENERATION, sequence=1, acknowledged=3)) is None
    assert receiver.next_sequence == 1


def test_what_was_received_before_is_dropped() -> None:
    """A frame that comes twice, even in the middle of the next one, is delivered once."""
    first, second = messages(activation()), messages(activation(), sequence=1, chunk_bytes=64)
    receiver = assembler()
    assert receiver.feed(first[0]) is not None
    assert [receiver.feed(chunk) for chunk in (second[0], first[0], *second[1:-1])] == [None] * len(second)
    assert receiver.feed(second[-1]) is not None
    assert receiver.num_duplicates == 1
    assert receiver.next_sequence == 2


def test_a_new_stream_begins_with_a_whole_frame() -> None:
    """A frame that was cut off in its middle comes again from its first byte."""
    chunks = messages(activation(), chunk_bytes=64)
    receiver = assembler()
    receiver.feed(chunks[0])
    receiver.restart(acknowledged=0, next_sequence=0)
    assert [receiver.feed(chunk) for chunk in chunks][-1] is not None


def test_values_of_an_attachment_are_announced_and_come_again_if_they_did_not_arrive() -> None:
    """A header without a payload says all but the values; after a break the same number is due again, and so is the
    goodbye behind it."""
    frame = activation()
    outgoing = OutgoingFrame(frame, GENERATION, sequence=0, is_attached=True)
    (announcing,) = (b"".join(parts) for parts in outgoing.messages(lambda: 0, chunk_bytes=1))
    receiver = assembler()
    for _ in range(2):
        announced = receiver.feed(announcing)
        assert isinstance(announced, Announced)
        assert (announced.frame.kind, announced.frame.batch, announced.frame.tensors) == (frame.kind, 5, ())
        assert announced.forms == tuple((tensor.dtype, tensor.shape) for tensor in frame.tensors)
        receiver.feed(said_goodbye(sequence=1))
        assert (receiver.next_sequence, receiver.is_ended) == (2, True)
        receiver.restart(acknowledged=0, next_sequence=0)
        assert (receiver.next_sequence, receiver.is_ended) == (0, False)
    outgoing.carry(frame.tensors)  # the devices are not linked: the same frame, with its values
    (carrying,) = (b"".join(parts) for parts in outgoing.messages(lambda: 0))
    assert carrying == messages(frame)[0]


def test_a_key_takes_no_number() -> None:
    """It travels like a heartbeat."""
    receiver = assembler()
    key = Key("where", b"here")
    assert receiver.feed(heartbeat(GENERATION, sequence=0, acknowledged=0, key=key)) == key
    assert receiver.next_sequence == 0


def test_a_goodbye_takes_a_number() -> None:
    """It is acknowledged and, when it comes again, dropped like a frame."""
    receiver = assembler()
    goodbye = said_goodbye()
    assert receiver.feed(goodbye) is None
    assert receiver.is_ended
    assert receiver.next_sequence == 1
    assert receiver.feed(goodbye) is None
    assert receiver.num_duplicates == 1


VIOLATIONS: dict[str, tuple[Callable[[], list[bytes]], str]] = {
    "an empty message": (lambda: [b""], "a message of 0 bytes"),
    "random bytes": (lambda: [b"\x04\x00\x00\x00\xff\xff\xff\xff"], "an undecodable header"),
    "a header length beyond the message": (lambda: [LENGTH.pack(200) + b"x"], "a header of 200 bytes"),
    "a huge header length": (lambda: [b"\xff\xff\xff\xff" + bytes(100)], "a header of 4294967295 bytes"),
    "a stale generation": (lambda: messages(activation(generation=3)), "generation 3 on a link of 4"),
    "a gap": (lambda: [*messages(activation()), *messages(activation(), sequence=2)], "frame 2 where 1 was due"),
    "a negative number": (lambda: [message(kind=FrameHeader.HEARTBEAT, sequence=-1)], "frame -1 where 0 was due"),
    "a frame after the goodbye": (
        lambda: [said_goodbye(), *messages(activation(), sequence=1)],
        "a frame after the goodbye",
    ),
    "a goodbye with a payload": (lambda: [message(b"x", kind=FrameHeader.GOODBYE)], "a goodbye with"),
    "a wrong shape": (lambda: messages(activation(shape=(2, 3, 9))), "ACTIVATION tensor 0 is"),
    "a kind of the other direction": (lambda: [message(kind=FrameHeader.GRADIENT)], "of kind 2 in this direction"),
    "an unknown kind": (lambda: [message(kind=77)], "of kind 77"),
    "an unknown type": (
        lambda: [message(kind=FrameHeader.NORM_TOTAL, tensors=[TensorSpec(dtype=55)])],  # type: ignore[arg-type]
        "a tensor of unknown type",
    ),
    "a missing tensor": (lambda: [message(kind=FrameHeader.ACTIVATION)], "0 tensors instead of 2"),
    "a huge payload": (
        lambda: [
            message(kind=FrameHeader.NORM_TOTAL, tensors=[TensorSpec(dtype=TensorSpec.FLOAT64)], payload_bytes=1 << 60)
        ],
        f"a payload of {1 << 60} bytes for tensors of 64",
    ),
    "a chunk beyond the payload": (
        lambda: [
            message(
                bytes(65), kind=FrameHeader.NORM_TOTAL, tensors=[TensorSpec(dtype=TensorSpec.FLOAT64)], payload_bytes=64
            )
        ],
        "a chunk up to byte 65 in a payload of 64",
    ),
    "a chunk of nothing": (
        lambda: [
            message(kind=FrameHeader.NORM_TOTAL, tensors=[TensorSpec(dtype=TensorSpec.FLOAT64)], payload_bytes=64)
        ],
        "a chunk up to byte 0",
    ),
    "a missing chunk": (lambda: messages(activation(), chunk_bytes=64)[0:3:2], "does not continue frame 0"),
    "a frame that begins in its middle": (lambda: messages(activation(), chunk_bytes=64)[1:2], "begins at byte 64"),
    "an acknowledgement that goes back": (
        lambda: [heartbeat(GENERATION, sequence=0, acknowledged=count) for count in (2, 1)],
        "acknowledgement 1 after 2",
    ),
    "values beside an announcement": (
        lambda: [
            message(
                bytes(64),
                kind=FrameHeader.NORM_TOTAL,
                tensors=[TensorSpec(dtype=TensorSpec.FLOAT64)],
                payload_bytes=64,
                is_attached=True,
            )
        ],
        "a frame of the attachment with",
    ),
    "an announcement of another shape": (
        lambda: [message(kind=FrameHeader.NORM_TOTAL, is_attached=True)],
        "0 tensors instead of 1",
    ),
    "a key inside a payload": (
        lambda: [
            messages(activation(), chunk_bytes=64)[0],
            heartbeat(GENERATION, sequence=0, acknowledged=0, key=Key("a", b"")),
        ],
        "a heartbeat with or inside",
    ),
    "a heartbeat with a payload": (
        lambda: [heartbeat(GENERATION, sequence=0, acknowledged=0) + b"x"],
        "a heartbeat with",
    ),
}


@pytest.mark.parametrize("what", VIOLATIONS)
def test_what_the_protocol_does_not_allow_is_an_error_that_names_the_peer(what: str) -> None:
    """Each deviation is told as the peer's fault, with what was wrong, before anything is delivered for it."""
    make, reason = VIOLATIONS[what]
    receiver = assembler()
    *allowed, violating = make()
    for chunk in allowed:
        receiver.feed(chunk)
    with pytest.raises(ProtocolError, match=reason) as caught:
        receiver.feed(violating)
    assert caught.value.peer == PEER


@given(st.binary(max_size=300))
def test_no_bytes_crash_the_receiver(raw: bytes) -> None:
    """Whatever arrives is a heartbeat, part of a frame, or a ProtocolError."""
    with suppress(ProtocolError):
        assert assembler().feed(raw) is None


@given(position=st.integers(min_value=0), flip=st.integers(1, 255))
def test_a_flipped_byte_never_crashes_the_receiver(position: int, flip: int) -> None:
    """One byte of a valid message changed: a frame of the right form, nothing yet, or a ProtocolError."""
    raw = bytearray(messages(activation())[0])
    raw[position % len(raw)] ^= flip
    try:
        frame = assembler().feed(bytes(raw))
    except ProtocolError:
        return
    assert not isinstance(frame, Frame) or [tensor.shape for tensor in frame.tensors] == [HIDDEN, (2, 3)]


@pytest.mark.parametrize(("codec", "said"), [(Codec.BF16, "bf16"), (9, "number 9")])
def test_a_codec_shows_where_the_form_does_not(codec: int, said: str) -> None:
    """A bf16 job without coded cuts, and a frame of just the forms that it has, but said to be coded → refused."""
    train = TrainSpec(microbatches=4, microbatch_size=2, sequence_length=3, dtype="bfloat16")
    contract = FrameContract.of(ModelSpec(hidden_size=8), train)
    hidden, targets = torch.rand(HIDDEN).to(torch.bfloat16), torch.randint(0, 256, (2, 3))
    frame = Frame(FrameKind.ACTIVATION, GENERATION, Batch(5), MicrobatchIndex(1), (hidden, targets), codec)  # type: ignore[arg-type]
    assembler = FrameAssembler(PEER, generation=GENERATION, contract=contract, kinds=DOWNSTREAM_KINDS)
    with pytest.raises(ProtocolError, match=f"ACTIVATION with codec {said}, the plan has none here"):
        assembler.feed(messages(frame)[0])


def test_a_codec_that_the_plan_does_not_have_is_refused() -> None:
    """A neighbour codes what this side takes as it is, or the other way round, or by a codec of tomorrow → one line
    that names both, before any memory is taken; the form alone would not show it for bf16 in a bf16 job."""
    train = TrainSpec(microbatches=4, microbatch_size=2, sequence_length=3, wire="int8")
    plain, coded = (
        FrameContract.of(ModelSpec(hidden_size=8), train, activations=codec) for codec in Codec if codec != 1
    )
    hidden, targets = torch.rand(HIDDEN), torch.randint(0, 256, (2, 3))
    place = FrameKind.ACTIVATION, GENERATION, Batch(5), MicrobatchIndex(1)
    rounded = Frame(*place, (*encode(hidden, Codec.INT8), targets), Codec.INT8)

    def receives(contract: FrameContract, frame: Frame) -> object:
        assembler = FrameAssembler(PEER, generation=GENERATION, contract=contract, kinds=DOWNSTREAM_KINDS)
        return assembler.feed(messages(frame)[0])

    arrived = receives(coded, rounded)
    assert isinstance(arrived, Frame)
    assert arrived.codec is Codec.INT8
    assert all(torch.equal(one, other) for one, other in zip(arrived.tensors, rounded.tensors, strict=True))
    with pytest.raises(ProtocolError, match="ACTIVATION with codec int8, the plan has none here"):
        receives(plain, rounded)
    with pytest.raises(ProtocolError, match="ACTIVATION with codec none, the plan has int8 here"):
        receives(coded, Frame(*place, (hidden, targets)))
    of_tomorrow = message(kind=FrameHeader.ACTIVATION, codec=9)
    receiver = FrameAssembler(PEER, generation=GENERATION, contract=coded, kinds=DOWNSTREAM_KINDS)
    with pytest.raises(ProtocolError, match="ACTIVATION with codec number 9, the plan has int8 here"):
        receiver.feed(of_tomorrow)


def test_a_coded_link_takes_room_for_coded_frames() -> None:
    """The bound on what one side may have handed over follows the size on the wire."""
    train = TrainSpec(microbatch_size=2, sequence_length=64)
    model = ModelSpec(hidden_size=128)
    plain, coded = (
        FrameContract.of(model, train, activations=codec, gradients=codec).max_frame_bytes
        for codec in (Codec.NONE, Codec.INT8)
    )
    values, targets = 2 * 64 * 128, 2 * 64 * 8
    assert (plain, coded) == (4 * values + targets, values + 4 * values // 64 + targets)


def test_the_contract_of_a_job_bounds_every_frame() -> None:
    """A job's largest frame is one microbatch's hidden states and targets, and 2m of them fit."""
    train = TrainSpec(microbatches=4, microbatch_size=2, sequence_length=16, dtype="bfloat16")
    contract = FrameContract.of(ModelSpec(num_hidden_layers=3, hidden_size=32), train)
    hidden, targets = 2 * 16 * 32 * 2, 2 * 16 * 8
    assert contract.max_frame_bytes == hidden + targets
    assert contract.max_unacknowledged_bytes >= 8 * contract.max_frame_bytes
    assert contract.violation(FrameKind.NORM_SQUARES, [(torch.float64, (5,))]) is None
    assert contract.violation(FrameKind.NORM_SQUARES, [(torch.float64, (1,))]) is None
    assert contract.violation(FrameKind.NORM_SQUARES, [(torch.float64, (6,))]) is not None
    assert contract.violation(FrameKind.NORM_SQUARES, [(torch.float64, (-1,))]) is not None
    assert contract.violation(FrameKind.GRADIENT, [(torch.float32, (2, 16, 32))]) is not None


LARGE = FrameContract(
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
    receiver = FrameAssembler("stage 0", generation=GENERATION, contract=LARGE, kinds=DOWNSTREAM_KINDS)
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
