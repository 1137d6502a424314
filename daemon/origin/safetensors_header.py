"""Reads the header of a foreign safetensors file, or says in one sentence what is wrong with it. Pure."""

import json
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, Final

MAX_HEADER_BYTES: Final = 16 << 20
"""Maximum size of a header: a hundred thousand tensors take 12 MB."""
LFS_START: Final = b"version https://git-lfs"
LFS_POINTER: Final = "is a pointer of git-lfs, not the file; run `git lfs pull` there, or `hf download` the model again"
DTYPES: Final = ("F32", "BF16", "F16")
"""Those of weights that are read."""
MAX_NAME: Final = 512
_MAX_DIMENSIONS: Final = 8
_MAX_ELEMENTS: Final = 1 << 48
_ITEM_BYTES: Final = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


class HeaderError(ValueError):
    """A wrong header, described by the end of a sentence about its file."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file."""

    dtype: str
    """As safetensors names it: `BF16`."""
    shape: tuple[int, ...]
    begin: int
    """Offset of its first byte in the file."""
    end: int


def header_bytes(start: bytes, size_bytes: int) -> int:
    """Return how many bytes stand before the data. start: the file's first 8 bytes. Raises HeaderError."""
    if size_bytes < 8 or len(start) < 8:
        raise HeaderError(f"is truncated: {size_bytes} bytes")
    if start[:8] == LFS_START[:8]:
        raise HeaderError(LFS_POINTER)
    length = int.from_bytes(start[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise HeaderError(f"says that its header has {length} bytes; at most {MAX_HEADER_BYTES} are read")
    if length > size_bytes - 8:
        raise HeaderError(f"is truncated: its header has {length} bytes, and the file {size_bytes}")
    return 8 + length


def tensors_of(header: bytes, size_bytes: int) -> dict[str, TensorEntry]:
    """Return the tensors of a file in the order of their data. header: all bytes before the data.

    Raises HeaderError unless each byte of the data belongs to exactly one tensor.
    """
    try:
        index = json.loads(header[8:], object_pairs_hook=unique_keys)
    except HeaderError:
        raise
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"has a header that is not JSON ({type(error).__name__})") from error
    if not isinstance(index, dict):
        raise HeaderError("has a header that is not a table")
    index.pop("__metadata__", None)
    found = {name: _entry(name, raw, len(header)) for name, raw in index.items()}
    ordered = dict(sorted(found.items(), key=lambda item: (item[1].begin, item[1].end)))
    _check_cover(ordered, begin=len(header), end=size_bytes)
    return ordered


def shown(name: str) -> str:
    """Return a foreign name as one short printable word."""
    text = repr(name[:80])[1:-1]
    return text if len(name) <= 80 else f"{text}…"


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises HeaderError for a name that it has twice."""
    table = dict(pairs)
    if len(table) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise HeaderError(f"names {shown(key)} twice")
    return table


def _entry(name: str, raw: Any, header: int) -> TensorEntry:
    if not name.isprintable() or not 0 < len(name) <= MAX_NAME:
        raise HeaderError(f"has a tensor with the impossible name {shown(name)}")
    if not isinstance(raw, dict) or raw.keys() != {"dtype", "shape", "data_offsets"}:
        raise HeaderError(f"has no dtype, shape and data_offsets of {shown(name)}")
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise HeaderError(f"has {shown(name)} in the unknown dtype {shown(str(dtype))}")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS or prod(max(1, size) for size in shape) > _MAX_ELEMENTS:
        raise HeaderError(f"has {shown(name)} of an impossible shape")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise HeaderError(f"has impossible data_offsets of {shown(name)}")
    begin, end = offsets
    if end - begin != prod(shape) * _ITEM_BYTES[dtype]:
        raise HeaderError(f"gives {shown(name)} {end - begin} bytes, and its shape {shape} in {dtype} takes others")
    return TensorEntry(dtype, tuple(shape), header + begin, header + end)


def _are_sizes(raw: object) -> bool:
    return isinstance(raw, list) and all(type(size) is int and 0 <= size < 1 << 62 for size in raw)


def _check_cover(tensors: dict[str, TensorEntry], *, begin: int, end: int) -> None:
    """Refuse tensors that share bytes, and bytes of no tensor."""
    last = max((entry.end for entry in tensors.values()), default=begin)
    if last > end:
        raise HeaderError(f"is truncated: its tensors end at byte {last}, and it has {end}")
    for (one, before), (other, after) in pairwise(tensors.items()):
        if after.begin < before.end:
            raise HeaderError(f"has {shown(one)} and {shown(other)} in the same bytes")
    ends = [begin, *(entry.end for entry in tensors.values())]
    begins = [*(entry.begin for entry in tensors.values()), end]
    if ends != begins:
        raise HeaderError("has bytes that belong to no tensor")
