"""Reads files of records: JSON lines, JSON values one after the other or in one array, and tables with separators.

One record is in memory at a time, and it has a maximum size.
"""

import codecs
import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from headway.daemon.base.errors import ConfigError
from headway.daemon.text.documents import MAX_RECORD_BYTES, BadRecord, Found
from headway.daemon.text.file_content import TO_UTF8
from headway.daemon.text.records import Field

_SKIP_BYTES: Final = 1 << 20
_BLOCK_BYTES: Final = 64 << 10
_SEPARATORS: Final = (",", ";", "\t")
_BETWEEN_VALUES: Final = re.compile(r"[\s,]*")
_TOO_LONG: Final = f"is longer than {MAX_RECORD_BYTES >> 20} MiB"
_PART_OF_WORD: Final = 16
"""An error so near the end of what is read may be due to this end."""


def json_lines(content: io.BufferedReader, path: Path, field: Field) -> Iterator[Found]:
    """Yield the documents of a file with one JSON object a line."""
    if content.peek(_BLOCK_BYTES).lstrip().startswith(b"["):
        yield from json_values(content, path, field)
        return
    number = 0
    while line := content.readline(MAX_RECORD_BYTES + 1):
        number += 1
        where = f"{path}, line {number}"
        if len(line) > MAX_RECORD_BYTES:
            line = line[-1:]  # so that two lines are never in memory
            while line and not line.endswith(b"\n"):
                line = content.readline(_SKIP_BYTES)
            yield BadRecord(_TOO_LONG, where)
        elif line.strip():
            yield _of_line(line, field, where)


def _of_line(line: bytes, field: Field, where: str) -> Found:
    try:
        return field.document(json.loads(line.rstrip().rstrip(b",")), where)
    except UnicodeDecodeError:
        return BadRecord(f"is not UTF-8 text: {TO_UTF8}", where)
    except json.JSONDecodeError as error:
        return BadRecord(f"is not JSON: {error.msg} at character {error.pos + 1}", where)
    except (ValueError, RecursionError):  # a number of thousands of digits, or thousands of lists
        return BadRecord("is not JSON that can be read", where)


def json_values(content: io.BufferedReader, path: Path, field: Field) -> Iterator[Found]:
    """Yield the documents of a file with one array of JSON objects, or with objects one after the other."""
    for number, (value, line) in enumerate(_values(content, path), 1):  # all may stand in one line
        yield field.document(value, f"{path}, record {number}, line {line}")


def table(content: io.BufferedReader, path: Path, field: Field) -> Iterator[Found]:
    """Yield the documents of a file of fields with separators: comma, semicolon or tab. Its first row names them."""
    csv.field_size_limit(MAX_RECORD_BYTES)
    lines = _lines(content, path)
    first = next(lines, "")
    separator = max(_SEPARATORS, key=first.count)
    names = next(csv.reader([first], delimiter=separator), [])
    if not names:
        return
    twice = next((name for name in columns(names, field, path) if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"has two columns named {twice!r}; rename one of them", str(path))
    rows = csv.reader(lines, delimiter=separator, strict=True)
    while True:
        where = f"{path}, line {rows.line_num + 2}"  # the first row is not one of them
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise ConfigError(f"cannot be read as a table: {error}; is a quotation mark missing?", where) from error
        if row is None:
            return
        if row and len(row) != len(names):
            yield BadRecord(f"has {len(row)} fields, and the first row has {len(names)}", where)
        elif row:
            yield field.document(dict(zip(names, row, strict=True)), where)


def columns(names: list[str], field: Field, path: Path) -> list[str]:
    """Return the columns that are read. Raises ConfigError if they are missing."""
    try:
        return field.columns(names)
    except ConfigError as error:
        raise ConfigError(error.what, str(path)) from error


def _lines(content: IO[bytes], path: Path) -> Iterator[str]:
    """Yield the lines of a text. Raises ConfigError for one that is no UTF-8, or too long."""
    number = 0
    while line := content.readline(MAX_RECORD_BYTES + 1):
        number += 1
        where = f"{path}, line {number}"
        if len(line) > MAX_RECORD_BYTES:
            raise ConfigError(_TOO_LONG, where)
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            what = f"is not UTF-8 text ({line[error.start]:#04x} at {error.start})"
            raise ConfigError(f"{what}: {TO_UTF8}", where) from error


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
