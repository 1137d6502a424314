"""The link over gRPC streams: the data that one side sends, has sent, and has received, and the loops that move it.

`send` and `close` belong to the thread that computes, everything else to the loop's thread; a lock guards what both
touch. A frame's tensors are held until the peer has acknowledged it, that is, placed it in its inbox; after a break
they are written again. endpoint.py opens the streams.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

from headway.stages.errors import LinkOverflowError, ProtocolError
from headway.stages.links.grpc.acknowledgement_due import AcknowledgementDue
from headway.stages.links.grpc.frame_bundle import bundle, bundles, unbundle
from headway.stages.links.grpc.frame_codec import FrameAssembler, Goodbye, OutgoingFrame, heartbeat
from headway.stages.links.grpc.resend_window import ResendWindow
from headway.stages.links.grpc.write_pace import WritePace
from headway.stages.links.held_frames import HeldFrames
from headway.stages.links.link import Frame, LinkLost
from headway.stages.links.link_terms import LinkTerms
from headway.stages.links.loop_thread import LoopThread

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


class MessageStream(Protocol):
    """A connected stream of messages; gRPC's calls and contexts fit behind it, and unix sockets."""

    async def read(self) -> bytes | memoryview | None:
        """The next message, None at the end. The next read may overwrite it.

        Raises ConnectionError with the reason when the stream broke.
        """
        ...

    async def write(self, *parts: bytes | memoryview) -> None:
        """Send the parts as one message, and return when flow control has room for more.

        Raises ConnectionError like `read`.
        """
        ...

    async def finish(self) -> None:
        """Announce the end of messages, and return when the stream can be dropped without losing one."""
        ...


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


class GrpcLink:
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
        self._window: ResendWindow[OutgoingFrame | Goodbye] = ResendWindow()
        self._is_told = False
        """True if the loop knows that there is more to write than when the writer last began."""
        # Only the loop's thread:
        self._wake = asyncio.Event()
        self._over = asyncio.Event()
        self._turn = Turn()
        self._serving = asyncio.Lock()
        self._due = AcknowledgementDue()
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
        outgoing = OutgoingFrame(frame, sequence=self._window.next_to_push)
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
            self._window.push(Goodbye(self._generation, sequence=self._window.next_to_push), num_bytes=0)
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
        self._due.said()  # the new stream's hello has acknowledged this
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

    def _next_unwritten(self) -> OutgoingFrame | Goodbye | None:
        with self._lock:
            return self._window.pop_unwritten()

    def _acknowledge(self) -> int:
        self._due.said()
        self._is_acknowledgement_due = False
        return self._assembler.next_sequence

    def _deliver(self, frames: Sequence[Frame]) -> None:
        with self._lock:
            if self._is_open:
                for frame in frames:
                    self._inbox.put(frame)
        num_bytes = sum(tensor.nbytes for frame in frames for tensor in frame.tensors)
        self._due.received(num_bytes, now=self._loop.loop.time())
        self._watch_what_is_due()

    def _watch_what_is_due(self) -> None:
        """Let the timer end no later than an acknowledgement is due."""
        at, timer = self._due.at, self._acknowledge_timer
        if at is None or (timer is not None and timer.when() <= at):
            return
        if timer is not None:
            timer.cancel()
        self._acknowledge_timer = self._loop.loop.call_at(at, self._on_acknowledge_timer)

    def _on_acknowledge_timer(self) -> None:
        self._acknowledge_timer = None
        at = self._due.at
        if at is not None and at <= self._loop.loop.time():
            self._is_acknowledgement_due = True
            self._wake.set()
        else:
            self._watch_what_is_due()

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
