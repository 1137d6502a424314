"""Says which characters of a rendered conversation, and which of its tokens, the assistant speaks.

A template may mark answers. In others, an answer is what the template's loop writes for a message, without what the
prompt for the answer ends with, and with the special token that ends the turn. Some templates rewrite an answer once
the conversation goes on: they drop thoughts, or end it in another way. Then each such answer gets a text of its own:
the conversation up to it, as a model sees it that gives the answer.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from headway.daemon.base.errors import ConfigError
from headway.daemon.text.chat_template import ENDED, ChatTemplate, Rendered
from headway.daemon.text.documents import Conversation
from headway.daemon.text.message_form import called, thought_of
from headway.daemon.text.special_words import unguarded

MAX_MESSAGES: Final = 2048
"""Messages of a conversation. Each answer is found in a rendering of all that is before it, so the time grows with
their square: this many take some 20 s. A template may look back from the last message at any other, so nothing less is
rendered.
"""
MAX_CHARACTERS: Final = 16 << 20
"""Of all texts of a conversation together: each answer may need one of its own."""
_BEGIN: Final = "<think>"
_END: Final = "</think>"
Span = tuple[int, int]
Spans = Sequence[Span]


class Way(StrEnum):
    """How the answers of a conversation were found."""

    MARKED = "marked_by_template"
    WHOLE = "one_text"
    PER_ANSWER = "text_per_answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatText:
    """A conversation, or its beginning, as text."""

    text: str
    spans: Spans
    """The characters that the assistant speaks."""
    words: frozenset[int]
    """Begins of names of special tokens that people wrote: they are only words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTexts:
    """What is trained of a conversation."""

    texts: list[ChatText]
    way: Way
    num_thoughts_left_out: int = 0
    """Answers of which the template does not render what the assistant thinks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """An answer at the end of a text, as places in it."""

    start: int
    end: int
    """Where its message ends."""
    last: int
    """Where the special tokens end that the template puts after the last message."""
    is_ended: bool
    """A special token ends it."""


def chat_texts(template: ChatTemplate, chat: Conversation) -> ChatTexts:
    """Return a conversation's texts with the spans of its answers; the last text has the last answer.

    Raises ConfigError if an answer has no exact place.
    """
    if len(chat.messages) > MAX_MESSAGES:
        raise ConfigError(f"has more than {MAX_MESSAGES} messages; split it into shorter conversations", chat.where)
    whole = template.render(chat, chat.messages)
    if whole.marked:
        marked = ChatText(text=whole.text, spans=whole.marked, words=whole.words)
        return ChatTexts(texts=[marked], way=Way.MARKED)
    followed = _followed(template, chat, chat.messages, whole)
    text, spans, texts, num_left_out = whole.text, list[Span](), list[ChatText](), 0
    is_apart = False
    for number, message in enumerate(chat.messages):
        if message["role"] != "assistant":
            continue
        if sum(len(each.text) for each in texts) > MAX_CHARACTERS:
            what = "is too long for a text of each answer, which the chat template changes when the chat goes on"
            raise ConfigError(f"{what}; split it into shorter ones", chat.where)
        is_last = number + 1 == len(chat.messages)
        so_far = followed if is_last else template.follow(chat, chat.messages[: number + 1])
        answer = _answer(template, chat, number, so_far)
        if _check_words(message, so_far.text[answer.start : answer.last], number, chat):
            with_thought = _with_thought(template, chat, number, so_far, answer)
            if with_thought is not None:
                texts.append(with_thought)
                is_apart = is_last
                continue
            num_left_out += 1
        if not is_last and text.startswith(so_far.text[: answer.end]):
            stop = None if answer.is_ended else _end_of_turn(template, followed, answer.end)
            spans.append((answer.start, stop or answer.end))
            continue
        stop_text = "" if answer.is_ended else _stop(template, chat, number)
        ended = so_far.text[: answer.end] + stop_text if stop_text else so_far.text
        span = (answer.start, len(ended) if stop_text else answer.last)
        if is_last:
            text = ended
            spans.append(span)
        else:
            _followed(template, chat, chat.messages[: number + 1])
            texts.append(ChatText(text=ended, spans=[span], words=so_far.words))
    way = Way.PER_ANSWER if texts else Way.WHOLE
    if spans or not texts:
        texts.insert(len(texts) - is_apart, ChatText(text=text, spans=spans, words=whole.words))
    return ChatTexts(texts=texts, way=way, num_thoughts_left_out=num_left_out)


def _followed(
    template: ChatTemplate, chat: Conversation, messages: Sequence[Any], rendered: Rendered | None = None
) -> Rendered:
    """Return a rendering that was followed, and is like one that was not. Raises ConfigError if it is not."""
    found = template.follow(chat, messages)
    if found.text != (rendered or template.render(chat, messages)).text:
        raise _unknown("the chat template renders in another way when its loops are followed", chat)
    return found


def _answer(template: ChatTemplate, chat: Conversation, number: int, so_far: Rendered) -> _Answer:
    """Return the answer that a message is, in the conversation up to it."""
    text = so_far.text
    begin, end = _place(chat, number, so_far)
    start = begin + _header(template, chat, number, text[begin:end])
    last = len(text) if _is_of_names(template, text[end:]) else end
    spoken = start + len(text[start:last].rstrip())
    is_ended = any(stop == spoken for _, stop in template.names.places(text, so_far.words, start=start))
    return _Answer(start=start, end=end, last=last, is_ended=is_ended)


def _place(chat: Conversation, number: int, rendered: Rendered) -> Span:
    """Return the span that the template's loop writes for a message."""
    rounds = [each for each in rendered.rounds if each.item is chat.messages[number]]
    spans = [(each.start, each.end) for each in rounds if rendered.text[each.start : each.end].strip()]
    if len(spans) != 1:
        where = "in no place" if not spans else f"in {len(spans)} places"
        raise _unknown(f"the chat template writes message {number + 1} {where}", chat)
    return spans[0]


def _header(template: ChatTemplate, chat: Conversation, number: int, text: str) -> int:
    """Return how much of a message's text is the begin of an answer, which a prompt for it has: no model says it."""
    before = chat.messages[:number]
    prompts = [""]
    with suppress(ConfigError):  # the template wants more than a question
        prompts.append(_usual_prompt(template))
    with suppress(ConfigError):  # the template wants a question, or any message
        prompts.append(_end_of_prompt(template.follow(chat, before, is_prompt=True)))
    return max(_common(template, text, prompt) for prompt in prompts)


@lru_cache(maxsize=8)
def _usual_prompt(template: ChatTemplate) -> str:
    chat = template.conversation(Conversation(messages=[{"role": "user", "content": "x"}], tools=None, where=""))
    return _end_of_prompt(template.follow(chat, chat.messages, is_prompt=True))


def _end_of_prompt(prompt: Rendered) -> str:
    """Return what follows the messages of a prompt."""
    ends = [each.start for each in prompt.rounds if each.item is ENDED and not each.depth]
    return prompt.text[max(ends) :] if ends else ""


def _common(template: ChatTemplate, text: str, prompt: str) -> int:
    """Return how much of a prompt a text begins with: all of it, or up to a line's or a special token's end."""
    cuts = [0, len(prompt), *(end for _, end in template.names.places(prompt))]
    cuts += [at + 1 for at, character in enumerate(prompt) if character == "\n"]
    return max(cut for cut in cuts if text.startswith(prompt[:cut]))


def _end_of_turn(template: ChatTemplate, rendered: Rendered, at: int) -> int | None:
    """Return the end of the special token that follows a place, but for spaces; None: another text follows."""
    start, end = next(template.names.places(rendered.text, rendered.words, start=at), (at, at))
    return end if end > at and not rendered.text[at:start].strip() else None


def _stop(template: ChatTemplate, chat: Conversation, number: int) -> str:
    """Return what ends a turn that the template leaves open: the special token with which it begins the next one."""
    role = "tool" if next(called(chat.messages[number]), None) else "user"
    probe = {"role": role, "content": "x", "name": "x", "tool_call_id": "x"}
    following = chat.messages[number + 1 : number + 2]
    if not following:
        following = template.conversation(Conversation(messages=[probe], tools=None, where=chat.where)).messages
    try:
        rendered = template.follow(chat, [*chat.messages[: number + 1], *following])
        _, end = _place(chat, number, rendered)
    except ConfigError:
        return template.end_of_text
    stop = _end_of_turn(template, rendered, end)
    return rendered.text[end:stop] if stop else template.end_of_text


def _is_of_names(template: ChatTemplate, text: str) -> bool:
    """Return whether a text is special tokens alone."""
    places = list(template.names.places(text))
    return bool(places) and sum(end - start for start, end in places) == len("".join(text.split()))


def _with_thought(
    template: ChatTemplate, chat: Conversation, number: int, so_far: Rendered, answer: _Answer
) -> ChatText | None:
    """Return a prompt that begins a thought, with the thought and the answer; None: the prompt begins none.

    It is for templates that never render a thought, and yet ask the model for one, such as DeepSeek-R1's.
    """
    prompt = template.render(chat, chat.messages[:number], is_prompt=True)
    if not prompt.text.rstrip().endswith(_BEGIN):
        return None
    start = len(prompt.text)
    thought, in_thought = unguarded(thought_of(chat.messages[number]).strip())
    opened = f"{prompt.text}{thought}\n{_END}\n\n"
    spoken = so_far.text[answer.start : answer.last].lstrip()
    moved = len(opened) + len(spoken) - answer.last
    stop = "" if answer.is_ended else _stop(template, chat, number)
    words = {*prompt.words, *(start + word for word in in_thought)}
    words |= {word + moved for word in so_far.words if word >= answer.start}
    text = opened + spoken + stop
    return ChatText(text=text, spans=[(start, len(text))], words=frozenset(words))


def _check_words(message: Mapping[str, Any], spoken: str, number: int, chat: Conversation) -> bool:
    """Return whether a thought is left out of what is spoken. Raises ConfigError if a tool call is."""
    missing = next((name for name in called(message) if unguarded(name)[0] not in spoken), None)
    if missing is not None:
        what = f"the chat template leaves out that message {number + 1} calls {unguarded(missing)[0]}"
        raise ConfigError(f"{what}; name a tokenizer whose template knows tools, or drop the record", chat.where)
    return unguarded(thought_of(message))[0].strip() not in spoken


def _unknown(what: str, chat: Conversation) -> ConfigError:
    return ConfigError(f"{what}, so that answers have no exact place; mark them with {{% generation %}}", chat.where)


def spoken_tokens(offsets: Spans, spans: Spans) -> npt.NDArray[np.bool_]:
    """Return which tokens cover a character of a span. A token begins where the last one ends, also after spaces."""
    ends = np.maximum.accumulate(np.array([0, *(end for _, end in offsets)], dtype=np.int64))
    begins = np.minimum(np.array([start for start, _ in offsets], dtype=np.int64), ends[:-1])
    is_spoken = np.zeros(len(offsets), dtype=np.bool_)
    for start, end in spans:
        is_spoken |= (begins < end) & (ends[1:] > start)
    return is_spoken
