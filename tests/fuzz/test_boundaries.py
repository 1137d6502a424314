"""A second of mutated bytes at each boundary in the default run; `make fuzz` has ten minutes."""

import random

import pytest

from tests.fuzz.run import mutated
from tests.fuzz.targets import TARGETS

NUM_INPUTS = 150


@pytest.mark.parametrize("name", TARGETS)
def test_no_bytes_get_past_a_boundary(name: str) -> None:
    """Valid bytes pass; after random changes they pass, or the boundary's own error says why not."""
    target, draw = TARGETS[name], random.Random(7)
    seeds = target.seeds()
    for seed in seeds:
        target.run(seed)
    for _ in range(NUM_INPUTS):
        target.run(mutated(draw.choice(seeds), draw))


@pytest.mark.parametrize(
    "nested", [b"[" * 100_000, b'{"a":' * 50_000, b'{"a":' + b"[" * 100_000, b"a = " + b"[" * 50_000]
)
@pytest.mark.parametrize("name", TARGETS)
def test_nesting_without_end_is_one_error(name: str, nested: bytes) -> None:
    """A parser that gives up in its recursion is an error of the bytes, as any other."""
    TARGETS[name].run(nested)
