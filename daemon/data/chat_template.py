"""Renders conversations by a tokenizer's own chat template, in the sandbox that transformers uses for it.

The time of day is not in the sandbox: the same data gives the same tokens on any day.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Final

from headway.daemon.data.documents import Conversation, library
from headway.daemon.data.message_form import MessageForm, find_form
from headway.daemon.data.special_words import GUARD, SpecialWords, unguarded
from headway.daemon.data.template_limits import (
    MAX_CHARACTERS,
    TOO_LARGE,
    TooMuchError,
    limited_memory,
    limited_product,
    limited_time,
)
from headway.daemon.data.template_loops import LoopNotes, Round, with_notes
from headway.daemon.errors import ConfigError

# The sandbox of chat templates: jinja2 as transformers sets it up, but with a date that stands still.
#
# Everything in this file is called while a template renders.

_ESCAPED_GUARD: Final = re.compile(rf"(?<!\\)((?:\\\\)*)\\u{ord(GUARD):04x}")
"""A backslash that people wrote is two in JSON, and escapes nothing."""


def sandbox(*, today: date, mark: Callable[[str], str]) -> Any:
    """Return jinja2's environment. mark receives what a template emits between `{% generation %}` and its end."""
    jinja2, sandboxes = library("jinja2"), library("jinja2.sandbox")
    nodes, extensions = library("jinja2.nodes"), library("jinja2.ext")

    def parse(self: Any, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def marked(_self: Any, caller: Any) -> str:
        return mark(caller())

    generation = type("Generation", (extensions.Extension,), {"tags": {"generation"}, "parse": parse, "_mark": marked})
    limits = {"intercepted_binops": frozenset({"*", "**"}), "call_binop": limited_product}
    environment = type("Sandbox", (sandboxes.ImmutableSandboxedEnvironment,), limits)(
        trim_blocks=True, lstrip_blocks=True, extensions=[generation, extensions.loopcontrols]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = today.strftime
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return _ESCAPED_GUARD.sub(rf"\1{GUARD}", text) if ensure_ascii else text


TEMPLATE_NAME: Final = "chat_template.jinja"
OTHERS_NAME: Final = "additional_chat_templates"
DEFAULT: Final = "default"
MAX_SOURCE: Final = 1 << 20
"""Maximum size of a template: those of the Hub have a hundredth of it."""
_SEARCHES: Final = ("split", "rsplit", "partition", "rpartition", "startswith", "endswith", "replace", "find", "index")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text."""

    text: str
    marked: tuple[tuple[int, int], ...]
    """Spans of characters between `{% generation %}` and its end."""
    words: frozenset[int]
    """Begins of names of special tokens that people wrote: they are only words."""
    rounds: tuple[Round, ...] = ()
    """Of the template's loops, if they were to be followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a chat template is given beside a conversation."""

    special: Mapping[str, str]
    """Texts of special tokens, by the names that a template has for them."""
    names: SpecialWords
    """Names of special tokens."""
    words: SpecialWords
    """Those that only the template may write."""
    today: date
    """The date, which stands still."""


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, around: Surroundings, *, name: str) -> None:
        """Raises ConfigError when the template is invalid."""
        self.source = source
        self.names = around.names
        self._special = dict(around.special)
        self._notes = LoopNotes()
        self._spans: list[tuple[int, int, str]] = []
        self._length = 0
        try:
            with limited_time(), limited_memory():  # jinja2 computes constant expressions at once
                environment = sandbox(today=around.today, mark=self._mark)
                self._template = environment.from_string(source)
                self._words = around.words.without(_looked_for(environment.parse(source)))
                followed = sandbox(today=around.today, mark=str)
                self._followed = with_notes(followed, source, library("jinja2.nodes"), self._notes.note)
        except ConfigError:
            raise
        except MemoryError:
            raise ConfigError(f"its chat template is invalid: {TOO_LARGE}", name) from None
        except Exception as error:  # templates are programs of others
            raise ConfigError(f"its chat template is invalid: {_line(error)}", name) from error
        self._form: MessageForm | None = None

    @property
    def end_of_text(self) -> str:
        """Return the special token that ends a text; empty: there is none."""
        return self._special.get("eos_token", "")

    def conversation(self, chat: Conversation) -> Conversation:
        """Return a conversation as this template reads it. Raises ConfigError for what is not a text."""
        if self._form is None:
            self._form = find_form(lambda probe: self.render(probe, probe.messages).text, self.source, chat.where)
        formed = self._form.applied(chat)
        guarded = self._words.guarded
        return replace(formed, messages=guarded(formed.messages), tools=guarded(formed.tools))

    def follow(self, chat: Conversation, messages: Sequence[Any], *, is_prompt: bool = False) -> Rendered:
        """Render as `render` does, and say what each round of the template's loops has written."""
        self._notes.clear()
        raw = self._raw(self._followed, chat, messages, is_prompt=is_prompt)
        try:
            noted, rounds = self._notes.rounds(raw)
        except ValueError as error:
            raise ConfigError(f"the chat template cannot be followed: {error}", chat.where) from error
        text, words = unguarded(noted)
        missing = _missing(words)
        moved = (replace(each, start=_moved(each.start, missing), end=_moved(each.end, missing)) for each in rounds)
        return Rendered(text, (), frozenset(words), tuple(moved))

    def render(self, chat: Conversation, messages: Sequence[Any], *, is_prompt: bool = False) -> Rendered:
        """Render the first messages of a conversation. is_prompt: with the begin of an answer.

        Raises ConfigError, which names the place in the data: the template fails, or exceeds a limit.
        """
        raw = self._raw(self._template, chat, messages, is_prompt=is_prompt)
        if any(raw[start:end] != spoken for start, end, spoken in self._spans):
            raise ConfigError("the chat template changes what it marks with {% generation %}", chat.where)
        text, words = unguarded(raw)
        missing = _missing(words)
        marked = tuple((_moved(start, missing), _moved(end, missing)) for start, end, _ in self._spans)
        return Rendered(text, marked, frozenset(words))

    def _raw(self, template: Any, chat: Conversation, messages: Sequence[Any], *, is_prompt: bool) -> str:
        """Return what a template emits, with guards and notes. Raises ConfigError."""
        self._spans, self._length = [], 0
        pieces: list[str] = []
        values = {
            **self._special,
            "messages": list(messages),
            "tools": chat.tools,
            "documents": None,
            "add_generation_prompt": is_prompt,
        }
        try:
            with limited_time(), limited_memory():
                for piece in template.generate(values):
                    pieces.append(piece)
                    self._length += len(piece)
                    if self._length > MAX_CHARACTERS:
                        raise ValueError(f"it is longer than {MAX_CHARACTERS >> 20} Mi characters")
        except MemoryError:  # its traceback would keep what the template has made
            pieces.clear()
            raise TooMuchError(f"the chat template cannot render it: {TOO_LARGE}", chat.where) from None
        except TimeoutError as error:
            raise TooMuchError(f"the chat template cannot render it: {error}", chat.where) from error
        except Exception as error:  # templates are programs of others
            raise ConfigError(f"the chat template cannot render it: {_line(error)}", chat.where) from error
        return "".join(pieces)

    def _mark(self, spoken: str) -> str:
        """Note a text that the template is about to emit as an answer."""
        self._spans.append((self._length, self._length + len(spoken), spoken))
        return spoken


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """The chat templates of a tokenizer, by name."""

    named: Mapping[str, ChatTemplate]

    def of(self, chat: Conversation) -> ChatTemplate:
        """Return the template that transformers takes: `tool_use` for a conversation with tools, if there is one."""
        return self.named["tool_use" if chat.tools is not None and "tool_use" in self.named else DEFAULT]

    @property
    def ask_for_date(self) -> bool:
        """Return whether a template asks what day it is."""
        return any("strftime_now" in template.source for template in self.named.values())

    @property
    def described(self) -> Any:
        """Return what tokenizer_config.json says of them."""
        sources = {name: template.source for name, template in self.named.items()}
        is_one = list(sources) == [DEFAULT]
        return sources[DEFAULT] if is_one else [{"name": name, "template": each} for name, each in sources.items()]


def read_templates(
    folder: Path, config: Mapping[str, Any], *, names: SpecialWords, words: SpecialWords, today: date
) -> ChatTemplates | None:
    """Return the chat templates of a tokenizer's folder; None: it has none. Raises ConfigError."""
    try:
        sources = _in_files(folder) or _in_config(config)
    except (OSError, ValueError) as error:
        raise ConfigError(f"its chat template cannot be read: {error}", str(folder)) from error
    if not sources:
        return None
    if DEFAULT not in sources:
        known = ", ".join(map(str, sources))
        raise ConfigError(f"has the chat templates {known}, and none is named {DEFAULT}", str(folder))
    texts = {key: _text(value) for key, value in config.items() if key.endswith("_token")}
    special = {key: text for key, text in texts.items() if text}
    around = Surroundings(special=special, names=names, words=words, today=today)
    named = {}
    for name, source in sources.items():
        if not isinstance(source, str):
            raise ConfigError("chat_template is no text", str(folder))
        if len(source) > MAX_SOURCE:
            raise ConfigError(f"its chat template has more than {MAX_SOURCE} characters", str(folder))
        named[name] = ChatTemplate(source, around, name=str(folder))
    return ChatTemplates(named)


def _in_files(folder: Path) -> dict[str, Any]:
    """Return the templates that are files: the default one, and others by the names of their files."""
    default = folder / TEMPLATE_NAME
    found = {DEFAULT: _read(default)} if default.is_file() else {}
    return found | {file.stem: _read(file) for file in sorted((folder / OTHERS_NAME).glob("*.jinja"))}


def _in_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the templates in tokenizer_config.json: a text, or a list of tables with a name."""
    source = config.get("chat_template")
    if isinstance(source, list):
        return {str(each.get("name")): each.get("template") for each in source if isinstance(each, dict)}
    return {} if source is None else {DEFAULT: source}


def _looked_for(tree: Any) -> Iterator[str]:
    """Yield the texts that a template looks for in what people wrote, such as the end of thinking."""
    nodes = library("jinja2.nodes")
    for node in tree.find_all((nodes.Compare, nodes.Call)):
        if isinstance(node, nodes.Compare):
            asked = [node.expr] if any(each.op in ("in", "notin") for each in node.ops) else []
        else:
            asked = node.args if isinstance(node.node, nodes.Getattr) and node.node.attr in _SEARCHES else []
        yield from (each.value for each in asked if isinstance(each, nodes.Const) and isinstance(each.value, str))


def _missing(words: Sequence[int]) -> list[int]:
    """Return where one more guard is missing before it, in a text with guards."""
    return [word + 1 + number for number, word in enumerate(words)]


def _moved(at: int, missing: Sequence[int]) -> int:
    return at - bisect_left(missing, at)


def _read(file: Path) -> str:
    """Return a template's text, of which no more is read than is allowed."""
    with file.open(encoding="utf-8") as stream:
        return stream.read(MAX_SOURCE + 1)


def _text(value: Any) -> str:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
