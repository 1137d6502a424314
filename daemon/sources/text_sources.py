"""Sources of text for training: files, folders, JSON lines, columns, Hugging Face data sets, all read as documents.

`datasets` belongs to the optional extra `data` and is imported when a source needs it.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from headway.daemon.data.documents import BadRecord, Document, FileSource, library
from headway.daemon.errors import ConfigError
from headway.daemon.sources.arrow_sources import ArrowSource, ParquetSource
from headway.daemon.sources.file_content import (
    check_beginning,
    check_kind,
    checked,
    file_content,
    is_compressed,
    kind_of,
)
from headway.daemon.sources.found_files import find_files
from headway.daemon.sources.pieces import pieces_from
from headway.daemon.sources.record_files import JsonLinesSource, JsonSource, TableSource
from headway.daemon.sources.records import Field, without_nulls

HUGGING_FACE_PREFIX = "hf:"


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
    name: str,
    *,
    field: Field,
    config: str | None = None,
    split: str = "train",
    is_binary: bool = False,
    tell: Callable[[str], None] = lambda _text: None,
) -> list[Source]:
    """Return the sources of a name. config and split are for Hugging Face, is_binary makes each file a document.

    tell receives what is passed over. Raises ConfigError: there is no such file, or it is no text.
    """
    if name.startswith(HUGGING_FACE_PREFIX):
        return [HuggingFaceSource(name.removeprefix(HUGGING_FACE_PREFIX), field, config, split)]
    files = find_files(name, split, tell)
    if is_binary:
        return [TextSource(file, is_binary=True) for file in files]
    kinds = Counter("text" if (kind := kind_of(file)) not in _OF_RECORDS else kind for file in files)
    if len(kinds) > 1:
        tell(f"{name}: has files of several kinds: {', '.join(f'{num} {kind}' for kind, num in sorted(kinds.items()))}")
    return [_file_source(file, field) for file in files]


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
                yield self.field.document(without_nulls(record), f"{self.name}, record {number}"), 0.0
                number += 1
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"cannot be read beyond record {number}: {_first_line(error)}", self.name) from error


_OF_RECORDS: Final[dict[str, Callable[[Path, Field], Source]]] = {
    ".jsonl": JsonLinesSource,
    ".ndjson": JsonLinesSource,
    ".json": JsonSource,
    ".csv": TableSource,
    ".tsv": TableSource,
    ".parquet": ParquetSource,
    ".arrow": ArrowSource,
    ".feather": ArrowSource,
}
"""Kinds of files with records; every other file is a text."""


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _file_source(path: Path, field: Field) -> Source:
    kind = kind_of(path)
    make = _OF_RECORDS.get(kind)
    if make is None:
        if field.is_chat or field.is_pair:
            raise ConfigError(f"is a text, and conversations are in {', '.join(_OF_RECORDS)}", str(path))
        check_beginning(path)
        return TextSource(path)
    if make in (ParquetSource, ArrowSource):
        if is_compressed(path):
            raise ConfigError("is compressed as a whole, and is not read by columns so; decompress it first", str(path))
    else:
        check_kind(path)
    return make(path, field)
