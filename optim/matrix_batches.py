"""Orthogonalisation of several matrices of one shape at once, if that saves time and changes no bit.

The cut of the model decides which matrices share a batch, so a batch must give the bits of each matrix alone. Products
of many small matrices and of one may come from different kernels (seen on CPUs for a shorter side of 16 or less). A
batch is therefore limited to shapes without that difference. Also, each size of batch is compared with single matrices,
bit by bit, at its first use in a process; if they differ, matrices stay single.

Batches save the cost per call, so they are for small matrices. Large stacks lose: they do not stay in the cache.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from headway.optim.newton_schulz import orthogonalize

SHORTEST_SIDE: Final = 17
MOST_MATRICES: Final = 16
MOST_ELEMENTS: Final = {torch.float32: 1 << 15, torch.bfloat16: 1 << 19}
"""Maximum number of elements of a stack on a CPU, by the iteration's dtype: measured by bench/update.py."""


def batch_limit(rows: int, cols: int, *, dtype: torch.dtype, device: torch.device) -> int:
    """Return how many matrices of a shape are orthogonalised at once in `dtype`: 1 is one by one, as always on CUDA."""
    if device.type != "cpu" or torch.get_num_threads() != 1 or min(rows, cols) < SHORTEST_SIDE:
        return 1
    return max(1, min(MOST_MATRICES, MOST_ELEMENTS.get(dtype, 0) // (rows * cols)))


def orthogonalize_each(matrices: Sequence[Tensor], *, steps: int, dtype: torch.dtype) -> list[Tensor]:
    """Do `orthogonalize` of each matrix [rows, cols], all of one shape and device, at most `batch_limit` of them."""
    rows, cols = matrices[0].shape
    if len(matrices) > 1 and _has_same_bits(len(matrices), rows, cols, steps, dtype):
        return list(orthogonalize(torch.stack(list(matrices)), steps=steps, dtype=dtype).unbind())
    return [orthogonalize(matrix, steps=steps, dtype=dtype) for matrix in matrices]


@lru_cache(maxsize=256)
def _has_same_bits(number: int, rows: int, cols: int, steps: int, dtype: torch.dtype) -> bool:
    """Return whether a batch on a CPU has the bits of single matrices.

    Kernels are chosen by shape, and no sum in another order has all of a random matrix's bits.
    """
    stack = torch.randn(number, rows, cols, generator=torch.Generator().manual_seed(rows * cols))
    batch = orthogonalize(stack, steps=steps, dtype=dtype)
    return all(
        torch.equal(of_batch, orthogonalize(matrix, steps=steps, dtype=dtype))
        for of_batch, matrix in zip(batch, stack, strict=True)
    )
