"""Reads text in columns: parquet and Arrow files, also those that `datasets` saves; a few hundred rows at a time.

A small file may name a long text many times over, or inflate to any size. So a batch has so few rows that it fits into
memory, lists of texts stay references to them, and a record's size is known before the record is made.

`pyarrow` belongs to the optional extra `data` and is imported when a source needs it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headway.daemon.data.documents import MAX_RECORD_BYTES, BadRecord, Document, FileSource, library
from headway.daemon.errors import ConfigError
from headway.daemon.sources.arrow_messages import check_inflated
from headway.daemon.sources.column_size import can_measure, num_bytes
from headway.daemon.sources.records import Field, without_nulls
from headway.daemon.storage.file_system import sentence

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
