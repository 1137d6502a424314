"""Finds the tokens that a tokenizer calls the beginning, the end and the padding of a text. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final

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
