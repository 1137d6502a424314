"""Where text for training lies: files, folders, JSON lines, parquet, Hugging Face data sets, all read as documents.

`datasets` and `pyarrow` belong to the optional extra `data` and are imported when a source needs them.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from headway.daemon.errors import ConfigError

HUGGING_FACE_PREFIX = "hf:"
_PIECE_BYTES = 1 << 20

Document = Iterator[bytes]
"""One text as UTF-8, in pieces that end at line ends."""


class Source(Protocol):
    """A place that documents come from."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def size(self) -> float:
        """What the second halves of `documents()` add up to; 0: not known before the end."""
        ...

    def documents(self) -> Iterator[tuple[Document, float]]:
        """Each text, with the part of `size` that it stands for. A document is read before the next is asked for."""
        ...


def open_sources(name: str, *, field: str, config: str | None, split: str) -> list[Source]:
    """The sources that a name stands for. `field` is the text's column; config and split are for Hugging Face.

    Raises ConfigError when there is no such file.
    """
    if name.startswith(HUGGING_FACE_PREFIX):
        return [HuggingFaceSource(name.removeprefix(HUGGING_FACE_PREFIX), field, config, split)]
    path = Path(name)
    if path.is_dir():
        files = sorted((file for file in path.rglob("*") if file.is_file()), key=Path.as_posix)
        if not files:
            raise ConfigError("this folder holds no files", name)
        return [_file_source(file, field) for file in files]
    if not path.is_file():
        raise ConfigError("no such file or folder (a Hugging Face data set is written hf:NAME)", name)
    return [_file_source(path, field)]


def library(name: str) -> Any:
    """A library of the optional extra. Raises ConfigError that names the extra."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(f"needs the library {name}: pip install 'headway[data]'") from error


@dataclass(frozen=True, slots=True)
class TextSource:
    """A file that is one document."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def size(self) -> float:
        return self.path.stat().st_size

    def documents(self) -> Iterator[tuple[Document, float]]:
        yield self._pieces(), self.size

    def _pieces(self) -> Document:
        with self.path.open("rb") as stream:
            while lines := stream.readlines(_PIECE_BYTES):
                yield b"".join(lines)


@dataclass(frozen=True, slots=True)
class JsonLinesSource:
    """A file with one JSON object a line."""

    path: Path
    field: str

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def size(self) -> float:
        return self.path.stat().st_size

    def documents(self) -> Iterator[tuple[Document, float]]:
        with self.path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    where = f"{self.path}, line {number}"
                    try:
                        record = json.loads(line)
                    except ValueError as error:
                        raise ConfigError("is not JSON", where) from error
                    yield iter([_text(record, self.field, where)]), len(line)


@dataclass(frozen=True, slots=True)
class ParquetSource:
    """A parquet file, read one row group at a time."""

    path: Path
    field: str

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def size(self) -> float:
        return self.path.stat().st_size

    def documents(self) -> Iterator[tuple[Document, float]]:
        parquet = library("pyarrow.parquet")
        try:
            file = parquet.ParquetFile(self.path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot be read: {error}", str(self.path)) from error
        if self.field not in file.schema_arrow.names:
            raise ConfigError(f"has no column {self.field!r}", str(self.path))
        share = self.size / max(1, file.metadata.num_rows)
        for group in range(file.num_row_groups):
            for text in file.read_row_group(group, columns=[self.field]).column(self.field).to_pylist():
                yield iter([_text({self.field: text}, self.field, str(self.path))]), share


@dataclass(frozen=True, slots=True)
class HuggingFaceSource:
    """A data set of the Hugging Face hub, streamed."""

    repository: str
    field: str
    config: str | None
    split: str

    @property
    def name(self) -> str:
        return HUGGING_FACE_PREFIX + self.repository

    @property
    def size(self) -> float:
        return 0.0

    def documents(self) -> Iterator[tuple[Document, float]]:
        datasets = library("datasets")
        try:
            records = datasets.load_dataset(self.repository, self.config, split=self.split, streaming=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot be opened: {str(error).splitlines()[0]}", self.name) from error
        for number, record in enumerate(records):
            yield iter([_text(record, self.field, f"{self.name}, record {number}")]), 0.0


def _file_source(path: Path, field: str) -> Source:
    if path.suffix in {".jsonl", ".ndjson"}:
        return JsonLinesSource(path, field)
    if path.suffix == ".parquet":
        return ParquetSource(path, field)
    return TextSource(path)


def _text(record: Any, field: str, where: str) -> bytes:
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f"has no text in the field {field!r}", where)
    return text.encode()
