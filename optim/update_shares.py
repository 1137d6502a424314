"""Which replica of a stage orthogonalises which of its matrices, and how its results lie in one tensor.

All replicas compute the owners alike, from shapes alone. A result keeps the strides of `orthogonalize`, so that its
way through a tensor changes no operation that reads it.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def matrix_owners(shapes: Sequence[tuple[int, int]], num_replicas: int) -> tuple[int, ...]:
    """Return the position of each matrix's owner.

    Matrices go in order of falling cost to the replica with the least so far. Ties go to the first.
    """
    costs = [iteration_cost(*shape) for shape in shapes]
    owners, loads = [0] * len(shapes), [0] * num_replicas
    for index in sorted(range(len(shapes)), key=lambda index: (-costs[index], index)):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return tuple(owners)


def iteration_cost(rows: int, cols: int) -> int:
    """Return the multiplications of one Newton-Schulz step: three products, of which one is square."""
    short, long = sorted((rows, cols))
    return short * short * (2 * long + short)


def joined(results: Sequence[Tensor]) -> Tensor:
    """Return results of `orthogonalize` end to end in one flat tensor; of none, an empty one."""
    if not results:
        return torch.empty(0)
    return torch.cat([_wide(result).reshape(-1) for result in results])


def from_shares(shares: Mapping[int, Tensor], shapes: Sequence[tuple[int, int]], owners: Sequence[int]) -> list[Tensor]:
    """Return the result of each matrix, out of what its owner has `joined`. Raises as `parted`."""
    results: dict[int, Tensor] = {}
    for owner, flat in shares.items():
        owned = [index for index, replica in enumerate(owners) if replica == owner]
        results |= zip(owned, parted(flat, [shapes[index] for index in owned]), strict=True)
    return [results[index] for index in range(len(shapes))]


def parted(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return the results of these shapes that `joined` has put into a tensor, as views.

    Raises ValueError when the tensor has another length than they.
    """
    sizes = [rows * cols for rows, cols in shapes]
    if flat.ndim != 1 or flat.numel() != sum(sizes):
        raise ValueError(f"a share of {sum(sizes)} elements, not of {list(flat.shape)}")
    return [
        part.view(cols, rows).mT if rows > cols else part.view(rows, cols)
        for part, (rows, cols) in zip(flat.split_with_sizes(sizes), shapes, strict=True)
    ]


def _wide(result: Tensor) -> Tensor:
    """Return a tall matrix's transpose: `orthogonalize` iterates on it, and returns a view of it."""
    return result.mT if result.size(0) > result.size(1) else result
