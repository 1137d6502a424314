"""Draws a job's microbatches from token shards: a folder of memory-mapped files that `shards.json` describes.

The shards, in order, are one long stream of tokens, or rows of a fixed length. A sequence is a window of the stream
that starts anywhere, so windows cross the seams between shards and documents, or it is a whole row. In epochs it is a
row, or a window of a stream that is cut into windows. Which one is a function of (seed, batch, microbatch, row) and
nothing else.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from headway.stages.data.microbatch import Microbatch
from headway.stages.data.shard_index import (
    BEGINS_DOCUMENT,
    INDEX_NAME,
    IS_TARGET,
    TOKEN_TYPES,
    Shard,
    ShardIndex,
    Tokens,
    fingerprint,
    mapped,
    read_index,
    rows_in,
    verify_file,
)
from headway.stages.errors import DataError
from headway.stages.spec import TrainSpec

# What the flags of rows mean to a job: targets, positions in documents, the divisor of a batch's losses. Pure.
#
# Flags are [size, length + 1]: those of the inputs, and of the token after the last one.

NOT_TRAINED: Final = -100
"""A target that is not trained on: torch's `ignore_index`."""

Flags = npt.NDArray[Any]


def trained_targets(targets: npt.NDArray[np.int64], flags: Flags, train: TrainSpec) -> npt.NDArray[np.int64]:
    """Return the targets int64 [size, length], with NOT_TRAINED for those that are masked."""
    return np.where(_is_trained(flags, train), targets, NOT_TRAINED)


def num_targets(flags: Flags, train: TrainSpec) -> int:
    """Return the number of what a loss is the mean over: unmasked targets, or pairs of documents that have some."""
    is_trained = _is_trained(flags, train)
    if not train.learns_preferences:
        return int(is_trained.sum())
    number = np.cumsum(positions(flags) == 0, axis=1) - 1
    of_rows = [set(row[mask].tolist()) for row, mask in zip(number, is_trained, strict=True)]
    return sum(document ^ 1 in trained for trained in of_rows for document in trained) // 2


def mean_tokens(num_of_all: int, num_microbatches: int) -> float:
    """Return the number by which each microbatch divides its sum of losses: the targets of all of them, over their
    number.
    """
    return max(num_of_all, 1) / num_microbatches


def positions(flags: Flags) -> npt.NDArray[np.int32]:
    """Return each input's position in its document, int32 [size, length]. A row's first token has position 0."""
    begins = (flags[:, :-1] & BEGINS_DOCUMENT) != 0
    places = np.arange(begins.shape[1], dtype=np.int32)
    first_of_document = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    return (places - first_of_document).astype(np.int32)


def _is_trained(flags: Flags, train: TrainSpec) -> npt.NDArray[np.bool_]:
    """Return which targets are trained on. No document predicts the first token of the next one."""
    of_targets = flags[:, 1:]
    is_trained: npt.NDArray[np.bool_] = (of_targets & IS_TARGET) != 0
    return is_trained & ((of_targets & BEGINS_DOCUMENT) == 0) if train.separates_documents else is_trained


# The order of a data set's rows over epochs: each row once an epoch, in an order drawn from the seed. Pure.
#
# The order is a keyed permutation that is computed for one row at a time: a Feistel network (Luby and Rackoff 1988)
# over a power of four, walked until it ends below the number of rows (Black and Rogaway 2002). So nothing is stored,
# and a run goes on anywhere.

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


NO_VALIDATION: Final = "has no validation split; `headway data prepare --validation 0.01` makes one"
_MOST_COUNTS: Final = 8
"""Batches whose number of targets is remembered."""


class TokenShards:
    """An open data folder: a random-access stream of tokens. Threads may share it."""

    def __init__(self, index: ShardIndex, maps: Iterable[Tokens], flags: Iterable[Tokens] = ()) -> None:
        self.index = index
        self.maps = tuple(maps)
        self.flag_maps = tuple(flags)
        self.validation: TokenShards | None = None
        """The validation split; None: there is none."""
        self._tokens = _Stream(self.maps)
        self._flags = _Stream(self.flag_maps)
        self._counts: dict[tuple[object, ...], int] = {}

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        expected_sha256: str | None = None,
        verify: bool = True,
        verified: str = "",
        is_validation: bool = False,
    ) -> Self:
        """Map a folder's shards.

        verified: the `fingerprint` of the files when their hashes were checked, instead of another check.
        is_validation: map the shards of the validation split instead.

        expected_sha256 is the data's name in the job; None or "" accepts any. verify reads every file once to check
        its hash; leave it out only if this process or its daemon has done so before. Raises DataError: a missing or
        truncated file, other data than expected, bytes that do not fit their hash, no validation split.
        """
        path = Path(path)
        index = read_index(path)
        if expected_sha256 and expected_sha256 != index.sha256:
            raise DataError(str(path), f"holds data {index.sha256[:12]}…, and {expected_sha256[:12]}… was asked for")
        if is_validation and not index.validation:
            raise DataError(str(path), NO_VALIDATION)
        found = cls._mapped(path, index, index.validation if is_validation else index.shards)
        if index.validation and not is_validation:
            found.validation = cls._mapped(path, index, index.validation)
        if verified:
            if fingerprint(path) != verified:
                raise DataError(str(path), "was written to since it was verified")
        elif verify:
            for each in index.files:
                verify_file(path / each.file, each.sha256)
        return found

    @classmethod
    def _mapped(cls, path: Path, index: ShardIndex, shards: Iterable[Shard]) -> Self:
        maps = [mapped(path / shard.file, shard.num_tokens, TOKEN_TYPES[index.dtype]) for shard in shards]
        flags = [mapped(path / shard.flags, shard.num_tokens, "<u1") for shard in shards if shard.flags]
        return cls(index, maps, flags)

    @property
    def num_tokens(self) -> int:
        """Return the length of the stream, or of all rows."""
        return self._tokens.length

    @property
    def vocab_size(self) -> int:
        """Return the size of the vocabulary: every token is below it."""
        return self.index.vocab_size

    def microbatch(self, train: TrainSpec, *, seed: int, batch: int, microbatch: int) -> Microbatch:
        """Return a microbatch of a job, in host memory.

        Each row's place depends on (seed, batch, microbatch, row) and the data alone. Raises DataError: the stream is
        shorter than a window and the token after it, rows are of another length, or the job needs flags.
        """
        places = self._places(train, seed, batch, microbatch)
        return self._rows(places, train, lambda: mean_tokens(self._num_targets(train, seed, batch), train.microbatches))

    def held_out(self, train: TrainSpec, microbatch: int) -> Microbatch:
        """Return a microbatch of an evaluation, in host memory: equal in each of them.

        The rows of the validation split follow each other, in a stream as windows that do not overlap. Raises
        DataError: there is no such split, or it has too few rows for several microbatches.
        """
        if self.validation is None:
            raise DataError(INDEX_NAME, NO_VALIDATION)
        return self.validation._evaluated(train, microbatch)

    def _evaluated(self, train: TrainSpec, microbatch: int) -> Microbatch:
        places = self._places_in_turn(train, microbatch)
        return self._rows(places, train, lambda: mean_tokens(self._num_evaluated_targets(train), train.num_evaluated))

    def _places_in_turn(self, train: TrainSpec, microbatch: int) -> list[int]:
        """Return where the rows of an evaluation's microbatch begin."""
        size, num_rows = train.microbatch_size, self.num_rows(train)
        needed = train.num_evaluated * size
        if not num_rows or num_rows < needed > size:
            raise DataError(
                INDEX_NAME,
                f"the validation split has {num_rows} rows of {train.sequence_length} tokens, and an evaluation takes "
                f"{needed}: {train.num_evaluated} microbatches of {size}",
            )
        step = self.index.row_tokens or train.sequence_length
        return [(microbatch * size + row) % num_rows * step for row in range(size)]

    def num_rows(self, train: TrainSpec) -> int:
        """Return the number of rows that do not overlap: those of the data, or windows of a stream.

        Raises DataError: rows of another length.
        """
        length, row_tokens = train.sequence_length, self.index.row_tokens
        if row_tokens and row_tokens != length + 1:
            raise DataError(INDEX_NAME, f"has rows for sequences of {row_tokens - 1} tokens, not of {length}")
        return rows_in(self.num_tokens, row_tokens=row_tokens, sequence_length=length)

    def _num_evaluated_targets(self, train: TrainSpec) -> int:
        """Return the number of unmasked targets of a whole evaluation."""
        return self._counted((train,), train, (self._places_in_turn(train, i) for i in range(train.num_evaluated)))

    def _rows(self, places: list[int], train: TrainSpec, mean_tokens_of_all: Callable[[], float]) -> Microbatch:
        import torch  # imported here: commands that read only an index do without it

        tokens = torch.from_numpy(self._tokens.windows(places, train.sequence_length + 1))
        # A view of a single row counts as contiguous, but has strides that compiled code was not made for.
        inputs, targets = (
            part.clone(memory_format=torch.contiguous_format) for part in (tokens[:, :-1], tokens[:, 1:])
        )
        if not train.has_mask:
            return Microbatch(inputs, targets)
        flags = self._flags_at(places, train)
        return Microbatch(
            inputs,
            torch.from_numpy(trained_targets(targets.numpy(), flags, train)),
            positions=torch.from_numpy(positions(flags)) if train.separates_documents else None,
            mean_tokens=torch.tensor(mean_tokens_of_all(), dtype=torch.float32),
        )

    def _num_targets(self, train: TrainSpec, seed: int, batch: int) -> int:
        """Return the number of unmasked targets of a whole batch, also of microbatches that others draw."""
        of_each = (self._places(train, seed, batch, i) for i in range(train.microbatches))
        return self._counted((train, seed, batch), train, of_each)

    def _counted(self, key: tuple[object, ...], train: TrainSpec, of_each: Iterable[list[int]]) -> int:
        """Return the number of unmasked targets of some microbatches, counted once."""
        found = self._counts.get(key)
        if found is None:
            found = sum(num_targets(self._flags_at(places, train), train) for places in of_each)
            while len(self._counts) >= _MOST_COUNTS:
                self._counts.pop(next(iter(self._counts)), None)
            self._counts[key] = found
        return found

    def _places(self, train: TrainSpec, seed: int, batch: int, microbatch: int) -> list[int]:
        """Return where the rows of a microbatch begin in the stream."""
        length, row_tokens, num_rows = train.sequence_length, self.index.row_tokens, self.num_rows(train)
        if train.data_order == "epochs":
            if not num_rows:
                raise DataError(INDEX_NAME, f"{self.num_tokens} tokens are too few for a row of {length}")
            first = (batch * train.microbatches + microbatch) * train.microbatch_size
            numbers = range(first, first + train.microbatch_size)
            return [row_at(number, num_rows=num_rows, seed=seed) * (row_tokens or length) for number in numbers]
        return [self.drawn_place(train, f"{seed}/{batch}/{microbatch}/{row}") for row in range(train.microbatch_size)]

    def drawn_place(self, train: TrainSpec, key: str) -> int:
        """Return where the row begins that is drawn by this key. Raises DataError as `microbatch`."""
        length, row_tokens = train.sequence_length, self.index.row_tokens
        num_starts = self.num_rows(train) if row_tokens else self.num_tokens - length
        if num_starts < 1:
            raise DataError(
                INDEX_NAME, f"{self.num_tokens} tokens are too few for a window of {length} and the token after it"
            )
        return _number(key) % num_starts * (row_tokens or 1)

    def _flags_at(self, places: Iterable[int], train: TrainSpec) -> Tokens:
        if not self.index.has_flags:
            raise DataError(INDEX_NAME, "has no flags, and the job's loss has a mask")
        return self._flags.windows(places, train.sequence_length + 1)


class _Stream:
    """Files that follow each other."""

    def __init__(self, maps: Iterable[Tokens]) -> None:
        self._maps = tuple(maps)
        self._starts = (0, *accumulate(len(each) for each in self._maps))
        self.length = self._starts[-1]

    def windows(self, starts: Iterable[int], length: int) -> Tokens:
        """Return the numbers from each start on: int64 [number of starts, length]."""
        places = list(starts)
        found = np.empty((len(places), length), dtype=np.int64)
        for row, start in zip(found, places, strict=True):
            self._read(start, row)
        return found

    def _read(self, start: int, out: Tokens) -> None:
        """Fill `out` from `start` on, across as many files as it takes."""
        number = bisect_right(self._starts, start) - 1
        done = 0
        while done < len(out):
            offset = start + done - self._starts[number]
            piece = self._maps[number][offset : offset + len(out) - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
            number += 1


def _number(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=16).digest(), "little")
