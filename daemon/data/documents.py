"""Documents from sources of text, as UTF-8 in pieces; and the text of one record."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from headway.daemon.errors import ConfigError

Document = Iterator[bytes]
"""One text as UTF-8, in pieces that end at line ends where lines have a sensible length."""


@dataclass(frozen=True, slots=True)
class FileSource:
    """The common part of sources that are one file."""

    path: Path

    @property
    def name(self) -> str:
        """Return the name for people."""
        return str(self.path)

    @property
    def size(self) -> float:
        """Return the total that the second halves of `documents()` reach."""
        return self.path.stat().st_size


def library(name: str) -> Any:
    """Import a library of the optional extra. Raises ConfigError that names the extra."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(f"needs the library {name}: pip install 'headway[data]'") from error


def text_of(record: Any, field: str, where: str) -> bytes:
    """Return a record's text as UTF-8. Raises ConfigError if the text is missing or not representable in UTF-8."""
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f"has no text in the field {field!r}", where)
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise ConfigError(f"has half a character, {half}, in the field {field!r}; repair or drop it", where) from error
