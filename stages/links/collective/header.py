"""The header before each payload of a collective link: sixteen integers. No socket, no thread, no clock here.

A header names kind, generation, batch, microbatch, number and codec of a frame, and the first dimension of each of its
tensors. Everything else about the payload is in the contract that both ends derive from the job. A small frame's header
also says whether another frame follows in the same message.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from headway.stages.errors import ProtocolError
from headway.stages.ids import Batch, Generation, MicrobatchIndex
from headway.stages.links.codec import Codec
from headway.stages.links.frame_contract import FrameContract, TensorForm, aligned
from headway.stages.links.link import Frame, FrameKind

HEADER_LENGTH = 16
MAGIC = 0x68656164776179
CODEC = HEADER_LENGTH - 1
FOLLOWED = HEADER_LENGTH - 2
MAX_TENSORS = FOLLOWED - 8


INLINE_BYTES = 1 << 20
"""Maximum bytes of all tensors of a frame that travels with its header. A separate transfer costs a small frame more
time than its bytes do. A large frame is sent from its own memory, without a copy.
"""


class Signal(IntEnum):
    """Kinds of a header without payload."""

    HEARTBEAT = -1  # has the next frame's number and takes none
    GOODBYE = -2  # the last of its direction


class Route(IntEnum):
    """The way of a payload."""

    HOST = 0
    DEVICE = 1  # from accelerator to accelerator
    INLINE = 2  # after the header, in one transfer, perhaps with other frames


@dataclass(frozen=True, slots=True)
class Announcement:
    """A frame that is about to arrive: everything except the values."""

    kind: FrameKind
    generation: Generation
    batch: Batch
    microbatch: MicrobatchIndex
    route: Route
    tensors: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    codec: Codec = Codec.NONE
    is_followed: bool = False
    """True if another frame follows in the same message."""

    def frame(self, tensors: tuple[Tensor, ...]) -> Frame:
        """Return the frame with the values."""
        return Frame(self.kind, self.generation, self.batch, self.microbatch, tensors, self.codec)


def announce(frame: Frame, *, sequence: int, route: Route) -> list[int]:
    """Return the words of a frame's header."""
    sizes = [tensor.shape[0] if tensor.dim() else 0 for tensor in frame.tensors]
    assert len(sizes) <= MAX_TENSORS
    header = _header(frame.kind, frame.generation, sequence, frame.batch, frame.microbatch, route, *sizes)
    header[CODEC] = frame.codec
    return header


def signal(kind: Signal, generation: Generation, *, sequence: int) -> list[int]:
    """Return the words of a header that stands alone."""
    return _header(kind, generation, sequence)


class HeaderReader:
    """Turns headers of one direction into announcements. Each deviation is a ProtocolError that names the peer."""

    def __init__(
        self, peer: str, *, generation: Generation, contract: FrameContract, kinds: frozenset[FrameKind]
    ) -> None:
        self.peer = peer
        self.is_ended = False
        """True if the peer said goodbye."""
        self._generation = generation
        self._contract = contract
        self._kinds = {int(kind): kind for kind in kinds}
        self._next_sequence = 0

    def read(self, header: Sequence[int]) -> Announcement | None:
        """Return the next announcement; None when nothing follows this header. Raises ProtocolError."""
        magic, kind, generation, sequence, batch, microbatch, route, num_tensors, *sizes, followed, codec = header
        if magic != MAGIC:
            raise self._error("something that is no header")
        if generation != self._generation:
            raise self._error(f"a frame of generation {generation} on a link of {self._generation}")
        if sequence != self._next_sequence:
            raise self._error(f"frame {sequence} where {self._next_sequence} was due")
        if self.is_ended:
            raise self._error("a frame after the goodbye")
        if kind == Signal.HEARTBEAT:
            return None
        self._next_sequence += 1
        if kind == Signal.GOODBYE:
            self.is_ended = True
            return None
        known = self._kinds.get(kind)
        if known is None:
            raise self._error(f"a frame of kind {kind} in this direction")
        if batch < 0 or microbatch < 0:
            raise self._error(f"a frame of batch {batch}, microbatch {microbatch}")
        if (miscoded := self._contract.miscoded(known, codec)) is not None:
            raise self._error(miscoded)
        forms = self._contract.forms.get(known, ())
        if num_tensors != len(forms):
            raise self._error(f"{known.name} with {num_tensors} tensors instead of {len(forms)}")
        if route not in tuple(Route):
            raise self._error(f"a payload that travels by way {route}")
        tensors = tuple(_of_form(form, size) for form, size in zip(forms, sizes, strict=False))
        if (violation := self._contract.violation(known, tensors, codec)) is not None:
            raise self._error(violation)
        if route != Route.DEVICE and (route == Route.INLINE) != is_inline(forms):
            raise self._error(f"{known.name} by way of {Route(route).name}")
        if followed and (followed != 1 or route != Route.INLINE):
            raise self._error(f"{known.name} by way of {Route(route).name}, followed by {followed}")
        place = Batch(batch), MicrobatchIndex(microbatch)
        return Announcement(known, self._generation, *place, Route(route), tensors, Codec(codec), bool(followed))

    def _error(self, reason: str) -> ProtocolError:
        return ProtocolError(self.peer, reason)


def is_inline(forms: Sequence[TensorForm]) -> bool:
    """Return whether frames of these forms travel in one transfer with their header."""
    return sum(aligned(form.num_bytes) for form in forms) <= INLINE_BYTES


def _header(kind: int, generation: int, sequence: int, batch: int = 0, microbatch: int = 0, *rest: int) -> list[int]:
    route, sizes = (rest[0], rest[1:]) if rest else (0, ())
    fields = [MAGIC, kind, generation, sequence, batch, microbatch, route, len(sizes), *sizes]
    return fields + [0] * (HEADER_LENGTH - len(fields))


def _of_form(form: TensorForm, size: int) -> tuple[torch.dtype, tuple[int, ...]]:
    shape: Sequence[int] = form.shape
    return form.dtype, (size, *shape[1:]) if shape else ()
