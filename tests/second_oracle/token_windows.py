"""Which tokens a microbatch sees (docs/numerics.md, section 10)."""

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Stream = npt.NDArray[Any]
"""All tokens of a data folder, one after another."""


def read_stream(folder: Path) -> Stream:
    """The tokens of all shards, in the order in which `shards.json` lists them."""
    index = json.loads((folder / "shards.json").read_text(encoding="utf-8"))
    little_endian = {"uint8": "<u1", "uint16": "<u2", "uint32": "<u4"}[index["dtype"]]
    shards = [np.fromfile(folder / shard["file"], dtype=little_endian) for shard in index["shards"]]
    return np.concatenate(shards)


def microbatch(stream: Stream, *, seed: int, b: int, i: int, size: int, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, both int64 [size, length]."""
    rows = []
    for row in range(size):
        digest = blake2b(f"{seed}/{b}/{i}/{row}".encode(), digest_size=16).digest()
        start = int.from_bytes(digest, "little") % (len(stream) - length)
        rows.append(stream[start : start + length + 1].astype(np.int64))
    windows = torch.from_numpy(np.stack(rows))
    return windows[:, :-1], windows[:, 1:]
