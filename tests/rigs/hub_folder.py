"""What people bring: a model as the cache of the Hub has it, and conversations with tools in three formats.

The chat template is Qwen3's own, from the wheel of trl.
"""

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import tokenizers
import transformers
import trl
from safetensors.torch import load_file, save_file

from tests.rigs.tiny_models import write_tiny_model

VOCABULARY = 600
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {name: {"type": "integer"} for name in "ab"}},
    },
}


def write_hub_model(cache: Path) -> Path:
    """Write a tied Qwen3 in shards, with a second copy of its head, and return its snapshot of links into `blobs`."""
    plain = cache / "plain"
    write_tiny_model(
        plain, model_type="qwen3", vocab_size=VOCABULARY, head_dim=16, tie_word_embeddings=True, shard_size="60KB"
    )
    index = json.loads((plain / "model.safetensors.index.json").read_text())
    shard = index["weight_map"]["model.embed_tokens.weight"]
    tensors = load_file(plain / shard)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, plain / shard, metadata={"format": "pt"})
    index["weight_map"]["lm_head.weight"] = shard
    (plain / "model.safetensors.index.json").write_text(json.dumps(index))
    _write_tokenizer(plain)
    blobs, snapshot = cache / "models--tiny--qwen3/blobs", cache / "models--tiny--qwen3/snapshots/0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in sorted(plain.iterdir()):
        blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        file.rename(blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


def write_hub_chats(folder: Path) -> list[str]:
    """Write conversations as JSON lines, as parquet of which one row has tools, and as ShareGPT has them."""
    chance = random.Random(5)
    lines, rows, shared = [], [], []
    for number in range(60):
        lines.append({"messages": [*_turn(chance), *_turn(chance)], **({"tools": [TOOL]} if number % 3 == 0 else {})})
        called = number == 7
        rows.append(
            {"messages": _with_call(chance) if called else list(_turn(chance)), "tools": [TOOL] if called else None}
        )
        names = {"user": "human", "assistant": "gpt"}
        shared.append(
            {"conversations": [{"from": names[each["role"]], "value": each["content"]} for each in _turn(chance)]}
        )
    (folder / "lines.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    (folder / "shared.json").write_text(json.dumps(shared))
    return ["lines.jsonl", "rows.parquet", "shared.json"]


def _turn(chance: random.Random) -> Iterator[dict[str, Any]]:
    left, right = chance.randrange(50), chance.randrange(50)
    yield {"role": "user", "content": f"What is {left} + {right}?"}
    yield {"role": "assistant", "content": f"It is {left + right}."}


def _with_call(chance: random.Random) -> list[dict[str, Any]]:
    question, answer = _turn(chance)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    return [
        question,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        answer,
    ]


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with the special tokens of Qwen3."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    template = (Path(trl.__file__).parent / "chat_templates/qwen3.jinja").read_text()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([template, "What is 1 + 2? It is 3."] * 3, trainer)
    whole: Any = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template
    )
    whole.save_pretrained(folder)
