"""Reads text in columns: parquet and Arrow files, also those that `datasets` saves; a few hundred rows at a time.

A small file may name a long text many times over, or inflate to any size. So a batch has so few rows that it fits into
memory, lists of texts stay references to them, and a record's size is known before the record is made.

`pyarrow` belongs to the optional extra `data` and is imported when a source needs it.
"""

import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headway.daemon.data.documents import MAX_RECORD_BYTES, BadRecord, Document, FileSource, library
from headway.daemon.errors import ConfigError
from headway.daemon.sources.records import Field, without_nulls
from headway.daemon.storage.file_system import sentence

# Bounds what the messages of an Arrow file inflate to, before any is inflated.
#
# A message is a FlatBuffer of the Arrow columnar format (Message.fbs), and a body. Each compressed buffer of the body
# begins with its own length after inflation, 8 bytes; -1: it is not compressed.

MAX_INFLATED_BYTES: Final = 1 << 30
"""Of one batch of records; one that is not compressed may have any size, because the file is mapped into memory."""
_DICTIONARY_BATCH: Final = 2
_RECORD_BATCH: Final = 3


def check_inflated(messages: Iterable[Any], name: str) -> None:
    """Raise ConfigError if a batch inflates to too much, or is damaged."""
    for number, message in enumerate(messages):
        try:
            size = inflated_bytes(memoryview(message.metadata), memoryview(message.body or b""))
        except (struct.error, ValueError) as error:
            raise ConfigError(f"cannot be read: its message {number} is damaged", name) from error
        if size > MAX_INFLATED_BYTES:
            most = f"at most {MAX_INFLATED_BYTES >> 20:,} MiB are read at once: write smaller batches"
            raise ConfigError(f"its message {number} inflates to {size >> 20:,} MiB; {most}", name)


def inflated_bytes(metadata: memoryview, body: memoryview) -> int:
    """Return the number of bytes that a message's compressed buffers inflate to. Raises ValueError, struct.error."""
    message = _referred(metadata, 0)
    kind, header = _field(metadata, message, 1), _field(metadata, message, 2)
    if kind is None or header is None or metadata[kind] not in (_DICTIONARY_BATCH, _RECORD_BATCH):
        return 0
    batch: int = _referred(metadata, header)
    if metadata[kind] == _DICTIONARY_BATCH:
        data = _field(metadata, batch, 1)
        if data is None:
            return 0
        batch = _referred(metadata, data)
    buffers, compression = _field(metadata, batch, 2), _field(metadata, batch, 3)
    if buffers is None or compression is None:
        return 0
    vector = _referred(metadata, buffers)
    total = 0
    for index in range(_number(metadata, "<I", vector)):
        start, length = struct.unpack_from("<qq", metadata, vector + 4 + 16 * index)
        if length:
            size = _number(body, "<q", start)
            if size < -1:
                raise ValueError("a length is negative")
            total += max(size, 0)
    return total


def _field(raw: memoryview, table: int, number: int) -> int | None:
    """Return where a table's field is; None: it has its default."""
    vtable = table - _number(raw, "<i", table)
    slot = 4 + 2 * number
    if slot + 2 > _number(raw, "<H", vtable):
        return None
    offset = _number(raw, "<H", vtable + slot)
    return table + offset if offset else None


def _referred(raw: memoryview, at: int) -> int:
    return at + _number(raw, "<I", at)


def _number(raw: memoryview, form: str, at: int) -> int:
    if at < 0:
        raise ValueError("a place is negative")
    found: int = struct.unpack_from(form, raw, at)[0]
    return found


# The memory that a column of Arrow takes as Python objects, before these are made.
#
# A dictionary, or lists over it, may name one long text any number of times.

VALUE_BYTES: Final = 64
"""What each value counts beside its text."""


def can_measure(kind: Any) -> bool:
    """Return whether `num_bytes` knows a type. It does not know views and runs, which few files have."""
    types = library("pyarrow").types
    if types.is_dictionary(kind) or _is_list(types, kind):
        return can_measure(kind.value_type)
    if types.is_map(kind):
        return can_measure(kind.key_type) and can_measure(kind.item_type)
    if types.is_struct(kind):
        return all(can_measure(kind.field(number).type) for number in range(kind.num_fields))
    return bool(_is_text(types, kind) or types.is_primitive(kind) or types.is_null(kind))


def num_bytes(column: Any) -> int:
    """Return about how many bytes the values of an array take, with each repetition. `can_measure` is true of it."""
    types, compute = library("pyarrow").types, library("pyarrow.compute")
    kind, own = column.type, VALUE_BYTES * len(column)
    if types.is_dictionary(kind):
        if not _is_text(types, kind.value_type):
            return own + len(column) * num_bytes(column.dictionary)
        lengths = compute.binary_length(column.dictionary).take(column.indices)
        return own + (compute.sum(lengths).as_py() or 0)
    if _is_text(types, kind):
        return own + (compute.sum(compute.binary_length(column)).as_py() or 0)
    if types.is_struct(kind):
        return own + sum(num_bytes(part) for part in column.flatten())
    if _is_list(types, kind) or types.is_map(kind):
        return own + num_bytes(column.flatten())
    return own


def _is_list(types: Any, kind: Any) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_text(types: Any, kind: Any) -> bool:
    of = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary, types.is_fixed_size_binary)
    return any(is_kind(kind) for is_kind in of)


ROWS: Final = 256
MAX_BATCH_BYTES: Final = 1 << 30
"""A group of rows that may take more is read row by row."""
_BUFFER_BYTES: Final = 1 << 20
_HEAD: Final = b"ARROW1\0\0"


@dataclass(frozen=True, slots=True)
class ParquetSource(FileSource):
    """A parquet file."""

    field: Field

    def documents(self) -> Iterator[tuple[Document | BadRecord, float]]:
        parquet = library("pyarrow.parquet")
        with _readable(self.path):
            with parquet.ParquetFile(self.path) as described:
                columns = _columns(described.schema_arrow, self.field, self.path)
                metadata = described.metadata
            parts = _leaves(metadata, columns)
            in_lists = [name for name in parts.values() if name not in columns]
            with parquet.ParquetFile(
                self.path, metadata=metadata, read_dictionary=in_lists, pre_buffer=False, buffer_size=_BUFFER_BYTES
            ) as file:
                share = self.size / max(1, metadata.num_rows)
                batches = self._batches(file, columns, list(parts), is_nested=bool(in_lists))
                yield from _rows(batches, self.field, self.path, share)

    def _batches(self, file: Any, columns: list[str], leaves: list[int], *, is_nested: bool) -> Iterator[Any]:
        for number in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(number)
            size = sum(group.column(column).total_uncompressed_size for column in leaves)
            if size > MAX_RECORD_BYTES * group.num_rows:
                what = f"the {group.num_rows} rows of its row group {number} inflate to {size >> 20:,} MiB"
                raise ConfigError(f"{what}; a record has at most {MAX_RECORD_BYTES >> 20} MiB", str(self.path))
            # Each row of plain text is a copy, also where the file has that text once.
            rows = ROWS if is_nested and size <= MAX_BATCH_BYTES else 1
            yield from file.iter_batches(batch_size=rows, row_groups=[number], columns=columns)


@dataclass(frozen=True, slots=True)
class ArrowSource(FileSource):
    """An Arrow file, as a stream or with random access, as `datasets.save_to_disk` writes it."""

    field: Field

    @property
    def size(self) -> float:
        return 0.0  # a stream gives its number of rows only at its end

    def documents(self) -> Iterator[tuple[Document | BadRecord, float]]:
        arrow, ipc = library("pyarrow"), library("pyarrow.ipc")
        with _readable(self.path), arrow.memory_map(str(self.path)) as stream:
            # With random access, the file is a stream between a head and a table of contents.
            start = len(_HEAD) if stream.read(len(_HEAD)) == _HEAD else 0
            stream.seek(start)
            check_inflated(ipc.MessageReader.open_stream(stream), str(self.path))
            stream.seek(start)
            reader = ipc.open_stream(stream)
            columns = _columns(reader.schema, self.field, self.path)
            yield from _rows((batch.select(columns) for batch in reader), self.field, self.path, 0.0)


def _rows(
    batches: Iterable[Any], field: Field, path: Path, share: float
) -> Iterator[tuple[Document | BadRecord, float]]:
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, ROWS):
            for record in _made(batch.slice(start, ROWS)):
                number += 1
                where = f"{path}, row {number}"
                if record is None:
                    yield BadRecord(f"is longer than {MAX_RECORD_BYTES >> 20} MiB", where), share
                else:
                    yield field.document(without_nulls(record), where), share


def _made(batch: Any) -> Iterator[dict[str, Any] | None]:
    """Yield each record; None: it is too long."""
    if _size(batch) <= MAX_RECORD_BYTES:
        yield from batch.to_pylist()
        return
    for index in range(batch.num_rows):
        one = batch.slice(index, 1)
        yield one.to_pylist()[0] if _size(one) <= MAX_RECORD_BYTES else None


def _size(batch: Any) -> int:
    return sum(num_bytes(column) for column in batch.columns)


def _leaves(metadata: Any, columns: list[str]) -> dict[int, str]:
    """Return the columns of a parquet file that these columns of Arrow consist of, with their names."""
    paths = ((number, metadata.schema.column(number).path) for number in range(metadata.num_columns))
    begins = tuple(f"{name}." for name in columns)
    return {number: path for number, path in paths if path in columns or path.startswith(begins)}


def _columns(schema: Any, field: Field, path: Path) -> list[str]:
    """Return the columns that are read. Raises ConfigError: they are missing, or of a type that is not read."""
    try:
        columns = field.columns(schema.names)
    except ConfigError as error:
        raise ConfigError(error.what, str(path)) from error
    for name in columns:
        if not can_measure(kind := schema.field(name).type):
            raise ConfigError(
                f"its column {name!r} has the type {kind}, which is not read; write it as string", str(path)
            )
    return columns


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn any pyarrow error about a file into one line with the file's name."""
    arrow = library("pyarrow")
    try:
        yield
    except (OSError, ValueError, arrow.ArrowException) as error:
        raise ConfigError(f"cannot be read: {sentence(error)}", str(path)) from error
