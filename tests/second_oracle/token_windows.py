"""Which tokens a microbatch sees, and which of them count (docs/numerics.md, section 10)."""

import json
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


def microbatch(stream: Stream, train: Train, *, seed: int, b: int, i: int) -> Rows:
    """Inputs and targets, both int64 [size, length], and what the sum of the losses is divided by."""
    starts = starts_of(stream, train, seed, b, i)
    of_batch = [starts_of(stream, train, seed, b, k) for k in range(train.microbatches)]
    return rows_of(stream, train, starts, of_batch)


def held_out_microbatch(stream: Stream, train: Train, *, i: int, number: int) -> Rows:
    """Inputs and targets of one of so many held-out microbatches: rows that follow each other."""
    step, size = stream.row_tokens or train.sequence_length, train.microbatch_size
    of_all = [[(k * size + row) * step for row in range(size)] for k in range(number)]
    return rows_of(stream, train, of_all[i], of_all)


def rows_of(stream: Stream, train: Train, starts: list[int], of_all: list[list[int]]) -> Rows:
    """Rows that begin at these places. of_all: those of all microbatches whose targets count for the divisor."""
    windows = torch.from_numpy(cut(stream.tokens, starts, train.sequence_length))
    targets = windows[:, 1:].clone()
    if train.loss_mask != "data":
        return Rows(windows[:, :-1], targets, None, None)
    targets[~counts(stream, starts, train)] = IGNORED
    number = sum(int(counts(stream, each, train).sum()) for each in of_all)
    divisor = torch.tensor(max(number, 1) / len(of_all), dtype=torch.float32)
    return Rows(windows[:, :-1], targets, divisor, positions(stream, starts, train))


def positions(stream: Stream, starts: list[int], train: Train) -> Tensor | None:
    """How many tokens of its document, in this row, are before each token; None if documents are joined."""
    if train.documents != "separate":
        return None
    assert stream.flags is not None, "documents need flags"
    rows = []
    for flags in cut(stream.flags, starts, train.sequence_length).tolist():
        row = [0]
        for flag in flags[1:-1]:
            row.append(0 if flag >= 2 else row[-1] + 1)
        rows.append(row)
    return torch.tensor(rows)


def starts_of(stream: Stream, train: Train, seed: int, b: int, i: int) -> list[int]:
    """Where each row begins: anywhere in a stream, or at the beginning of a packed row."""
    if train.data_order == "epochs":
        return starts_in_epochs(stream, train, seed, b, i)
    found = []
    for row in range(train.microbatch_size):
        number = int.from_bytes(blake2b(f"{seed}/{b}/{i}/{row}".encode(), digest_size=16).digest(), "little")
        if stream.row_tokens:
            found.append(number % (len(stream.tokens) // stream.row_tokens) * stream.row_tokens)
        else:
            found.append(number % (len(stream.tokens) - train.sequence_length))
    return found


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


def cut(values: npt.NDArray[Any], starts: list[int], length: int) -> npt.NDArray[np.int64]:
    """The numbers of each row and the one after it."""
    return np.stack([values[start : start + length + 1] for start in starts]).astype(np.int64)


def counts(stream: Stream, starts: list[int], train: Train) -> Tensor:
    """Which targets are trained on."""
    assert stream.flags is not None, "a mask needs flags"
    flags = torch.from_numpy(cut(stream.flags, starts, train.sequence_length))[:, 1:]
    is_target = flags % 2 == 1
    return is_target & (flags < 2) if train.documents == "separate" else is_target
