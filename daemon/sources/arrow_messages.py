"""Bounds what the messages of an Arrow file inflate to, before any is inflated.

A message is a FlatBuffer of the Arrow columnar format (Message.fbs), and a body. Each compressed buffer of the body
begins with its own length after inflation, 8 bytes; -1: it is not compressed.
"""

import struct
from collections.abc import Iterable
from typing import Any, Final

from headway.daemon.errors import ConfigError

MAX_INFLATED_BYTES: Final = 1 << 30
"""Of one batch of records; one that is not compressed may have any size, because the file is mapped into memory."""
_DICTIONARY_BATCH: Final = 2
_RECORD_BATCH: Final = 3


def check_inflated(messages: Iterable[Any], name: str) -> None:
    """Raise ConfigError if a batch inflates to too much, or is damaged."""
    for number, message in enumerate(messages):
        try:
            size = inflated_bytes(memoryview(message.metadata), memoryview(message.body or b""))
        except (struct.error, ValueError) as error:
            raise ConfigError(f"cannot be read: its message {number} is damaged", name) from error
        if size > MAX_INFLATED_BYTES:
            most = f"at most {MAX_INFLATED_BYTES >> 20:,} MiB are read at once: write smaller batches"
            raise ConfigError(f"its message {number} inflates to {size >> 20:,} MiB; {most}", name)


def inflated_bytes(metadata: memoryview, body: memoryview) -> int:
    """Return the number of bytes that a message's compressed buffers inflate to. Raises ValueError, struct.error."""
    message = _referred(metadata, 0)
    kind, header = _field(metadata, message, 1), _field(metadata, message, 2)
    if kind is None or header is None or metadata[kind] not in (_DICTIONARY_BATCH, _RECORD_BATCH):
        return 0
    batch: int = _referred(metadata, header)
    if metadata[kind] == _DICTIONARY_BATCH:
        data = _field(metadata, batch, 1)
        if data is None:
            return 0
        batch = _referred(metadata, data)
    buffers, compression = _field(metadata, batch, 2), _field(metadata, batch, 3)
    if buffers is None or compression is None:
        return 0
    vector = _referred(metadata, buffers)
    total = 0
    for index in range(_number(metadata, "<I", vector)):
        start, length = struct.unpack_from("<qq", metadata, vector + 4 + 16 * index)
        if length:
            size = _number(body, "<q", start)
            if size < -1:
                raise ValueError("a length is negative")
            total += max(size, 0)
    return total


def _field(raw: memoryview, table: int, number: int) -> int | None:
    """Return where a table's field is; None: it has its default."""
    vtable = table - _number(raw, "<i", table)
    slot = 4 + 2 * number
    if slot + 2 > _number(raw, "<H", vtable):
        return None
    offset = _number(raw, "<H", vtable + slot)
    return table + offset if offset else None


def _referred(raw: memoryview, at: int) -> int:
    return at + _number(raw, "<I", at)


def _number(raw: memoryview, form: str, at: int) -> int:
    if at < 0:
        raise ValueError("a place is negative")
    found: int = struct.unpack_from(form, raw, at)[0]
    return found
