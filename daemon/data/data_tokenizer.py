"""The tokenizer that a data folder was made with, as a model that was trained on it takes it along."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from headway.daemon.data.byte_tokenizer import tokenizer_json
from headway.daemon.data.special_tokens import SpecialTokens, special_tokens
from headway.stages.tokens import ShardIndex

BYTES: Final = "bytes"
TOKENIZER_NAME: Final = "tokenizer.json"
TOKENIZER_CONFIG_NAME: Final = "tokenizer_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTokenizer:
    """What is put beside a model."""

    text: str
    """tokenizer.json"""
    special: SpecialTokens = field(default_factory=SpecialTokens)


def tokenizer_of(folder: Path, index: ShardIndex) -> DataTokenizer | None:
    """The tokenizer of a data folder; None: its files are not there, or cannot be read."""
    if index.tokenizer == BYTES:
        return DataTokenizer(text=tokenizer_json())
    try:
        text = (folder / index.tokenizer).read_text(encoding="utf-8")
        return DataTokenizer(text=text, special=special_tokens(json.loads(text), read_config(folder)))
    except (OSError, ValueError, RecursionError, AttributeError):
        return None  # the folder without its tokenizer is still a model


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's tokenizer_config.json; empty where there is none. Raises OSError, ValueError."""
    file = folder / TOKENIZER_CONFIG_NAME
    if not file.is_file():
        return {}
    raw = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(raw, dict):
        raise ValueError("it is no table")
    return raw
