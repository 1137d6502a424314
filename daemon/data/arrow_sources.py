"""Reads text in columns: parquet and Arrow files, also those that `datasets` saves; a few hundred rows at a time.

`pyarrow` belongs to the optional extra `data` and is imported when a source needs it.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headway.daemon.data.documents import BadRecord, Document, Field, FileSource, library
from headway.daemon.errors import ConfigError
from headway.daemon.storage.file_system import sentence

ROWS: Final = 256
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
            file = parquet.ParquetFile(self.path)
            _check_column(file.schema_arrow, self.field, self.path)
            share = self.size / max(1, file.metadata.num_rows)
            yield from _rows(
                file.iter_batches(batch_size=ROWS, columns=[self.field.name]), self.field, self.path, share
            )


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
            try:
                reader = ipc.open_stream(stream)
                batches: Iterable[Any] = reader
            except arrow.ArrowInvalid:
                stream.seek(0)
                reader = ipc.open_file(stream)
                batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            _check_column(reader.schema, self.field, self.path)
            yield from _rows(batches, self.field, self.path, 0.0)


def _rows(
    batches: Iterable[Any], field: Field, path: Path, share: float
) -> Iterator[tuple[Document | BadRecord, float]]:
    number = 0
    for batch in batches:
        column = batch.column(field.name)
        for start in range(0, len(column), ROWS):
            for text in column.slice(start, ROWS).to_pylist():
                number += 1
                yield field.document({field.name: text}, f"{path}, row {number}"), share


def _check_column(schema: Any, field: Field, path: Path) -> None:
    if field.is_chat and "tools" in schema.names:
        raise ConfigError("tools are read from .jsonl alone, and this file has a column of them", str(path))
    if field.name not in schema.names:
        raise ConfigError(f"has no column {field.name!r}; there are {', '.join(schema.names[:20])}", str(path))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn any pyarrow error about a file into one line with the file's name."""
    arrow = library("pyarrow")
    try:
        yield
    except (OSError, ValueError, arrow.ArrowException) as error:
        raise ConfigError(f"cannot be read: {sentence(error)}", str(path)) from error
