"""Turns text into tokens, as bytes or by a `tokenizers` file.

Such a file's truncation and padding are meant for other programs' batches: here they would drop the end of each
document. A text that happens to contain the name of a special token is still text.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from headway.daemon.base.errors import ConfigError
from headway.daemon.base.near_path import near
from headway.daemon.text.chat_mask import ChatText, ChatTexts, chat_texts, spoken_tokens
from headway.daemon.text.chat_template import ChatTemplates, read_templates
from headway.daemon.text.data_tokenizer import (
    BYTES,
    TOKENIZER_NAME,
    SpecialTokens,
    begin_of_text,
    read_config,
    special_names,
    special_tokens,
)
from headway.daemon.text.documents import TOO_DEEP, Conversation, library
from headway.daemon.text.preparation import Preparation
from headway.daemon.text.special_words import GUARD, SpecialWords

# Turns conversations into tokens. In what a chat template writes, the names of special tokens are these tokens.
#
# A name that people wrote stays a word. The tokenizer's library cannot tell both apart, so such a text goes to a second
# tokenizer: there all names are words, and each special token that the template wrote is a stand-in of equal length.

Tokens = npt.NDArray[np.integer]
Spoken = npt.NDArray[np.bool_]
_STAND_IN: Final = "\ufdd1"
"""Begins a stand-in; no conversation has it."""
_NUMBERS: Final = 0xF0000
"""Private code points, which number the stand-ins."""


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A conversation as rows of tokens, each a document of its own."""

    rows: tuple[tuple[Tokens, Spoken], ...]
    """The tokens, and which of them the assistant speaks."""
    texts: ChatTexts

    @property
    def num_words(self) -> int:
        """Return how many names of special tokens people wrote."""
        return max(len(text.words) for text in self.texts.texts)


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
        self._loaded = _parsed(tokenizer)

    def encode(self, chats: Sequence[Conversation]) -> list[EncodedChat | ConfigError]:
        """Return what becomes of each conversation, or why it cannot be encoded."""
        rendered: list[ChatTexts | ConfigError] = [_tried(self._texts, chat) for chat in chats]
        plain = [text for each in rendered if isinstance(each, ChatTexts) for text in each.texts if not text.words]
        try:
            found = iter(self._loaded.encode_batch([each.text for each in plain], add_special_tokens=False))
        except Exception:  # the library does not say which text it was
            found = (_tried(_encoded_whole, self._loaded, each.text) for each in plain)
        done: list[EncodedChat | ConfigError] = []
        for of_chat in rendered:
            if isinstance(of_chat, ConfigError):
                done.append(of_chat)
                continue
            rows = [self._row(text, next(found) if not text.words else None) for text in of_chat.texts]
            wrong = next((row for row in rows if isinstance(row, ConfigError)), None)
            good = tuple(row for row in rows if not isinstance(row, ConfigError))
            done.append(wrong or EncodedChat(good, of_chat))
        return done

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
        whole = _encoded_whole(second.loaded, "".join([*parts, text.text[end:]]))
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
        for name, at in self._names_in(_encoded_whole(self._loaded, guarded), guarded):
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
    found = _Second(_parsed(tokenizer), {}, {})
    found.loaded.encode_special_tokens = True
    flags = {each["content"]: each for each in tokenizer["added_tokens"]}
    for number, name in enumerate(words.names):
        stand_in = found.stand_ins[name] = _STAND_IN + chr(_NUMBERS + number) * (len(name) - 1)
        same = {key: flags[name][key] for key in ("lstrip", "rstrip", "single_word", "normalized")}
        found.loaded.add_tokens([library("tokenizers").AddedToken(stand_in, special=False, **same)])
        found.meant[found.loaded.token_to_id(stand_in)] = ids[name]
    return found


def _parsed(tokenizer: Mapping[str, Any]) -> Any:
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


def _encoded_whole(loaded: Any, text: str) -> Any:
    try:
        return loaded.encode(text, add_special_tokens=False)
    except Exception as error:  # the library raises nothing more exact
        raise ConfigError(f"the tokenizer cannot encode it: {error}", "") from error


NO_WORDS: Final = SpecialWords(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Turns text into tokens."""

    vocab_size: int
    encode: Callable[[Sequence[bytes]], list[Tokens]]
    """Encode some texts in UTF-8. Raises UnicodeDecodeError if the tokenizer needs text."""
    end_of_text: int | None
    """Token after each document; None: the tokenizer has no such token."""
    begin_of_text: tuple[int, ...] = ()
    """Tokens before each text."""
    begin_name: str = ""
    padding: int = 0
    """Token that fills rows; no job trains on it."""
    file: Path | None = None
    """Tokenizer's own file, which is copied to the shards."""
    config: str = ""
    """The tokenizer_config.json with its special tokens and chat template, which is copied too."""
    words: SpecialWords = NO_WORDS
    """Names of special tokens, which stay words in what people wrote."""
    told: str = ""
    """What chat templates are told beside a conversation, for the index."""
    chats: ChatEncoder | None = None
    """Turns conversations into tokens; None: there is no chat template."""


def _file_of(tokenizer: str) -> Path:
    """Return the JSON file of a tokenizer, which may be named by its folder."""
    file = Path(tokenizer)
    found = "no such tokenizer" + (near(file) or ": say bytes, or name a tokenizers JSON file or its folder")
    with suppress(OSError, ValueError):  # a name that is too long, or has a zero character
        file = file / TOKENIZER_NAME if file.is_dir() else file
        if file.is_file():
            return file
        if (file.parent / "snapshots").is_dir():
            found = f"no such tokenizer: in a cache of the Hub it is {tokenizer}/snapshots/REVISION"
    raise ConfigError(found, tokenizer[:500])


def read_encoder(options: Preparation) -> Encoder:
    """Return the encoder of `bytes`, of a `tokenizers` JSON file, or of a folder with its tokenizer.json.

    Raises ConfigError when it is missing or invalid.
    """
    tokenizer, today = options.tokenizer, date.fromisoformat(options.date)
    if tokenizer == BYTES:
        if options.end_of_text:
            raise ConfigError("bytes have a zero byte after each document; leave it out", "--end-of-text")
        return Encoder(vocab_size=256, encode=_bytes, end_of_text=0)
    file = _file_of(tokenizer)
    config = _config(file)
    raw, special = _described(file, config, options.end_of_text)
    names = special_names(raw, special)
    words = SpecialWords(() if options.special_tokens else names)
    with_special = _with_special(raw, names)
    try:
        loaded = _parsed(with_special)  # for texts, in which `words` are words
    except ConfigError:
        raise
    except Exception as error:  # the library raises nothing more exact
        raise ConfigError(f"is not a tokenizers JSON file: {error}", str(file)) from error
    loaded.encode_special_tokens = bool(words.names)
    begin = begin_of_text(raw.get("post_processor")) if not options.no_bos else ()
    templates = read_templates(file.parent, config, names=SpecialWords(names), words=words, today=today)
    described = {"tokenizer_class": "PreTrainedTokenizerFast", **special.texts}
    if templates:
        described["chat_template"] = templates.described
    return Encoder(
        vocab_size=max(loaded.get_vocab_size(), 1 + max(loaded.get_vocab().values(), default=0)),
        encode=lambda texts: _encode(loaded, [text.decode() for text in texts], special, tokenizer),
        end_of_text=special.eos_token_id,
        begin_of_text=begin,
        begin_name="".join(loaded.id_to_token(token) or "" for token in begin),
        padding=next((token for token in (special.pad_token_id, special.eos_token_id) if token is not None), 0),
        file=file,
        config=json.dumps(described),
        words=words,
        told=f"date {today}" if templates and templates.ask_for_date else "",
        chats=None if templates is None else ChatEncoder(with_special, names, templates, words),
    )


def _config(file: Path) -> dict[str, Any]:
    try:
        return read_config(file.parent)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"the tokenizer_config.json beside it cannot be read: {error}", str(file)) from error


def _bytes(texts: Sequence[bytes]) -> list[Tokens]:
    return [np.frombuffer(text, dtype=np.uint8) for text in texts]


def _described(file: Path, config: dict[str, Any], end_of_text: str) -> tuple[dict[str, Any], SpecialTokens]:
    """Return a parsed tokenizer.json, and its special tokens."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        special = special_tokens(raw, config, end_of_text=end_of_text)
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise ConfigError(f"is not a tokenizers JSON file: {error}", str(file)) from error
    if end_of_text and special.eos_token != end_of_text:
        raise ConfigError(f"{end_of_text!r} is not a token of {file}", "--end-of-text")
    return raw, special


def _with_special(raw: dict[str, Any], names: Mapping[str, int]) -> dict[str, Any]:
    """Return a tokenizer in which the tokens of these names are special: some files do not say so."""
    added = [{**each, "special": each["special"] or each["content"] in names} for each in raw.get("added_tokens", ())]
    known = {each["content"] for each in added}
    missing = [
        {"id": token, "content": name, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for name, token in names.items()
        if name not in known
    ]
    return {**raw, "added_tokens": sorted([*added, *missing], key=lambda each: each["id"])}


def _encode(loaded: Any, texts: list[str], special: SpecialTokens, name: str) -> list[Tokens]:
    """Return the tokens of some texts, each as by `_ids`: the library encodes a batch on all cores."""
    try:
        found = loaded.encode_batch_fast(texts, add_special_tokens=False)
    except Exception:  # the library does not say which text it was
        return [np.array(_ids(loaded, text, special, name), dtype=np.int64) for text in texts]
    ids = [np.array(each.ids, dtype=np.int64) for each in found]
    end = special.eos_token_id
    return [
        np.array(_ids(loaded, text, special, name), dtype=np.int64) if end is not None and (of == end).any() else of
        for text, of in zip(texts, ids, strict=True)
    ]


def _ids(loaded: Any, text: str, special: SpecialTokens, name: str) -> list[int]:
    """Return a text's tokens without the end-of-text token. Raises ConfigError if only that token can represent it."""
    try:
        found = loaded.encode(text, add_special_tokens=False)
    except Exception as error:  # the library raises nothing more exact
        raise ConfigError(f"cannot encode this text: {error}", name) from error
    if special.eos_token_id not in found.ids:
        return list(found.ids)
    spans = [span for token, span in zip(found.ids, found.offsets, strict=True) if token == special.eos_token_id]
    return [token for part in _halved(text, spans, name) for token in _ids(loaded, part, special, name)]


def _halved(text: str, spans: list[tuple[int, int]], name: str) -> list[str]:
    """Cut a text inside each span that was read as its end. A vocabulary with that word also has its halves."""
    single = next((text[start:end] for start, end in spans if end - start < 2), None)
    if single is not None:
        what = f"takes {single!r} in a text for its end, and has no other token for it"
        raise ConfigError(f"{what}: name another token with --end-of-text", name)
    cuts = [0, *((start + end) // 2 for start, end in spans), len(text)]
    return [text[start:end] for start, end in pairwise(cuts)]
