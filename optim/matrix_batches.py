"""Orthogonalisation of several matrices of one shape at once, where that saves time and changes no bit.

Which matrices share a batch depends on where the model is cut, so a batch must give the bits of each matrix alone.
Products of many small matrices and of one may come from different kernels (seen on CPUs: where the shorter side is 16
or less). A batch is therefore kept to shapes where they do not, and before a size of batch is used for the first time
in a process, it is compared with one by one, bit by bit; where they differ, it stays with one by one.

What is saved is the cost per call, so batches are for small matrices. Large stacks lose: they do not stay in the cache.
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
"""Of a stack on a CPU, by the iteration's dtype: measured by bench/update.py."""


def batch_limit(rows: int, cols: int, *, dtype: torch.dtype, device: torch.device) -> int:
    """How many matrices of a shape are orthogonalised at once in `dtype`: 1 is one by one, as always on CUDA."""
    if device.type != "cpu" or torch.get_num_threads() != 1 or min(rows, cols) < SHORTEST_SIDE:
        return 1
    return max(1, min(MOST_MATRICES, MOST_ELEMENTS.get(dtype, 0) // (rows * cols)))


def orthogonalize_each(matrices: Sequence[Tensor], *, steps: int, dtype: torch.dtype) -> list[Tensor]:
    """`orthogonalize` of each matrix [rows, cols], all of one shape and device, no more of them than `batch_limit`."""
    rows, cols = matrices[0].shape
    if len(matrices) > 1 and _has_same_bits(len(matrices), rows, cols, steps, dtype):
        return list(orthogonalize(torch.stack(list(matrices)), steps=steps, dtype=dtype).unbind())
    return [orthogonalize(matrix, steps=steps, dtype=dtype) for matrix in matrices]


@lru_cache(maxsize=256)
def _has_same_bits(number: int, rows: int, cols: int, steps: int, dtype: torch.dtype) -> bool:
    """Whether a batch on a CPU is each by itself. Kernels are chosen by shape, and no sum in another order has all of
    a random matrix's bits."""
    stack = torch.randn(number, rows, cols, generator=torch.Generator().manual_seed(rows * cols))
    batch = orthogonalize(stack, steps=steps, dtype=dtype)
    return all(
        torch.equal(of_batch, orthogonalize(matrix, steps=steps, dtype=dtype))
        for of_batch, matrix in zip(batch, stack, strict=True)
    )
