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

from headway.daemon.base.errors import ConfigError
from headway.daemon.text.documents import Conversation, library
from headway.daemon.text.message_form import MessageForm, find_form
from headway.daemon.text.special_words import GUARD, SpecialWords, unguarded

# Follows which message a chat template renders where: each round of its loops writes a note into the text. Pure.
#
# A note is a number between two code points that stand for no character, so that it also passes through macros.

_NOTE: Final = re.compile("\ufdd2([\ufdd6-\ufddf]+)\ufdd3")
_DIGITS: Final = str.maketrans("0123456789", "".join(map(chr, range(0xFDD6, 0xFDE0))))
_CALLED: Final = "_loop_note"
ENDED: Final = object()
"""Noted when a loop has ended."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a loop."""

    item: Any
    """What the loop's variable was; ENDED: it is what follows a loop."""
    start: int
    end: int
    depth: int
    """Number of the rounds around it."""


class LoopNotes:
    """The notes of one rendering."""

    def __init__(self) -> None:
        self._noted: list[tuple[int, Any]] = []

    def clear(self) -> None:
        """Forget the last rendering."""
        self._noted.clear()

    def note(self, loop: int, item: Any = ENDED) -> str:
        """Return the note of a round that begins, or of a loop's end."""
        self._noted.append((loop, item))
        return "\ufdd2" + str(len(self._noted) - 1).translate(_DIGITS) + "\ufdd3"

    def rounds(self, raw: str) -> tuple[str, list[Round]]:
        """Return a text without its notes, and the rounds in it, in the order of their ends.

        Raises ValueError for a note that the template has made up.
        """
        parts = _NOTE.split(raw)
        found: list[Round] = []
        open_: list[tuple[int, Any, int]] = []
        length = len(parts[0])
        for number, part in zip(parts[1::2], parts[2::2], strict=True):
            place = int(number.translate({0xFDD6 + digit: str(digit) for digit in range(10)}))
            if place >= len(self._noted):
                raise ValueError("it has a note that no loop wrote")
            loop, item = self._noted[place]
            if loop in (each for each, _, _ in open_):
                while _close(open_, found, length) != loop:
                    pass
            if item is ENDED:
                found.append(Round(ENDED, length, length, len(open_)))
            else:
                open_.append((loop, item, length))
            length += len(part)
        while open_:
            _close(open_, found, length)
        return "".join(parts[::2]), found


def _close(open_: list[tuple[int, Any, int]], found: list[Round], end: int) -> int:
    loop, item, start = open_.pop()
    found.append(Round(item, start, end, len(open_)))
    return loop


def with_notes(environment: Any, source: str, nodes: Any, note: Callable[..., str]) -> Any:
    """Return a template with a note at the begin of each round of a loop, and after it. nodes: jinja2's module."""
    environment.globals[_CALLED] = note
    tree = environment.parse(source)
    loops = 0

    def noted(*arguments: Any) -> Any:
        call = nodes.Call(nodes.Name(_CALLED, "load"), list(arguments), [], None, None)
        return nodes.Output([call]).set_lineno(1)

    def visit(node: Any, *, is_captured: bool) -> None:
        nonlocal loops
        is_captured |= isinstance(node, nodes.Macro | nodes.CallBlock | nodes.FilterBlock | nodes.AssignBlock)
        for field, value in node.iter_fields():
            children: Sequence[Any] = value if isinstance(value, list) else [value]
            with_ends: list[Any] = []
            for child in children:
                with_ends.append(child)
                if isinstance(child, nodes.Node):
                    visit(child, is_captured=is_captured)
                if isinstance(child, nodes.For) and not is_captured:
                    loops += 1
                    number, target = nodes.Const(loops), child.target
                    named = isinstance(target, nodes.Name)
                    item = nodes.Name(target.name, "load") if named else nodes.Const(None)
                    child.body.insert(0, noted(number, item))
                    with_ends.append(noted(number))
            if isinstance(value, list):
                setattr(node, field, with_ends)

    visit(tree, is_captured=False)
    tree.set_environment(environment)
    code = environment.compile(tree)
    return environment.template_class.from_code(environment, code, environment.make_globals(None))


# The sandbox of chat templates: jinja2 as transformers sets it up, but with a date that stands still.

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
    environment = sandboxes.ImmutableSandboxedEnvironment(
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


class ChatTemplate:
    """A compiled chat template."""

    def __init__(
        self,
        source: str,
        *,
        special: Mapping[str, str],
        names: SpecialWords,
        words: SpecialWords,
        today: date,
        name: str,
    ) -> None:
        """special: texts of special tokens, by the names that a template has for them. names: of all special tokens.

        words: those that only the template may write. today: stands still. name: of the folder.

        Raises ConfigError when the template is invalid.
        """
        self.source = source
        self.names = names
        self._special = dict(special)
        self._notes = LoopNotes()
        self._spans: list[tuple[int, int, str]] = []
        self._length = 0
        try:
            environment = sandbox(today=today, mark=self._mark)
            self._template = environment.from_string(source)
            self._words = words.without(_looked_for(environment.parse(source)))
            followed = sandbox(today=today, mark=str)
            self._followed = with_notes(followed, source, library("jinja2.nodes"), self._notes.note)
        except ConfigError:
            raise
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

        Raises ConfigError, which names the place in the data, if the template fails.
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
            for piece in template.generate(values):
                pieces.append(piece)
                self._length += len(piece)
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
    named = {}
    for name, source in sources.items():
        if not isinstance(source, str):
            raise ConfigError("chat_template is no text", str(folder))
        named[name] = ChatTemplate(source, special=special, names=names, words=words, today=today, name=str(folder))
    return ChatTemplates(named)


def _in_files(folder: Path) -> dict[str, Any]:
    """Return the templates that are files: the default one, and others by the names of their files."""
    default = folder / TEMPLATE_NAME
    found = {DEFAULT: default.read_text(encoding="utf-8")} if default.is_file() else {}
    return found | {
        file.stem: file.read_text(encoding="utf-8") for file in sorted((folder / OTHERS_NAME).glob("*.jinja"))
    }


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


def _text(value: Any) -> str:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
