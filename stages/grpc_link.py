"""The link over a gRPC stream: what one side has to say, has said, and has heard, and the two loops that move it.

`send` and `close` belong to the thread that computes, everything else to the loop's thread; a lock guards what both
touch. A frame's tensors are held until the peer has acknowledged it, that is, placed it in its inbox. How a stream
comes about is link_endpoint.py's business.
"""

import asyncio
import threading
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from headway.stages.errors import ProtocolError
from headway.stages.frame_codec import FrameAssembler, OutgoingFrame, heartbeat
from headway.stages.frame_contract import FrameContract
from headway.stages.ids import Generation
from headway.stages.link import Frame, FrameKind, Inbox, LinkLost
from headway.stages.loop_thread import LoopThread

ACKNOWLEDGE_AFTER = timedelta(milliseconds=20)
"""How long an acknowledgement waits for a frame to travel with before it travels alone."""

CLOSE_GRACE = timedelta(seconds=5)
"""How long a closed link goes on delivering what was handed over before."""


class MessageStream(Protocol):
    """A connected stream of messages; gRPC's calls and contexts fit behind it."""

    async def read(self) -> bytes | None:
        """The next message, None at the end. Raises ConnectionError with the reason when the stream broke."""
        ...

    async def write(self, message: bytes) -> None:
        """Returns when flow control has room for more. Raises ConnectionError like `read`."""
        ...

    async def finish(self) -> None:
        """Say that no more messages follow, and return when the stream can be dropped without losing one."""
        ...


@dataclass
class LinkOverflowError(Exception):
    """More was sent than any schedule can have in flight: a bug of the caller, told before memory grows."""

    peer: str
    unacknowledged_bytes: int
    limit_bytes: int

    def __str__(self) -> str:
        return f"{self.peer}: {self.unacknowledged_bytes} bytes unacknowledged, the limit is {self.limit_bytes}"


class GrpcLink:
    """A `Link`. Usable before it is connected: frames wait within the contract's bound."""

    def __init__(
        self,
        loop: LoopThread,
        peer: str,
        *,
        generation: Generation,
        inbox: Inbox,
        contract: FrameContract,
        receives: frozenset[FrameKind],
    ) -> None:
        self._loop = loop
        self._peer = peer
        self._generation = generation
        self._inbox = inbox
        self._contract = contract
        self._assembler = FrameAssembler(peer, generation=generation, contract=contract, kinds=receives)
        # Both threads, under the lock:
        self._lock = threading.Lock()
        self._is_open = True
        self._unsent: deque[OutgoingFrame] = deque()
        self._unacknowledged: deque[OutgoingFrame] = deque()
        self._unacknowledged_bytes = 0
        self._num_sent = 0
        # The loop's thread alone:
        self._wake = asyncio.Event()
        self._closed = asyncio.Event()
        self._acknowledged_to_peer = 0
        self._acknowledge_timer: asyncio.TimerHandle | None = None
        self._is_heartbeat_due = False

    @property
    def peer(self) -> str:
        """`stage 2 at 10.0.0.7:4711`."""
        return self._peer

    @property
    def unacknowledged_bytes(self) -> int:
        """Payload bytes handed over that the peer has not acknowledged."""
        with self._lock:
            return self._unacknowledged_bytes

    def send(self, frame: Frame) -> None:
        """See `Link`. Raises LinkOverflowError beyond the contract's bound; after a break the frame is dropped."""
        assert frame.generation == self._generation, "a frame of another generation"
        outgoing = OutgoingFrame(frame, sequence=self._num_sent)
        with self._lock:
            if not self._is_open:
                return
            total = self._unacknowledged_bytes + outgoing.payload_bytes
            if total > self._contract.max_unacknowledged_bytes:
                raise LinkOverflowError(self._peer, total, self._contract.max_unacknowledged_bytes)
            self._unacknowledged_bytes = total
            self._unacknowledged.append(outgoing)
            self._unsent.append(outgoing)
            self._num_sent += 1
        self._loop.call_soon(self._wake.set)

    def close(self) -> None:
        """See `Link`. What was sent before is still delivered, within CLOSE_GRACE, if the stream is connected."""
        with self._lock:
            self._is_open = False
        self._loop.call_soon(self._on_closed)

    # --- in the loop's thread ---------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether close() was called or the link was lost."""
        return self._closed.is_set()

    def lose(self, reason: str) -> None:
        """Give the link up: LinkLost in the inbox, unless it is closed or lost already."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._inbox.put(LinkLost(self._peer, reason))
            self._unsent.clear()
            self._unacknowledged.clear()
            self._unacknowledged_bytes = 0
        self._on_closed()

    async def run(self, stream: MessageStream) -> None:
        """Serve a connected stream until the link is closed or lost. Then raises the peer's ProtocolError."""
        try:
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(self._read(stream))
                writer = tasks.create_task(self._write(stream))
                await self._closed.wait()
                await asyncio.wait({writer}, timeout=CLOSE_GRACE.total_seconds())
                reader.cancel()
                writer.cancel()
        except* ProtocolError as errors:
            error = errors.exceptions[0]
            assert isinstance(error, ProtocolError)
            raise error from None
        finally:
            if self._acknowledge_timer is not None:
                self._acknowledge_timer.cancel()

    async def _read(self, stream: MessageStream) -> None:
        try:
            while (message := await stream.read()) is not None:
                frame = self._assembler.feed(message)
                self._forget(self._assembler.acknowledged)
                if frame is not None:
                    self._deliver(frame)
            self.lose("the peer closed the link")
        except ConnectionError as error:
            self.lose(str(error))
        except ProtocolError as error:
            self.lose(f"protocol violated: {error.reason}")
            raise

    async def _write(self, stream: MessageStream) -> None:
        try:
            while True:
                self._wake.clear()
                while (frame := self._next_unsent()) is not None:
                    for message in frame.messages(self._acknowledge):
                        await stream.write(message)
                if self._is_heartbeat_due and self._assembler.next_sequence > self._acknowledged_to_peer:
                    # Only the loop's thread makes unsent frames sent, so this is the next one's number.
                    await stream.write(
                        heartbeat(self._generation, sequence=self._next_to_write(), acknowledged=self._acknowledge())
                    )
                self._is_heartbeat_due = False
                if self._closed.is_set():
                    break
                await self._wake.wait()
            await stream.finish()
        except ConnectionError as error:
            self.lose(str(error))

    def _next_unsent(self) -> OutgoingFrame | None:
        with self._lock:
            return self._unsent.popleft() if self._unsent else None

    def _next_to_write(self) -> int:
        with self._lock:
            return self._unsent[0].sequence if self._unsent else self._num_sent

    def _acknowledge(self) -> int:
        self._acknowledged_to_peer = self._assembler.next_sequence
        return self._acknowledged_to_peer

    def _deliver(self, frame: Frame) -> None:
        with self._lock:
            if self._is_open:
                self._inbox.put(frame)
        if self._acknowledge_timer is None:
            self._acknowledge_timer = self._loop.loop.call_later(
                ACKNOWLEDGE_AFTER.total_seconds(), self._on_acknowledge_timer
            )

    def _on_acknowledge_timer(self) -> None:
        self._acknowledge_timer = None
        self._is_heartbeat_due = True
        self._wake.set()

    def _forget(self, acknowledged: int) -> None:
        with self._lock:
            if acknowledged > self._num_sent - len(self._unsent):
                raise ProtocolError(self._peer, f"acknowledgement {acknowledged} of frames not yet sent")
            while self._unacknowledged and self._unacknowledged[0].sequence < acknowledged:
                self._unacknowledged_bytes -= self._unacknowledged.popleft().payload_bytes

    def _on_closed(self) -> None:
        self._closed.set()
        self._wake.set()
