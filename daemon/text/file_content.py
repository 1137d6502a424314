"""Opens files of text: decompressed as their names say, and without a byte-order mark. Refuses what is no text.

The decoders are read through one small class, because those of the libraries end a cut-off zstd file without an error,
or read only the first of several parts. It also bounds what a small file inflates to in memory.
"""

import bz2
import io
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from headway.daemon.base.errors import ConfigError
from headway.daemon.text.documents import library

# Cuts texts into pieces for a tokenizer, so that a long line costs no more memory than its length.

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


_BLOCK_BYTES: Final = 1 << 10
"""Compressed bytes that a decoder takes at once: zstd makes up to 32,768 times as many of them."""
_INFLATED_BYTES: Final = 1 << 20
_XZ_MEMORY_BYTES: Final = 512 << 20
"""`xz -9` needs 65 MiB to read; a file may ask for 4 GiB."""
_LOOK_BYTES: Final = 64 << 10
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
TO_UTF8: Final = "convert it, for example with `iconv -f WINDOWS-1252 -t UTF-8`"
_KNOWN: Final = {
    b"\x1f\x8b": "compressed by gzip: end its name with .gz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: end its name with .zst",
    b"BZh91AY&SY": "compressed by bzip2: end its name with .bz2",
    b"\xfd7zXZ\0": "compressed by xz: end its name with .xz",
    b"\xff\xfe": "UTF-16: convert it with `iconv -f UTF-16 -t UTF-8`",
    b"\xfe\xff": "UTF-16: convert it with `iconv -f UTF-16 -t UTF-8`",
    b"PK\x03\x04": "a zip archive: unpack it, or write its text to a file",
    b"%PDF-": "a PDF: write its text to a file",
    b"SQLite format 3": "SQLite: write a table with `sqlite3 -header -csv FILE 'select * from TABLE' > table.csv`",
    b"PAR1": "parquet: end its name with .parquet",
    b"ARROW1": "Arrow: end its name with .arrow",
}
"""Files that are no text, by how they begin."""


def _zstd() -> Any:
    return library("zstandard").ZstdDecompressor().decompressobj()


# What makes a decoder, and the further arguments with which it decompresses a block.
_DECODERS: Final[dict[str, tuple[Callable[[], Any], tuple[int, ...]]]] = {
    ".gz": (lambda: zlib.decompressobj(31), ()),
    ".zst": (_zstd, ()),
    ".bz2": (bz2.BZ2Decompressor, (_INFLATED_BYTES,)),
    ".xz": (lambda: lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES), (_INFLATED_BYTES,)),
}


def kind_of(path: Path) -> str:
    """Return the suffix that says what a file holds, without that of its compression."""
    return (path.with_suffix("") if is_compressed(path) else path).suffix.lower()


def is_compressed(path: Path) -> bool:
    """Return whether a file's name says that it is compressed."""
    return path.suffix.lower() in _DECODERS


@contextmanager
def file_content(path: Path) -> Iterator[tuple[io.BufferedReader, io.BufferedReader]]:
    """Open a file's content, and the file itself, whose place says how much is read.

    Raises ConfigError: it is compressed, and damaged, or a library is missing.
    """
    with path.open("rb") as file:
        content: io.BufferedReader = file
        if is_compressed(path):
            content = io.BufferedReader(_Inflated(file, path))
        if content.peek(len(_BYTE_ORDER_MARK)).startswith(_BYTE_ORDER_MARK):
            content.read(len(_BYTE_ORDER_MARK))
        yield content, file


def check_kind(path: Path) -> None:
    """Raise ConfigError if a file is of a known kind that is no text. A file that cannot be read is told when used."""
    with file_content(path) as (content, _):
        if known := _known(content.peek(16)):
            raise ConfigError(f"is no UTF-8 text, but {known}", str(path))


def check_beginning(path: Path) -> None:
    """Raise ConfigError if a file does not begin as text."""
    with file_content(path) as (content, _):
        head = content.read(_LOOK_BYTES)
    _check(path, _why_no_text(head, is_cut=len(head) == _LOOK_BYTES))


def checked(pieces: Iterable[bytes], path: Path) -> Iterator[bytes]:
    """Yield pieces of a text. Raises ConfigError at the first that is none."""
    start = 0
    for piece in pieces:
        _check(path, _why_no_text(piece, start=start))
        start += len(piece)
        yield piece


def _check(path: Path, why_no_text: str) -> None:
    if why_no_text:
        hint = "--binary takes every file as it is, and a pattern such as 'FOLDER/**/*.md' some of a folder"
        raise ConfigError(f"is no UTF-8 text, but {why_no_text}; {hint}", str(path))


def _why_no_text(text: bytes, *, start: int = 0, is_cut: bool = False) -> str:
    """Return why bytes are no text; empty: they are. start: their place in the text. is_cut: the text goes on."""
    if not start and (known := _known(text)):
        return known
    if b"\0" in text:
        return f"has a zero byte at {start + text.index(0)}"
    try:
        text.decode()
    except UnicodeDecodeError as error:
        if not (is_cut and error.start >= len(text) - 4):  # a sample may end inside a character
            place = f"has the byte {text[error.start]:#04x} at {start + error.start}"
            return f"{place}: {TO_UTF8}"
    return ""


def _known(head: bytes) -> str:
    return next((f"is {what}" for magic, what in _KNOWN.items() if head.startswith(magic)), "")


class _Inflated(io.RawIOBase):
    """The content of a compressed file, of one or more parts, as `cat` makes them."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file = file
        self._path = path
        self._make, self._limits = _DECODERS[path.suffix.lower()]
        self._decoder: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer, unless the content ends. Raises ConfigError when the file is damaged."""
        filled = 0
        while filled < len(buffer) and (self._ready or self._inflate()):
            size = min(len(self._ready), len(buffer) - filled)
            buffer[filled : filled + size] = self._ready[:size]
            self._ready = self._ready[size:]
            filled += size
        return filled

    def _inflate(self) -> bool:
        """Make further content ready. Returns whether there is any."""
        while not self._ready:
            block = b""
            if self._decoder is None or self._decoder.eof:
                block = self._next_part()
                if not block:
                    return False
                self._decoder = self._make()
            elif getattr(self._decoder, "needs_input", True):
                block = self._file.read(_BLOCK_BYTES)
                if not block:
                    raise ConfigError("is cut off: its compressed data end early; fetch it again", str(self._path))
            try:
                self._ready = memoryview(self._decoder.decompress(block, *self._limits))
            except Exception as error:  # each library raises its own
                raise ConfigError(f"cannot be decompressed: {error}; fetch it again", str(self._path)) from error
        return True

    def _next_part(self) -> bytes:
        """Return how the next part begins, after the zero bytes that may fill up a file; empty: there is none."""
        block: bytes = self._decoder.unused_data.lstrip(b"\0") if self._decoder else b""
        while not block and (read := self._file.read(_BLOCK_BYTES)):
            block = read.lstrip(b"\0")
        return block
