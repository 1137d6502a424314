"""Reads text in columns: parquet and Arrow files, also those that `datasets` saves; a few hundred rows at a time.

A small file may name a long text many times over, or inflate to any size. So a batch has so few rows that it fits into
memory, lists of texts stay references to them, and a record's size is known before the record is made.

`pyarrow` belongs to the optional extra `data` and is imported when a source needs it.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headway.daemon.data.arrow_messages import check_inflated
from headway.daemon.data.column_size import can_measure, num_bytes
from headway.daemon.data.documents import MAX_RECORD_BYTES, BadRecord, Document, Field, FileSource, library
from headway.daemon.errors import ConfigError
from headway.daemon.storage.file_system import sentence

ROWS: Final = 256
MAX_BATCH_BYTES: Final = 1 << 30
"""A group of rows that may take more is read row by row."""
_BUFFER_BYTES: Final = 1 << 20
_HEAD: Final = b"ARROW1\0\0"
_ABOUT_A_DATA_SET: Final = ("state.json", "dataset_info.json", "dataset_dict.json")


def without_descriptions(files: Iterable[Path]) -> list[Path]:
    """Return a folder's files, except those with which `datasets` describes the Arrow files."""
    every = list(files)
    saved = {file.parent for file in every if file.suffix == ".arrow"}
    saved |= {folder.parent for folder in saved}
    return [file for file in every if file.name not in _ABOUT_A_DATA_SET or file.parent not in saved]


def folder_of_split(folder: Path, split: str) -> Path:
    """Return the folder of one split of a saved `DatasetDict`; any other folder is itself. Raises ConfigError."""
    description = folder / "dataset_dict.json"
    if not description.is_file():
        return folder
    try:
        splits = [str(name) for name in json.loads(description.read_text(encoding="utf-8"))["splits"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"cannot be read: {error}", str(description)) from error
    if split not in splits or not (folder / split).is_dir():
        raise ConfigError(f"has no split {split!r}; there are {', '.join(splits)}: name one with --split", str(folder))
    return folder / split


@dataclass(frozen=True, slots=True)
class ParquetSource(FileSource):
    """A parquet file."""

    field: Field

    def documents(self) -> Iterator[tuple[Document | BadRecord, float]]:
        parquet = library("pyarrow.parquet")
        with _readable(self.path):
            with parquet.ParquetFile(self.path) as described:
                _check_column(described.schema_arrow, self.field, self.path)
                metadata = described.metadata
            parts = _leaves(metadata, self.field.name)
            in_lists = [name for name in parts.values() if name != self.field.name]
            with parquet.ParquetFile(
                self.path, metadata=metadata, read_dictionary=in_lists, pre_buffer=False, buffer_size=_BUFFER_BYTES
            ) as file:
                share = self.size / max(1, metadata.num_rows)
                batches = self._batches(file, list(parts), is_nested=bool(in_lists))
                yield from _rows(batches, self.field, self.path, share)

    def _batches(self, file: Any, columns: list[int], *, is_nested: bool) -> Iterator[Any]:
        for number in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(number)
            size = sum(group.column(column).total_uncompressed_size for column in columns)
            if size > MAX_RECORD_BYTES * group.num_rows:
                what = f"the {group.num_rows} rows of its row group {number} inflate to {size >> 20:,} MiB"
                raise ConfigError(f"{what}; a record has at most {MAX_RECORD_BYTES >> 20} MiB", str(self.path))
            # Each row of plain text is a copy, also where the file has that text once.
            rows = ROWS if is_nested and size <= MAX_BATCH_BYTES else 1
            yield from file.iter_batches(batch_size=rows, row_groups=[number], columns=[self.field.name])


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
            _check_column(reader.schema, self.field, self.path)
            yield from _rows(reader, self.field, self.path, 0.0)


def _rows(
    batches: Iterable[Any], field: Field, path: Path, share: float
) -> Iterator[tuple[Document | BadRecord, float]]:
    number = 0
    for batch in batches:
        column = batch.column(field.name)
        for start in range(0, len(column), ROWS):
            for values in _made(column.slice(start, ROWS)):
                number += 1
                where = f"{path}, row {number}"
                if values is None:
                    yield BadRecord(f"is longer than {MAX_RECORD_BYTES >> 20} MiB", where), share
                else:
                    yield field.document({field.name: values[0]}, where), share


def _made(column: Any) -> Iterator[list[Any] | None]:
    """Yield each record in a list; None: it is too long."""
    if num_bytes(column) <= MAX_RECORD_BYTES:
        yield from ([value] for value in column.to_pylist())
        return
    for index in range(len(column)):
        one = column.slice(index, 1)
        yield one.to_pylist() if num_bytes(one) <= MAX_RECORD_BYTES else None


def _leaves(metadata: Any, name: str) -> dict[int, str]:
    """Return the columns of a parquet file that a column of Arrow consists of, with their names."""
    paths = ((number, metadata.schema.column(number).path) for number in range(metadata.num_columns))
    return {number: path for number, path in paths if path == name or path.startswith(f"{name}.")}


def _check_column(schema: Any, field: Field, path: Path) -> None:
    if field.is_chat and "tools" in schema.names:
        raise ConfigError("tools are read from .jsonl alone, and this file has a column of them", str(path))
    if field.name not in schema.names:
        raise ConfigError(f"has no column {field.name!r}; there are {', '.join(schema.names[:20])}", str(path))
    if not can_measure(kind := schema.field(field.name).type):
        raise ConfigError(f"its column {field.name!r} has the type {kind}, which is not read", str(path))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn any pyarrow error about a file into one line with the file's name."""
    arrow = library("pyarrow")
    try:
        yield
    except (OSError, ValueError, arrow.ArrowException) as error:
        raise ConfigError(f"cannot be read: {sentence(error)}", str(path)) from error
