"""Writes a record as bytes: JSON, with the version of its format in front. Pure."""

from dataclasses import dataclass, is_dataclass
from typing import Any, Final, TypeVar

import msgspec

FORMAT: Final = 1
"""Format of every record. It rises when an older release would misread a newer record; new fields alone need none."""
_FORMAT_HEAD: Final = f'{{"format":{FORMAT}'.encode()

RecordT = TypeVar("RecordT")


class UnreadableRecordError(ValueError):
    """The bytes are not a valid record."""


class NewerFormatError(UnreadableRecordError):
    """A newer release wrote a record that this one cannot read."""


@dataclass(frozen=True, slots=True)
class _Format:
    format: int = 1


def encode(record: object) -> bytes:
    """Return a record as JSON, with the version of its format in front."""
    raw = msgspec.json.encode(record)
    if not raw.startswith(b"{") or not is_dataclass(record):
        return raw
    return _FORMAT_HEAD + (b"," if raw != b"{}" else b"") + raw[1:]


def decode(raw: bytes, kind: type[RecordT]) -> RecordT:
    """Return the record of JSON. Raises NewerFormatError, and UnreadableRecordError, naming the field."""
    try:
        if not raw.startswith(_FORMAT_HEAD + b","):
            found = msgspec.json.decode(raw, type=_Format).format
            if found > FORMAT:
                raise NewerFormatError(f"a newer release wrote it, in format {found}; this one reads up to {FORMAT}")
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise UnreadableRecordError(str(error)) from error


def to_builtins(record: object) -> Any:
    """Return a record as plain dicts and lists, for `--json`."""
    return msgspec.to_builtins(record)
