"""Which of a job's data sources a row comes from. Pure.

Each row of a batch chooses by a number of its own, and so does each row of an evaluation. So a row's source does not
depend on the worker that draws it, nor on the rows before it. The number of a held-out row's turn in its source does.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import accumulate, count
from typing import Final

STDLIB: Final = "python-stdlib"
HEADWAY_DOCS: Final = "headway-docs"
BUILT_IN_SOURCES: Final = (STDLIB, HEADWAY_DOCS)
"""Data that needs no folder: `stdlib_corpus` makes it."""

_BITS: Final = 53
"""Bits of a drawn fraction: those that float64 has."""


def source_of(key: str, weights: Sequence[float]) -> int:
    """Return the source that the row with this key takes: the first whose cumulative weight exceeds its number."""
    bounds = tuple(accumulate(weights))
    drawn = int.from_bytes(blake2b(f"{key}/source".encode(), digest_size=16).digest(), "little")
    place = (drawn % (1 << _BITS)) / (1 << _BITS) * bounds[-1]
    return next(index for index, bound in enumerate(bounds) if place < bound)


def held_out_rows(weights: Sequence[float], num_rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the rows of an evaluation as pairs of source and row in its validation split.

    Each takes the next row of its source. The iterator ends at the first row whose source has no more of them.
    """
    taken = [0] * len(weights)
    for number in count():
        source = source_of(f"held-out/{number}", weights)
        if taken[source] == num_rows[source]:
            return
        yield source, taken[source]
        taken[source] += 1


def mixture_sha256(names: Iterable[str]) -> str:
    """Return the name of several sources' data: SHA-256 over a line `sources`, then a line with each one's name."""
    return hashlib.sha256("".join(f"{line}\n" for line in ("sources", *names)).encode()).hexdigest()
