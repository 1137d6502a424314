"""One safetensors file of boundary state: written completely or not at all, and used only when it is complete.

The layout is that of safetensors (8 bytes header length, JSON header, data), so any tool opens it. It is written here
because equal content must give equal bytes on every node, and the library orders metadata at random.

`content_checksum` in the metadata covers the other metadata, the index of tensors and the data. It is computed once,
while the data is written, and put into a place that the header has left for it; nodes compare this checksum. It is
XXH3 of 128 bits: against accidents. The nodes' certificates keep forgers out.
"""

import errno
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from io import BytesIO
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from xxhash import xxh3_128

from headway.stages.device.cpu import CpuDevice
from headway.stages.errors import DamagedFileError
from headway.stages.state.device_loading import DeviceLoading
from headway.stages.state.file_digest import FileDigest

FORMAT = "headway-state-1"
CHUNK_BYTES = 4 << 20
"""Bytes hashed and written, or read, at a time."""
_CHECKSUM = "content_checksum"
_NO_CHECKSUM = "0" * 32
_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 4 << 20
"""Maximum size of the JSON header: a layer's takes some kilobytes, and reading it takes many times its length."""
_MAX_DIMENSIONS = 8
_MAX_ELEMENTS = 1 << 48
_BLAMELESS = frozenset({errno.ENOENT, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors that say nothing about a file's content: it is gone, or this process has nothing to spare."""


class WriteCancelledError(Exception):
    """The file is not wanted any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateHeader:
    """A file's description of itself.

    It leaves out the generation that wrote it, because a boundary is a content. Writing a boundary twice gives equal
    bytes, so that a checkpoint may be written over itself at any moment.
    """

    job: str
    layer: str
    """`journal` names the journal's own file."""
    boundary: int
    timeline: int
    dtype: str
    """Dtype of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile(FileDigest):
    """A complete file in its place."""

    path: Path


def to_host(tensor: Tensor) -> tuple[Tensor]:
    """Return a tensor on the CPU, in one piece; without a copy if it is there."""
    return (tensor.detach().cpu(),)


@dataclass(frozen=True, slots=True)
class StateStart:
    """The bytes of a file before its data, and the beginning of its checksum."""

    head: bytes
    """With zeros in the place of the checksum."""
    place: int
    """Offset of the checksum."""
    data_bytes: int
    content: xxh3_128
    """Covers all but the data, which follows in the order of the tensors' names."""

    def signed(self, checksum: str) -> bytes:
        """Return the bytes with a checksum in its place."""
        return self.head[: self.place] + checksum.encode() + self.head[self.place + len(checksum) :]


def state_start(tensors: Mapping[str, tuple[str, Sequence[int]]], header: StateHeader) -> StateStart:
    """Return the start of a file from the dtype, as safetensors names it, and the shape of each tensor."""
    index: dict[str, Any] = {}
    offset = 0
    for name in sorted(tensors):
        dtype, shape = tensors[name]
        end = offset + prod(shape) * _DTYPES[dtype].itemsize
        index[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    metadata = {key: str(value) for key, value in asdict(header).items()} | {"format": FORMAT}
    head = _canonical(metadata | {_CHECKSUM: _NO_CHECKSUM}, index)
    place = 8 + head.index(f'"{_CHECKSUM}":"{_NO_CHECKSUM}"'.encode()) + len(f'"{_CHECKSUM}":"')
    head += b" " * (-len(head) % 8)
    return StateStart(len(head).to_bytes(8, "little") + head, place, offset, xxh3_128(_canonical(metadata, index)))


def write_state(
    path: Path,
    tensors: Mapping[str, Tensor],
    header: StateHeader,
    *,
    fetch: Callable[[Tensor], Sequence[Tensor]] = to_host,
    is_wanted: Callable[[], bool] = lambda: True,
) -> WrittenFile:
    """Write a file under a temporary name next to `path`, then rename it.

    fetch: returns a tensor's content on the CPU, in pieces, when its turn comes. is_wanted: is asked before every chunk
    and before the file gets its name.

    Raises OSError, which names the file, and WriteCancelledError when it is not wanted; nothing is left behind then.
    """
    names = sorted(tensors)
    start = state_start({name: (DTYPE_NAMES[tensors[name].dtype], tensors[name].shape) for name in names}, header)
    content = start.content

    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(start.head)
            for name in names:
                for chunk in (chunk for piece in fetch(tensors[name]) for chunk in _chunks(_bytes_of(piece))):
                    if not is_wanted():
                        raise WriteCancelledError(str(path))
                    file.write(chunk)
                    content.update(chunk)
            file.seek(start.place)
            file.write(content.hexdigest().encode())
        if not is_wanted():
            raise WriteCancelledError(str(path))
        temporary.replace(path)
    except BaseException as error:
        with suppress(FileNotFoundError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # an error of a write names no file
        raise
    return WrittenFile(path=path, size_bytes=len(start.head) + start.data_bytes, checksum=content.hexdigest())


def read_state(path: Path, *, loading: DeviceLoading | None = None) -> tuple[StateHeader, dict[str, Tensor]]:
    """Read a whole file, once, and check it. The caller owns the tensors. loading: to a device; None: to the CPU.

    Raises DamagedFileError when a byte is missing, added, altered or on a disk that fails, FileNotFoundError when there
    is no such file, and OSError when this process has no descriptor or memory to spare.
    """
    with _named(path):
        opened = path.open("rb", buffering=0)
    with opened as file:
        head = _read_head(path, file, os.fstat(file.fileno()).st_size)
        tensors = {}
        content = xxh3_128(_canonical(head.unsigned_metadata, head.index))

        def fill(piece: Tensor) -> None:
            for chunk in _chunks(_bytes_of(piece)):
                _fill(path, file, chunk)
                content.update(chunk)

        loading = loading or DeviceLoading(CpuDevice())
        for name, entry in head.index.items():
            tensors[name] = loading.read(_DTYPES[entry["dtype"]], entry["shape"], fill)
        loading.finish()
    head.check(path, content.hexdigest())
    try:
        header = StateHeader(
            **{field.name: field.type(head.metadata[field.name]) for field in fields(StateHeader)}  # type: ignore[operator]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(str(path), f"its header is not that of a state file: {error}") from error
    return header, tensors


def content_checksum(path: Path, *, beat: Callable[[], None] = lambda: None) -> str:
    """Return the content's checksum, computed in one pass and little memory, and compared with the file's own.

    beat: is called with each piece that is read.

    Raises DamagedFileError when a byte is missing, added or altered, OSError when the file cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        content = ContentCheck(path, os.fstat(file.fileno()).st_size)
        buffer = memoryview(bytearray(min(CHUNK_BYTES, max(1, content.size_bytes))))
        while num_read := file.readinto(buffer):
            content.update(buffer[:num_read])
            beat()
    return content.checksum()


class ContentCheck:
    """The content's checksum of a file whose bytes come in pieces, in order."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        """path: for messages. size_bytes: of the whole file."""
        self.size_bytes = size_bytes
        self.num_bytes = 0
        """Number of bytes that have come."""
        self._path = path
        self._start = bytearray()
        """Bytes of the header so far, while it is incomplete."""
        self._head: _Head | None = None
        self._content = xxh3_128()

    def update(self, piece: bytes | memoryview) -> None:
        """Add the next bytes. Raises DamagedFileError when the header, now complete, is invalid."""
        self.num_bytes += len(piece)
        if self._head is not None:
            self._content.update(piece)
            return
        self._start += piece
        head_bytes = 8 + (int.from_bytes(self._start[:8], "little") if len(self._start) >= 8 else 0)
        if len(self._start) < head_bytes <= min(self.size_bytes, 8 + _MAX_HEADER_BYTES):
            return
        self._head = _read_head(self._path, BytesIO(self._start), self.size_bytes)
        self._content.update(_canonical(self._head.unsigned_metadata, self._head.index))
        self._content.update(memoryview(self._start)[head_bytes:])
        self._start = bytearray()

    def checksum(self) -> str:
        """Return the checksum of all bytes. Raises DamagedFileError when it differs from the file's own."""
        if self._head is None or self.num_bytes != self.size_bytes:
            raise DamagedFileError(str(self._path), f"it is truncated: {self.num_bytes} bytes")
        found = self._content.hexdigest()
        self._head.check(self._path, found)
        return found


def check_header(path: Path, header: StateHeader, **expected: object) -> None:
    """Compare a file's header with the request. Raises DamagedFileError naming the difference."""
    for name, wanted in expected.items():
        found = getattr(header, name)
        if found != wanted:
            raise DamagedFileError(str(path), f"it is of {name} {found}, and {name} {wanted} was asked for")


@dataclass(frozen=True, slots=True)
class _Head:
    """The header before the data. Only the checksum proves it."""

    metadata: dict[str, str]
    index: dict[str, Any]
    """Tensors in the order of their data."""
    data_bytes: int

    @property
    def unsigned_metadata(self) -> dict[str, str]:
        return {key: value for key, value in self.metadata.items() if key != _CHECKSUM}

    def check(self, path: Path, found: str) -> None:
        if found != self.metadata.get(_CHECKSUM):
            raise DamagedFileError(str(path), "its content does not have the checksum that it was written with")


def _read_head(path: Path, file: IO[bytes], size: int) -> _Head:
    start = bytearray(8 if size >= 8 else 0)
    _fill(path, file, memoryview(start))
    length = int.from_bytes(start, "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        raise DamagedFileError(str(path), f"it is truncated: {size} bytes")
    head = bytearray(length)
    _fill(path, file, memoryview(head))
    data_bytes = size - 8 - length
    try:
        return _parsed(bytes(head), data_bytes)
    except Exception as error:  # foreign bytes may raise any error of a parser: RecursionError, OverflowError
        reason = str(error) if isinstance(error, _HeadError) else f"its header cannot be read: {_told(error)}"
        raise DamagedFileError(str(path), reason) from error


class _HeadError(ValueError):
    """A wrong header, described by a whole sentence."""


def _parsed(head: bytes, data_bytes: int) -> _Head:
    index = json.loads(head)
    metadata = index.pop("__metadata__")
    if metadata["format"] != FORMAT:
        raise _HeadError(f"its format is {str(metadata['format'])[:40]}, this program reads {FORMAT}")
    if head.rstrip(b" ") != _canonical(metadata, index) or len(head) % 8:
        raise _HeadError("its header is not as it was written")
    if not all(isinstance(value, str) for value in metadata.values()):
        raise _HeadError("its header is not that of a state file")
    offset = 0
    for name in sorted(index):
        try:
            offset = _end_of(index[name], offset)
        except (KeyError, TypeError, ValueError) as error:
            raise _HeadError(f"its index of tensors is wrong: {_told(error)}") from error
    if offset != data_bytes:
        raise _HeadError(f"its index of tensors is wrong: {data_bytes} bytes of data instead of {offset}")
    return _Head(metadata, {name: index[name] for name in sorted(index)}, data_bytes)


def _end_of(entry: Mapping[str, Any], begin: int) -> int:
    """Return where a tensor's data ends, when it begins here. Raises ValueError when its entry disagrees."""
    shape, itemsize = entry["shape"], _DTYPES[entry["dtype"]].itemsize
    if type(shape) is not list or len(shape) > _MAX_DIMENSIONS or any(type(size) is not int for size in shape):
        raise ValueError("a tensor has no shape")
    if min(shape, default=0) < 0 or prod(max(size, 1) for size in shape) > _MAX_ELEMENTS:
        raise ValueError("a tensor's shape is out of bounds")
    end = begin + int(prod(shape)) * itemsize
    if entry["data_offsets"] != [begin, end]:
        raise ValueError("a tensor's size and place disagree")
    return end


def _told(error: Exception) -> str:
    """Return an error in a few words: quotes of foreign bytes are cut."""
    return f"{type(error).__name__}: {error}"[:200]


def _fill(path: Path, file: IO[bytes], buffer: memoryview) -> None:
    """Read exactly this many bytes."""
    while len(buffer):
        with _named(path):
            num_read: int = file.readinto(buffer)  # type: ignore[attr-defined]
        if not num_read:
            raise DamagedFileError(str(path), "it became shorter while it was read")
        buffer = buffer[num_read:]


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn a failing disk into a damaged file: it is named, and another copy takes its place."""
    try:
        yield
    except OSError as error:
        if error.errno in _BLAMELESS:
            raise
        raise DamagedFileError(str(path), f"it cannot be read: {error.strerror or error}") from error


def _canonical(metadata: Mapping[str, str], index: Mapping[str, Any]) -> bytes:
    header = {"__metadata__": metadata, **index}
    return json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _chunks(data: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(data), CHUNK_BYTES):
        yield data[begin : begin + CHUNK_BYTES]


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU; its own memory if it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def tensor_of(data: bytes, dtype: str, shape: Sequence[int]) -> Tensor:
    """Return a tensor from its bytes. dtype: as safetensors names it."""
    return torch.frombuffer(bytearray(data), dtype=_DTYPES[dtype]).reshape(tuple(shape))


def raw_bytes(tensor: Tensor, dtype: str) -> memoryview:
    """Return a CPU tensor's bytes in a dtype, as safetensors names it."""
    return _bytes_of(tensor.to(_DTYPES[dtype]))
