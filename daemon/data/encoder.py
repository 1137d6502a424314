"""Turns text into tokens, as bytes or by a `tokenizers` file, and conversations by the chat template beside it.

Such a file's truncation and padding are meant for other programs' batches: here they would drop the end of each
document. A text that happens to contain the name of a special token is still text.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.daemon.data.chat_mask import spoken_spans, spoken_tokens
from headway.daemon.data.chat_template import ChatTemplate, read_template
from headway.daemon.data.data_tokenizer import BYTES, TOKENIZER_NAME, read_config
from headway.daemon.data.documents import Conversation, library
from headway.daemon.data.special_tokens import SpecialTokens, special_tokens
from headway.daemon.errors import ConfigError

Tokens = npt.NDArray[np.integer]
Spoken = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Turns text into tokens."""

    vocab_size: int
    encode: Callable[[Sequence[bytes]], list[Tokens]]
    """Encode some texts in UTF-8. Raises UnicodeDecodeError if the tokenizer needs text."""
    end_of_text: int | None
    """Token after each document; None: the tokenizer has no such token."""
    padding: int = 0
    """Token that fills rows; no job trains on it."""
    file: Path | None = None
    """Tokenizer's own file, which is copied to the shards."""
    config: str = ""
    """The tokenizer_config.json with its special tokens and chat template, which is copied too."""
    encode_chats: Callable[[Sequence[Conversation]], list[tuple[Tokens, Spoken] | ConfigError]] | None = None
    """Return each conversation's tokens, and which of them the assistant speaks; or why it cannot be encoded. None:
    there is no chat template.
    """


def read_encoder(tokenizer: str, end_of_text: str = "") -> Encoder:
    """Return the encoder of `bytes`, of a `tokenizers` JSON file, or of a folder with its tokenizer.json.

    Raises ConfigError when it is missing or invalid.

    end_of_text: the token after each document; empty: the one in tokenizer_config.json, or a known one.
    """
    if tokenizer == BYTES:
        if end_of_text:
            raise ConfigError("bytes have a zero byte after each document; leave it out", "--end-of-text")
        return Encoder(vocab_size=256, encode=_bytes, end_of_text=0)
    file = Path(tokenizer)
    if file.is_dir():
        file /= TOKENIZER_NAME
    if not file.is_file():
        raise ConfigError("no such tokenizer: say bytes, or name a tokenizers JSON file or its folder", tokenizer)
    config = _config(file)
    loaded, special = _load(file, config, end_of_text)
    template = read_template(file.parent, config)
    described = {"tokenizer_class": "PreTrainedTokenizerFast", **special.texts}
    if template:
        described["chat_template"] = template.source
    return Encoder(
        vocab_size=max(loaded.get_vocab_size(), 1 + max(loaded.get_vocab().values(), default=0)),
        encode=lambda texts: _encode(loaded, [text.decode() for text in texts], special, tokenizer),
        end_of_text=special.eos_token_id,
        padding=next((token for token in (special.pad_token_id, special.eos_token_id) if token is not None), 0),
        file=file,
        config=json.dumps(described),
        encode_chats=None if template is None else _chat_encoder(file, template),
    )


def _config(file: Path) -> dict[str, Any]:
    try:
        return read_config(file.parent)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"the tokenizer_config.json beside it cannot be read: {error}", str(file)) from error


def _bytes(texts: Sequence[bytes]) -> list[Tokens]:
    return [np.frombuffer(text, dtype=np.uint8) for text in texts]


def _chat_encoder(
    file: Path, template: ChatTemplate
) -> Callable[[Sequence[Conversation]], list[tuple[Tokens, Spoken] | ConfigError]]:
    """Return what encodes rendered conversations, in which the names of special tokens are these tokens."""
    loaded = library("tokenizers").Tokenizer.from_file(str(file))
    loaded.no_truncation()
    loaded.no_padding()

    def encode(chats: Sequence[Conversation]) -> list[tuple[Tokens, Spoken] | ConfigError]:
        rendered = [_tried(spoken_spans, template, chat) for chat in chats]
        texts = [each[0] for each in rendered if not isinstance(each, ConfigError)]
        try:
            found = iter(loaded.encode_batch(texts, add_special_tokens=False))
        except Exception:  # the library does not say which text it was
            found = (_tried(_encode_chat, loaded, text) for text in texts)
        done: list[tuple[Tokens, Spoken] | ConfigError] = []
        for chat, each in zip(chats, rendered, strict=True):
            whole = each if isinstance(each, ConfigError) else next(found)
            if isinstance(each, ConfigError) or isinstance(whole, ConfigError):
                done.append(whole)
                continue
            _, spans, is_marked = each
            is_spoken = _tried(spoken_tokens, whole.offsets, spans, may_cross=is_marked, where=chat.where)
            is_refused = isinstance(is_spoken, ConfigError)
            done.append(is_spoken if is_refused else (np.array(whole.ids, dtype=np.int64), is_spoken))
        return done

    return encode


def _load(file: Path, config: dict[str, Any], end_of_text: str) -> tuple[Any, SpecialTokens]:
    """Return the tokenizer, and its special tokens."""
    tokenizers = library("tokenizers")
    try:
        text = file.read_text(encoding="utf-8")
        raw = json.loads(text)
        loaded = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more exact
        raise ConfigError(f"is not a tokenizers JSON file: {error}", str(file)) from error
    special = special_tokens(raw, config, end_of_text=end_of_text)
    if end_of_text and special.eos_token != end_of_text:
        raise ConfigError(f"{end_of_text!r} is not a token of {file}", "--end-of-text")
    loaded.no_truncation()
    loaded.no_padding()
    if special.eos_token:
        loaded.add_special_tokens([special.eos_token])  # it keeps its id; some files do not mark it as special
    loaded.encode_special_tokens = True  # without special names, these words in a text are plain text
    return loaded, special


def _tried(make: Callable[..., Any], *given: Any, **more: Any) -> Any:
    """Return what is made, or the ConfigError that it raises."""
    try:
        return make(*given, **more)
    except ConfigError as error:
        return error


def _encode_chat(loaded: Any, text: str) -> Any:
    try:
        return loaded.encode(text, add_special_tokens=False)
    except Exception as error:  # the library raises nothing more exact
        raise ConfigError(f"the tokenizer cannot encode it: {error}", "") from error


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
