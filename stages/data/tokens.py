"""Token shards: a folder of memory-mapped `*.bin` files that `shards.json` describes, and the windows drawn from them.

The shards, in order, are one long stream of tokens. A sequence is a window of it that starts anywhere, so windows cross
the seams between shards and documents. The window is a function of (seed, batch, microbatch, row) and nothing else.
"""

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from headway.stages.data.microbatch import Microbatch
from headway.stages.errors import DataError

INDEX_NAME = "shards.json"
FORMAT_VERSION = 1
_DTYPES = {"uint8": "<u1", "uint16": "<u2", "uint32": "<u4"}
_SHA256 = re.compile(r"[0-9a-f]{64}")

Tokens = npt.NDArray[Any]
"""One dimension of an unsigned integer type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file of tokens."""

    file: str
    num_tokens: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """The content of `shards.json`."""

    dtype: str
    """uint8, uint16 or uint32, little-endian."""
    vocab_size: int
    shards: tuple[Shard, ...]
    sha256: str
    """`combined_sha256` of dtype and all shards: the name of the data."""
    tokenizer: str = "bytes"
    """`bytes`, or the file name of a `tokenizers` JSON in the folder."""
    provenance: str = ""
    """Origin of the text, for people."""
    format: int = FORMAT_VERSION

    @property
    def num_tokens(self) -> int:
        """Return the length of the stream."""
        return sum(shard.num_tokens for shard in self.shards)


def combined_sha256(dtype: str, shards: Iterable[Shard]) -> str:
    """Return SHA-256 over the lines `dtype`, then `num_tokens sha256` of each shard in order."""
    lines = [dtype, *(f"{shard.num_tokens} {shard.sha256}" for shard in shards)]
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def narrowest_dtype(vocab_size: int) -> str:
    """Return the smallest token type that holds a vocabulary."""
    return "uint8" if vocab_size <= 1 << 8 else "uint16" if vocab_size <= 1 << 16 else "uint32"


def read_index(path: Path) -> ShardIndex:
    """Return `shards.json` of a data folder. Raises DataError when it is missing, broken or inconsistent."""
    file = path / INDEX_NAME
    try:
        index = msgspec.json.decode(file.read_bytes(), type=ShardIndex)
    except FileNotFoundError as error:
        raise DataError(str(path), f"no token shards here: {INDEX_NAME} is missing") from error
    except (OSError, ValueError) as error:
        raise DataError(str(file), f"cannot be read: {error}") from error
    if index.format != FORMAT_VERSION:
        raise DataError(str(file), f"format {index.format} is not known; this version reads {FORMAT_VERSION}")
    if index.dtype not in _DTYPES:
        raise DataError(str(file), f"dtype {index.dtype!r} is not one of {', '.join(_DTYPES)}")
    for shard in index.shards:
        if Path(shard.file).name != shard.file or shard.file in ("", "..") or "\0" in shard.file:
            raise DataError(str(file), f"shard {shard.file!r} is not a plain file name")
        if _SHA256.fullmatch(shard.sha256) is None:  # a download's partial file has this name
            raise DataError(str(file), f"shard {shard.file!r}: {shard.sha256!r} is no SHA-256")
        if shard.num_tokens < 0:
            raise DataError(str(file), f"shard {shard.file!r} has {shard.num_tokens} tokens")
    if index.sha256 != combined_sha256(index.dtype, index.shards):
        raise DataError(str(file), "its sha256 does not fit its list of shards")
    return index


def write_index(path: Path, index: ShardIndex) -> None:
    """Write `shards.json`, last of all, because a folder without it holds no shards."""
    fields: dict[str, Any] = asdict(index)
    (path / INDEX_NAME).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


FileState = tuple[int, int, int, int]
"""Size, time of the last write, time of the last change, inode: they change with the content."""


def state_of(file: Path) -> FileState:
    """Return a file's present state. Raises DataError when there is none."""
    try:
        status = file.stat()
    except OSError as error:
        raise DataError(str(file), "this shard is missing") from error
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def fingerprint(folder: Path) -> str:
    """Return the states of a folder's shards, for a reader that relies on another's verification. Raises DataError."""
    index = read_index(folder)
    states = [index.sha256, *(f"{shard.file} {state_of(folder / shard.file)}" for shard in index.shards)]
    return blake2b("\n".join(states).encode(), digest_size=16).hexdigest()


def verify_shard(file: Path, sha256: str) -> None:
    """Read a shard and compare its hash. Raises DataError when it differs."""
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256:
        raise DataError(str(file), f"was changed or damaged: its SHA-256 is {found[:12]}…, not {sha256[:12]}…")


class TokenShards:
    """An open data folder: a random-access stream of tokens. Threads may share it."""

    def __init__(self, index: ShardIndex, maps: Iterable[Tokens]) -> None:
        self.index = index
        self._maps = tuple(maps)
        self._starts = (0, *accumulate(shard.num_tokens for shard in index.shards))

    @classmethod
    def open(cls, path: Path, *, expected_sha256: str | None = None, verify: bool = True, verified: str = "") -> Self:
        """Map a folder's shards.

        verified: the `fingerprint` of the files when their hashes were checked, instead of another check.

        expected_sha256 is the data's name in the job; None or "" accepts any. verify reads every shard once to check
        its hash; leave it out only if this process or its daemon has done so before. Raises DataError: a missing or
        truncated shard, other data than expected, bytes that do not fit their hash.
        """
        path = Path(path)
        index = read_index(path)
        if expected_sha256 and expected_sha256 != index.sha256:
            raise DataError(str(path), f"holds data {index.sha256[:12]}…, and {expected_sha256[:12]}… was asked for")
        maps = [_map(path / shard.file, shard.num_tokens, _DTYPES[index.dtype]) for shard in index.shards]
        if verified:
            if fingerprint(path) != verified:
                raise DataError(str(path), "was written to since it was verified")
        elif verify:
            for shard in index.shards:
                verify_shard(path / shard.file, shard.sha256)
        return cls(index, maps)

    @property
    def num_tokens(self) -> int:
        """Return the length of the stream."""
        return self._starts[-1]

    @property
    def vocab_size(self) -> int:
        """Return the size of the vocabulary: every token is below it."""
        return self.index.vocab_size

    def microbatch(self, *, seed: int, batch: int, microbatch: int, size: int, length: int) -> Microbatch:
        """Return rows of `length` tokens, in host memory.

        Each row's window depends on (seed, batch, microbatch, row) and the data alone. Raises DataError when the stream
        is shorter than a window of length + 1 tokens.
        """
        import torch  # imported here: commands that read only an index do without it

        num_starts = self.num_tokens - length
        if num_starts < 1:
            raise DataError(
                INDEX_NAME, f"{self.num_tokens} tokens are too few for a window of {length} and the token after it"
            )
        window = np.empty((size, length + 1), dtype=np.int64)
        for row in range(size):
            key = f"{seed}/{batch}/{microbatch}/{row}".encode()
            number = int.from_bytes(blake2b(key, digest_size=16).digest(), "little")
            self._read(number % num_starts, window[row])
        tokens = torch.from_numpy(window)
        return Microbatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def _read(self, start: int, out: Tokens) -> None:
        """Fill `out` with the stream's tokens from `start`, across as many shards as it takes."""
        shard = bisect_right(self._starts, start) - 1
        done = 0
        while done < len(out):
            offset = start + done - self._starts[shard]
            piece = self._maps[shard][offset : offset + len(out) - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
            shard += 1


def _map(file: Path, num_tokens: int, dtype: str) -> Tokens:
    expected_bytes = num_tokens * np.dtype(dtype).itemsize
    try:
        size_bytes = file.stat().st_size
    except OSError as error:
        raise DataError(str(file), "this shard is missing") from error
    if size_bytes != expected_bytes:
        raise DataError(str(file), f"has {size_bytes} bytes where {INDEX_NAME} says {expected_bytes}")
    if not num_tokens:
        return np.empty(0, dtype=dtype)  # an empty file cannot be mapped
    return np.memmap(file, dtype=dtype, mode="r")
