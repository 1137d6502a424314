"""The messages of a group: a header and, directly after it, the tensors of a small frame.

Both ends derive from the contract which kinds are small, and the maximum size of a message.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from headway.stages.links.collective.header import HEADER_LENGTH, is_inline
from headway.stages.links.frame_contract import FrameContract, aligned
from headway.stages.links.receive_buffers import empty_tensor

HEADER_BYTES = 8 * HEADER_LENGTH


def max_message_bytes(contract: FrameContract) -> int:
    """Return the maximum size of a message in either direction."""
    all_forms = (*contract.forms.values(), *contract.sent_forms.values())
    sizes = [sum(aligned(form.num_bytes) for form in forms) for forms in all_forms if is_inline(forms)]
    return HEADER_BYTES + max(sizes, default=0)


def pack(buffer: Tensor, header: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Write a message to the beginning of the buffer, uint8 [bytes]; return the part to send."""
    # numpy lets other threads run meanwhile and starts none
    array, offset = buffer.numpy(), HEADER_BYTES
    array[:HEADER_BYTES] = _raw(header)
    for tensor in tensors:
        raw = _raw(tensor)
        array[offset : offset + raw.nbytes] = raw
        offset += aligned(raw.nbytes)
    return buffer[:offset]


def header_of(message: Tensor) -> Tensor:
    """Return the header, int64 [HEADER_LENGTH]."""
    return message[:HEADER_BYTES].view(torch.int64)


def unpack(message: Tensor, tensors: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> tuple[tuple[Tensor, ...], bool]:
    """Return the tensors of these types and shapes, and whether they are parts of the message, which they then own.

    Small tensors are copied, because they would keep a mostly empty buffer alive.
    """
    num_bytes = sum(aligned(prod(shape) * dtype.itemsize) for dtype, shape in tensors)
    payload = message[HEADER_BYTES : HEADER_BYTES + num_bytes]
    is_part = 2 * num_bytes >= message.numel()
    if not is_part:
        copied = empty_tensor(torch.uint8, (num_bytes,))
        copied.numpy()[:] = payload.numpy()
        payload = copied
    parts, offset = [], 0
    for dtype, shape in tensors:
        size = prod(shape) * dtype.itemsize
        parts.append(payload[offset : offset + size].view(dtype).view(shape))
        offset += aligned(size)
    return tuple(parts), is_part


def _raw(tensor: Tensor) -> Any:
    return tensor.cpu().reshape(-1).view(torch.uint8).numpy()
