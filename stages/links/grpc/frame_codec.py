"""Turns frames into messages of data.proto and back. No socket, no thread, no clock here.

A message is `uint32 little-endian length of the header · serialized FrameHeader · raw bytes of this chunk`.
`frame_layout.py` places the frame's tensors in a payload. Only the first chunk's header names them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any

from google.protobuf.message import DecodeError

from headway.proto.data_pb2 import FrameHeader
from headway.stages.errors import ProtocolError
from headway.stages.ids import Batch, Generation, MicrobatchIndex
from headway.stages.links.codec import Codec
from headway.stages.links.frame_contract import FrameContract, aligned
from headway.stages.links.grpc.frame_layout import TORCH_DTYPES, FrameLayout, layout_of, raw_bytes
from headway.stages.links.link import Frame, FrameKind
from headway.stages.links.receive_buffers import EmptyBytes, empty_bytes

HEADER_LENGTH = Struct("<I")
MAX_HEADER_BYTES = 4096
CHUNK_BYTES = 1 << 20
"""Size of a chunk. Larger ones exceed the caches during copies; smaller ones wake more threads."""

Message = Sequence[bytes | memoryview]
"""Parts of a message, not yet copied together."""

WIRE_KINDS = {
    FrameKind.ACTIVATION: FrameHeader.ACTIVATION,
    FrameKind.GRADIENT: FrameHeader.GRADIENT,
    FrameKind.NORM_SQUARES: FrameHeader.NORM_SQUARES,
    FrameKind.NORM_TOTAL: FrameHeader.NORM_TOTAL,
    FrameKind.SUMS: FrameHeader.SUMS,
    FrameKind.REDUCED: FrameHeader.REDUCED,
    FrameKind.LOSSES: FrameHeader.LOSSES,
    FrameKind.STOP: FrameHeader.STOP,
    FrameKind.UPDATE_SHARE: FrameHeader.UPDATE_SHARE,
    FrameKind.EVALUATION: FrameHeader.EVALUATION,
    FrameKind.TIED_SUMS: FrameHeader.TIED_SUMS,
    FrameKind.JOB_END: FrameHeader.JOB_END,
}
_PADDING = memoryview(bytes(aligned(1)))


def heartbeat(generation: Generation, *, sequence: int, acknowledged: int) -> bytes:
    """Return a message with nothing but an acknowledgement. `sequence` is that of the next real frame."""
    header = FrameHeader(
        kind=FrameHeader.HEARTBEAT, generation=generation, sequence=sequence, acknowledged=acknowledged
    ).SerializeToString()
    return HEADER_LENGTH.pack(len(header)) + header


class Goodbye:
    """The last message of one direction. It takes a number like a frame, so that it is resent like one."""

    def __init__(self, generation: Generation, *, sequence: int) -> None:
        self._generation = generation
        self._sequence = sequence
        self.payload_bytes = 0

    def messages(self, acknowledged: Callable[[], int], *, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Message]:  # noqa: ARG002
        """Yield the messages, as for a frame: always one."""
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
        self._layout = layout_of(tuple([(tensor.dtype, tensor.shape) for tensor in frame.tensors]))
        self.payload_bytes = self._layout.payload_bytes
        self._segments = [raw_bytes(tensor) for tensor in frame.tensors]

    def messages(self, acknowledged: Callable[[], int], *, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Message]:
        """Yield the frame as messages, each with the acknowledgement of the moment when it is asked for."""
        for offset in range(0, max(1, self.payload_bytes), chunk_bytes):
            header = FrameHeader(
                kind=WIRE_KINDS[self.frame.kind],
                generation=self.frame.generation,
                batch=self.frame.batch,
                microbatch=self.frame.microbatch,
                sequence=self.sequence,
                acknowledged=acknowledged(),
                payload_bytes=self.payload_bytes,
                payload_offset=offset,
                codec=self.frame.codec,
            ).SerializeToString()
            if offset == 0:
                header += self._layout.encoded
            assert len(header) <= MAX_HEADER_BYTES
            yield (HEADER_LENGTH.pack(len(header)), header, *self._cut(offset, offset + chunk_bytes))

    def _cut(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the payload's bytes between two positions: parts of tensors, and the gaps after them."""
        for segment, (first, end) in zip(self._segments, self._layout.spans, strict=True):
            if first < stop and end > start:
                yield segment[max(0, start - first) : stop - first]
            gap_end = first + aligned(end - first)
            if (gap := min(stop, gap_end) - max(start, end)) > 0:
                yield _PADDING[:gap]


@dataclass(slots=True)
class _Partial:
    """A frame whose chunks are still arriving."""

    header: FrameHeader
    layout: FrameLayout
    payload: Any
    """Bytes as a numpy array: numpy copies without blocking other threads."""
    filled: int = 0


class FrameAssembler:
    """Turns messages of one direction into frames. Each deviation from the protocol is a ProtocolError naming
    the peer.
    """

    def __init__(
        self,
        peer: str,
        *,
        generation: Generation,
        contract: FrameContract,
        kinds: frozenset[FrameKind],
        allocate: EmptyBytes = empty_bytes,
    ) -> None:
        """allocate: memory of the payloads."""
        self._allocate = allocate
        self.peer = peer
        self.next_sequence = 0
        """First sequence number not yet received, for acknowledgements."""
        self.acknowledged = 0
        """Last acknowledgement of the peer."""
        self.num_duplicates = 0
        """Messages of frames that had been received before; they are dropped."""
        self.is_ended = False
        """True if the peer said goodbye."""
        self._generation = generation
        self._contract = contract
        self._kinds = {WIRE_KINDS[kind]: kind for kind in kinds}
        self._usual = {WIRE_KINDS[kind]: layout_of(contract.largest(kind)) for kind in kinds if kind in contract.forms}
        self._partial: _Partial | None = None

    def restart(self, *, acknowledged: int) -> None:
        """Begin a new stream: an incomplete frame will come again from its first byte."""
        self._partial = None
        self.acknowledged = acknowledged

    def feed(self, message: bytes | memoryview) -> Frame | None:
        """Take one message; return the frame, when this was its last chunk. Raises ProtocolError."""
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
        partial.payload[partial.filled : end] = chunk
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
        layout = self._usual.get(header.kind)
        if layout is None or header.tensors != layout.specs:
            layout = self._layout(kind, header)
        elif (violation := self._contract.miscoded(kind, header.codec)) is not None:
            raise self._error(violation)
        if header.payload_bytes != layout.payload_bytes:
            raise self._error(f"a payload of {header.payload_bytes} bytes for tensors of {layout.payload_bytes}")
        return _Partial(header, layout, self._allocate(layout.payload_bytes))

    def _layout(self, kind: FrameKind, header: FrameHeader) -> FrameLayout:
        """Return the layout of a frame that is smaller than its maximum, or that breaks the contract."""
        if any(tensor.dtype not in TORCH_DTYPES for tensor in header.tensors):
            raise self._error("a tensor of unknown type")
        forms = tuple((TORCH_DTYPES[tensor.dtype], tuple(tensor.shape)) for tensor in header.tensors)
        if (violation := self._contract.violation(kind, forms, header.codec)) is not None:
            raise self._error(violation)
        return layout_of(forms)

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
            microbatch=MicrobatchIndex(header.microbatch),
            tensors=tuple(partial.layout.tensors(partial.payload)),
            codec=Codec(header.codec),
        )

    def _error(self, reason: str) -> ProtocolError:
        return ProtocolError(self.peer, reason)
