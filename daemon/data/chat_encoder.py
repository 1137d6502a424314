"""Turns conversations into tokens. In what a chat template writes, the names of special tokens are these tokens.

A name that people wrote stays a word. The tokenizer's library cannot tell both apart, so such a text goes to a second
tokenizer: there all names are words, and each special token that the template wrote is a stand-in of equal length.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from headway.daemon.data.chat_mask import ChatText, ChatTexts, Way, chat_texts, spoken_tokens
from headway.daemon.data.chat_template import ChatTemplates
from headway.daemon.data.documents import TOO_DEEP, Conversation, library
from headway.daemon.data.special_words import GUARD, SpecialWords
from headway.daemon.data.template_limits import TooMuchError
from headway.daemon.errors import ConfigError

Tokens = npt.NDArray[np.integer]
Spoken = npt.NDArray[np.bool_]
MAX_TOO_MUCH: Final = 3
"""Records for which a template may take too much time or memory: each costs up to 20 s, and the next will too."""
_STAND_IN: Final = "\ufdd1"
"""Begins a stand-in; no conversation has it."""
_NUMBERS: Final = 0xF0000
"""Private code points, which number the stand-ins."""


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A conversation as rows of tokens, each a document of its own."""

    rows: tuple[tuple[Tokens, Spoken], ...]
    """The tokens, and which of them the assistant speaks."""
    way: Way
    num_thoughts_left_out: int
    """Answers of which the template does not render what the assistant thinks."""
    num_words: int
    """Names of special tokens that people wrote."""


class ChatEncoder:
    """A tokenizer with its chat templates."""

    def __init__(
        self, tokenizer: Mapping[str, Any], ids: Mapping[str, int], templates: ChatTemplates, words: SpecialWords
    ) -> None:
        """tokenizer: a parsed tokenizer.json. ids: of special tokens, by name. words: the names that are guarded."""
        self._ids = ids
        self._names = {token: name for name, token in ids.items()}
        self._templates = templates
        self._words = words
        self._tokenizer = tokenizer
        self._loaded = _load(tokenizer)
        self._num_too_much = 0

    def encode(self, chats: Sequence[Conversation]) -> list[EncodedChat | ConfigError]:
        """Return what becomes of each conversation, or why it cannot be encoded."""
        rendered = [self._tried_texts(chat) for chat in chats]
        plain = [text for each in rendered if isinstance(each, ChatTexts) for text in each.texts if not text.words]
        try:
            found = iter(self._loaded.encode_batch([each.text for each in plain], add_special_tokens=False))
        except Exception:  # the library does not say which text it was
            found = (_tried(_encode, self._loaded, each.text) for each in plain)
        done: list[EncodedChat | ConfigError] = []
        for of_chat in rendered:
            if isinstance(of_chat, ConfigError):
                done.append(of_chat)
                continue
            texts = of_chat.texts
            rows = [self._row(text, next(found) if not text.words else None) for text in texts]
            wrong = next((row for row in rows if isinstance(row, ConfigError)), None)
            num_words = max(len(text.words) for text in texts)
            good = tuple(row for row in rows if not isinstance(row, ConfigError))
            left_out = of_chat.num_thoughts_left_out
            done.append(wrong or EncodedChat(good, of_chat.way, left_out, num_words))
        return done

    def _tried_texts(self, chat: Conversation) -> ChatTexts | ConfigError:
        """Return what is trained of a conversation, or why nothing is. Raises TooMuchError if this happens often."""
        found: ChatTexts | ConfigError = _tried(self._texts, chat)
        if isinstance(found, TooMuchError):
            self._num_too_much += 1
            if self._num_too_much == MAX_TOO_MUCH:
                what = f"{found.what}, as for {MAX_TOO_MUCH - 1} records before; name a tokenizer with another template"
                raise TooMuchError(what, found.where)
        return found

    def _texts(self, chat: Conversation) -> ChatTexts:
        template = self._templates.of(chat)
        return chat_texts(template, template.conversation(chat))

    def _row(self, text: ChatText, whole: Any) -> tuple[Tokens, Spoken] | ConfigError:
        whole = whole or _tried(self._with_words, text)
        if isinstance(whole, ConfigError):
            return whole
        is_spoken = spoken_tokens(whole.offsets, text.spans)
        ids = [self._second.meant.get(token, token) for token in whole.ids] if text.words else whole.ids
        return np.array(ids, dtype=np.int64), is_spoken

    @cached_property
    def _second(self) -> "_Second":
        return _second(self._tokenizer, self._ids, self._words)

    def _with_words(self, text: ChatText) -> Any:
        """Encode a text in which some names of special tokens are only words."""
        second = self._second
        parts: list[str] = []
        end = 0
        for start, stop in sorted(self._matched(text)):
            parts += [text.text[end:start], second.stand_ins[text.text[start:stop]]]
            end = stop
        whole = _encode(second.loaded, "".join([*parts, text.text[end:]]))
        for name, _ in self._names_in(whole, text.text):
            raise ConfigError(f"the tokenizer has no other token for {name!r} in a message; drop the record", "")
        return whole

    def _matched(self, text: ChatText) -> set[tuple[int, int]]:
        """Return the spans of names that the tokenizer reads as special tokens, and that the template wrote.

        Some names are tokens in some places alone: where no letter follows, or before the text is normalised.
        """
        cuts = [word + 1 for word in sorted(text.words)]
        guarded = GUARD.join(text.text[start:end] for start, end in pairwise([0, *cuts, len(text.text)]))
        guards = [cut + number for number, cut in enumerate(cuts)]
        spans = set()
        for name, at in self._names_in(_encode(self._loaded, guarded), guarded):
            start = at - bisect_left(guards, at)
            spans.add((start, start + len(name)))
        return spans

    def _names_in(self, whole: Any, text: str) -> Iterator[tuple[str, int]]:
        """Yield each special token that stands in a text by its name, and where. That of unknown text does not."""
        for token, (start, end) in zip(whole.ids, whole.offsets, strict=True):
            name = self._names.get(token)
            at = text.find(name, start, end) if name else -1  # offsets may have spaces around a name
            if name and at >= 0:
                yield name, at


@dataclass(frozen=True, slots=True)
class _Second:
    """A tokenizer to which all names of special tokens are words."""

    loaded: Any
    stand_ins: dict[str, str]
    """By the name of the special token that the template wrote."""
    meant: dict[int, int]
    """From the token of a stand-in to the special token."""


def _second(tokenizer: Mapping[str, Any], ids: Mapping[str, int], words: SpecialWords) -> _Second:
    found = _Second(_load(tokenizer), {}, {})
    found.loaded.encode_special_tokens = True
    flags = {each["content"]: each for each in tokenizer["added_tokens"]}
    for number, name in enumerate(words.names):
        stand_in = found.stand_ins[name] = _STAND_IN + chr(_NUMBERS + number) * (len(name) - 1)
        same = {key: flags[name][key] for key in ("lstrip", "rstrip", "single_word", "normalized")}
        found.loaded.add_tokens([library("tokenizers").AddedToken(stand_in, special=False, **same)])
        found.meant[found.loaded.token_to_id(stand_in)] = ids[name]
    return found


def _load(tokenizer: Mapping[str, Any]) -> Any:
    loaded = library("tokenizers").Tokenizer.from_str(json.dumps(tokenizer))
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def _tried(make: Callable[..., Any], *given: Any, **more: Any) -> Any:
    """Return what is made, or the ConfigError that it raises."""
    try:
        return make(*given, **more)
    except ConfigError as error:
        return error
    except RecursionError:
        return ConfigError(TOO_DEEP, "")


def _encode(loaded: Any, text: str) -> Any:
    try:
        return loaded.encode(text, add_special_tokens=False)
    except Exception as error:  # the library raises nothing more exact
        raise ConfigError(f"the tokenizer cannot encode it: {error}", "") from error
