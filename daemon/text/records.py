"""Finds the text or the conversation of a record, in the forms in which people write them. Pure."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from headway.daemon.base.errors import ConfigError
from headway.daemon.text.documents import BadRecord, Conversation, Document, Pair
from headway.daemon.text.file_content import pieces_of

Messages = list[dict[str, Any]]
SHAREGPT: Final = "ShareGPT (from + value)"
_ROLES: Final = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "bot", "chatbot", "chatgpt", "ai", "function_call"), "assistant"),
    "system": "system",
}
"""Roles by the names of ShareGPT, OpenAssistant and Gemini, and of LLaMA-Factory's variant of the first."""
_TOOL: Final = ("tool", "observation", "function", "function_response")
"""Names of ShareGPT's `from` for what a tool returns. As a `role`, each is the template's own."""
_ABOUT: Final = ("input", "context")
"""Columns of the text that an instruction is about."""
_MAX_NAMED: Final = 20


@dataclass(frozen=True, slots=True)
class _Form:
    """A form of conversations."""

    needs: tuple[str, ...]
    """Names of columns."""
    messages: Callable[[Mapping[str, Any]], Any]
    may_have: tuple[str, ...] = ("tools", "functions", "system")

    @property
    def name(self) -> str:
        return " + ".join(self.needs)


def _listed(column: str) -> _Form:
    return _Form((column,), lambda record: record.get(column))


def _completed(record: Mapping[str, Any]) -> Any:
    """Return the messages of a prompt and its completion: texts, or lists of messages."""
    if record.get("label") in (False, 0):
        what = "has the label false, so its completion is a bad answer"
        raise ConfigError(f"{what}: leave it out, or make pairs of chosen and rejected answers for --pairs", "")
    prompt, completion = _messages_of(record["prompt"], "user"), _messages_of(record["completion"], "assistant")
    if any(isinstance(message, Mapping) and message.get("role") == "assistant" for message in prompt):
        what = "has answers in its prompt, which are not to be trained on"
        raise ConfigError(f"{what}: write all as `messages` to train on them too, or make them part of a question", "")
    return [*prompt, *completion]


def _instructed(asked: str, answered: str) -> _Form:
    """Return the form of an instruction with an optional text that it is about."""

    def messages(record: Mapping[str, Any]) -> Messages:
        about, *more = [record[name] for name in _ABOUT if record.get(name)] or [None]
        history = record.get("history") or []
        turns = [*(history if isinstance(history, list) else [history]), (record[asked], record[answered])]
        if not all(isinstance(turn, list | tuple) and len(turn) == 2 for turn in turns):
            raise ConfigError("has a history that is no list of pairs", "")
        found: Messages = []
        for question, answer in turns:
            found += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if about and not (isinstance(about, str) and isinstance(record[asked], str) and not more):
            raise ConfigError(f"has {asked} and {' or '.join(_ABOUT)} that are not one text each", "")
        if about and about.strip():
            found[-2]["content"] = f"{record[asked]}\n\n{about}"
        return found

    return _Form((asked, answered), messages, (*_ABOUT, "history", "system", "tools"))


def _preferred(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pair by the names of TRL."""
    asked = record["input"] if isinstance(record["input"], Mapping) else {"messages": record["input"]}
    answers = {"chosen": record["preferred_output"], "rejected": record["non_preferred_output"]}
    return {**asked, "prompt": asked.get("messages"), **answers}


_FORMS: Final = (
    _listed("messages"),
    _listed("conversations"),
    _Form(("prompt", "completion"), _completed, ("tools", "system", "label")),
    _instructed("instruction", "output"),
    _instructed("instruction", "response"),
    _instructed("question", "answer"),
)

_PAIRS: Final = (
    _Form(("chosen", "rejected"), dict, ("prompt", "tools", "system")),
    _Form(("input", "preferred_output", "non_preferred_output"), _preferred, ()),
)
"""Pairs of answers, by the names of TRL and of OpenAI."""


@dataclass(frozen=True, slots=True)
class Field:
    """The part of a record that is trained on."""

    name: str = ""
    """Its column; empty: `text`, or the columns of a known form of conversations."""
    is_chat: bool = False
    is_pair: bool = False

    def columns(self, names: Collection[str]) -> list[str]:
        """Return the columns of a table in which it is. Raises ConfigError, without a place, if they are missing."""
        there = f"there are {', '.join(list(names)[:_MAX_NAMED])}"
        if not self.is_chat and not self.is_pair:
            text = self.name or "text"
            if text not in names:
                raise ConfigError(f"has no column {text!r}; {there}{_hint(names)}", "")
            return [text]
        form = self._form(names)
        if form is None or not set(form.needs) <= set(names):
            if self.is_pair:
                raise ConfigError(f"has no columns {_PAIRS[0].name}; {there}: give the columns these names", "")
            wanted = repr(self.name) if self.name else f"of conversations ({_known()})"
            raise ConfigError(f"has no column {wanted}; {there}: name one with --field", "")
        return [*form.needs, *(name for name in form.may_have if name in names)]

    def document(self, record: Any, where: str) -> Document | BadRecord:
        """Return a record's document, or why it has none."""
        try:
            if self.is_pair:
                return iter((_pair_of(record, where),))
            if self.is_chat:
                return iter((self._conversation(record, where),))
            return pieces_of(text_of(record, self.name or "text", where))
        except ConfigError as error:
            return BadRecord(error.what, where)

    def _form(self, names: Collection[str]) -> _Form | None:
        if self.is_pair:
            return _form_of(names, _PAIRS)
        return _listed(self.name) if self.name else _form_of(names, _FORMS)

    def _conversation(self, record: Any, where: str) -> Conversation:
        """Return a record's conversation. Raises ConfigError if the messages are missing or malformed."""
        if not isinstance(record, dict):
            raise ConfigError("is no table", where)
        form = self._form([name for name, value in record.items() if value is not None])
        told = _parsed(form.messages(record)) if form else None
        if form and (told == [] or record.get(form.name) == []):
            raise ConfigError(f"has no message in {form.name!r}; drop the record", where)
        if not isinstance(told, list):
            wanted = f"the field {self.name!r}" if self.name else f"a known form ({_known()})"
            lists = [name for name, value in record.items() if _has_tables(value)]
            hint = (
                f": --field {lists[0]} takes them from there"
                if lists
                else ": write `messages`, a list of role and content"
            )
            hint = ": --pairs reads these" if _form_of(record, _PAIRS) else hint
            raise ConfigError(f"has no list of messages in {wanted}; it has {_names(record)}{hint}", where)
        messages = [_message(message, number) for number, message in enumerate(told, 1)]
        for number, (message, written) in enumerate(zip(messages, told, strict=True), 1):
            if message["role"] == "assistant" and written.get("weight") == 0:
                what = f"message {number} has the weight 0, but every answer is trained on"
                raise ConfigError(f"{what}; end the record before it, or take `weight` out to train on it", where)
        messages = _with_system(messages, record)
        is_sharegpt = any("from" in message for message in told)
        known = SHAREGPT if is_sharegpt else form.name if form and len(form.needs) > 1 else ""
        return Conversation(messages=messages, tools=_tools_of(record), where=where, form=known)


def _pair_of(record: Any, where: str) -> Pair:
    """Return a record's pair: `chosen` and `rejected`, perhaps after a `prompt`, as texts or lists of messages.

    Raises ConfigError if an answer is missing or malformed.
    """
    given = record if isinstance(record, dict) else {}
    form = _form_of(given, _PAIRS)
    fields = form.messages(given) if form else given
    prompt = _messages_of(fields.get("prompt") or [], "user")
    tools = _tools_of(fields)

    def conversation(answer: str) -> Conversation:
        found = fields.get(answer)
        if not found:
            what = f"has no answer in the field {answer!r}; a pair is `prompt`, `chosen` and `rejected`"
            raise ConfigError(f"{what}, each a text or a list of messages", where)
        answered = _messages_of(found, "assistant")
        told = answered if prompt and answered[: len(prompt)] == prompt else [*prompt, *answered]
        messages = [_message(message, number) for number, message in enumerate(told, 1)]
        begins = [message["role"] for message in messages[len(prompt) - 1 : len(prompt) + 1]]
        if len(told) > len(answered) and begins in (["user", "user"], ["user", "system"]):
            raise ConfigError(f"has a prompt, and {answer!r} begins with another question; leave one out", where)
        messages = _with_system(messages, fields)
        if all(message["role"] in ("system", "assistant") for message in messages):
            what = f"has no question before {answer!r}; it has {_names(fields)}"
            raise ConfigError(f"{what}: name its column `prompt`, or write both answers as lists of messages", where)
        return Conversation(messages=messages, tools=tools, where=where)

    return Pair(preferred=conversation("chosen"), other=conversation("rejected"))


def _with_system(messages: Messages, record: Mapping[str, Any]) -> Messages:
    """Return messages after a record's system prompt, if it has one of its own and they begin with none."""
    system = record.get("system")
    is_needed = isinstance(system, str) and system.strip() and messages[0]["role"] != "system"
    return [{"role": "system", "content": system}, *messages] if is_needed else messages


def _messages_of(said: Any, role: str) -> list[Any]:
    """Return messages, of which a text is one."""
    return [{"role": role, "content": said}] if isinstance(said, str) else said if isinstance(said, list) else [said]


def text_of(record: Any, field: str, where: str) -> bytes:
    """Return a record's text as UTF-8. Raises ConfigError if the text is missing or not representable in UTF-8."""
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        hint = ""
        if isinstance(record, dict):
            texts = [name for name, value in record.items() if isinstance(value, str)]
            hint = _hint(record) or (f"; it has {_names(texts)}: name one with --field" if texts else "")
        raise ConfigError(f"has no text in the field {field!r}{hint}", where)
    if "\0" in text:  # for the tokenizer of bytes it is the end of a document, and no file of text has one
        raise ConfigError(f"has a zero character in the field {field!r}; remove it", where)
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise ConfigError(f"has half a character, {half}, in the field {field!r}; repair or drop it", where) from error


def without_nulls(value: Any) -> Any:
    """Return a value of Arrow without the fields that it has because another record has them; a content stays."""
    if isinstance(value, dict):
        is_message = "role" in value
        kept = ((name, each) for name, each in value.items() if each is not None or (is_message and name == "content"))
        return {name: without_nulls(each) for name, each in kept}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def _form_of(names: Collection[str], forms: Iterable[_Form]) -> _Form | None:
    return next((form for form in forms if set(form.needs) <= set(names)), None)


def _hint(names: Collection[str]) -> str:
    """Return what to do with names of columns that say that a record is a conversation."""
    if _form_of(names, _PAIRS):
        return "; pairs need --pairs --tokenizer FOLDER --pack LENGTH"
    form = _form_of(names, _FORMS)
    return f"; conversations need --chat --tokenizer FOLDER (it has {' and '.join(form.needs)})" if form else ""


def _known() -> str:
    return ", ".join(form.name for form in _FORMS)


def _names(names: Iterable[str]) -> str:
    return ", ".join(list(names)[:_MAX_NAMED]) or "nothing"


def _parsed(value: Any) -> Any:
    """Return a list that may be written as JSON in a text, which is the only way in a table with few types."""
    if not isinstance(value, str) or not value.strip():
        return value or None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ConfigError("has messages or tools that are a text, and not JSON", "") from None


def _tools_of(record: Mapping[str, Any]) -> list[Any] | None:
    """Return a record's tools, of which each may be JSON in a text; None: it has none. Raises ConfigError."""
    told = _parsed(record.get("tools"))
    if told is None and _has_tables(functions := _parsed(record.get("functions"))):
        told = [{"type": "function", "function": each} for each in functions]
    tools = [_parsed(each) for each in told] if isinstance(told, list) else told
    if tools and not _has_tables(tools):
        raise ConfigError("has tools that are no list of tables, each with the name of a tool; repair or drop them", "")
    return tools or None


def _has_tables(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(each, dict) for each in values)


def _message(message: Any, number: int) -> dict[str, Any]:
    """Return a message with its role. Raises ConfigError, without a place."""
    said = message if isinstance(message, dict) else {}
    name = said.get("role", said.get("from"))
    if not isinstance(name, str):
        raise ConfigError(f"message {number} is no table with a role", "")
    role = _ROLES.get(name.strip().lower(), name)
    if "role" not in said:
        role = "tool" if name in _TOOL else role
        said = {"function_call" if name == "function_call" else "content": said.get("value")}
    kept = {key: value for key, value in said.items() if key not in ("role", "function_call")}
    if said.get("function_call") is None:
        return {"role": role, **kept}
    calls = _parsed(said["function_call"])
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": role, **kept, "tool_calls": [{"type": "function", "function": call} for call in calls]}
