"""Says where each tensor of a model lies: in shards of 5 GB, or in those of the model's origin. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, Literal

from headway.daemon.origin.safetensors_header import TensorEntry, tensors_of

SHARD_BYTES: Final = 5 * 10**9
"""Largest shard, unless one tensor is larger: some file systems and stores refuse more."""
DTYPES: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Names of safetensors by those of torch."""
_ITEM_BYTES: Final = {"F32": 4, "BF16": 2, "F16": 2}

Shapes = Mapping[str, Sequence[int]]
"""Shapes of the tensors by their names in a checkpoint, in the order of the layers."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One file."""

    name: str
    header: bytes
    """All bytes before the data."""
    tensors: dict[str, TensorEntry]

    @property
    def size_bytes(self) -> int:
        """Return the size of the whole file."""
        return max((entry.end for entry in self.tensors.values()), default=len(self.header))


def planned_shards(
    shapes: Shapes, dtype: Literal["float32", "bfloat16"], *, most_bytes: int = SHARD_BYTES
) -> tuple[Shard, ...]:
    """Return shards in the order of the layers, each filled up before the next begins."""
    item = _ITEM_BYTES[DTYPES[dtype]]
    groups: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = prod(shape) * item
        if groups[-1] and filled + size > most_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    named = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    return tuple(
        _shard(file, {name: shapes[name] for name in sorted(group)}, DTYPES[dtype])
        for file, group in zip(named, groups, strict=True)
    )


def shards_of_origin(headers: Mapping[str, bytes], shapes: Shapes) -> tuple[Shard, ...] | None:
    """Return the shards of the folder with the initial weights; None: they do not have exactly these tensors."""
    shards = []
    for name, header in sorted(headers.items()):
        data = json.loads(header[8:])
        end = max((entry["data_offsets"][1] for key, entry in data.items() if key != "__metadata__"), default=0)
        shards.append(Shard(name, header, tensors_of(header, len(header) + end)))
    found = {name: entry for shard in shards for name, entry in shard.tensors.items()}
    is_same = {name: entry.shape for name, entry in found.items()} == {
        name: tuple(shape) for name, shape in shapes.items()
    }
    return tuple(shards) if is_same and all(entry.dtype in _ITEM_BYTES for entry in found.values()) else None


def _shard(file: str, shapes: Shapes, dtype: str) -> Shard:
    """Return a shard whose header has the bytes that safetensors itself writes."""
    index: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape in shapes.items():
        end = begin + prod(shape) * _ITEM_BYTES[dtype]
        index[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    raw = json.dumps(index, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    header = len(raw).to_bytes(8, "little") + raw
    return Shard(file, header, tensors_of(header, len(header) + begin))
