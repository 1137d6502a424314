"""Brings the messages of a conversation into the form that a chat template reads, or says why it cannot.

A template shows by a few small conversations what it reads: contents as texts or as lists of parts, the arguments of
tool calls as tables or as texts, and what stands for the content of a message that only calls tools.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

from headway.daemon.base.errors import ConfigError
from headway.daemon.text.documents import Conversation
from headway.daemon.text.special_words import NO_CHARACTER

_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Names under which templates read what an assistant thinks; transformers passes the first two for any of them."""
_ROLES: Final = ("system", "user", "assistant", "tool")
_SAME: Final = {"developer": "system", "observation": "tool", "function": "tool"}
"""What a role is to a template that does not name it."""
_QUOTED: Final = re.compile(r"""(?<=['"])\w+(?=['"])""")
_END: Final = "</think>"
_WORD: Final = "headwayprobe"
_ASKED: Final = ({"role": "user", "content": "x"},)
_TOOL: Final = {
    "name": _WORD,
    "description": "x",
    "parameters": {
        "type": "object",
        "properties": {"key": {"type": "string", "description": "x"}},
        "required": ["key"],
    },
}
_TOOLS: Final = [{"type": "function", "function": _TOOL}]


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForm:
    """What a chat template reads."""

    has_parts: bool
    """Contents are lists of parts, and a text is read as nothing."""
    without_content: Mapping[str, Any]
    """What says that a message has no content beside its tool calls: no field, null, or an empty text."""
    arguments_are_text: bool
    """Arguments of a tool call are JSON as a text, and a table is not read."""
    roles: Collection[str]
    """The usual ones, and those that the template names."""

    def applied(self, chat: Conversation) -> Conversation:
        """Return a conversation in this form. Raises ConfigError for what is not a text where one is due."""
        messages = [self._message(each, f"message {number}", chat) for number, each in enumerate(chat.messages, 1)]
        # Arguments that were JSON in a text are parsed by now: an escape there becomes its code point.
        if found := next(filter(None, map(NO_CHARACTER.search, _texts([messages, chat.tools]))), None):
            what = f"has the code point U+{ord(found[0]):04X}, which stands for no character"
            raise ConfigError(f"{what}; remove it", chat.where)
        return replace(chat, messages=messages)

    def _message(self, message: Mapping[str, Any], name: str, chat: Conversation) -> dict[str, Any]:
        found = {key: value for key, value in message.items() if value is not None and key != "content"}
        found["role"] = found["role"] if found["role"] in self.roles else _SAME.get(found["role"], found["role"])
        if found["role"] not in self.roles:
            what = f"{name} has the role {found['role']!r}, which the chat template does not name"
            raise ConfigError(f"{what}; say user, assistant, system or tool, or drop the record", chat.where)
        calls = found.get("tool_calls")
        if calls is not None:
            found["tool_calls"] = [self._call(call, name, chat.where) for call in _list(calls, name, chat.where)]
        text = _text(message.get("content"), name, chat.where)
        if text is not None:
            found["content"] = [{"type": "text", "text": text}] if self.has_parts else text
        elif found.get("tool_calls"):
            found |= self.without_content
        else:
            what = f"{name} ({found['role']}) has no content, and no tool_calls either"
            raise ConfigError(f"{what}; give it a text, or drop the record", chat.where)
        for key in _REASONING:
            if key in found:
                found[key] = _text(found[key], f"the {key} of {name}", chat.where)
        thought = next((found[key] for key in _REASONING if key in found), None)
        return found if thought is None else {"thinking": thought, **found, "reasoning_content": thought}

    def _call(self, call: Any, name: str, where: str) -> Any:
        if not isinstance(call, Mapping):
            raise ConfigError(f"{name} has a tool call that is no table", where)
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": self._call(call["function"], name, where)}
        arguments = call.get("arguments")
        if self.arguments_are_text and isinstance(arguments, Mapping):
            return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
        if not self.arguments_are_text and isinstance(arguments, str):
            try:
                return {**call, "arguments": json.loads(arguments or "{}")}
            except (ValueError, RecursionError):
                raise ConfigError(f"{name} has a tool call whose arguments are no JSON; repair them", where) from None
        return dict(call)


def find_form(render: Callable[[Conversation], str], source: str, where: str) -> MessageForm:
    """Ask a template what it reads. render: may raise ConfigError. source: of the template. where: for errors."""

    def shown(messages: list[dict[str, Any]], tools: Any = None) -> str:
        try:
            return render(Conversation(messages=messages, tools=tools, where=where))
        except ConfigError:
            return ""

    roles = {*_ROLES, *_QUOTED.findall(source)}
    user = {"role": "user", "content": _WORD}
    as_parts = {**user, "content": [{"type": "text", "text": _WORD}]}
    of_parts = shown([as_parts])
    has_parts = _WORD not in shown([user]) and _WORD in of_parts and "{'" not in of_parts  # no text of Python's
    absent: tuple[dict[str, Any], ...] = ({}, {"content": None}, {"content": ""})
    for are_text, no_content in product((False, True), absent):
        arguments = {"key": "value"}
        call = {"name": _WORD, "arguments": json.dumps(arguments) if are_text else arguments}
        calls = [{"id": "probe0001", "type": "function", "function": call}]
        text = shown([*_ASKED, {"role": "assistant", **no_content, "tool_calls": calls}], _TOOLS)
        is_whole = text.count(_WORD) > shown([*_ASKED], _TOOLS).count(_WORD) and "value" in text
        if is_whole and "\\" not in text and "{'" not in text and text.count("None") <= source.count("None"):
            return MessageForm(
                has_parts=has_parts, without_content=no_content, arguments_are_text=are_text, roles=roles
            )
    return MessageForm(has_parts=has_parts, without_content={}, arguments_are_text=False, roles=roles)


def called(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the tools that a message calls."""
    for call in message.get("tool_calls", ()):
        name = call.get("function", call).get("name")
        if isinstance(name, str):
            yield name


def thought_of(message: Mapping[str, Any]) -> str:
    """Return what a message's assistant thinks; empty: nothing."""
    thought, content = message.get("reasoning_content"), message.get("content")
    if isinstance(thought, str):
        return thought
    return content.split(_END)[0].split("<think>")[-1] if isinstance(content, str) and _END in content else ""


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in messages and tools, the names of their fields too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value:
            yield from _texts(each)
        if isinstance(value, dict):
            yield from _texts(list(value.values()))


def _list(calls: Any, name: str, where: str) -> list[Any]:
    if not isinstance(calls, list):
        raise ConfigError(f"{name} has tool_calls that are no list", where)
    return calls


def _text(content: Any, name: str, where: str) -> str | None:
    """Return a content as one text, as a template would join its parts. None: there is none."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        what = f"{name} has a content that is {_kind(content)}, and not a text or a list of text parts"
        raise ConfigError(f"{what}; write it as a text, or drop the record", where)
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
        if not isinstance(text, str):
            kind = f"of the type {part.get('type')!r}" if isinstance(part, Mapping) else f"that is {_kind(part)}"
            raise ConfigError(f"{name} has a part {kind}, and only text is trained on; drop the record", where)
        texts.append(text)
    return "".join(texts)


def _kind(value: Any) -> str:
    return {bool: "true or false", int: "a number", float: "a number", dict: "a table", list: "a list"}.get(
        type(value), type(value).__name__
    )
