"""The order of a data set's rows over epochs: each row once an epoch, in an order drawn from the seed. Pure.

The order is a keyed permutation that is computed for one row at a time: a Feistel network (Luby and Rackoff 1988) over
a power of four, walked until it ends below the number of rows (Black and Rogaway 2002). So nothing is stored, and a
run goes on anywhere.
"""

from hashlib import blake2b
from typing import Final

ROUNDS: Final = 6


def row_at(number: int, *, num_rows: int, seed: int) -> int:
    """Return the row that is drawn as `number` = 0, 1, … of a whole job. Epoch e has the numbers e·num_rows and on."""
    epoch, place = divmod(number, num_rows)
    half = max(1, ((num_rows - 1).bit_length() + 1) // 2)
    found = _permuted(place, half, seed=seed, epoch=epoch)
    while found >= num_rows:
        found = _permuted(found, half, seed=seed, epoch=epoch)
    return found


def _permuted(value: int, half: int, *, seed: int, epoch: int) -> int:
    """Return where a permutation of 0 … 4^half − 1 takes a value."""
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for turn in range(ROUNDS):
        key = f"{seed}/{epoch}/{turn}/{right}".encode()
        drawn = int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
        left, right = right, left ^ (drawn & mask)
    return left << half | right
