"""A link's messages that acknowledge frames, seen by a stream that records writes."""

import asyncio
import queue
import time
from datetime import timedelta

import pytest
import torch

from headway.proto.data_pb2 import FrameHeader
from headway.stages.ids import Batch, Generation, MicrobatchIndex
from headway.stages.links.frame_codec import LENGTH, OutgoingFrame, unbundle
from headway.stages.links.frame_contract import FrameContract, TensorForm
from headway.stages.links.link import Frame, FrameKind
from headway.stages.links.loop_thread import LoopThread
from headway.stages.links.stream_link import MUCH_BYTES, PATIENCE, TICK, StreamLink
from tests.rigs.two_sides import lower_terms

GENERATION = Generation(1)
TIMEOUT = timedelta(seconds=10)


class KeptStream:
    """A stream whose other end is the test."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[bytes] = asyncio.Queue()
        self.written: list[tuple[float, FrameHeader]] = []

    async def read(self) -> bytes | None:
        return await self.incoming.get()

    async def write(self, *parts: bytes | memoryview) -> None:
        for part in unbundle(b"".join(parts)):
            (length,) = LENGTH.unpack_from(part)
            header = FrameHeader.FromString(bytes(part[LENGTH.size : LENGTH.size + length]))
            self.written.append((time.monotonic(), header))

    async def finish(self) -> None:
        pass


class Side:
    """One end of a link, and what its peer says and hears."""

    def __init__(self, loop: LoopThread, num_values: int) -> None:
        self.form = (TensorForm(torch.uint8, (num_values,)),)
        forms = {FrameKind.ACTIVATION: self.form, FrameKind.GRADIENT: self.form}
        self._loop = loop
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        contract = FrameContract(forms, max_unacknowledged_frames=64)
        self.link = StreamLink(loop, lower_terms("j", inbox=self.inbox, contract=contract, generation=GENERATION))
        self.stream = loop.run(self._open(), timeout=TIMEOUT, what="a stream")
        self._num_heard = 0

    async def _open(self) -> KeptStream:
        stream = KeptStream()
        self._task = asyncio.create_task(self._serve(stream))
        return stream

    async def _serve(self, stream: KeptStream) -> None:
        async with self.link.turn() as turn:
            await self.link.run(stream, turn, acknowledged=0)

    def frame(self, kind: FrameKind, batch: int) -> Frame:
        values = torch.zeros(self.form[0].shape, dtype=torch.uint8)
        return Frame(kind, GENERATION, Batch(batch), MicrobatchIndex(0), (values,))

    def hears_a_frame(self) -> float:
        """One arrives, and is taken from the inbox: when."""
        outgoing = OutgoingFrame(
            self.frame(FrameKind.ACTIVATION, self._num_heard), GENERATION, sequence=self._num_heard
        )
        self._num_heard += 1
        parts = [part for message in outgoing.messages(lambda: 0, chunk_bytes=1 << 30) for part in message]
        bundle = LENGTH.pack(sum(map(len, parts))) + b"".join(parts)
        self._loop.call_soon(self.stream.incoming.put_nowait, bundle)
        assert isinstance(self.inbox.get(timeout=TIMEOUT.total_seconds()), Frame)
        return time.monotonic()

    def said_alone(self) -> list[float]:
        """Return when messages were written that carry an acknowledgement and nothing else."""
        return [at for at, header in self.stream.written if header.kind == FrameHeader.HEARTBEAT]


@pytest.fixture
def loop() -> "object":
    thread = LoopThread()
    thread.start()
    yield thread
    thread.stop()


def test_a_large_frame_is_acknowledged_long_before_a_heartbeat(loop: LoopThread) -> None:
    """As much as a peer should not hold for nothing → the acknowledgement travels alone, within its short patience."""
    side = Side(loop, MUCH_BYTES)
    arrived = side.hears_a_frame()
    while not side.said_alone() and time.monotonic() < arrived + 5:
        time.sleep(0.005)
    assert side.said_alone()[0] - arrived < PATIENCE.total_seconds() / 2


def test_a_small_frame_waits_for_another_to_travel_with(loop: LoopThread) -> None:
    """Little to hold, and nothing to say → alone, but not before its patience is over."""
    side = Side(loop, 64)
    arrived = side.hears_a_frame()
    while not side.said_alone() and time.monotonic() < arrived + 5:
        time.sleep(0.005)
    assert side.said_alone()[0] - arrived > PATIENCE.total_seconds() / 2


def test_frames_that_go_both_ways_carry_every_acknowledgement(loop: LoopThread) -> None:
    """Twenty frames in, each answered: twenty out, and each acknowledges all that came before it."""
    side = Side(loop, 64)
    began = time.monotonic()
    for batch in range(20):
        side.hears_a_frame()
        side.link.send(side.frame(FrameKind.GRADIENT, batch))
        time.sleep(0.01)
    frames = [header for _, header in side.stream.written if header.kind == FrameHeader.GRADIENT]
    assert [header.acknowledged for header in frames] == list(range(1, 21))
    assert len(side.said_alone()) <= (time.monotonic() - began) / TICK.total_seconds()
