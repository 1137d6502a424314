"""Memory for tensors that arrive: blocks of the same sizes, taken and freed again and again.

torch takes its memory by `posix_memalign`, and glibc does not find a freed block again for the same size and alignment:
it looks for one that is larger. So fresh pages are taken again and again, which can double the time that a frame of
16 MiB takes. A block of plain `malloc`, with room to align inside, is found again.
"""

from math import prod
from typing import Any

import numpy
import torch
from torch import Tensor

from headway.stages.frame_contract import ALIGNMENT_BYTES


def empty_bytes(num_bytes: int) -> "numpy.ndarray[Any, Any]":
    """uint8 [num_bytes], that begin at a multiple of ALIGNMENT_BYTES."""
    block = numpy.empty(num_bytes + ALIGNMENT_BYTES, dtype=numpy.uint8)
    begin = -torch.from_numpy(block).data_ptr() % ALIGNMENT_BYTES  # numpy's own ways to an address are slower
    return block[begin : begin + num_bytes]


def empty_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Like `torch.empty` on the CPU; begins at a multiple of ALIGNMENT_BYTES."""
    num_bytes = prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(empty_bytes(num_bytes)).view(dtype).view(shape)
