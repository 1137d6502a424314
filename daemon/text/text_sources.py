"""Sources of text for training: files, folders, JSON lines, columns, Hugging Face data sets, all read as documents.

`datasets` and `pyarrow` belong to the optional extra `data` and are imported when a source needs them.
"""

import glob
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from headway.daemon.base.errors import ConfigError
from headway.daemon.base.file_system import sentence
from headway.daemon.text.documents import BadRecord, Document, FileSource, library
from headway.daemon.text.file_content import (
    check_beginning,
    check_kind,
    checked,
    file_content,
    is_compressed,
    kind_of,
    pieces_from,
)
from headway.daemon.text.record_files import JsonLinesSource, JsonSource, TableSource
from headway.daemon.text.records import Field, without_nulls

# Finds the files that a name stands for: a file, a folder, or a pattern with `*`. The order is that of their paths.

_ABOUT_A_DATA_SET: Final = ("state.json", "dataset_info.json", "dataset_dict.json", "dataset_infos.json")
_SPLIT: Final = r"train|test|valid|val|dev|eval"
_OF_SPLIT: Final = (
    re.compile(rf"(?:.+-)?(\w*(?:{_SPLIT})\w*)[-.]\d{{5}}-of-\d{{5}}\..+"),
    re.compile(rf"({_SPLIT}|validation)\.(?:jsonl|ndjson|json|csv|tsv|parquet|arrow)(?:\.\w+)?"),
)
"""Names of files that hold one split of a data set, as the Hub has them."""
_ABOUT_A_FOLDER: Final = re.compile(r"(README|LICEN[CS]E|CHANGELOG|CITATION)(\.\w+)?", re.IGNORECASE)


def find_files(name: str, split: str, tell: Callable[[str], None]) -> list[Path]:
    """Return files. tell receives what is passed over. Raises ConfigError when there are none.

    split: of a folder that has several.
    """
    path = Path(name)
    if path.is_dir():
        return _in_folder(path, split, tell)
    if path.is_file():
        return [path]
    if path.exists():
        raise ConfigError("is a pipe, a socket or a device; write its text to a file first", name)
    matches = glob.glob(name, recursive=True) if glob.has_magic(name) else []  # noqa: PTH207 - names may be absolute
    found: dict[Path, None] = {}
    for match in sorted(map(Path, matches), key=Path.as_posix):
        found |= dict.fromkeys(_in_folder(match, split, tell) if match.is_dir() else [match] if match.is_file() else [])
    if not found:
        what = "no file has such a name" if glob.has_magic(name) else "no such file or folder"
        raise ConfigError(f"{what} (a Hugging Face data set is written hf:NAME)", name)
    return list(found)


def _in_folder(folder: Path, split: str, tell: Callable[[str], None]) -> list[Path]:
    folder = _folder_of_split(folder, split)
    every = sorted((file for file in folder.rglob("*") if file.is_file()), key=Path.as_posix)
    wanted = _without_descriptions([file for file in every if not _is_hidden(file.relative_to(folder))])
    texts = [file for file in wanted if not _ABOUT_A_FOLDER.fullmatch(file.name)] or wanted
    passed = [file for file in every if file not in set(texts)]
    if passed:
        named = ", ".join(str(file.relative_to(folder)) for file in passed[:5])
        more = f" and {len(passed) - 5:,} more" if len(passed) > 5 else ""
        tell(f"{folder}: passes over {named}{more}: hidden, or about the folder; name a file to read it")
    if not texts:
        raise ConfigError("this folder holds no files" + (" but hidden ones" if every else ""), str(folder))
    return _of_split(texts, split, folder, tell)


def _of_split(files: list[Path], split: str, folder: Path, tell: Callable[[str], None]) -> list[Path]:
    """Return the files of one split and those of none, if names tell several. Raises ConfigError: not this one."""
    splits = {file: match[1] for file in files for name in _OF_SPLIT if (match := name.fullmatch(file.name))}
    there = sorted(set(splits.values()))
    if len(there) < 2:
        return files
    if split not in there:
        raise ConfigError(f"has no split {split!r}; there are {', '.join(there)}: name one with --split", str(folder))
    others = ", ".join(name for name in there if name != split)
    tell(f"{folder}: takes the split {split}, and leaves out {others}; --split or a pattern of names takes others")
    return [file for file in files if splits.get(file, split) == split]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _without_descriptions(files: Iterable[Path]) -> list[Path]:
    """Return a folder's files, except those with which `datasets` describes the others."""
    every = list(files)
    saved = {file.parent for file in every if file.suffix in (".arrow", ".parquet")}
    saved |= {folder.parent for folder in saved}
    return [file for file in every if file.name not in _ABOUT_A_DATA_SET or file.parent not in saved]


def _folder_of_split(folder: Path, split: str) -> Path:
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


# Text in columns: parquet and Arrow files, also those that `datasets` saves; a few hundred rows at a time.

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
