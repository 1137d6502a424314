"""Cuts texts into pieces for a tokenizer, so that a long line costs no more memory than its length."""

from collections.abc import Iterator
from typing import IO, Final

PIECE_BYTES: Final = 1 << 20
"""A piece ends with the first line that goes beyond it."""
MAX_PIECE_BYTES: Final = 2 << 20
"""A longer line is cut, if possible before a space: a tokenizer takes a hundred times its text's memory."""
_SPACES: Final = (b" ", b"\n", b"\t")


def pieces_of(text: bytes) -> Iterator[bytes]:
    """Yield a whole text as one piece, unless it is longer than the maximum."""
    start = 0
    while len(text) - start > MAX_PIECE_BYTES:
        end = _cut(text, start)
        yield text[start:end]
        start = end
    yield text[start:] if start else text


def pieces_from(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield a file's text, in pieces that end at line ends unless a line is too long."""
    held = b""
    while block := stream.read(PIECE_BYTES):
        held += block
        while (end := _end(held)) is not None:
            yield held[:end]
            held = held[end:]
    if held:
        yield held


def _end(held: bytes) -> int | None:
    """Return where the first piece ends in the bytes read so far; None: it may continue."""
    newline = held.find(b"\n", PIECE_BYTES, MAX_PIECE_BYTES)
    if newline >= 0:
        return newline + 1
    return _cut(held, 0) if len(held) >= MAX_PIECE_BYTES else None


def _cut(text: bytes, start: int) -> int:
    """Return where to cut a text without a line end: before a space, else between two characters."""
    end = start + PIECE_BYTES
    space = max(text.rfind(space, start + 1, end) for space in _SPACES)
    if space > start:
        return space
    while end > start + 1 and text[end] & 0xC0 == 0x80:  # inside a character of UTF-8
        end -= 1
    return end
