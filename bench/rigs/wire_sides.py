"""The ways that `wire.py` measures, once they are open: what it is to send and to take frames of one size over each."""

import queue
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from headway.stages.ids import Batch, Generation, MicrobatchIndex
from headway.stages.links.frame_codec import raw_bytes
from headway.stages.links.frame_contract import FrameContract, TensorForm
from headway.stages.links.link import Frame, FrameKind, Inbox, Link, LinkLost
from headway.stages.links.loop_thread import LoopThread
from headway.stages.links.receive_buffers import empty_bytes

TIMEOUT = timedelta(seconds=60)
GENERATION = Generation(1)
MAX_FRAMES = 1 << 12
LINKS = ("plain", "grpc", "grpc_local")
"""The sides that are links."""

WINDOW = 16
"""Frames under way each way at most where they go both ways: as many as a stage's depth might be."""


class Side(Protocol):
    """One end of a way for frames of one size. Rank 0 sends, rank 1 takes and answers."""

    def send(self, num_frames: int) -> None:
        """Returns with the answer to the last frame."""
        ...

    def take(self, num_frames: int) -> None: ...


class TcpSide:
    """One socket."""

    def __init__(self, connection: socket.socket, num_bytes: int) -> None:
        self._connection = connection
        self._buffer = bytearray(num_bytes)

    def send(self, num_frames: int) -> None:
        for _ in range(num_frames):
            self._connection.sendall(self._buffer)
        self._connection.recv(1)

    def take(self, num_frames: int) -> None:
        view = memoryview(self._buffer)
        for _ in range(num_frames):
            filled = 0
            while filled < len(view):
                filled += self._connection.recv_into(view[filled:])
        self._connection.sendall(b"x")


class GlooSide:
    """torch.distributed's own calls."""

    def __init__(self, num_bytes: int, *, is_new: bool) -> None:
        """is_new: each frame is received into a new tensor."""
        self._values = torch.ones(num_bytes // 4)
        self._answer = torch.ones(1)
        self._is_new = is_new

    def send(self, num_frames: int) -> None:
        for _ in range(num_frames):
            dist.send(self._values, 1)
        dist.recv(self._answer, 1)

    def take(self, num_frames: int) -> None:
        for _ in range(num_frames):
            dist.recv(torch.empty_like(self._values) if self._is_new else self._values, 0)
        dist.send(self._answer, 0)


class BareSide:
    """A gRPC stream; `read` and `write` are those of the call or the context."""

    def __init__(self, loop: LoopThread, stream: Any, num_bytes: int, message_bytes: int) -> None:
        self._loop = loop
        self._stream = stream
        self._messages = [bytes(min(message_bytes, num_bytes)) for _ in range(-(-num_bytes // message_bytes))]

    def send(self, num_frames: int) -> None:
        self._loop.run(self._send(num_frames), timeout=TIMEOUT, what="a bare stream")

    def take(self, num_frames: int) -> None:
        self._loop.run(self._take(num_frames), timeout=TIMEOUT, what="a bare stream")

    async def _send(self, num_frames: int) -> None:
        for _ in range(num_frames):
            for message in self._messages:
                await self._stream.write(message)
        await self._stream.read()

    async def _take(self, num_frames: int) -> None:
        for _ in range(num_frames * len(self._messages)):
            await self._stream.read()
        await self._stream.write(b"x")


class TensorSide:
    """A bare stream that carries tensors, as a link must, and does nothing else: each piece is copied into ready bytes,
    and out of them into a tensor of its own, which goes to the thread that waits for it."""

    def __init__(self, loop: LoopThread, stream: Any, num_bytes: int, piece_bytes: int) -> None:
        self._loop = loop
        self._stream = stream
        self._values = torch.ones(num_bytes // 4)
        self._pieces = [slice(begin, begin + piece_bytes) for begin in range(0, num_bytes, piece_bytes)]
        self._inbox: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()

    def send(self, num_frames: int) -> None:
        self._loop.run(self._send(num_frames), timeout=TIMEOUT, what="a bare stream of tensors")

    def take(self, num_frames: int) -> None:
        self._loop.spawn(self._take(num_frames), name="a bare stream of tensors")
        for _ in range(num_frames):
            self._inbox.get(timeout=TIMEOUT.total_seconds())
        self._loop.run(self._stream.write(b"x"), timeout=TIMEOUT, what="the answer of a bare stream of tensors")

    async def _send(self, num_frames: int) -> None:
        values = raw_bytes(self._values)
        for _ in range(num_frames):
            for piece in self._pieces:
                await self._stream.write(bytes(values[piece]))
        await self._stream.read()

    async def _take(self, num_frames: int) -> None:
        for _ in range(num_frames):
            payload = empty_bytes(self._values.nbytes)
            for piece in self._pieces:
                payload[piece] = memoryview(await self._stream.read())
            self._inbox.put(torch.from_numpy(payload.view("float32")))


class LinkSide:
    """A link. Where frames go one way, the answer is a total of the norm, or its squares."""

    def __init__(self, rank: int, open_link: Callable[[Inbox, FrameContract], Link], num_bytes: int) -> None:
        form = (TensorForm(torch.float32, (num_bytes // 4,)),)
        forms = {
            FrameKind.ACTIVATION: form,
            FrameKind.GRADIENT: form,
            FrameKind.NORM_SQUARES: (TensorForm(torch.float64, (1,)),),
        }
        self._inbox: queue.SimpleQueue[Frame | LinkLost] = queue.SimpleQueue()
        self._link = open_link(self._inbox, FrameContract(forms, MAX_FRAMES))
        kind = FrameKind.GRADIENT if rank else FrameKind.ACTIVATION
        self._frame = _frame(kind, torch.ones(num_bytes // 4))
        self._answer = _frame(FrameKind.NORM_SQUARES, torch.ones(1, dtype=torch.float64))

    def send(self, num_frames: int) -> None:
        for _ in range(num_frames):
            self._link.send(self._frame)
        self._take_one()

    def take(self, num_frames: int) -> None:
        for _ in range(num_frames):
            self._take_one()
        self._link.send(self._answer)

    def exchange(self, num_frames: int) -> None:
        """Send this number of frames each way, both at once, as activations and gradients go."""
        for _ in range(min(WINDOW, num_frames)):
            self._link.send(self._frame)
        for number in range(num_frames):
            self._take_one()
            if number + WINDOW < num_frames:
                self._link.send(self._frame)

    def _take_one(self) -> None:
        item = self._inbox.get(timeout=TIMEOUT.total_seconds())
        if isinstance(item, LinkLost):
            raise RuntimeError(f"{item.peer}: {item.reason}")


def _frame(kind: FrameKind, values: torch.Tensor) -> Frame:
    return Frame(kind, GENERATION, Batch(0), MicrobatchIndex(0), (values,))
