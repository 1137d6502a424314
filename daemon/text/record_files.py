"""Reads files of records: JSON lines, JSON values one after the other or in one array, and tables with separators.

One record is in memory at a time, and it has a maximum size.
"""

import codecs
import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from headway.daemon.base.errors import ConfigError
from headway.daemon.text.documents import MAX_RECORD_BYTES, BadRecord, Document, FileSource
from headway.daemon.text.file_content import TO_UTF8, file_content
from headway.daemon.text.records import Field

MAX_LINE_BYTES: Final = MAX_RECORD_BYTES
"""Maximum length of a JSON line, which is parsed as a whole."""
_SKIP_BYTES: Final = 1 << 20
_BLOCK_BYTES: Final = 64 << 10
_SEPARATORS: Final = (",", ";", "\t")
_BETWEEN_VALUES: Final = re.compile(r"[\s,]*")
_TOO_LONG: Final = f"is longer than {MAX_RECORD_BYTES >> 20} MiB"
_PART_OF_WORD: Final = 16
"""An error so near the end of what is read may be due to this end."""


@dataclass(frozen=True, slots=True)
class JsonLinesSource(FileSource):
    """A file with one JSON object a line."""

    field: Field

    def documents(self) -> Iterator[tuple[Document | BadRecord, float]]:
        with file_content(self.path) as (content, file):
            if content.peek(_BLOCK_BYTES).lstrip().startswith(b"["):
                yield from _of_values(content, file, self.path, self.field)
                return
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
            return self.field.document(json.loads(line.rstrip().rstrip(b",")), where)
        except UnicodeDecodeError:
            return BadRecord(f"is not UTF-8 text: {TO_UTF8}", where)
        except json.JSONDecodeError as error:
            return BadRecord(f"is not JSON: {error.msg} at character {error.pos + 1}", where)
        except (ValueError, RecursionError):  # a number of thousands of digits, or thousands of lists
            return BadRecord("is not JSON that can be read", where)


@dataclass(frozen=True, slots=True)
class JsonSource(FileSource):
    """A file with one array of JSON objects, or with objects one after the other."""

    field: Field

    def documents(self) -> Iterator[tuple[Document | BadRecord, float]]:
        with file_content(self.path) as (content, file):
            yield from _of_values(content, file, self.path, self.field)


@dataclass(frozen=True, slots=True)
class TableSource(FileSource):
    """A file of fields with separators: comma, semicolon or tab. Its first row names them."""

    field: Field

    def documents(self) -> Iterator[tuple[Document | BadRecord, float]]:
        csv.field_size_limit(MAX_RECORD_BYTES)
        with file_content(self.path) as (content, file):
            lines = _Lines(content, self.path)
            first = next(lines, "")
            separator = max(_SEPARATORS, key=first.count)
            names = next(csv.reader([first], delimiter=separator), [])
            if not names:
                return
            try:
                twice = next((name for name in self.field.columns(names) if names.count(name) > 1), None)
            except ConfigError as error:
                raise ConfigError(error.what, str(self.path)) from error
            if twice is not None:
                raise ConfigError(f"has two columns named {twice!r}; rename one of them", str(self.path))
            start, line, lines.num_bytes = 0, 1, 0
            rows = csv.reader(lines, delimiter=separator, strict=True)
            while (row := self._next(rows, line + 1)) is not None:
                line, where = lines.number, f"{self.path}, line {line + 1}"
                lines.num_bytes = 0
                if not row:
                    continue
                found = self.field.document(dict(zip(names, row, strict=False)), where)
                if len(row) != len(names):
                    found = BadRecord(f"has {len(row)} fields, and the first row has {len(names)}", where)
                end = file.tell()
                yield found, end - start
                start = end

    def _next(self, rows: Iterator[list[str]], line: int) -> list[str] | None:
        try:
            return next(rows, None)
        except csv.Error as error:
            raise ConfigError(f"cannot be read as a table: {error}", f"{self.path}, line {line}") from error


class _Lines:
    """The lines of a text. Raises ConfigError for one that is no UTF-8, and for a row that is too long."""

    def __init__(self, content: IO[bytes], path: Path) -> None:
        self.number = 0
        self.num_bytes = 0
        """Of the row that is being read."""
        self._content = content
        self._path = path

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._content.readline(MAX_RECORD_BYTES + 1)
        if not line:
            raise StopIteration
        self.number += 1
        self.num_bytes += len(line)
        where = f"{self._path}, line {self.number}"
        if self.num_bytes > MAX_RECORD_BYTES:
            raise ConfigError(f"{_TOO_LONG}: is a quotation mark missing above?", where)
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            what = f"is not UTF-8 text ({line[error.start]:#04x} at {error.start})"
            raise ConfigError(f"{what}: {TO_UTF8}", where) from error


def _of_values(
    content: IO[bytes], file: IO[bytes], path: Path, field: Field
) -> Iterator[tuple[Document | BadRecord, float]]:
    start = 0
    for number, (value, line) in enumerate(_values(content, path), 1):  # all may stand in one line
        end = file.tell()
        yield field.document(value, f"{path}, record {number}, line {line}"), end - start
        start = end


def _values(content: IO[bytes], path: Path) -> Iterator[tuple[Any, int]]:
    """Yield the values of an array, or of a stream of values, with their lines. Raises ConfigError."""
    decode = codecs.getincrementaldecoder("utf-8")().decode
    decoder = json.JSONDecoder()
    text, at, line = "", 0, 1
    is_last = False
    closing: bool | None = None  # whether an array is yet to be closed; None: nothing has been read
    while True:
        end = _BETWEEN_VALUES.match(text, at).end()  # type: ignore[union-attr]  # it matches everywhere
        line += text.count("\n", at, end)
        at = end
        where = f"{path}, line {line}"
        if at < len(text):
            if (closing is None and text[at] == "[") or (closing and text[at] == "]"):
                closing = closing is None
                at += 1
                continue
            closing = bool(closing)
            try:
                value, end = decoder.raw_decode(text, at)
            except ValueError as error:
                _check_error(error, text, is_last=is_last, path=path, line=line - text.count("\n", 0, at))
            except RecursionError:
                raise ConfigError("is not JSON that can be read: it is too deep", where) from None
            else:
                if end < len(text) or is_last:  # a number may go on
                    yield value, line
                    line += text.count("\n", at, end)
                    at = end
                    continue
        if is_last:
            if closing:
                raise ConfigError("ends inside its array; fetch it again", where)
            return
        if len(text) - at > MAX_RECORD_BYTES:
            raise ConfigError(_TOO_LONG, where)
        block = content.read(max(_BLOCK_BYTES, len(text) - at))
        is_last = not block
        try:
            text, at = text[at:] + decode(block, is_last), 0
        except UnicodeDecodeError as error:
            raise ConfigError(f"is not UTF-8 text: {TO_UTF8}", f"{path}, after line {line}") from error


def _check_error(error: ValueError, text: str, *, is_last: bool, path: Path, line: int) -> None:
    """Raise ConfigError unless an error may be due to the end of what is read. line: that of the text's begin."""
    place = getattr(error, "pos", 0)
    is_cut = "Unterminated string" in str(error) or place > len(text) - _PART_OF_WORD
    if is_cut and not is_last:
        return
    what = "ends inside a value; fetch it again" if is_cut else f"is not JSON: {getattr(error, 'msg', error)}"
    hint = "" if is_cut else "; lines in a .jsonl file may be left out one by one"
    raise ConfigError(f"{what}{hint}", f"{path}, line {line + text.count(chr(10), 0, place)}")
