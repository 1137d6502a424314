"""Documents from sources of text, as UTF-8 in pieces or as conversations; and the document of one record."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from headway.daemon.data.pieces import pieces_of
from headway.daemon.errors import ConfigError

MAX_RECORD_BYTES: Final = 128 << 20
"""Maximum size of one record, which is in memory as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The messages of one chat."""

    messages: list[dict[str, Any]]
    tools: Any
    where: str
    """Its place in the data, for errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two conversations that differ in how they end, the preferred one first."""

    preferred: Conversation
    other: Conversation


Document = Iterator[bytes | Conversation | Pair]
"""One text as UTF-8, in pieces that end at line ends where lines have a sensible length; one conversation; one pair."""


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that has no document."""

    what: str
    where: str


@dataclass(frozen=True, slots=True)
class Field:
    """The part of a record that is trained on."""

    name: str
    is_chat: bool = False
    is_pair: bool = False

    def document(self, record: Any, where: str) -> Document | BadRecord:
        """Return a record's document, or why it has none."""
        try:
            if self.is_pair:
                return iter((pair_of(record, where),))
            if self.is_chat:
                return iter((conversation_of(record, self.name, where),))
            return pieces_of(text_of(record, self.name, where))
        except ConfigError as error:
            return BadRecord(error.what, where)


@dataclass(frozen=True, slots=True)
class FileSource:
    """The common part of sources that are one file."""

    path: Path

    @property
    def name(self) -> str:
        """Return the name for people."""
        return str(self.path)

    @property
    def identity(self) -> str | None:
        """Return a text that another content changes."""
        status = self.path.stat()
        return f"{self.path} {status.st_size} {status.st_mtime_ns}"

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


def conversation_of(record: Any, field: str, where: str) -> Conversation:
    """Return a record's conversation. Raises ConfigError if the messages are missing or malformed."""
    messages = record.get(field) if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"has no list of messages in the field {field!r}", where)
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(f"message {number} is no table with a role", where)
    return Conversation(messages=messages, tools=record.get("tools"), where=where)


def pair_of(record: Any, where: str) -> Pair:
    """Return a record's pair: `chosen` and `rejected`, perhaps after a `prompt`, as texts or lists of messages.

    Raises ConfigError if an answer is missing or malformed.
    """
    fields = record if isinstance(record, dict) else {}
    prompt = _messages_of(fields.get("prompt") or [], "user")

    def conversation(answer: str) -> Conversation:
        found = fields.get(answer)
        if not found:
            what = f"has no answer in the field {answer!r}; a pair is `prompt`, `chosen` and `rejected`"
            raise ConfigError(f"{what}, each a text or a list of messages", where)
        messages = [*prompt, *_messages_of(found, "assistant")]
        return conversation_of({answer: messages, "tools": fields.get("tools")}, answer, where)

    return Pair(preferred=conversation("chosen"), other=conversation("rejected"))


def _messages_of(said: Any, role: str) -> list[Any]:
    """Return messages, of which a text is one."""
    return [{"role": role, "content": said}] if isinstance(said, str) else said if isinstance(said, list) else [said]


def text_of(record: Any, field: str, where: str) -> bytes:
    """Return a record's text as UTF-8. Raises ConfigError if the text is missing or not representable in UTF-8."""
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        hint = "; conversations need --chat" if isinstance(record, dict) and "messages" in record else ""
        raise ConfigError(f"has no text in the field {field!r}{hint}", where)
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise ConfigError(f"has half a character, {half}, in the field {field!r}; repair or drop it", where) from error
