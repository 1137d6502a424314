"""Turns frames into messages of data.proto and back, and bundles messages. No socket, no thread, no clock here.

A message is `uint32 little-endian length of the header · serialized FrameHeader · raw bytes of this chunk`. A payload
has the tensors one after the other, each at a multiple of 64 bytes. Only the first chunk's header names them.

Each write to or read from a stream wakes several threads: for a small frame that is most of its cost. So waiting frames
travel together: a bundle is one or more messages, each after its length.

Work per frame uses numpy if possible: to cut a tensor out of a payload takes three calls and 7.8 µs with torch, and
3.0 µs with numpy.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from struct import Struct
from typing import Any

import numpy
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from headway.proto.data_pb2 import FrameHeader, TensorSpec
from headway.stages.errors import ProtocolError
from headway.stages.ids import Batch, Generation, MicrobatchIndex
from headway.stages.links.codec import Codec
from headway.stages.links.frame_contract import FrameContract, aligned
from headway.stages.links.link import Frame, FrameKind
from headway.stages.links.receive_buffers import EmptyBytes, empty_bytes

LENGTH = Struct("<I")
MAX_HEADER_BYTES = 4096
CHUNK_BYTES = 1 << 20
"""Size of a chunk. Larger ones exceed the caches during copies; smaller ones wake more threads."""
MAX_OVERHEAD_BYTES = 2 * LENGTH.size + MAX_HEADER_BYTES
"""Bytes of a bundle beyond those of one chunk: the header of that chunk, or those of several."""
MAX_BUNDLE_BYTES = CHUNK_BYTES + MAX_OVERHEAD_BYTES

Message = Sequence[bytes | memoryview]
"""Parts of a message, not yet copied together."""

Forms = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
"""Types and shapes of a frame's tensors."""


@dataclass(frozen=True, slots=True)
class Key:
    """What one end says for the forming of the attachment."""

    name: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Announced:
    """A frame whose values come over the attachment."""

    frame: Frame
    """Without tensors."""
    forms: Forms


_NAMES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.int8)
}
_WIRE_DTYPES = {dtype: getattr(TensorSpec, name.upper()) for dtype, name in _NAMES.items()}
_TORCH_DTYPES = {wire: dtype for dtype, wire in _WIRE_DTYPES.items()}
# numpy has no bfloat16, so its bits
_NUMPY_DTYPES = {dtype: numpy.dtype("int16" if name == "bfloat16" else name) for dtype, name in _NAMES.items()}
_WIRE_KINDS = {kind: getattr(FrameHeader, kind.name) for kind in FrameKind}
_PADDING = memoryview(bytes(aligned(1)))
_MOST_KEPT = 256
"""Number of layouts kept. One worker has a few; sums of squares have one per number of layers."""


@dataclass(frozen=True, slots=True)
class FrameLayout:
    """The layout of frames whose tensors have these types and shapes."""

    forms: Forms
    spans: tuple[tuple[int, int], ...]
    """First byte of each tensor, and the one after its last."""
    payload_bytes: int
    """Bytes of the payload, with the gaps."""
    specs: Any
    """Tensors as a FrameHeader has them."""
    encoded: bytes
    """Serialized FrameHeader of the tensors alone: it can follow one that leaves the tensors out."""

    def tensors(self, payload: Any) -> Iterator[Tensor]:
        """Yield views of the payload, a numpy array uint8 [payload_bytes]."""
        for (dtype, shape), (start, stop) in zip(self.forms, self.spans, strict=True):
            tensor = torch.from_numpy(payload[start:stop].view(_NUMPY_DTYPES[dtype]).reshape(shape))
            yield tensor if dtype != torch.bfloat16 else tensor.view(dtype)


@lru_cache(_MOST_KEPT)
def layout_of(forms: Forms) -> FrameLayout:
    """Return the layout of tensors of these forms. Raises KeyError for a type without number in data.proto."""
    spans = []
    end = 0
    for dtype, shape in forms:
        num_bytes = prod(shape) * dtype.itemsize
        spans.append((end, end + num_bytes))
        end += aligned(num_bytes)
    header = FrameHeader(tensors=[TensorSpec(dtype=_WIRE_DTYPES[dtype], shape=shape) for dtype, shape in forms])
    return FrameLayout(forms, tuple(spans), end, header.tensors, header.SerializeToString())


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the elements of a tensor in host memory; not copied if they are contiguous."""
    assert tensor.is_cpu, "a tensor of another device is copied out before its frame reaches the link"
    if not tensor.is_contiguous() or tensor.requires_grad:
        tensor = tensor.detach().contiguous()
    if not tensor.numel():
        return memoryview(b"")
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    array: Any = tensor.numpy()
    return memoryview(array).cast("B")


def heartbeat(generation: Generation, *, sequence: int, acknowledged: int, key: Key | None = None) -> bytes:
    """Return a message with an acknowledgement, and perhaps a key. `sequence` is that of the next real frame."""
    header = FrameHeader(
        kind=FrameHeader.HEARTBEAT, generation=generation, sequence=sequence, acknowledged=acknowledged
    )
    if key is not None:
        header.kind, header.key, header.value = FrameHeader.ATTACHING, key.name, key.value
    raw = header.SerializeToString()
    return LENGTH.pack(len(raw)) + raw


class OutgoingFrame:
    """A frame, or the goodbye, that was handed over and is not yet acknowledged. Holds the tensors, no copy of them."""

    def __init__(
        self, frame: Frame | None, generation: Generation, *, sequence: int, is_attached: bool = False
    ) -> None:
        """frame: None is the goodbye, the last of its direction; it takes a number, so that it is resent like a frame.

        is_attached: the values are of the link's attachment, and not in host memory. Raises KeyError for a type of
        tensor that has no number in data.proto.
        """
        self.tensors = () if frame is None else frame.tensors
        self.sent_by: object = None
        """The attachment that has begun to send the values. Only the loop's thread writes it, as all below."""
        self.begun_by: object = None
        """The attachment that was asked to."""
        self.transfers: Sequence[object] = ()
        """What sends them: held until the peer has acknowledged the frame."""
        self.is_attached = is_attached
        self._header = FrameHeader(kind=FrameHeader.GOODBYE, generation=generation, sequence=sequence)
        if frame is not None:
            self._header.kind = _WIRE_KINDS[frame.kind]
            self._header.batch, self._header.microbatch, self._header.codec = frame.batch, frame.microbatch, frame.codec
        self._layout = layout_of(tuple([(tensor.dtype, tensor.shape) for tensor in self.tensors]))
        self.payload_bytes = self._header.payload_bytes = self._layout.payload_bytes
        self._segments: list[memoryview] = []
        if is_attached:
            self._header.is_attached = True
        else:
            self.carry(self.tensors)

    def carry(self, tensors: Sequence[Tensor]) -> None:
        """Carry the values in the messages. tensors: in host memory."""
        self.is_attached = False
        self._header.ClearField("is_attached")
        self._segments = [raw_bytes(tensor) for tensor in tensors]

    def messages(self, acknowledged: Callable[[], int], *, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Message]:
        """Yield the frame as messages, each with the acknowledgement of the moment when it is asked for."""
        for offset in range(0, 1 if self.is_attached else max(1, self.payload_bytes), chunk_bytes):
            self._header.acknowledged, self._header.payload_offset = acknowledged(), offset
            header = self._header.SerializeToString()
            if offset == 0:
                header += self._layout.encoded
            assert len(header) <= MAX_HEADER_BYTES
            cut = () if self.is_attached else self._cut(offset, offset + chunk_bytes)
            yield (LENGTH.pack(len(header)), header, *cut)

    def _cut(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the payload's bytes between two positions: parts of tensors, and the gaps after them."""
        for segment, (first, end) in zip(self._segments, self._layout.spans, strict=True):
            if first < stop and end > start:
                yield segment[max(0, start - first) : stop - first]
            gap_end = first + aligned(end - first)
            if (gap := min(stop, gap_end) - max(start, end)) > 0:
                yield _PADDING[:gap]


def bundles(
    next_frame: Callable[[], OutgoingFrame | None], acknowledged: Callable[[], int], chunk_bytes: Callable[[], int]
) -> Iterator[list[bytes | memoryview]]:
    """Yield all frames in their order; each bundle is made when it is asked for, as parts that are not yet copied
    together.

    chunk_bytes: the present chunk size, which is the size of a bundle.
    """
    parts: list[bytes | memoryview] = []
    num_bytes = 0
    while (frame := next_frame()) is not None:
        size = chunk_bytes()
        for message in frame.messages(acknowledged, chunk_bytes=size):
            message_bytes = sum(map(len, message))
            if parts and num_bytes + LENGTH.size + message_bytes > size + MAX_OVERHEAD_BYTES:
                yield parts
                parts, num_bytes = [], 0
            parts += (LENGTH.pack(message_bytes), *message)
            num_bytes += LENGTH.size + message_bytes
    if parts:
        yield parts


def bundle(message: bytes) -> bytes:
    """Return one message that travels alone."""
    return LENGTH.pack(len(message)) + message


def unbundle(received: bytes | memoryview) -> Iterator[memoryview]:
    """Yield the messages. Raises ValueError if the bundle ends too early, after the messages before that place."""
    rest = memoryview(received)
    while True:
        if len(rest) < LENGTH.size:
            raise ValueError(f"a bundle that ends with {len(rest)} bytes")
        (length,) = LENGTH.unpack_from(rest)
        end = LENGTH.size + length
        if end > len(rest):
            raise ValueError(f"a message of {length} bytes in a bundle with {len(rest) - LENGTH.size} left")
        yield rest[LENGTH.size : end]
        rest = rest[end:]
        if not rest:
            return


@dataclass(slots=True)
class _Partial:
    """A frame whose chunks are still arriving."""

    header: FrameHeader
    layout: FrameLayout
    payload: Any
    """Bytes as a numpy array: numpy copies without blocking other threads."""
    filled: int = 0


class FrameAssembler:
    """Turns messages of one direction into frames. Each deviation from the protocol is a ProtocolError naming the
    peer.
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
        self._kinds = {_WIRE_KINDS[kind]: kind for kind in kinds}
        self._usual = {_WIRE_KINDS[kind]: layout_of(contract.largest(kind)) for kind in kinds if kind in contract.forms}
        self._partial: _Partial | None = None

    def restart(self, *, acknowledged: int, next_sequence: int) -> None:
        """Begin a new stream: an incomplete frame will come again from its first byte, and so will what was announced
        and did not arrive.
        """
        self._partial = None
        self.acknowledged = acknowledged
        self.is_ended = self.is_ended and next_sequence == self.next_sequence
        self.next_sequence = next_sequence

    def feed(self, message: bytes | memoryview) -> Frame | Announced | Key | None:
        """Take one message; return the frame, when this was its last chunk, or what else it says. Raises
        ProtocolError.
        """
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
        if header.kind in (FrameHeader.HEARTBEAT, FrameHeader.ATTACHING):
            if chunk.nbytes or self._partial is not None:
                raise self._error("a heartbeat with or inside a payload")
            return Key(header.key, header.value) if header.kind == FrameHeader.ATTACHING else None
        if self.is_ended:
            raise self._error("a frame after the goodbye")
        if header.kind == FrameHeader.GOODBYE:
            if chunk.nbytes or self._partial is not None or header.payload_bytes:
                raise self._error("a goodbye with or inside a payload")
            self.next_sequence += 1
            self.is_ended = True
            return None
        if header.is_attached:
            if chunk.nbytes or self._partial is not None:
                raise self._error("a frame of the attachment with or inside a payload")
            forms = self._layout_of(header).forms
            self.next_sequence += 1
            return Announced(self._frame(header, ()), forms)
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
        return self._frame(header, tuple(partial.layout.tensors(partial.payload)))

    def _parse(self, message: bytes | memoryview) -> tuple[FrameHeader, memoryview]:
        if len(message) < LENGTH.size:
            raise self._error(f"a message of {len(message)} bytes")
        (length,) = LENGTH.unpack_from(message)
        start = LENGTH.size + length
        if length > MAX_HEADER_BYTES or start > len(message):
            raise self._error(f"a header of {length} bytes in a message of {len(message)}")
        try:
            return FrameHeader.FromString(bytes(message[LENGTH.size : start])), memoryview(message)[start:]
        except DecodeError as error:
            raise self._error("an undecodable header") from error

    def _begin(self, header: FrameHeader) -> _Partial:
        layout = self._layout_of(header)
        return _Partial(header, layout, self._allocate(layout.payload_bytes))

    def _layout_of(self, header: FrameHeader) -> FrameLayout:
        """Return the layout of a frame that begins, as the contract allows it."""
        kind = self._kinds.get(header.kind)
        if kind is None:
            raise self._error(f"a frame of kind {header.kind} in this direction")
        if header.payload_offset != 0:
            raise self._error(f"a frame that begins at byte {header.payload_offset}")
        layout = self._usual.get(header.kind)
        if layout is None or header.tensors != layout.specs:
            layout = self._unusual(kind, header)
        elif (violation := self._contract.miscoded(kind, header.codec)) is not None:
            raise self._error(violation)
        if header.payload_bytes != layout.payload_bytes:
            raise self._error(f"a payload of {header.payload_bytes} bytes for tensors of {layout.payload_bytes}")
        return layout

    def _unusual(self, kind: FrameKind, header: FrameHeader) -> FrameLayout:
        """Return the layout of a frame that is smaller than its maximum, or that breaks the contract."""
        if any(tensor.dtype not in _TORCH_DTYPES for tensor in header.tensors):
            raise self._error("a tensor of unknown type")
        forms = tuple((_TORCH_DTYPES[tensor.dtype], tuple(tensor.shape)) for tensor in header.tensors)
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

    def _frame(self, header: FrameHeader, tensors: tuple[Tensor, ...]) -> Frame:
        return Frame(
            kind=self._kinds[header.kind],
            generation=Generation(header.generation),
            batch=Batch(header.batch),
            microbatch=MicrobatchIndex(header.microbatch),
            tensors=tensors,
            codec=Codec(header.codec),
        )

    def _error(self, reason: str) -> ProtocolError:
        return ProtocolError(self.peer, reason)
