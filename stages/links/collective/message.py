"""The messages of a group: a header and, directly after it, the tensors of a small frame; perhaps more small frames.

Both ends derive from the contract which kinds are small, and the maximum size of a message. Frames that wait to be sent
travel together, because each transfer of gloo costs three wake-ups, whatever its size.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import numpy
import torch
from torch import Tensor

from headway.stages.links.collective.header import FOLLOWED, HEADER_LENGTH, INLINE_BYTES, is_inline
from headway.stages.links.frame_contract import FrameContract, aligned
from headway.stages.links.receive_buffers import empty_bytes, empty_tensor

Forms = Sequence[tuple[torch.dtype, tuple[int, ...]]]
"""Types and shapes of a frame's tensors."""

HEADER_BYTES = 8 * HEADER_LENGTH

MAX_TOGETHER = 8
"""Maximum number of frames of a message."""

TOGETHER_BYTES = INLINE_BYTES + MAX_TOGETHER * HEADER_BYTES
"""Maximum size of a message of several frames."""


def max_message_bytes(contract: FrameContract) -> int:
    """Return the maximum size of a message in either direction."""
    all_forms = (*contract.forms.values(), *contract.sent_forms.values())
    sizes = [sum(aligned(form.num_bytes) for form in forms) for forms in all_forms if is_inline(forms)]
    largest = HEADER_BYTES + max(sizes, default=0)
    return max(largest, min(MAX_TOGETHER * largest, TOGETHER_BYTES))


def frame_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes that a frame with tensors of these sizes takes in a message."""
    return HEADER_BYTES + sum(map(aligned, sizes))


class Message:
    """The memory of one message, seen as bytes and as headers. numpy's views cost a fraction of torch's."""

    __slots__ = ("_bytes", "_words", "tensor")

    def __init__(self, num_bytes: int) -> None:
        self._bytes = empty_bytes(num_bytes)
        self._words = self._bytes[: num_bytes // 8 * 8].view(numpy.int64)
        self.tensor = torch.from_numpy(self._bytes)
        """uint8 [num_bytes]: where the message arrives."""

    @property
    def has_begun(self) -> bool:
        """Return whether any part has arrived since `clear`: gloo's transfer does not tell without waiting."""
        return bool(self._words[0])

    def clear(self) -> None:
        """Forget the first header."""
        self._words[0] = 0

    def header(self, offset: int = 0) -> list[int]:
        """Return the words of a frame's header."""
        words: list[int] = self._words[offset // 8 : offset // 8 + HEADER_LENGTH].tolist()
        return words

    def has_room(self, offset: int, sizes: Iterable[int] = ()) -> bool:
        """Return whether a frame with tensors of these sizes may lie at the offset."""
        return offset + frame_bytes(sizes) <= self._bytes.nbytes

    def write(self, frames: Sequence[tuple[Sequence[int], Sequence[Tensor]]]) -> Tensor:
        """Write headers and tensors of frames; return the part of the tensor to send."""
        # numpy lets other threads run meanwhile and starts none
        offset = 0
        for number, (header, tensors) in enumerate(frames, 1):
            words = self._words[offset // 8 : offset // 8 + HEADER_LENGTH]
            words[:] = header
            words[FOLLOWED] = number < len(frames)
            offset += HEADER_BYTES
            for tensor in tensors:
                raw = _raw(tensor)
                self._bytes[offset : offset + raw.nbytes] = raw
                offset += aligned(raw.nbytes)
        return self.tensor[:offset]

    def read(self, frames: Sequence[Forms]) -> tuple[list[tuple[Tensor, ...]], bool]:
        """Return the tensors of frames of these types and shapes, and whether they are parts of the message, which they
        then own.

        Few bytes are copied, because they would keep a mostly empty message alive.
        """
        num_bytes = sum(frame_bytes(sizes_of(forms)) for forms in frames)
        is_part = 2 * num_bytes >= self._bytes.nbytes
        source, offset, read = self.tensor, 0, []
        for forms in frames:
            offset += HEADER_BYTES
            sizes = sizes_of(forms)
            begin = offset
            if not is_part:
                num_bytes, begin = sum(map(aligned, sizes)), 0
                source = empty_tensor(torch.uint8, (num_bytes,))
                source.numpy()[:] = self._bytes[offset : offset + num_bytes]
            read.append(_parts(source, begin, forms, sizes))
            offset += sum(map(aligned, sizes))
        return read, is_part


def sizes_of(forms: Forms) -> list[int]:
    """Return the bytes of tensors of these types and shapes."""
    return [prod(shape) * dtype.itemsize for dtype, shape in forms]


def _parts(source: Tensor, offset: int, forms: Forms, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    parts = []
    for size, (dtype, shape) in zip(sizes, forms, strict=True):
        parts.append(source[offset : offset + size].view(dtype).view(shape))
        offset += aligned(size)
    return tuple(parts)


def _raw(tensor: Tensor) -> Any:
    return tensor.cpu().reshape(-1).view(torch.uint8).numpy()
