"""The link over streams: the data that one side sends, has sent, and has received, and the loops that move it.

`send` and `close` belong to the thread that computes, everything else to the loop's thread; a lock guards what both
touch. A frame's tensors are held until the peer has acknowledged it, that is, placed it in its inbox; after a break
they are written again. endpoint.py opens the streams.

On a link between two devices the values of most frames travel over the attachment of the stream (attachment.py).
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial

from torch import Tensor

from headway.stages.errors import LinkOverflowError, ProtocolError
from headway.stages.links.attachment import Attachment
from headway.stages.links.frame_codec import (
    Announced,
    FrameAssembler,
    Key,
    OutgoingFrame,
    bundle,
    bundles,
    heartbeat,
    unbundle,
)
from headway.stages.links.link import Frame, LinkLost
from headway.stages.links.link_terms import LinkTerms
from headway.stages.links.loop_thread import LoopThread
from headway.stages.links.streams import MessageStream
from headway.stages.links.window import HeldFrames, ResendWindow, WritePace

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
"""Number of protocol violations, or of broken attachments, without a good frame in between, after which the link is
given up.
"""

PATIENCE = timedelta(milliseconds=250)
"""Maximum wait of an acknowledgement for a frame to carry it, while few bytes wait.

One that travels alone wakes several threads in both processes, only to free memory of the peer, which holds a frame
until then. When frames go both ways, each frame carries one, and none has to travel alone.
"""

PATIENCE_WITH_MUCH = timedelta(milliseconds=20)
MUCH_BYTES = 1 << 21


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


@dataclass(slots=True)
class _Arriving:
    """A frame that has to wait for its place: its values, or those of an earlier one, are still on their way."""

    frame: Frame
    is_here: bool


class StreamLink:
    """A `Link`. Usable before it is connected and between two streams: frames wait within the contract's bound."""

    def __init__(self, loop: LoopThread, terms: LinkTerms) -> None:
        self._loop = loop
        self._peer = terms.peer
        self._generation = terms.generation
        self._inbox = terms.inbox
        self._terms = terms
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
        self._cut_s = 0.0
        self._attachment: Attachment | None = None
        """Of the present stream; None between two streams, and on a link between hosts."""
        self._keys: deque[Key] = deque()
        """What is still to be said for the forming of the attachment."""
        self._has_left_nothing = False
        """Whether the link is over, and the peer had acknowledged every frame by then."""
        self._arriving: deque[_Arriving] = deque()
        """Frames in the peer's order; the first one is not here. Empty between two streams."""

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

    @property
    def cut_s(self) -> float:
        """Return the seconds of its breaks that are over."""
        return self._cut_s

    def send(self, frame: Frame) -> None:
        """Send a frame, see `Link`. Raises LinkOverflowError beyond the contract's bound; after LinkLost the frame is
        dropped.
        """
        assert frame.generation == self._generation, "a frame of another generation"
        attach = self._terms.attach
        is_attached = attach is not None and all(attach.takes(tensor) for tensor in frame.tensors)
        if is_attached:
            frame = replace(frame, tensors=tuple(tensor.detach().contiguous() for tensor in frame.tensors))
        outgoing = OutgoingFrame(frame, self._generation, sequence=self._window.next_to_push, is_attached=is_attached)
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
        """Return the number of the next expected frame, or of the goodbye. It does not change between two turns."""
        num_waiting = len(self._arriving) + bool(self._arriving and self._assembler.is_ended)
        return self._assembler.next_sequence - num_waiting

    def lose(self, reason: str, *, was_unreached: bool = False) -> None:
        """Give the link up: LinkLost in the inbox, unless it is closed or lost already."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._inbox.put(LinkLost(self._peer, reason, was_unreached))
        self._end()

    def violated(self, error: ProtocolError) -> None:
        """Count a violation, for which the stream was dropped; after MAX_VIOLATIONS the link is given up."""
        self._count_failure("protocol violated", error.reason)

    def _count_failure(self, what: str, reason: str) -> None:
        self._num_violations += 1
        if self._num_violations >= MAX_VIOLATIONS:
            self.lose(f"{what} {self._num_violations} times: {reason}")

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
        attachment = self._attachment = self._new_attachment()
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
            if attachment is not None:
                attachment.abort(keeps_pair=self._has_left_nothing and not self._arriving)
            self._attachment = None
            self._forget_what_has_not_arrived()
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
        self._assembler.restart(acknowledged=acknowledged, next_sequence=self._assembler.next_sequence)
        self._acknowledge()  # the new stream's hello has done it
        if self._broken_at is not None:
            self._cut_s += self._loop.loop.time() - self._broken_at
        self._broken_at = None
        self._num_streams += 1  # last: who finds it counted does not find it cut

    def _new_attachment(self) -> Attachment | None:
        """Begin to form it. Its calls come in this thread, and none once it is aborted."""
        terms = self._terms
        if terms.attach is None:
            return None
        return Attachment(
            self._loop,
            terms.attach,
            peer=terms.peer,
            other=terms.peer_incarnation,
            rank=int(terms.worker > terms.peer_worker),
            silence=terms.silence,
            launched_s=terms.launched_s,
            tell=self._tell,
            on_ready=self._wake.set,
            on_failure=self._on_attachment_failed,
        )

    def _tell(self, key: Key) -> None:
        self._keys.append(key)
        self._wake.set()

    def _on_attachment_failed(self, reason: str) -> None:
        self._count_failure("attachment broken", reason)
        self._turn.end(reason)

    def _forget_what_has_not_arrived(self) -> None:
        """It comes again, over the next stream."""
        self._keys.clear()
        next_sequence = self.next_sequence
        self._arriving.clear()
        self._assembler.restart(acknowledged=self._assembler.acknowledged, next_sequence=next_sequence)

    async def _read(self, stream: MessageStream) -> None:
        while (received := await stream.read()) is not None:
            self._num_heard += 1
            is_any = self._take(received)
            del received  # a large message; the next may take long
            if is_any:
                self._num_violations = 0
            if self._has_ended():
                return
        raise ConnectionError("the stream ended without a goodbye")

    def _has_ended(self) -> bool:
        """Return whether the peer's goodbye was heard, and all before it is here; the link is lost then."""
        is_ended = self._assembler.is_ended and not self._arriving
        if is_ended:
            self._is_heartbeat_due = True
            self.lose("the peer closed the link")
        return is_ended

    def _take(self, received: bytes | memoryview) -> bool:
        """Deliver the frames that this bundle completes, together; return whether there are any.

        Acknowledged frames are forgotten first, because the receiver of a frame may send at once. Raises ProtocolError,
        after the frames before the violation are delivered.
        """
        frames: list[Frame] = []
        try:
            for message in unbundle(received):
                match self._assembler.feed(message):
                    case Frame() as frame if not self._arriving:
                        frames.append(frame)
                        self._held.add(frame)
                    case Frame() as frame:
                        self._let_wait(frame)
                    case Announced() as announced:
                        arriving = self._let_wait(announced.frame)
                        self._its_attachment().receive(announced.forms, partial(self._on_arrived, arriving))
                    case Key() as key:
                        self._its_attachment().hear(key)
        except (ValueError, OverflowError) as error:
            raise ProtocolError(self._peer, str(error)) from error
        finally:
            try:
                self._forget(self._assembler.acknowledged)
            finally:
                if frames:
                    self._deliver(frames)
        return bool(frames)

    def _its_attachment(self) -> Attachment:
        if self._attachment is None:
            raise ValueError("something for an attachment, on a link without one")
        return self._attachment

    def _let_wait(self, frame: Frame) -> _Arriving:
        """Give a frame its place behind those whose values are on their way. Raises OverflowError."""
        self._arriving.append(_Arriving(frame, is_here=bool(frame.tensors)))  # first: it counts as not arrived
        self._held.make_sure_of_room(len(self._arriving) - 1)
        return self._arriving[-1]

    def _on_arrived(self, arriving: _Arriving, tensors: tuple[Tensor, ...]) -> None:
        """Deliver a frame whose values are here, and those that waited behind it."""
        arriving.frame, arriving.is_here = replace(arriving.frame, tensors=tensors), True
        frames = []
        while self._arriving and self._arriving[0].is_here:
            frames.append(self._arriving.popleft().frame)
            self._held.add(frames[-1])  # its room was kept
        self._num_violations = 0
        if frames:
            self._deliver(frames)
        self._has_ended()

    async def _write(self, stream: MessageStream) -> None:
        pace = WritePace()
        while True:
            self._wake.clear()
            with self._lock:
                self._is_told = False
            while self._keys:
                await self._beat(stream, self._keys.popleft())
            for written in bundles(self._next_unwritten, self._acknowledge, lambda: pace.chunk_bytes):
                began_at = time.monotonic()
                await self._write_one(stream, *written)
                pace.wrote(sum(map(len, written)), time.monotonic() - began_at)
            if self._is_heartbeat_due or self._is_acknowledgement_due:
                self._is_heartbeat_due = False
                await self._beat(stream)
            if self._over.is_set():
                return await stream.finish()
            await self._wake.wait()

    async def _beat(self, stream: MessageStream, key: Key | None = None) -> None:
        # Only the loop's thread marks frames as written, so this is the next one's number.
        beat = heartbeat(
            self._generation, sequence=self._window.next_to_write, acknowledged=self._acknowledge(), key=key
        )
        await self._write_one(stream, bundle(beat))

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
            if self._attachment is not None and not self._may_write_next(self._attachment):
                return None
            return self._window.pop_unwritten()

    def _may_write_next(self, attachment: Attachment) -> bool:
        """Return whether the next frame may be announced: its transfer is launched. All that wait are begun here."""
        if attachment.is_decided:
            for outgoing in self._window.unwritten():
                if outgoing.is_attached and outgoing.begun_by is not attachment:
                    attachment.send(outgoing)
        first = next(self._window.unwritten(), None)
        return first is None or not first.is_attached or first.sent_by is attachment

    def _acknowledge(self) -> int:
        """Return what a message on its way acknowledges: every arrived frame."""
        self._unsaid_since, self._unsaid_bytes, self._is_acknowledgement_due = None, 0, False
        return self.next_sequence

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
            if not self.is_over:
                self._has_left_nothing = not self._window.num_bytes
            self._window.clear()
        if self._acknowledge_timer is not None:
            self._acknowledge_timer.cancel()
        self._over.set()
        self._wake.set()
