"""The link over streams: the data that one side sends, has sent, and has received, and the loops that move it.

`send` and `close` belong to the thread that computes, everything else to the loop's thread; a lock guards what both
touch. A frame's tensors are held until the peer has acknowledged it, that is, placed it in its inbox; after a break
they are written again. endpoint.py opens the streams.
"""

import asyncio
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Generic, TypeVar

from torch import Tensor

from headway.stages.errors import LinkOverflowError, ProtocolError
from headway.stages.links.frame_codec import (
    CHUNK_BYTES,
    FrameAssembler,
    OutgoingFrame,
    bundle,
    bundles,
    heartbeat,
    unbundle,
)
from headway.stages.links.frame_contract import FrameContract
from headway.stages.links.link import Frame, LinkLost
from headway.stages.links.link_terms import LinkTerms
from headway.stages.links.loop_thread import LoopThread
from headway.stages.links.streams import MessageStream

CLOSE_GRACE = timedelta(seconds=5)
"""Time for which a closed link still delivers its frames, over a new stream if needed."""

FINISH_GRACE = timedelta(seconds=1)
"""Time for the last acknowledgement of a link to leave."""

TICK = timedelta(seconds=0.5)
"""A side that wrote nothing for a tick sends a heartbeat, so that the peer receives something each second."""

SILENT_TICKS = 4
"""Number of ticks without a message (two missed heartbeats) after which the stream is dropped. Ticks are counted, not
time: while this process itself stands still, no peer counts as silent.
"""

STALLED_TICKS = 20
"""Number of ticks inside one write after which the stream is dropped."""

MAX_VIOLATIONS = 3
"""Number of protocol violations without a good frame in between after which the link is given up."""

PATIENCE = timedelta(milliseconds=250)
"""Maximum wait of an acknowledgement for a frame to carry it, while few bytes wait.

One that travels alone wakes several threads in both processes, only to free memory of the peer, which holds a frame
until then. When frames go both ways, each frame carries one, and none has to travel alone.
"""

PATIENCE_WITH_MUCH = timedelta(milliseconds=20)
MUCH_BYTES = 1 << 21

SLACK = 2
"""Multiple of the contract's number of frames that may be held: a used frame may not be freed yet."""

FIRST_CHUNK_BYTES = 64 << 10
MIN_CHUNK_BYTES = 16 << 10
CHUNK_SECONDS = 0.25
"""Target time of one chunk."""
PACE_BYTES = 1 << 20
"""Bytes written before the size changes: the first bytes go into buffers, at full speed on any line."""

ItemT = TypeVar("ItemT")


class ResendWindow(Generic[ItemT]):
    """The sent and not yet acknowledged items of one direction, to resend them after a break. Items are numbered from 0
    and held, not copied.

    Numbers rise: acknowledged ≤ next to write ≤ next to push. All items from the first to the last are held.
    """

    def __init__(self) -> None:
        self._held: deque[tuple[ItemT, int]] = deque()
        self._first_held = 0
        self.next_to_write = 0
        """Number of the next item to write, whether it exists yet or not."""
        self.next_to_push = 0
        """Number of the next pushed item. Changed by `push` alone."""
        self.num_bytes = 0
        """Bytes of all held items."""

    def push(self, item: ItemT, *, num_bytes: int) -> None:
        """Hold one more item."""
        self._held.append((item, num_bytes))
        self.next_to_push += 1
        self.num_bytes += num_bytes

    def pop_unwritten(self) -> ItemT | None:
        """Return the next item to write, which stays held; None when all have been written since the last break."""
        position = self.next_to_write - self._first_held
        if position == len(self._held):
            return None
        self.next_to_write += 1
        return self._held[position][0]

    def acknowledge(self, next_expected: int) -> None:
        """Note that the peer has all items before `next_expected`. Raises ValueError when that is impossible."""
        if next_expected > self.next_to_write:
            raise ValueError(f"acknowledgement {next_expected} of frames not yet sent")
        if next_expected < self._first_held:
            raise ValueError(f"acknowledgement {next_expected} after {self._first_held}")
        while self._first_held < next_expected:
            self.num_bytes -= self._held.popleft()[1]
            self._first_held += 1

    def resume(self, next_expected: int) -> None:
        """Begin a new stream: write again from `next_expected` on. Raises ValueError like `acknowledge`."""
        self.acknowledge(next_expected)
        self.next_to_write = next_expected

    def clear(self) -> None:
        """Drop all items: nothing is written any more, and nothing pushed."""
        self._first_held = self.next_to_write
        self._held.clear()
        self.num_bytes = 0


class HeldFrames:
    """Limits how many frames of one link are in memory here: in the inbox, or with the code that took them.

    A neighbour that keeps to the schedule never has more than the contract's number under way. But the protocol allows
    more: an acknowledgement confirms that a frame has arrived, not that it was used. Frames count by the life of their
    first tensor. `add` belongs to one thread; tensors may die in any.
    """

    def __init__(self, contract: FrameContract) -> None:
        self.max_frames = SLACK * contract.max_unacknowledged_frames
        self._alive: set[weakref.ref[Tensor]] = set()

    @property
    def num_frames(self) -> int:
        """Return the number of arrived frames that still exist."""
        return len(self._alive)

    def add(self, frame: Frame) -> None:
        """Note an arrived frame. Raises OverflowError when there are too many already."""
        if len(self._alive) >= self.max_frames:
            raise OverflowError(f"more than {self.max_frames} frames that nobody has used")
        if frame.tensors:
            self._alive.add(weakref.ref(frame.tensors[0], self._alive.discard))


class WritePace:
    """The chunk size of one stream: on a slow line, a large chunk would leave the peer without a message for too
    long.
    """

    def __init__(self) -> None:
        self.chunk_bytes = FIRST_CHUNK_BYTES
        self._num_bytes = 0
        self._seconds = 0.0

    def wrote(self, num_bytes: int, seconds: float) -> None:
        """Note how long bytes took."""
        self._num_bytes += num_bytes
        self._seconds += seconds
        if self._num_bytes >= PACE_BYTES or self._seconds >= CHUNK_SECONDS:
            wanted = int(CHUNK_SECONDS * self._num_bytes / max(self._seconds, 1e-6))
            self.chunk_bytes = max(MIN_CHUNK_BYTES, min(CHUNK_BYTES, wanted))
            self._num_bytes, self._seconds = 0, 0.0


@dataclass(slots=True)
class Turn:
    """One stream's time to serve a link. The next stream's turn, or a reason, ends it."""

    ended: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""

    def end(self, reason: str) -> None:
        """Drop the stream, now or as soon as it is served."""
        self.reason = self.reason or reason
        self.ended.set()

    async def wait(self) -> None:
        """Raise ConnectionError with the reason once this turn has ended."""
        await self.ended.wait()
        raise ConnectionError(self.reason)


class StreamLink:
    """A `Link`. Usable before it is connected and between two streams: frames wait within the contract's bound."""

    def __init__(self, loop: LoopThread, terms: LinkTerms) -> None:
        self._loop = loop
        self._peer = terms.peer
        self._generation = terms.generation
        self._inbox = terms.inbox
        self._held = HeldFrames(terms.contract)
        self._max_bytes = terms.contract.max_unacknowledged_bytes
        self._assembler = FrameAssembler(
            terms.peer,
            generation=terms.generation,
            contract=terms.contract,
            kinds=terms.receives,
            allocate=terms.empty_bytes,
        )
        # Both threads, under the lock:
        self._lock = threading.Lock()
        self._is_open = True
        self._window: ResendWindow[OutgoingFrame] = ResendWindow()
        self._is_told = False
        """True if the loop knows that there is more to write than when the writer last began."""
        # Only the loop's thread:
        self._wake = asyncio.Event()
        self._over = asyncio.Event()
        self._turn = Turn()
        self._serving = asyncio.Lock()
        self._unsaid_since: float | None = None
        """When the first frame arrived that no message on its way acknowledges."""
        self._unsaid_bytes = 0
        self._is_acknowledgement_due = False
        self._acknowledge_timer: asyncio.TimerHandle | None = None
        self._is_heartbeat_due = False
        self._num_heard = self._num_written = 0
        self._is_writing = False
        self._num_violations = 0
        self._num_streams = 0
        self._broken_at: float | None = None

    @property
    def peer(self) -> str:
        """Return `stage 2 at 10.0.0.7:4711`."""
        return self._peer

    @property
    def unacknowledged_bytes(self) -> int:
        """Return the payload bytes that were sent and not yet acknowledged."""
        with self._lock:
            return self._window.num_bytes

    @property
    def num_resumed(self) -> int:
        """Return how often a new stream has continued after a break."""
        return max(0, self._num_streams - 1)

    def send(self, frame: Frame) -> None:
        """Send a frame, see `Link`. Raises LinkOverflowError beyond the contract's bound; after LinkLost the frame is
        dropped.
        """
        assert frame.generation == self._generation, "a frame of another generation"
        outgoing = OutgoingFrame(frame, self._generation, sequence=self._window.next_to_push)
        with self._lock:
            if not self._is_open:
                return
            total = self._window.num_bytes + outgoing.payload_bytes
            if total > self._max_bytes:
                raise LinkOverflowError(self._peer, total, self._max_bytes)
            self._window.push(outgoing, num_bytes=outgoing.payload_bytes)
            was_told, self._is_told = self._is_told, True
        if not was_told:
            self._loop.call_soon(self._wake.set)

    def close(self) -> None:
        """Close the link, see `Link`. Sent frames are still delivered, within CLOSE_GRACE, if the link was ever
        connected.
        """
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            goodbye = OutgoingFrame(None, self._generation, sequence=self._window.next_to_push)
            self._window.push(goodbye, num_bytes=0)
        self._loop.call_soon(self._on_closed)

    # --- in the loop's thread ---------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Return whether the link needs no stream any more: the goodbye was heard, or the link was lost."""
        return self._over.is_set()

    @property
    def was_connected(self) -> bool:
        """Return whether it has had a stream."""
        return self._num_streams > 0

    @property
    def broken_at(self) -> float | None:
        """Return when the last stream broke (the loop's clock), None while there is one or before the first."""
        return self._broken_at

    @property
    def next_sequence(self) -> int:
        """Return the number of the next expected frame. It does not change between two turns."""
        return self._assembler.next_sequence

    def lose(self, reason: str, *, was_unreached: bool = False) -> None:
        """Give the link up: LinkLost in the inbox, unless it is closed or lost already."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._inbox.put(LinkLost(self._peer, reason, was_unreached))
        self._end()

    def violated(self, error: ProtocolError) -> None:
        """Count a violation, for which the stream was dropped; after MAX_VIOLATIONS the link is given up."""
        self._num_violations += 1
        if self._num_violations >= MAX_VIOLATIONS:
            self.lose(f"protocol violated {self._num_violations} times: {error.reason}")

    def interrupt(self, reason: str) -> None:
        """Drop the stream, if there is one; the link resumes."""
        self._turn.end(reason)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Turn]:
        """Begin the turn of a new stream, which supersedes the present one; inside, the old one is ignored."""
        self._turn.end("superseded by a new connection")
        mine = self._turn = Turn()
        async with self._serving:
            yield mine

    async def run(self, stream: MessageStream, turn: Turn, *, acknowledged: int) -> None:
        """Serve a connected stream until the link is over; the peer expects frame `acknowledged` next.

        Raises ConnectionError with the reason when the stream broke, ProtocolError when the peer violated the protocol.
        """
        self._resume(acknowledged)
        over = asyncio.create_task(self._over.wait())
        writer = asyncio.create_task(self._write(stream))
        tasks = [over, writer, *map(asyncio.create_task, (self._read(stream), self._watch(), turn.wait()))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._over.is_set():
                await asyncio.wait({writer}, timeout=FINISH_GRACE.total_seconds())
        finally:
            if not self._over.is_set():
                self._broken_at = self._loop.loop.time()  # first, because later steps may be cancelled
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        if self._over.is_set():
            return
        errors = [result for result in results if isinstance(result, Exception)]
        errors.append(ConnectionError("the stream was cancelled"))
        raise next((error for error in errors if isinstance(error, ProtocolError)), errors[0])

    def _resume(self, acknowledged: int) -> None:
        try:
            with self._lock:
                self._window.resume(acknowledged)
        except ValueError as error:
            raise ProtocolError(self._peer, str(error)) from error
        self._assembler.restart(acknowledged=acknowledged)
        self._acknowledge()  # the new stream's hello has done it
        self._num_streams += 1
        self._broken_at = None

    async def _read(self, stream: MessageStream) -> None:
        while (received := await stream.read()) is not None:
            self._num_heard += 1
            is_any = self._take(received)
            del received  # a large message; the next may take long
            if is_any:
                self._num_violations = 0
            if self._assembler.is_ended:
                self._is_heartbeat_due = True
                self.lose("the peer closed the link")
                return
        raise ConnectionError("the stream ended without a goodbye")

    def _take(self, received: bytes | memoryview) -> bool:
        """Deliver the frames that this bundle completes, together; return whether there are any.

        Acknowledged frames are forgotten first, because the receiver of a frame may send at once. Raises ProtocolError,
        after the frames before the violation are delivered.
        """
        frames: list[Frame] = []
        try:
            for message in unbundle(received):
                frame = self._assembler.feed(message)
                if frame is not None:
                    frames.append(frame)
                    self._held.add(frame)
        except (ValueError, OverflowError) as error:
            raise ProtocolError(self._peer, str(error)) from error
        finally:
            try:
                self._forget(self._assembler.acknowledged)
            finally:
                if frames:
                    self._deliver(frames)
        return bool(frames)

    async def _write(self, stream: MessageStream) -> None:
        pace = WritePace()
        while True:
            self._wake.clear()
            with self._lock:
                self._is_told = False
            for written in bundles(self._next_unwritten, self._acknowledge, lambda: pace.chunk_bytes):
                began_at = time.monotonic()
                await self._write_one(stream, *written)
                pace.wrote(sum(map(len, written)), time.monotonic() - began_at)
            if self._is_heartbeat_due or self._is_acknowledgement_due:
                self._is_heartbeat_due = False
                # Only the loop's thread marks frames as written, so this is the next one's number.
                beat = heartbeat(
                    self._generation, sequence=self._window.next_to_write, acknowledged=self._acknowledge()
                )
                await self._write_one(stream, bundle(beat))
            if self._over.is_set():
                return await stream.finish()
            await self._wake.wait()

    async def _write_one(self, stream: MessageStream, *parts: bytes | memoryview) -> None:
        self._is_writing = True
        await stream.write(*parts)
        self._is_writing = False
        self._num_written += 1

    async def _watch(self) -> None:
        """Send heartbeats, and notice silence. Raises ConnectionError."""
        num_heard, num_written, silent_ticks, quiet_ticks = self._num_heard, self._num_written, 0, 0
        self._is_writing = False
        while True:
            await asyncio.sleep(TICK.total_seconds())
            silent_ticks = silent_ticks + 1 if self._num_heard == num_heard else 0
            quiet_ticks = quiet_ticks + 1 if self._num_written == num_written else 0
            num_heard, num_written = self._num_heard, self._num_written
            if silent_ticks >= SILENT_TICKS:
                raise ConnectionError(f"silent for {SILENT_TICKS * TICK.total_seconds():g} s")
            if self._is_writing and quiet_ticks >= STALLED_TICKS:
                raise ConnectionError(f"took nothing for {STALLED_TICKS * TICK.total_seconds():g} s")
            if quiet_ticks:
                self._is_heartbeat_due = True
                self._wake.set()

    def _next_unwritten(self) -> OutgoingFrame | None:
        with self._lock:
            return self._window.pop_unwritten()

    def _acknowledge(self) -> int:
        """Return what a message on its way acknowledges: every arrived frame."""
        self._unsaid_since, self._unsaid_bytes, self._is_acknowledgement_due = None, 0, False
        return self._assembler.next_sequence

    def _deliver(self, frames: Sequence[Frame]) -> None:
        with self._lock:
            if self._is_open:
                for frame in frames:
                    self._inbox.put(frame)
        self._unsaid_bytes += sum(tensor.nbytes for frame in frames for tensor in frame.tensors)
        if self._unsaid_since is None:
            self._unsaid_since = self._loop.loop.time()
        self._see_to_the_acknowledgement()

    def _see_to_the_acknowledgement(self) -> None:
        """Send it alone if it is due, or let the timer end no later than that."""
        if self._unsaid_since is None:
            return
        patience = PATIENCE if self._unsaid_bytes < MUCH_BYTES else PATIENCE_WITH_MUCH
        at, timer = self._unsaid_since + patience.total_seconds(), self._acknowledge_timer
        if at <= self._loop.loop.time():
            self._is_acknowledgement_due = True
            self._wake.set()
        elif timer is None or timer.when() > at:
            if timer is not None:
                timer.cancel()
            self._acknowledge_timer = self._loop.loop.call_at(at, self._on_acknowledge_timer)

    def _on_acknowledge_timer(self) -> None:
        self._acknowledge_timer = None
        self._see_to_the_acknowledgement()

    def _forget(self, acknowledged: int) -> None:
        with self._lock:
            try:
                self._window.acknowledge(acknowledged)
            except ValueError as error:
                raise ProtocolError(self._peer, str(error)) from error
            is_all_said = not self._is_open and acknowledged == self._window.next_to_push
        if is_all_said:
            self._end()

    def _on_closed(self) -> None:
        self._wake.set()
        if not self.was_connected:
            self._end()
        elif not self.is_over:
            self._loop.loop.call_later(CLOSE_GRACE.total_seconds(), self._end)

    def _end(self) -> None:
        with self._lock:
            self._window.clear()
        if self._acknowledge_timer is not None:
            self._acknowledge_timer.cancel()
        self._over.set()
        self._wake.set()
