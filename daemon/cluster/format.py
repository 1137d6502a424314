"""Writes a record as bytes: JSON, with the version of its format in front. Pure.

Another release may know a field that this one does not. It is skipped, but not in the part of a record that is named
`WHOLE`: who skipped a setting of a job would train another job.
"""

from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any, TypeVar

import msgspec

RecordT = TypeVar("RecordT")


class UnreadableRecordError(ValueError):
    """The bytes are not a valid record."""


class NewerFormatError(UnreadableRecordError):
    """A newer release wrote a record that this one cannot read."""


@dataclass(frozen=True, slots=True)
class _Format:
    format: int = 1


def format_of(kind: type[object]) -> int:
    """Return the format of a class of records: its `FORMAT`, or 1. It rises when other releases would misread one."""
    return int(getattr(kind, "FORMAT", 1))


def encode(record: object) -> bytes:
    """Return a record as JSON, with the version of its format in front."""
    raw = msgspec.json.encode(record)
    if not raw.startswith(b"{") or not is_dataclass(record):
        return raw
    return b'{"format":%d%s%s' % (format_of(type(record)), b"," if raw != b"{}" else b"", raw[1:])


def decode(raw: bytes, kind: type[RecordT]) -> RecordT:
    """Return the record of JSON. Raises NewerFormatError, and UnreadableRecordError, naming the field."""
    own = format_of(kind)
    try:
        if not raw.startswith(b'{"format":%d,' % own):
            found = msgspec.json.decode(raw, type=_Format).format
            if found > own:
                raise NewerFormatError(f"a newer release wrote it, in format {found}; this one reads up to {own}")
            if found < own:
                raise UnreadableRecordError(
                    f"an earlier release wrote it, in format {found}: pause the job with that release, "
                    "or submit it again from its newest checkpoint"
                )
        record = msgspec.json.decode(raw, type=kind)
        whole = getattr(kind, "WHOLE", "")
        # Of this release it stands there as it would be written again: to compare keys takes ten times as long.
        if whole and msgspec.json.encode(part := getattr(record, whole)) not in raw:
            told, known = msgspec.json.decode(raw)[whole], msgspec.to_builtins(part)
            if key := next(_skipped(told, known, whole), ""):
                raise NewerFormatError(f"a newer release wrote it: this one does not know {key}, which is set")
        return record
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise UnreadableRecordError(str(error)) from error


def _skipped(told: Any, known: Any, path: str) -> Iterator[str]:
    """Yield the path of each key of some JSON that is on and that the record read from it lacks."""
    if isinstance(told, dict) and isinstance(known, dict):
        for key, value in told.items():
            if key in known:
                yield from _skipped(value, known[key], f"{path}.{key}")
            elif _is_on(value):
                yield f"{path}.{key}"
    elif isinstance(told, list):
        for value, part in zip(told, known, strict=True):
            yield from _skipped(value, part, path)


def _is_on(value: Any) -> bool:
    """Return whether a setting changes anything: by default a new one is empty, zero, false or null."""
    return any(map(_is_on, value.values())) if isinstance(value, dict) else bool(value)


def to_builtins(record: object) -> Any:
    """Return a record as plain dicts and lists, for `--json`."""
    return msgspec.to_builtins(record)
