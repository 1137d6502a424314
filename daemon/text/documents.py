"""Documents from sources of text, as UTF-8 in pieces or as conversations."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from headway.daemon.base.errors import ConfigError

MAX_RECORD_BYTES: Final = 128 << 20
"""Maximum size of one record, which is in memory as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The messages of one chat."""

    messages: list[dict[str, Any]]
    tools: Any
    where: str
    """Its place in the data, for errors."""
    form: str = ""
    """Where the messages come from, if not from a list of roles and contents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two conversations that differ in how they end, the preferred one first."""

    preferred: Conversation
    other: Conversation

    @property
    def where(self) -> str:
        """Return its place in the data."""
        return self.preferred.where


TOO_DEEP: Final = "has tables or lists that are nested too deeply; drop the record"

Document = Iterator[bytes | Conversation | Pair]
"""One text as UTF-8, in pieces that end at line ends where lines have a sensible length; one conversation; one pair."""


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that has no document."""

    what: str
    where: str


Found = Document | BadRecord


def library(name: str) -> Any:
    """Import a library of the optional extra. Raises ConfigError that names the extra."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(f"needs the library {name}: pip install 'headway[data]'") from error
