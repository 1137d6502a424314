"""Reads text in columns: parquet and Arrow files, also those that `datasets` saves; a few hundred rows at a time.

`pyarrow` belongs to the optional extra `data` and is imported when a source needs it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headway.daemon.base.errors import ConfigError
from headway.daemon.base.file_system import sentence
from headway.daemon.text.documents import BadRecord, Document, FileSource, library
from headway.daemon.text.records import Field, without_nulls

ROWS: Final = 256
"""Rows that are Python objects at once."""
_BUFFER_BYTES: Final = 1 << 20
_HEAD: Final = b"ARROW1\0\0"


@dataclass(frozen=True, slots=True)
class ParquetSource(FileSource):
    """A parquet file."""

    field: Field

    def documents(self) -> Iterator[tuple[Document | BadRecord, float]]:
        parquet = library("pyarrow.parquet")
        with (
            _readable(self.path),
            parquet.ParquetFile(self.path, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file,
        ):
            columns = _columns(file.schema_arrow.names, self.field, self.path)
            share = self.size / max(1, file.metadata.num_rows)
            yield from _rows(file.iter_batches(ROWS, columns=columns), self.field, self.path, share)


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
            stream.seek(len(_HEAD) if stream.read(len(_HEAD)) == _HEAD else 0)
            reader = ipc.open_stream(stream)
            columns = _columns(reader.schema.names, self.field, self.path)
            yield from _rows((batch.select(columns) for batch in reader), self.field, self.path, 0.0)


def _rows(
    batches: Iterable[Any], field: Field, path: Path, share: float
) -> Iterator[tuple[Document | BadRecord, float]]:
    parts = (batch.slice(start, ROWS) for batch in batches for start in range(0, batch.num_rows, ROWS))
    records = (record for part in parts for record in part.to_pylist())
    for number, record in enumerate(records, 1):
        yield field.document(without_nulls(record), f"{path}, row {number}"), share


def _columns(names: list[str], field: Field, path: Path) -> list[str]:
    """Return the columns that are read. Raises ConfigError if they are missing."""
    try:
        return field.columns(names)
    except ConfigError as error:
        raise ConfigError(error.what, str(path)) from error


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn any pyarrow error about a file into one line with the file's name."""
    arrow = library("pyarrow")
    try:
        yield
    except (OSError, ValueError, arrow.ArrowException) as error:
        raise ConfigError(f"cannot be read: {sentence(error)}", str(path)) from error
