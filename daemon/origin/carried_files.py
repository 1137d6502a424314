"""Names the files of a model's folder that its export carries over, and those of PEFT. Pure."""

from typing import Final

CONFIG_NAME: Final = "config.json"
ADAPTER_CONFIG_NAME: Final = "adapter_config.json"
ADAPTER_WEIGHTS_NAME: Final = "adapter_model.safetensors"
PEFT_PREFIX: Final = "base_model.model."
"""Before the names of a checkpoint, in a folder of adapters."""
CARRIED: Final = (
    CONFIG_NAME,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
)
MAX_CONFIG_BYTES: Final = 1 << 20
MAX_CARRIED_BYTES: Final = 64 << 20
"""Maximum size of one carried file: the largest tokenizers have half of it."""
FILE: Final = "file/"
"""Prefix of a carried file among the tensors of the carried part."""
HEADER: Final = "header/"
"""Prefix of the header of a file with tensors, so that an export can write equal bytes."""
