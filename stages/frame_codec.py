"""Frames as messages of data.proto and back. No socket, no thread, no clock here.

A message is `uint32 little-endian length of the header · serialized FrameHeader · raw bytes of this chunk`. A payload
is the frame's tensors one after the other, each at a multiple of 64 bytes. The first chunk's header names the tensors;
those of later chunks leave them out.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from struct import Struct
from typing import Any

import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from headway.proto.data_pb2 import FrameHeader, TensorSpec
from headway.stages.codec import Codec
from headway.stages.errors import ProtocolError
from headway.stages.frame_contract import FrameContract, aligned
from headway.stages.ids import Batch, Generation, Microbatch
from headway.stages.link import Frame, FrameKind

HEADER_LENGTH = Struct("<I")
MAX_HEADER_BYTES = 4096
CHUNK_BYTES = 1 << 20
"""Larger ones leave the caches of those who copy them; smaller ones wake more threads."""

Message = Sequence[bytes | memoryview]
"""Its parts, not yet copied together."""

WIRE_DTYPES = {
    torch.float32: TensorSpec.FLOAT32,
    torch.bfloat16: TensorSpec.BFLOAT16,
    torch.float64: TensorSpec.FLOAT64,
    torch.int64: TensorSpec.INT64,
    torch.int32: TensorSpec.INT32,
    torch.uint8: TensorSpec.UINT8,
    torch.int8: TensorSpec.INT8,
}
WIRE_KINDS = {
    FrameKind.ACTIVATION: FrameHeader.ACTIVATION,
    FrameKind.GRADIENT: FrameHeader.GRADIENT,
    FrameKind.NORM_SQUARES: FrameHeader.NORM_SQUARES,
    FrameKind.NORM_TOTAL: FrameHeader.NORM_TOTAL,
    FrameKind.SUMS: FrameHeader.SUMS,
    FrameKind.REDUCED: FrameHeader.REDUCED,
    FrameKind.LOSSES: FrameHeader.LOSSES,
    FrameKind.STOP: FrameHeader.STOP,
}
TORCH_DTYPES = {wire: dtype for dtype, wire in WIRE_DTYPES.items()}
_PADDING = memoryview(bytes(aligned(1)))


def heartbeat(generation: Generation, *, sequence: int, acknowledged: int) -> bytes:
    """A message that carries nothing but an acknowledgement. `sequence` is that of the next real frame."""
    header = FrameHeader(
        kind=FrameHeader.HEARTBEAT, generation=generation, sequence=sequence, acknowledged=acknowledged
    ).SerializeToString()
    return HEADER_LENGTH.pack(len(header)) + header


class Goodbye:
    """The last that is said in one direction. Takes a number like a frame, so that it is sent again like one."""

    def __init__(self, generation: Generation, *, sequence: int) -> None:
        self._generation = generation
        self._sequence = sequence
        self.payload_bytes = 0

    def messages(self, acknowledged: Callable[[], int], *, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Message]:  # noqa: ARG002
        """Like those of a frame: always one."""
        header = FrameHeader(
            kind=FrameHeader.GOODBYE,
            generation=self._generation,
            sequence=self._sequence,
            acknowledged=acknowledged(),
        ).SerializeToString()
        yield (HEADER_LENGTH.pack(len(header)), header)


class OutgoingFrame:
    """A frame that was handed over and is not yet acknowledged. Holds the tensors, not a copy of them."""

    def __init__(self, frame: Frame, *, sequence: int) -> None:
        """Raises KeyError for a type of tensor that has no number in data.proto."""
        self.frame = frame
        self.sequence = sequence
        self._segments: list[memoryview] = []
        self._tensors: list[TensorSpec] = []
        self.payload_bytes = 0
        for tensor in frame.tensors:
            self._append(tensor)

    def messages(self, acknowledged: Callable[[], int], *, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Message]:
        """The frame as messages, each with the acknowledgement of the moment when it is asked for."""
        for offset in range(0, max(1, self.payload_bytes), chunk_bytes):
            header = FrameHeader(
                kind=WIRE_KINDS[self.frame.kind],
                generation=self.frame.generation,
                batch=self.frame.batch,
                microbatch=self.frame.microbatch,
                sequence=self.sequence,
                acknowledged=acknowledged(),
                tensors=self._tensors if offset == 0 else (),
                payload_bytes=self.payload_bytes,
                payload_offset=offset,
                codec=self.frame.codec,
            ).SerializeToString()
            assert len(header) <= MAX_HEADER_BYTES
            yield (HEADER_LENGTH.pack(len(header)), header, *self._cut(offset, offset + chunk_bytes))

    def _append(self, tensor: Tensor) -> None:
        self._tensors.append(TensorSpec(dtype=WIRE_DTYPES[tensor.dtype], shape=tensor.shape))
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        self._segments.append(raw.data)
        padding = aligned(raw.nbytes) - raw.nbytes
        self._segments.append(_PADDING[:padding])
        self.payload_bytes += raw.nbytes + padding

    def _cut(self, start: int, stop: int) -> Iterator[memoryview]:
        offset = 0
        for segment in self._segments:
            if offset < stop and offset + segment.nbytes > start:
                yield segment[max(0, start - offset) : stop - offset]
            offset += segment.nbytes


@dataclass(slots=True)
class _Partial:
    """A frame whose chunks are still arriving."""

    header: FrameHeader
    buffer: Tensor
    array: Any
    """The same bytes; numpy copies without holding up other threads."""
    filled: int = 0


class FrameAssembler:
    """Messages of one direction in, frames out. Each deviation from the protocol is a ProtocolError naming the peer."""

    def __init__(
        self, peer: str, *, generation: Generation, contract: FrameContract, kinds: frozenset[FrameKind]
    ) -> None:
        self.peer = peer
        self.next_sequence = 0
        """The first sequence number not yet received: what is acknowledged."""
        self.acknowledged = 0
        """What the peer last acknowledged."""
        self.num_duplicates = 0
        """Messages of frames that had been received before; they are dropped."""
        self.is_ended = False
        """Whether the peer said goodbye."""
        self._generation = generation
        self._contract = contract
        self._kinds = {WIRE_KINDS[kind]: kind for kind in kinds}
        self._partial: _Partial | None = None

    def restart(self, *, acknowledged: int) -> None:
        """A new stream begins: the frame that was underway on the old one will come again from its first byte."""
        self._partial = None
        self.acknowledged = acknowledged

    def feed(self, message: bytes | memoryview) -> Frame | None:
        """Take one message; the frame, when this was its last chunk. Raises ProtocolError."""
        header, chunk = self._parse(message)
        if header.generation != self._generation:
            raise self._error(f"a frame of generation {header.generation} on a link of {self._generation}")
        if 0 <= header.sequence < self.next_sequence:
            self.num_duplicates += 1
            return None
        if header.sequence != self.next_sequence:
            raise self._error(f"frame {header.sequence} where {self.next_sequence} was due")
        if header.acknowledged < self.acknowledged:
            raise self._error(f"acknowledgement {header.acknowledged} after {self.acknowledged}")
        self.acknowledged = header.acknowledged
        if header.kind == FrameHeader.HEARTBEAT:
            if chunk.nbytes or self._partial is not None:
                raise self._error("a heartbeat with or inside a payload")
            return None
        if self.is_ended:
            raise self._error("a frame after the goodbye")
        if header.kind == FrameHeader.GOODBYE:
            if chunk.nbytes or self._partial is not None or header.payload_bytes:
                raise self._error("a goodbye with or inside a payload")
            self.next_sequence += 1
            self.is_ended = True
            return None
        partial = self._partial = self._begin(header) if self._partial is None else self._resume(self._partial, header)
        end = partial.filled + chunk.nbytes
        if end > partial.header.payload_bytes or (chunk.nbytes == 0 and partial.header.payload_bytes):
            raise self._error(f"a chunk up to byte {end} in a payload of {partial.header.payload_bytes}")
        partial.array[partial.filled : end] = chunk
        partial.filled = end
        if end < partial.header.payload_bytes:
            return None
        self._partial = None
        self.next_sequence += 1
        return self._finish(partial)

    def _parse(self, message: bytes | memoryview) -> tuple[FrameHeader, memoryview]:
        if len(message) < HEADER_LENGTH.size:
            raise self._error(f"a message of {len(message)} bytes")
        (length,) = HEADER_LENGTH.unpack_from(message)
        start = HEADER_LENGTH.size + length
        if length > MAX_HEADER_BYTES or start > len(message):
            raise self._error(f"a header of {length} bytes in a message of {len(message)}")
        try:
            return FrameHeader.FromString(bytes(message[HEADER_LENGTH.size : start])), memoryview(message)[start:]
        except DecodeError as error:
            raise self._error("an undecodable header") from error

    def _begin(self, header: FrameHeader) -> _Partial:
        kind = self._kinds.get(header.kind)
        if kind is None:
            raise self._error(f"a frame of kind {header.kind} in this direction")
        if header.payload_offset != 0:
            raise self._error(f"a frame that begins at byte {header.payload_offset}")
        if any(tensor.dtype not in TORCH_DTYPES for tensor in header.tensors):
            raise self._error("a tensor of unknown type")
        tensors = [(TORCH_DTYPES[tensor.dtype], tuple(tensor.shape)) for tensor in header.tensors]
        if (violation := self._contract.violation(kind, tensors, header.codec)) is not None:
            raise self._error(violation)
        size = sum(aligned(prod(shape) * dtype.itemsize) for dtype, shape in tensors)
        if header.payload_bytes != size:
            raise self._error(f"a payload of {header.payload_bytes} bytes for tensors of {size}")
        buffer = torch.empty(size, dtype=torch.uint8)
        return _Partial(header, buffer, buffer.numpy())

    def _resume(self, partial: _Partial, header: FrameHeader) -> _Partial:
        first = partial.header
        if (header.kind, header.batch, header.microbatch, header.payload_bytes, header.payload_offset) != (
            first.kind,
            first.batch,
            first.microbatch,
            first.payload_bytes,
            partial.filled,
        ):
            raise self._error(f"a chunk that does not continue frame {first.sequence}")
        return partial

    def _finish(self, partial: _Partial) -> Frame:
        header = partial.header
        return Frame(
            kind=self._kinds[header.kind],
            generation=Generation(header.generation),
            batch=Batch(header.batch),
            microbatch=Microbatch(header.microbatch),
            tensors=tuple(self._tensors(header.tensors, partial.buffer)),
            codec=Codec(header.codec),
        )

    def _tensors(self, specs: Sequence[TensorSpec], buffer: Tensor) -> Iterator[Tensor]:
        offset = 0
        for spec in specs:
            dtype = TORCH_DTYPES[spec.dtype]
            size = prod(spec.shape) * dtype.itemsize
            yield buffer[offset : offset + size].view(dtype).view(tuple(spec.shape))
            offset += aligned(size)

    def _error(self, reason: str) -> ProtocolError:
        return ProtocolError(self.peer, reason)
