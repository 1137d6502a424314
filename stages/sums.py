"""Sums in an order that no cut of the pipeline changes, and the slices that replicas own. Pure."""

from functools import reduce
from itertools import pairwise
from operator import add


def fold(numbers: list[float]) -> float:
    """Fold from left to right. `sum` would compensate its rounding since Python 3.12."""
    return reduce(add, numbers)


def slice_bounds(num_elements: int, num_replicas: int) -> tuple[tuple[int, int], ...]:
    """Return begin and end of each replica's slice: contiguous, and as equal as possible."""
    edges = [num_elements * k // num_replicas for k in range(num_replicas + 1)]
    return tuple(pairwise(edges))
