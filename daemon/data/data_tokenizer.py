"""The tokenizer of a data folder, for the folder of a model that was trained on it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from headway.daemon.data.byte_tokenizer import tokenizer_json
from headway.daemon.data.special_tokens import SpecialTokens, special_tokens
from headway.stages.data.shard_index import ShardIndex

BYTES: Final = "bytes"
TOKENIZER_NAME: Final = "tokenizer.json"
TOKENIZER_CONFIG_NAME: Final = "tokenizer_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTokenizer:
    """The tokenizer's files for a model folder."""

    text: str
    """Text of tokenizer.json."""
    special: SpecialTokens = field(default_factory=SpecialTokens)

    @property
    def files(self) -> dict[str, bytes]:
        """Return the files of a model folder that has no others for its tokenizer."""
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special.texts}
        return {TOKENIZER_NAME: self.text.encode(), TOKENIZER_CONFIG_NAME: (json.dumps(config) + "\n").encode()}


def tokenizer_of(folder: Path, index: ShardIndex) -> DataTokenizer | None:
    """Return the tokenizer of a data folder; None: its files do not exist, or cannot be read."""
    if index.tokenizer == BYTES:
        return DataTokenizer(text=tokenizer_json())
    try:
        text = (folder / index.tokenizer).read_text(encoding="utf-8")
        return DataTokenizer(text=text, special=special_tokens(json.loads(text), read_config(folder)))
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
