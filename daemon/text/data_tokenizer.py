"""The tokenizer of a data folder: special tokens, and files for the folder of a model that was trained on it."""

import json
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from headway.stages.data.shard_index import ShardIndex

KNOWN_ENDS: Final = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
"""Names that count as the end of a text if no tokenizer_config.json names it."""
_STEERING: Final = ("<|", "<\uff5c")
_KEYS: Final = ("eos_token", "bos_token", "pad_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """Token ids by the names of a Hugging Face config; None: the tokenizer has no such token."""

    eos_token_id: int | None = None
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token: str = ""
    bos_token: str = ""
    pad_token: str = ""

    @property
    def ids(self) -> dict[str, int | None]:
        """Return the ids for config.json."""
        return {f"{key}_id": getattr(self, f"{key}_id") for key in _KEYS}

    @property
    def texts(self) -> dict[str, str]:
        """Return the texts for tokenizer_config.json."""
        return {key: text for key in _KEYS if (text := getattr(self, key))}


def special_tokens(tokenizer: Mapping[str, Any], config: Mapping[str, Any], *, end_of_text: str = "") -> SpecialTokens:
    """Return the special tokens of a parsed tokenizer.json with its parsed tokenizer_config.json.

    end_of_text: the user's name of the end, which goes first. A name that the vocabulary does not have is no token.
    """
    ids = _vocabulary(tokenizer)
    found: dict[str, Any] = {}
    for key in _KEYS:
        told = (end_of_text if key == "eos_token" else "") or _text(config.get(key))
        if not told and key == "eos_token":
            told = next((end for end in KNOWN_ENDS if end in ids), "")
        if told in ids:
            found |= {key: told, f"{key}_id": ids[told]}
    return SpecialTokens(**found)


def special_names(tokenizer: Mapping[str, Any], special: SpecialTokens) -> dict[str, int]:
    """Return the names of tokens that steer a model, and that no text may forge, with their ids.

    Some tokenizers do not call all of them special: so are those that look like `<|name|>`. The others, such as
    `<think>`, are words of the vocabulary, and a text may have them.
    """
    added = tokenizer.get("added_tokens")
    entries = [entry for entry in (added if isinstance(added, list) else []) if isinstance(entry, Mapping)]
    found = {str(entry.get("content")): entry["id"] for entry in entries if isinstance(entry.get("id"), int)}
    steering = {str(entry.get("content")) for entry in entries if entry.get("special")}
    named = {text: special.ids[f"{key}_id"] for key, text in special.texts.items()}
    chosen = {name: token for name, token in found.items() if name in steering or name.startswith(_STEERING)}
    return chosen | {text: token for text, token in named.items() if token is not None}


def begin_of_text(post_processor: Any) -> tuple[int, ...]:
    """Return the ids that a post-processor of a valid tokenizer.json puts before a text.

    The config's `add_bos_token` does not count, as in transformers, for a tokenizer that has such a file.
    """
    if not isinstance(post_processor, Mapping):
        return ()
    if post_processor["type"] == "Sequence":
        return next((ids for each in post_processor["processors"] if (ids := begin_of_text(each))), ())
    if "cls" in post_processor:  # of BERT and RoBERTa
        return (post_processor["cls"][1],)
    before = takewhile(lambda part: "SpecialToken" in part, post_processor.get("single", ()))
    tokens = post_processor.get("special_tokens", {})
    return tuple(token for part in before for token in tokens[part["SpecialToken"]["id"]]["ids"])


def _text(value: object) -> str:
    """Return the text of a token in tokenizer_config.json: a text, or a table with its `content`."""
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else ""


def _vocabulary(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return token to id: of the model, and of added tokens."""
    model = tokenizer.get("model")
    told = model.get("vocab") if isinstance(model, Mapping) else None
    ids: dict[str, int] = {}
    if isinstance(told, Mapping):
        ids |= told
    elif isinstance(told, list):  # unigram: [token, score], in order of id
        ids |= {entry[0]: number for number, entry in enumerate(told) if isinstance(entry, list) and entry}
    added = tokenizer.get("added_tokens")
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, Mapping) and isinstance(entry.get("id"), int):
            ids[str(entry.get("content"))] = entry["id"]
    return ids


def tokenizer_json() -> str:
    """Return the tokenizer.json in which token n is the byte n: byte-level BPE (GPT-2's alphabet) without a single
    merge.
    """
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {character: byte for byte, character in enumerate(_alphabet())},
        "merges": [],
    }
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
    return json.dumps(tokenizer, ensure_ascii=False, indent=1) + "\n"


def _alphabet() -> list[str]:
    """Return GPT-2's printable character for each byte: itself if it prints, else the next free one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(256, 512))
    return [chr(byte if byte in printable else next(moved)) for byte in range(256)]


BYTES: Final = "bytes"
TOKENIZER_NAME: Final = "tokenizer.json"
TOKENIZER_CONFIG_NAME: Final = "tokenizer_config.json"
_TOKENIZERS: Final = (TOKENIZER_NAME, "tokenizer.model", "vocab.json", "vocab.txt")
_TEMPLATE: Final = re.compile(r"chat_template\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTokenizer:
    """The tokenizer's files for a model folder."""

    text: str
    """Text of tokenizer.json."""
    special: SpecialTokens = field(default_factory=SpecialTokens)
    chat_template: Any = None
    """As tokenizer_config.json has it; None: the data was not made of conversations, or not with a template."""

    def files(self, carried: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return what a model folder needs in addition to the files of its origin: a tokenizer, a chat template."""
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special.texts}
        found = {TOKENIZER_NAME: self.text.encode()}
        if has_tokenizer(carried):
            raw = carried.get(TOKENIZER_CONFIG_NAME, b"{}")
            if self.chat_template is None or b'"chat_template"' in raw or any(map(_TEMPLATE.match, carried)):
                return {}
            try:
                config, found = {**json.loads(raw)}, {}
            except (ValueError, TypeError):  # whatever the folder has in its place
                return {}
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        return found | {TOKENIZER_CONFIG_NAME: (json.dumps(config) + "\n").encode()}


def has_tokenizer(names: Container[str]) -> bool:
    """Return whether files of a model's folder have a tokenizer."""
    return any(name in names for name in _TOKENIZERS)


def tokenizer_of(folder: Path, index: ShardIndex) -> DataTokenizer | None:
    """Return the tokenizer of a data folder; None: its files do not exist, or cannot be read."""
    if index.tokenizer == BYTES:
        return DataTokenizer(text=tokenizer_json())
    try:
        text = (folder / index.tokenizer).read_text(encoding="utf-8")
        config = read_config(folder)
        special = special_tokens(json.loads(text), config)
        return DataTokenizer(text=text, special=special, chat_template=config.get("chat_template"))
    except (OSError, ValueError, RecursionError, AttributeError):
        return None  # without its tokenizer, the folder still holds a usable model


def read_config(folder: Path) -> dict[str, Any]:
    """Return a folder's tokenizer_config.json; empty if there is none. Raises OSError, ValueError."""
    file = folder / TOKENIZER_CONFIG_NAME
    if not file.is_file():
        return {}
    raw = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(raw, dict):
        raise ValueError("it is not a table")
    return raw
