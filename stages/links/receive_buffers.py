"""Allocates memory for arriving tensors: blocks of few sizes, taken and freed repeatedly.

torch takes its memory by `posix_memalign`, and glibc does not find a freed block again for an equal size and alignment:
it looks for a larger one. So fresh pages are taken each time, which can double the time of a frame of 16 MiB. A block
of plain `malloc`, with room to align inside, is found again.
"""

from math import prod
from typing import Any

import numpy
import torch
from torch import Tensor

from headway.stages.links.frame_contract import ALIGNMENT_BYTES


def empty_bytes(num_bytes: int) -> "numpy.ndarray[Any, Any]":
    """Return uint8 [num_bytes] that begin at a multiple of ALIGNMENT_BYTES."""
    block = numpy.empty(num_bytes + ALIGNMENT_BYTES, dtype=numpy.uint8)
    begin = -torch.from_numpy(block).data_ptr() % ALIGNMENT_BYTES  # numpy's own ways to an address are slower
    return block[begin : begin + num_bytes]


def empty_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor like `torch.empty` on the CPU; it begins at a multiple of ALIGNMENT_BYTES."""
    num_bytes = prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(empty_bytes(num_bytes)).view(dtype).view(shape)
