"""Small frames that wait travel together; a peer that abuses this is refused before it is believed."""

from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch
from torch import Tensor

from headway.stages.errors import ProtocolError
from headway.stages.ids import Batch, Generation, MicrobatchIndex
from headway.stages.links.collective.header import (
    INLINE_BYTES,
    HeaderReader,
    Route,
    Signal,
    announce,
    signal,
)
from headway.stages.links.collective.message import MAX_TOGETHER, Message, max_message_bytes
from headway.stages.links.collective.receiver import FrameReceiver
from headway.stages.links.collective.sender import FrameSender
from headway.stages.links.frame_contract import FrameContract, TensorForm
from headway.stages.links.link import Frame, FrameKind

GENERATION = Generation(3)
SILENCE = timedelta(seconds=5)
FORMS = {
    FrameKind.GRADIENT: (TensorForm(torch.float32, (INLINE_BYTES // 16,)),),
    FrameKind.NORM_TOTAL: (TensorForm(torch.float64, ()),),
    FrameKind.SUMS: (TensorForm(torch.float32, (INLINE_BYTES,)),),
}
CONTRACT = FrameContract(FORMS, max_unacknowledged_frames=64)


class Done:
    """A transfer that is over."""

    def wait(self, timeout: timedelta) -> None:
        """Return at once."""


class Wire:
    """A group whose messages are in a list; both ends in one object."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.payloads: list[Tensor] = []

    def send_message(self, message: Tensor) -> Done:
        """Keep a copy."""
        self.messages.append(message.numpy().tobytes())
        return Done()

    def receive_message(self, buffer: Tensor) -> "Transfer":
        """Write the next message into the buffer when it is waited for."""
        return Transfer(self, buffer)

    def send(self, tensor: Tensor) -> Done:
        """Keep it."""
        self.payloads.append(tensor)
        return Done()

    def receive(self, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, Done]:  # noqa: ARG002
        """Return the next payload."""
        return self.payloads.pop(0), Done()

    def goes_by_device(self, tensor: Tensor) -> bool:  # noqa: ARG002
        """Return False: tensors are in host memory."""
        return False


class Transfer:
    """The next message of a wire, once somebody waits for it."""

    def __init__(self, wire: Wire, buffer: Tensor) -> None:
        self._wire = wire
        self._buffer = buffer

    def wait(self, timeout: timedelta) -> None:  # noqa: ARG002
        """Write the message."""
        message = self._wire.messages.pop(0)
        self._buffer[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)


def sender(wire: Wire) -> FrameSender:
    """Return the sending half over a wire."""
    return FrameSender(
        wire,  # type: ignore[arg-type]
        CONTRACT,
        generation=GENERATION,
        silence=SILENCE,
        heartbeat=SILENCE,
    )


def receiver(wire: Wire) -> FrameReceiver:
    """Return the receiving half over a wire."""
    reader = HeaderReader("stage 1", generation=GENERATION, contract=CONTRACT, kinds=frozenset(FORMS))
    return FrameReceiver(wire, reader, CONTRACT, silence=SILENCE)  # type: ignore[arg-type]


def frame(kind: FrameKind, batch: int) -> Frame:
    """Return a frame whose values are its batch."""
    tensors = tuple(torch.full(form.shape, float(batch), dtype=form.dtype) for form in FORMS[kind])
    return Frame(kind, GENERATION, Batch(batch), MicrobatchIndex(0), tensors)


def send_all(sending: FrameSender, frames: Sequence[Frame]) -> list[int]:
    """Send frames that wait; return how many went in each message."""
    waiting, together = list(frames), []
    while waiting:
        together.append(sending.num_together(waiting))
        sending.send([waiting.pop(0) for _ in range(together[-1])])
        if sending.is_full:
            sending.finish()
    return together


def test_frames_that_wait_go_together_as_far_as_a_message_has_room() -> None:
    """Four of 256 KiB in one message, a large one alone, up to eight tiny ones; all arrive in order."""
    kinds = [FrameKind.GRADIENT] * 5 + [FrameKind.SUMS] + [FrameKind.NORM_TOTAL] * 10
    frames = [frame(kind, number) for number, kind in enumerate(kinds)]
    wire = Wire()
    sending = sender(wire)
    assert send_all(sending, frames) == [4, 1, 1, MAX_TOGETHER, 2]
    assert sending.num_together(frames[:1]) == 1
    sending.signal(Signal.GOODBYE)
    receiving, received = receiver(wire), []
    while not receiving.is_ended:
        if (got := receiving.receive()) is not None:
            received.append(got)
    assert [(got.kind, got.batch) for got in received] == [(sent.kind, sent.batch) for sent in frames]
    for sent, got in zip(frames, received, strict=True):
        assert all(torch.equal(*pair) for pair in zip(sent.tensors, got.tensors, strict=True))


def written(*frames: tuple[Sequence[int], Sequence[Tensor]]) -> bytes:
    """Return the bytes of a message, whose last header says that another follows."""
    message = Message(max_message_bytes(CONTRACT))
    return message.write([*frames, ([0] * 16, ())]).numpy().tobytes()[: -16 * 8]


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        (b"", "something that is no header"),
        (signal(Signal.HEARTBEAT, GENERATION, sequence=1), "something else among the frames of a message"),
        (announce(frame(FrameKind.SUMS, 0), sequence=1, route=Route.HOST), "something else among the frames"),
    ],
    ids=["nothing", "heartbeat", "large"],
)
def test_only_small_frames_follow_in_a_message(tail: Sequence[int] | bytes, reason: str) -> None:
    """A header that says that another frame follows, where none does: the peer is named with the reason."""
    one = frame(FrameKind.NORM_TOTAL, 0)
    wire = Wire()
    follows = torch.tensor(tail, dtype=torch.int64).numpy().tobytes() if tail else bytes(128)
    wire.messages.append(written((announce(one, sequence=0, route=Route.INLINE), one.tensors)) + follows)
    with pytest.raises(ProtocolError, match=reason):
        receiver(wire).receive()


def test_frames_that_exceed_their_message_are_refused() -> None:
    """Four frames fill the message, and a fifth is announced behind them: nothing is read beyond its end."""
    frames = [frame(FrameKind.GRADIENT, number) for number in range(4)]
    headers = [announce(each, sequence=k, route=Route.INLINE) for k, each in enumerate(frames)]
    fifth = torch.tensor(announce(frames[0], sequence=4, route=Route.INLINE), dtype=torch.int64)
    wire = Wire()
    blocks = [(header, each.tensors) for header, each in zip(headers, frames, strict=True)]
    wire.messages.append(written(*blocks) + fifth.numpy().tobytes())
    with pytest.raises(ProtocolError, match="frames that exceed their message"):
        receiver(wire).receive()
