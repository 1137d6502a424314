"""Says which characters of a rendered conversation, and which of its tokens, the assistant speaks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway.daemon.data.chat_template import ChatTemplate
from headway.daemon.data.documents import Conversation
from headway.daemon.errors import ConfigError

Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatText:
    """One row of a conversation, as text."""

    text: str
    spans: Spans
    """The characters that the assistant speaks."""
    words: frozenset[int]
    """Begins of names of special tokens that people wrote: they are only words."""
    is_marked: bool
    """The template marks what the assistant speaks."""


def chat_texts(template: ChatTemplate, chat: Conversation) -> list[ChatText]:
    """Return a conversation's text, with the spans of its answers.

    A template without marks is asked for each answer: it is what follows the prompt for it, up to the next message.
    Raises ConfigError if the conversation so far is no beginning of the whole one.
    """
    whole = template.render(chat, chat.messages)
    if whole.marked:
        return [ChatText(text=whole.text, spans=whole.marked, words=whole.words, is_marked=True)]
    spans = []
    for number, message in enumerate(chat.messages):
        if message["role"] != "assistant":
            continue
        before = template.render(chat, chat.messages[:number], is_prompt=True).text
        after = template.render(chat, chat.messages[: number + 1]).text
        if not (after.startswith(before) and whole.text.startswith(after)):
            what = f"message {number + 1} changes what is before it, so that its answer has no exact place"
            raise ConfigError(f"{what}; mark answers in the chat template with {{% generation %}}", chat.where)
        spans.append((len(before), len(after)))
    return [ChatText(text=whole.text, spans=spans, words=whole.words, is_marked=False)]


def spoken_tokens(offsets: Spans, spans: Spans, *, may_cross: bool, where: str) -> npt.NDArray[np.bool_]:
    """Return which tokens cover a character of a span. A token begins where the last one ends, also after spaces.

    may_cross: tokens may reach over the begin of a span; otherwise they raise ConfigError.
    """
    ends = np.maximum.accumulate(np.array([0, *(end for _, end in offsets)], dtype=np.int64))
    begins = np.minimum(np.array([start for start, _ in offsets], dtype=np.int64), ends[:-1])
    is_spoken = np.zeros(len(offsets), dtype=np.bool_)
    for start, end in spans:
        if not may_cross and bool(((begins < start) & (ends[1:] > start)).any()):
            what = "a token reaches over the begin of an answer"
            raise ConfigError(f"{what}; mark answers in the chat template with {{% generation %}}", where)
        is_spoken |= (begins < end) & (ends[1:] > start)
    return is_spoken
