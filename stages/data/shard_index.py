"""What `shards.json` of a data folder says: the files of tokens, beside them their flags, and every file's checksum.

Format 1 has tokens alone. Format 2 may have a file of flags beside each shard, rows of a fixed length, and a validation
split. An index without any of these is written as format 1. Format 3 has pairs of documents in its rows.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from headway.stages.errors import DataError

INDEX_NAME = "shards.json"
FORMAT_VERSION: Final = 3
"""Newest format that this version reads."""
MAX_INDEX_BYTES: Final = 64 << 20
"""Maximum size of an index: some 300,000 shards."""
TOKEN_TYPES: Final = {"uint8": "<u1", "uint16": "<u2", "uint32": "<u4"}
IS_TARGET: Final = 1
"""Bit of a token's flags: the token is one to train on."""
BEGINS_DOCUMENT: Final = 2
"""Bit of a token's flags: a document begins here."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file of tokens, perhaps with one of flags."""

    file: str
    num_tokens: int
    sha256: str
    flags: str = ""
    """File with one byte of flags for each token; empty: the data has none."""
    flags_sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A file that an index names."""

    file: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """The content of `shards.json`."""

    dtype: str
    """uint8, uint16 or uint32, little-endian."""
    vocab_size: int
    shards: tuple[Shard, ...]
    sha256: str = ""
    """`combined_sha256` of the rest: the name of the data."""
    tokenizer: str = "bytes"
    """`bytes`, or the file name of a `tokenizers` JSON in the folder."""
    provenance: str = ""
    """Origin of the text, for people."""
    row_tokens: int = 0
    """Tokens of a packed row, one more than a sequence has; 0: the shards are one stream."""
    holds_pairs: bool = False
    """Whether the documents of each row are pairs, the preferred one first."""
    validation: tuple[Shard, ...] = ()
    """Shards of the validation split, of the same form."""
    format: int = 1

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens to train on."""
        return sum(shard.num_tokens for shard in self.shards)

    def num_rows(self, sequence_length: int, *, of: "Iterable[Shard] | None" = None) -> int:
        """Return the rows that do not overlap of a split, by default of what is trained on."""
        num_tokens = sum(shard.num_tokens for shard in (self.shards if of is None else of))
        return rows_in(num_tokens, row_tokens=self.row_tokens, sequence_length=sequence_length)

    @property
    def has_flags(self) -> bool:
        """Return whether each token has flags."""
        return bool(self.shards) and bool(self.shards[0].flags)

    @property
    def files(self) -> Iterator[DataFile]:
        """Yield every file that belongs to the data, with its size."""
        width = np.dtype(self.dtype).itemsize
        for shard in (*self.shards, *self.validation):
            yield DataFile(file=shard.file, num_bytes=shard.num_tokens * width, sha256=shard.sha256)
            if shard.flags:
                yield DataFile(file=shard.flags, num_bytes=shard.num_tokens, sha256=shard.flags_sha256)


def rows_in(num_tokens: int, *, row_tokens: int, sequence_length: int) -> int:
    """Return the number of packed rows, or of a stream's windows that do not overlap, with the token after the last."""
    return num_tokens // row_tokens if row_tokens else max(num_tokens - 1, 0) // sequence_length


def combined_sha256(index: ShardIndex) -> str:
    """Return SHA-256 over lines: `dtype`, then for each shard in order `num_tokens sha256`, and its flags' sha256.

    After the first, a line `rows row_tokens` if the data has rows, and a line `pairs` if these hold pairs. A line
    `validation` comes before that split's shards.
    """
    lines = [index.dtype, *([f"rows {index.row_tokens}"] if index.row_tokens else []), *["pairs"] * index.holds_pairs]
    lines += [*map(_line, index.shards), *(["validation", *map(_line, index.validation)] if index.validation else [])]
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def _line(shard: Shard) -> str:
    return f"{shard.num_tokens} {shard.sha256}" + (f" {shard.flags_sha256}" if shard.flags else "")


def narrowest_dtype(vocab_size: int) -> str:
    """Return the smallest token type that holds a vocabulary."""
    return "uint8" if vocab_size <= 1 << 8 else "uint16" if vocab_size <= 1 << 16 else "uint32"


def read_index(path: Path) -> ShardIndex:
    """Return `shards.json` of a data folder. Raises DataError when it is missing, broken or inconsistent."""
    file = path / INDEX_NAME
    try:
        with file.open("rb") as stream:
            return parse_index(stream.read(MAX_INDEX_BYTES + 1), str(file))
    except FileNotFoundError as error:
        raise DataError(str(path), f"no token shards here: {INDEX_NAME} is missing") from error
    except OSError as error:
        raise DataError(str(file), f"cannot be read: {error}") from error


def parse_index(raw: bytes, place: str) -> ShardIndex:
    """Return the index in the bytes of a `shards.json`. place: of the file, for errors. Raises DataError."""
    if len(raw) > MAX_INDEX_BYTES:
        raise DataError(place, f"has more than {MAX_INDEX_BYTES >> 20} MiB, which no index has")
    try:
        index = msgspec.json.decode(raw, type=ShardIndex)
    except (ValueError, RecursionError) as error:
        raise DataError(place, f"cannot be read: {error}") from error
    if (why := _why_wrong(index)) is not None:
        raise DataError(place, why)
    return index


def write_index(path: Path, index: ShardIndex) -> None:
    """Write `shards.json`, last of all, because a folder without it holds no shards."""
    fields: dict[str, Any] = asdict(index)
    if index.format < 3:
        del fields["holds_pairs"]
    if index.format == 1:
        fields = {key: value for key, value in fields.items() if key not in ("row_tokens", "validation")}
        for shard in fields["shards"]:
            del shard["flags"], shard["flags_sha256"]
    (path / INDEX_NAME).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _why_wrong(index: ShardIndex) -> str | None:
    """Return what an index says that cannot be so."""
    if not 1 <= index.format <= FORMAT_VERSION:
        return f"format {index.format} is not known; this version reads 1 to {FORMAT_VERSION}"
    if index.dtype not in TOKEN_TYPES:
        return f"dtype {index.dtype!r} is not one of {', '.join(TOKEN_TYPES)}"
    if index.row_tokens < 0 or index.row_tokens == 1:
        return f"row_tokens {index.row_tokens} is no length of rows"
    if not _is_plain(index.tokenizer):
        return f"tokenizer {index.tokenizer!r} is not a plain file name"
    for shard in (*index.shards, *index.validation):
        if (why := _why_wrong_shard(shard, index)) is not None:
            return f"shard {shard.file!r} {why}"
    names = [each.file for each in index.files]
    if len(set(names)) < len(names) and index.format > 1:
        return "two of its files have one name"
    if index.holds_pairs and not (index.format >= 3 and index.has_flags and index.row_tokens):
        return "pairs need format 3, rows and flags"
    return None if index.sha256 == combined_sha256(index) else "its sha256 does not fit its list of shards"


def _why_wrong_shard(shard: Shard, index: ShardIndex) -> str | None:
    if not _is_plain(shard.file):
        return "is not a plain file name"
    if shard.flags and not _is_plain(shard.flags):
        return f"has flags {shard.flags!r}, which is not a plain file name"
    if _SHA256.fullmatch(shard.sha256) is None:  # a download's partial file has this name
        return f"has {shard.sha256!r}, which is no SHA-256"
    if shard.flags and _SHA256.fullmatch(shard.flags_sha256) is None:
        return f"has flags with {shard.flags_sha256!r}, which is no SHA-256"
    if shard.num_tokens < 0:
        return f"has {shard.num_tokens} tokens"
    if bool(shard.flags) != index.has_flags:
        return "has flags and others have none, or the other way round"
    if index.format == 1 and (shard.flags or index.row_tokens or index.validation):
        return "is of format 1, which has no flags, rows or validation"
    if index.row_tokens and shard.num_tokens % index.row_tokens:
        return f"has {shard.num_tokens} tokens, which are no whole rows of {index.row_tokens}"
    return None


def _is_plain(name: str) -> bool:
    return Path(name).name == name and name not in ("", "..") and "\0" not in name


Tokens = npt.NDArray[Any]
"""One dimension of an unsigned integer type."""
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
    """Return the states of a folder's files, for a reader that relies on another's verification. Raises DataError."""
    index = read_index(folder)
    states = [index.sha256, *(f"{each.file} {state_of(folder / each.file)}" for each in index.files)]
    return blake2b("\n".join(states).encode(), digest_size=16).hexdigest()


def verify_file(file: Path, sha256: str) -> None:
    """Read a file and compare its hash. Raises DataError when it differs."""
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256:
        raise DataError(str(file), f"was changed or damaged: its SHA-256 is {found[:12]}…, not {sha256[:12]}…")


def mapped(file: Path, num_values: int, dtype: str) -> Tokens:
    """Map a file of so many numbers. Raises DataError when it is missing or has another size."""
    expected_bytes = num_values * np.dtype(dtype).itemsize
    try:
        size_bytes = file.stat().st_size
    except OSError as error:
        raise DataError(str(file), "this shard is missing") from error
    if size_bytes != expected_bytes:
        raise DataError(str(file), f"has {size_bytes} bytes where {INDEX_NAME} says {expected_bytes}")
    if not num_values:
        return np.empty(0, dtype=dtype)  # an empty file cannot be mapped
    return np.memmap(file, dtype=dtype, mode="r")
