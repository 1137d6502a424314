"""Sources of text for training: files, folders, JSON lines, columns, Hugging Face data sets, all read as documents.

`datasets` and `pyarrow` belong to the optional extra `data` and are imported when a source needs them.
"""

import glob
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from headway.daemon.base.errors import ConfigError
from headway.daemon.base.file_system import sentence
from headway.daemon.base.near_path import near
from headway.daemon.text.documents import Document, Found, library
from headway.daemon.text.file_content import (
    check_beginning,
    check_kind,
    checked,
    file_content,
    is_compressed,
    kind_of,
    pieces_from,
)
from headway.daemon.text.record_files import columns, json_lines, json_values, table
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
        what = "no file has such a name" if glob.has_magic(name) else f"no such file or folder{near(path)}"
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


@dataclass(frozen=True, slots=True)
class Source:
    """A place that documents come from."""

    name: str
    """For people."""
    documents: Callable[[], Iterator[tuple[Found, float]]]
    """Yields each text, or why a record has none, with its part of `size`; a document is read before the next."""
    path: Path | None = None
    """None: a data set of the Hub."""

    @property
    def identity(self) -> str | None:
        """Return a text that another content changes; None: there is none, for the Hub gets commits at any time."""
        status = self.path.stat() if self.path else None
        return status and f"{self.path} {status.st_size} {status.st_mtime_ns}"

    @property
    def size(self) -> float:
        """Return the bytes of a file; 0: not known."""
        return self.path.stat().st_size if self.path else 0.0


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
        return [Source(name, partial(_of_hub, name, config, split, field))]
    files = find_files(name, split, tell)
    if is_binary:
        return [Source(str(file), partial(_whole, file, _raw), file) for file in files]
    kinds = Counter("text" if (kind := kind_of(file)) not in _OF_RECORDS else kind for file in files)
    if len(kinds) > 1:
        tell(f"{name}: has files of several kinds: {', '.join(f'{num} {kind}' for kind, num in sorted(kinds.items()))}")
    return [_file_source(file, field) for file in files]


def _file_source(path: Path, field: Field) -> Source:
    kind = kind_of(path)
    if read := _BY_COLUMNS.get(kind):
        if is_compressed(path):
            raise ConfigError("is compressed as a whole, and is not read by columns so; decompress it first", str(path))
        return Source(str(path), partial(_by_columns, path, field, read), path)
    if parse := _BY_CONTENT.get(kind):
        check_kind(path)
        return Source(str(path), partial(_by_content, path, field, parse), path)
    if field.is_chat or field.is_pair:
        raise ConfigError(f"is a text, and conversations are in {', '.join(_OF_RECORDS)}", str(path))
    check_beginning(path)
    return Source(str(path), partial(_whole, path, _text), path)


def _whole(path: Path, read: Callable[[Path], Document]) -> Iterator[tuple[Found, float]]:
    """Yield a file that is one document."""
    yield read(path), path.stat().st_size


def _raw(path: Path) -> Document:
    with path.open("rb") as stream:
        yield from pieces_from(stream)


def _text(path: Path) -> Document:
    with file_content(path) as (content, _):
        yield from checked(pieces_from(content), path)


def _by_content(
    path: Path, field: Field, parse: Callable[[io.BufferedReader, Path, Field], Iterator[Found]]
) -> Iterator[tuple[Found, float]]:
    """Yield the documents in a file's content."""
    with file_content(path) as (content, file):
        start = 0
        for found in parse(content, path, field):
            end = file.tell()
            yield found, end - start
            start = end


def _of_hub(name: str, config: str | None, split: str, field: Field) -> Iterator[tuple[Found, float]]:
    """Yield the documents of a data set of the Hugging Face hub, streamed."""
    datasets = library("datasets")
    repository = name.removeprefix(HUGGING_FACE_PREFIX)
    try:
        records = datasets.load_dataset(repository, config, split=split, streaming=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"cannot be opened: {_first_line(error)}", name) from error
    number = 0
    try:
        for record in records:
            yield field.document(without_nulls(record), f"{name}, record {number}"), 0.0
            number += 1
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"cannot be read beyond record {number}: {_first_line(error)}", name) from error


# Text in columns: parquet and Arrow files, also those that `datasets` saves; a few hundred rows at a time.

ROWS: Final = 256
"""Rows that are Python objects at once."""
_BUFFER_BYTES: Final = 1 << 20
_HEAD: Final = b"ARROW1\0\0"
_Batches = Iterator[tuple[Any, float]]
"""Batches of rows, each with the bytes of the file that a row takes."""


def _by_columns(path: Path, field: Field, read: Callable[[Path, Field], _Batches]) -> Iterator[tuple[Found, float]]:
    """Yield the documents in a file's rows. Any pyarrow error becomes one line with the file's name."""
    arrow = library("pyarrow")
    number = 0
    try:
        for batch, share in read(path, field):
            for start in range(0, batch.num_rows, ROWS):
                for record in batch.slice(start, ROWS).to_pylist():
                    number += 1
                    yield field.document(without_nulls(record), f"{path}, row {number}"), share
    except (OSError, ValueError, arrow.ArrowException) as error:
        raise ConfigError(f"cannot be read: {sentence(error)}", str(path)) from error


def _parquet(path: Path, field: Field) -> _Batches:
    with library("pyarrow.parquet").ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file:
        share = path.stat().st_size / max(1, file.metadata.num_rows)
        for batch in file.iter_batches(ROWS, columns=columns(file.schema_arrow.names, field, path)):
            yield batch, share


def _arrow(path: Path, field: Field) -> _Batches:
    """Yield the batches of an Arrow file, as a stream or with random access, as `datasets.save_to_disk` writes it."""
    with library("pyarrow").memory_map(str(path)) as stream:
        # With random access, the file is a stream between a head and a table of contents.
        stream.seek(len(_HEAD) if stream.read(len(_HEAD)) == _HEAD else 0)
        reader = library("pyarrow.ipc").open_stream(stream)
        names, start = columns(reader.schema.names, field, path), 0
        for batch in reader:
            yield batch.select(names), (stream.tell() - start) / max(1, batch.num_rows)
            start = stream.tell()


_BY_CONTENT: Final = {
    ".jsonl": json_lines,
    ".ndjson": json_lines,
    ".json": json_values,
    ".csv": table,
    ".tsv": table,
}
_BY_COLUMNS: Final = {".parquet": _parquet, ".arrow": _arrow, ".feather": _arrow}
_OF_RECORDS: Final = (*_BY_CONTENT, *_BY_COLUMNS)
"""Kinds of files with records; every other file is a text."""


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
