"""A tiny tokenizer with a chat template, and conversations for it: what a folder of the Hub and its user bring."""

import json
import random
from pathlib import Path
from typing import Any

import tokenizers
import transformers

VOCABULARY = 280
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|end|>{% endif %}\n{% endfor %}"
)
"""Chat markup in the style of Qwen, with the marks from which the targets are known."""

CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""The same markup without marks."""


def folder_of(tmp_path: Path, template: str | None, *, in_file: bool = True) -> Path:
    """A tokenizer's folder: bytes, a few merges, and three special tokens."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    special = ["<|start|>", "<|end|>", "<s>"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=280, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["Hello there, so long, assistant user"] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"eos_token": "<|end|>", "bos_token": {"content": "<s>"}}
    if template is not None and in_file:
        (folder / "chat_template.jinja").write_text(template)
    elif template is not None:
        config["chat_template"] = [{"name": "tools", "template": "x"}, {"name": "default", "template": template}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_chat_tokenizer(folder: Path) -> None:
    """Write a tokenizer of bytes, a few merges and two special tokens, as transformers does."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["What is the sum of user and assistant?"] * 3, trainer)
    whole: Any = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>", chat_template=TEMPLATE
    )
    whole.save_pretrained(folder)


def write_chats(path: Path, *, count: int = 200) -> None:
    """Write sums as conversations, one in a line."""
    chance = random.Random(5)
    with path.open("w") as file:
        for _ in range(count):
            left, right = chance.randrange(50), chance.randrange(50)
            question = {"role": "user", "content": f"What is {left} + {right}?"}
            answer = {"role": "assistant", "content": f"It is {left + right}."}
            file.write(json.dumps({"messages": [question, answer]}) + "\n")
