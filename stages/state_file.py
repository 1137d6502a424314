"""One safetensors file of boundary state: written all or not at all, and believed only when it is whole.

The layout is that of safetensors (8 bytes header length, JSON header, data), so any tool opens it. It is written here
because the same content must give the same bytes on every node, and the library orders metadata at random.

`content_sha256` in the metadata covers the other metadata, the index of tensors and the data. The SHA-256 of the whole
file, which the writer returns, is what nodes compare among themselves.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.stages.errors import DamagedFileError

FORMAT = "headway-state-1"
_CHECKSUM = "content_sha256"
_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


@dataclass(frozen=True, slots=True, kw_only=True)
class StateHeader:
    """What a file says it is.

    Not which generation wrote it: a boundary is a content. Writing the same one again gives the same bytes, so that a
    checkpoint may be written over itself at any moment.
    """

    job: str
    layer: str
    """`journal` names the journal's own file."""
    boundary: int
    timeline: int
    dtype: str
    """Of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A file that is whole and in place."""

    path: Path
    size_bytes: int
    sha256: str
    """Of the whole file."""


def write_state(
    path: Path, tensors: Mapping[str, Tensor], header: StateHeader, *, durable: bool = False
) -> WrittenFile:
    """Write a file under a temporary name beside `path`, then rename it. durable: it survives a power cut.

    Raises OSError; nothing is left behind then.
    """
    names = sorted(tensors)
    index: dict[str, Any] = {}
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.nbytes
        index[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    metadata = {key: str(value) for key, value in asdict(header).items()} | {"format": FORMAT}
    content = hashlib.sha256(_canonical(metadata, index))
    for name in names:
        content.update(_bytes_of(tensors[name]))
    head = _canonical(metadata | {_CHECKSUM: content.hexdigest()}, index)
    head += b" " * (-len(head) % 8)
    head = len(head).to_bytes(8, "little") + head

    whole = hashlib.sha256()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with temporary.open("wb") as file:
            for part in _parts(head, names, tensors):
                file.write(part)
                whole.update(part)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise
    if durable:
        _sync_folder(path.parent)
    return WrittenFile(path=path, size_bytes=len(head) + offset, sha256=whole.hexdigest())


def read_state(path: Path) -> tuple[StateHeader, dict[str, Tensor]]:
    """Read a whole file and check it. The tensors lie in one buffer that nobody else has.

    Raises DamagedFileError when a byte is missing, added or altered, FileNotFoundError when there is no such file.
    """
    raw = bytearray(path.read_bytes())
    metadata, index, start = _parse(path, raw)
    data = memoryview(raw)[start:]
    content = hashlib.sha256(_canonical({k: v for k, v in metadata.items() if k != _CHECKSUM}, index))
    content.update(data)
    if content.hexdigest() != metadata.get(_CHECKSUM):
        raise DamagedFileError(str(path), "its content does not have the checksum that it was written with")
    try:
        header = StateHeader(
            **{field.name: field.type(metadata[field.name]) for field in fields(StateHeader)}  # type: ignore[operator]
        )
        tensors = {name: _tensor(data, entry) for name, entry in index.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(str(path), f"its header is not that of a state file: {error}") from error
    return header, tensors


def check_header(path: Path, header: StateHeader, **expected: object) -> None:
    """Compare a file's header with what was asked for. Raises DamagedFileError naming the difference."""
    for name, wanted in expected.items():
        found = getattr(header, name)
        if found != wanted:
            raise DamagedFileError(str(path), f"it is of {name} {found}, and {name} {wanted} was asked for")


def _canonical(metadata: Mapping[str, str], index: Mapping[str, Any]) -> bytes:
    header = {"__metadata__": metadata, **index}
    return json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _parts(head: bytes, names: list[str], tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    yield head
    for name in names:
        yield _bytes_of(tensors[name])


def _bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes; without a copy on a CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _parse(path: Path, raw: bytearray) -> tuple[dict[str, str], dict[str, Any], int]:
    """Metadata, tensor index and the offset of the data. Only its checksum says whether they can be believed."""
    length = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or length > min(len(raw) - 8, _MAX_HEADER_BYTES):
        raise DamagedFileError(str(path), f"it is truncated: {len(raw)} bytes")
    head = raw[8 : 8 + length]
    try:
        index = json.loads(head)
        metadata = index.pop("__metadata__")
        if metadata["format"] != FORMAT:
            raise DamagedFileError(str(path), f"its format is {metadata['format']}, this program reads {FORMAT}")
        canonical = _canonical(metadata, index)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(str(path), f"its header cannot be read: {error}") from error
    if head.rstrip(b" ") != canonical or length % 8:
        raise DamagedFileError(str(path), "its header is not as it was written")
    return metadata, index, 8 + length


def _tensor(data: memoryview, entry: Mapping[str, Any]) -> Tensor:
    dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if end - begin != prod(shape) * dtype.itemsize or not 0 <= begin <= end <= len(data):
        raise ValueError("a tensor's size and place disagree")
    if begin == end:
        return torch.empty(shape, dtype=dtype)
    # The slice is copied: a tensor of 8-byte numbers may lie at any offset, and the buffer should not live on with one.
    return torch.frombuffer(bytearray(data[begin:end]), dtype=dtype).reshape(shape)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
