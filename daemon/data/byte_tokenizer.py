"""The byte tokens as a `tokenizers` file, so that Hugging Face's AutoTokenizer can open the trained model."""

import json
from typing import Any


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
    characters = []
    num_moved = 0
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(256 + num_moved))
            num_moved += 1
    return characters
