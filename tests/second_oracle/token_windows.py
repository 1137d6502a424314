"""Which tokens a microbatch sees, and which of them count (docs/numerics.md, section 10)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tests.second_oracle.job import Train

IGNORED = -100


@dataclass(frozen=True, slots=True)
class Stream:
    """All tokens of a data folder, one after another, and their flags if it has any."""

    tokens: npt.NDArray[Any]
    flags: npt.NDArray[Any] | None
    row_tokens: int


Place = tuple[Stream, int]
"""Where a row begins."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What one microbatch reads."""

    inputs: Tensor
    targets: Tensor
    divisor: Tensor | None
    positions: Tensor | None


def read_stream(folder: Path, split: str = "shards") -> Stream:
    """The tokens of all shards of a split, in the order in which `shards.json` lists them."""
    index = json.loads((folder / "shards.json").read_text(encoding="utf-8"))
    little_endian = {"uint8": "<u1", "uint16": "<u2", "uint32": "<u4"}[index["dtype"]]
    shards = [np.fromfile(folder / shard["file"], dtype=little_endian) for shard in index[split]]
    names = [shard.get("flags") for shard in index[split]]
    flags = np.concatenate([np.fromfile(folder / name, dtype="<u1") for name in names]) if all(names) else None
    return Stream(np.concatenate(shards), flags, index.get("row_tokens", 0))


def microbatch(streams: Sequence[Stream], train: Train, weights: list[float], *, seed: int, b: int, i: int) -> Rows:
    """Inputs and targets, both int64 [size, length], and what the sum of the losses is divided by."""
    of_batch = [places_of(streams, train, weights, seed, b, k) for k in range(train.microbatches)]
    return rows_of(train, of_batch[i], of_batch)


def held_out_microbatch(streams: Sequence[Stream], train: Train, weights: list[float], *, i: int, number: int) -> Rows:
    """Inputs and targets of one of so many held-out microbatches: rows that follow each other in their streams."""
    size, taken = train.microbatch_size, [0] * len(streams)
    places = []
    for n in range(number * size):
        j = chosen_source(f"held-out/{n}", weights) if len(streams) > 1 else 0
        tokens, row_tokens = len(streams[j].tokens), streams[j].row_tokens
        if taken[j] == (tokens // row_tokens if row_tokens else (tokens - 1) // train.sequence_length):
            break  # a single microbatch repeats its rows
        places.append((streams[j], taken[j] * (row_tokens or train.sequence_length)))
        taken[j] += 1
    places = [places[n % len(places)] for n in range(number * size)]
    of_all = [places[k * size : (k + 1) * size] for k in range(number)]
    return rows_of(train, of_all[i], of_all)


def rows_of(train: Train, places: list[Place], of_all: list[list[Place]]) -> Rows:
    """Rows that begin at these places. of_all: those of all microbatches whose targets count for the divisor."""
    windows = torch.from_numpy(np.stack([cut(stream.tokens, start, train) for stream, start in places]))
    targets = windows[:, 1:].clone()
    if train.loss_mask != "data":
        return Rows(windows[:, :-1], targets, None, None)
    targets[~counts(places, train)] = IGNORED
    number = sum(num_pairs(each, train) if train.objective == "dpo" else num_counted(each, train) for each in of_all)
    divisor = torch.tensor(max(number, 1) / len(of_all), dtype=torch.float32)
    return Rows(windows[:, :-1], targets, divisor, positions(places, train))


def positions(places: list[Place], train: Train) -> Tensor | None:
    """How many tokens of its document, in this row, are before each token; None if documents are joined."""
    if train.documents != "separate":
        return None
    rows = []
    for flags in flags_at(places, train).tolist():
        row = [0]
        for flag in flags[1:-1]:
            row.append(0 if flag >= 2 else row[-1] + 1)
        rows.append(row)
    return torch.tensor(rows)


def places_of(streams: Sequence[Stream], train: Train, weights: list[float], seed: int, b: int, i: int) -> list[Place]:
    """Where each row begins: anywhere in a stream, or at the beginning of a packed row."""
    if train.data_order == "epochs":
        (stream,) = streams
        return [(stream, start) for start in starts_in_epochs(stream, train, seed, b, i)]
    found = []
    for row in range(train.microbatch_size):
        key = f"{seed}/{b}/{i}/{row}"
        stream = streams[chosen_source(key, weights) if len(streams) > 1 else 0]
        if stream.row_tokens:
            found.append((stream, drawn(key) % (len(stream.tokens) // stream.row_tokens) * stream.row_tokens))
        else:
            found.append((stream, drawn(key) % (len(stream.tokens) - train.sequence_length)))
    return found


def chosen_source(key: str, weights: list[float]) -> int:
    """The first source whose weight, with those before it, is above a number that is drawn below all weights."""
    share = (drawn(f"{key}/source") % 2**53) / 2**53
    total = 0.0
    for weight in weights:
        total += weight
    place, sum_so_far = share * total, 0.0
    for j, weight in enumerate(weights):
        sum_so_far += weight
        if place < sum_so_far:
            return j
    raise AssertionError("every number is below the sum of all weights")


def drawn(key: str) -> int:
    """A number of 128 bits."""
    return int.from_bytes(blake2b(key.encode(), digest_size=16).digest(), "little")


def starts_in_epochs(stream: Stream, train: Train, seed: int, b: int, i: int) -> list[int]:
    """Where the rows begin that a permutation of each epoch chooses."""
    step = stream.row_tokens or train.sequence_length
    number_of_rows = (len(stream.tokens) - (0 if stream.row_tokens else 1)) // step
    half = max(1, -(-(number_of_rows - 1).bit_length() // 2))
    found = []
    for row in range(train.microbatch_size):
        n = (b * train.microbatches + i) * train.microbatch_size + row
        e, place = n // number_of_rows, n % number_of_rows
        while True:
            x, y = place // 2**half, place % 2**half
            for t in range(6):
                digest = blake2b(f"{seed}/{e}/{t}/{y}".encode(), digest_size=8).digest()
                x, y = y, x ^ (int.from_bytes(digest, "little") % 2**half)
            place = x * 2**half + y
            if place < number_of_rows:
                break
        found.append(place * step)
    return found


def cut(values: npt.NDArray[Any], start: int, train: Train) -> npt.NDArray[np.int64]:
    """The numbers of a row and the one after it."""
    return values[start : start + train.sequence_length + 1].astype(np.int64)


def flags_at(places: list[Place], train: Train) -> npt.NDArray[np.int64]:
    """The flags of rows."""
    found = []
    for stream, start in places:
        assert stream.flags is not None, "a mask needs flags"
        found.append(cut(stream.flags, start, train))
    return np.stack(found)


def num_counted(places: list[Place], train: Train) -> int:
    """How many targets are trained on."""
    return int(counts(places, train).sum())


def num_pairs(places: list[Place], train: Train) -> int:
    """How many pairs of documents have targets in both."""
    where = positions(places, train)
    assert where is not None
    found = 0
    for starts, counted in zip(where == 0, counts(places, train), strict=True):
        documents = (starts.cumsum(0) - 1).tolist()
        trained = {document for document, counts_here in zip(documents, counted.tolist(), strict=True) if counts_here}
        found += sum(1 for document in trained if document % 2 == 0 and document + 1 in trained)
    return found


def counts(places: list[Place], train: Train) -> Tensor:
    """Which targets are trained on."""
    flags = torch.from_numpy(flags_at(places, train))[:, 1:]
    is_target = flags % 2 == 1
    return is_target & (flags < 2) if train.documents == "separate" else is_target
