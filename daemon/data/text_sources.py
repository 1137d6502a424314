"""Sources of text for training: files, folders, JSON lines, columns, Hugging Face data sets, all read as documents.

`datasets` belongs to the optional extra `data` and is imported when a source needs it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from headway.daemon.data.arrow_sources import ArrowSource, ParquetSource, folder_of_split, without_descriptions
from headway.daemon.data.documents import MAX_RECORD_BYTES, BadRecord, Document, Field, FileSource, library
from headway.daemon.data.file_content import check_beginning, check_kind, checked, file_content, is_compressed, kind_of
from headway.daemon.data.pieces import pieces_from
from headway.daemon.errors import ConfigError

HUGGING_FACE_PREFIX = "hf:"
MAX_LINE_BYTES: Final = MAX_RECORD_BYTES
"""Maximum length of a JSON line, which is parsed as a whole."""
_SKIP_BYTES: Final = 1 << 20


class Source(Protocol):
    """A place that documents come from."""

    @property
    def name(self) -> str:
        """Return the name for people."""
        ...

    @property
    def identity(self) -> str | None:
        """Return a text that another content changes; None: there is no such text."""
        ...

    @property
    def size(self) -> float:
        """Return the sum of the second halves of `documents()`; 0: not known before the end."""
        ...

    def documents(self) -> Iterator[tuple[Document | BadRecord, float]]:
        """Yield each text, or why a record has none, with its part of `size`.

        A document is read before the next is requested.
        """
        ...


def open_sources(
    name: str, *, field: Field, config: str | None = None, split: str = "train", is_binary: bool = False
) -> list[Source]:
    """Return the sources of a name. `field` is the text's column; config and split are for Hugging Face.

    is_binary: each file is a document of its bytes. Raises ConfigError: there is no such file, or it is no text.
    """
    if name.startswith(HUGGING_FACE_PREFIX):
        return [HuggingFaceSource(name.removeprefix(HUGGING_FACE_PREFIX), field, config, split)]
    path = Path(name)
    if path.is_dir():
        path = folder_of_split(path, split)
        files = without_descriptions(sorted((file for file in path.rglob("*") if file.is_file()), key=Path.as_posix))
        if not files:
            raise ConfigError("this folder holds no files", name)
        return [_file_source(file, field, is_binary=is_binary) for file in files]
    if path.exists() and not path.is_file():
        raise ConfigError("is a pipe, a socket or a device; write its text to a file first", name)
    if not path.is_file():
        raise ConfigError("no such file or folder (a Hugging Face data set is written hf:NAME)", name)
    return [_file_source(path, field, is_binary=is_binary)]


@dataclass(frozen=True, slots=True)
class TextSource(FileSource):
    """A file that is one document."""

    is_binary: bool = False
    """Its bytes are taken as they are."""

    def documents(self) -> Iterator[tuple[Document | BadRecord, float]]:
        yield self._pieces(), self.size

    def _pieces(self) -> Document:
        if self.is_binary:
            with self.path.open("rb") as stream:
                yield from pieces_from(stream)
            return
        with file_content(self.path) as (content, _):
            yield from checked(pieces_from(content), self.path)


@dataclass(frozen=True, slots=True)
class JsonLinesSource(FileSource):
    """A file with one JSON object a line."""

    field: Field

    def documents(self) -> Iterator[tuple[Document | BadRecord, float]]:
        with file_content(self.path) as (content, file):
            number, start = 0, 0
            while line := content.readline(MAX_LINE_BYTES + 1):
                number += 1
                where = f"{self.path}, line {number}"
                if len(line) > MAX_LINE_BYTES:
                    line = line[-1:]  # so that two lines are never in memory
                    while line and not line.endswith(b"\n"):
                        line = content.readline(_SKIP_BYTES)
                    found: Document | BadRecord = BadRecord(f"is longer than {MAX_LINE_BYTES >> 20} MiB", where)
                elif line.strip():
                    found = self._document(line, where)
                else:
                    continue
                end = file.tell()
                yield found, end - start
                start = end

    def _document(self, line: bytes, where: str) -> Document | BadRecord:
        try:
            return self.field.document(json.loads(line), where)
        except UnicodeDecodeError:
            return BadRecord("is not UTF-8 text", where)
        except (ValueError, RecursionError):
            return BadRecord("is not JSON", where)


@dataclass(frozen=True, slots=True)
class HuggingFaceSource:
    """A data set of the Hugging Face hub, streamed."""

    repository: str
    field: Field
    config: str | None
    split: str

    @property
    def name(self) -> str:
        return HUGGING_FACE_PREFIX + self.repository

    @property
    def identity(self) -> str | None:
        return None  # the repository may get another commit at any time

    @property
    def size(self) -> float:
        return 0.0

    def documents(self) -> Iterator[tuple[Document | BadRecord, float]]:
        datasets = library("datasets")
        try:
            records = datasets.load_dataset(self.repository, self.config, split=self.split, streaming=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"cannot be opened: {_first_line(error)}", self.name) from error
        number = 0
        try:
            for record in records:
                yield self.field.document(record, f"{self.name}, record {number}"), 0.0
                number += 1
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"cannot be read beyond record {number}: {_first_line(error)}", self.name) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _file_source(path: Path, field: Field, *, is_binary: bool) -> Source:
    if is_binary:
        return TextSource(path, is_binary=True)
    kind = kind_of(path)
    if kind in {".parquet", ".arrow"}:
        if is_compressed(path):
            raise ConfigError("is compressed as a whole, and is not read by columns so; decompress it first", str(path))
        return ParquetSource(path, field) if kind == ".parquet" else ArrowSource(path, field)
    if kind in {".jsonl", ".ndjson"}:
        check_kind(path)
        return JsonLinesSource(path, field)
    check_beginning(path)
    return TextSource(path)
