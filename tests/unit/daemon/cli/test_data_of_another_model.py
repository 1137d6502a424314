"""`plan` and `reference` refuse what `submit` refuses: data of another tokenizer, an adapter beside random weights."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headway.stages.data.shard_writer import writing_shards

Headway = Callable[..., tuple[int, str, str]]

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
JOB = '[job]\nname = "j"\n[model]\nfrom = "model"\n[data]\nsource = "data"\n[train]\nsequence_length = 16\n'


def write_tokenizer(folder: Path, *, shift: int) -> None:
    vocabulary = {f"t{number}": (number + shift) % 256 for number in range(256)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))


@pytest.mark.parametrize("command", [("plan", "--nodes", "2"), ("reference", "--out", "out")], ids=lambda it: it[0])
def test_data_of_another_tokenizer_is_refused(headway: Headway, tmp_path: Path, command: tuple[str, ...]) -> None:
    """The data's tokens have other numbers in the model's folder: one line with the command that helps."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(tmp_path / "model", shift=0)
    with writing_shards(tmp_path / "data", vocab_size=256, tokenizer="tokenizer.json") as writer:
        writer.append(np.zeros(64, dtype=np.uint8))
    write_tokenizer(tmp_path / "data", shift=1)
    (tmp_path / "job.toml").write_text(JOB)
    name, *options = command
    options = [str(tmp_path / option) if option == "out" else option for option in options]
    code, out, err = headway(name, str(tmp_path / "job.toml"), *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "job.toml:data.source: " in err
    assert "run `headway data prepare` with --tokenizer" in err


def test_a_plan_of_an_adapter_beside_random_weights_is_refused(headway: Headway, tmp_path: Path) -> None:
    """`[adapter]` without `[model] from`: the line that `submit` prints."""
    (tmp_path / "job.toml").write_text('[job]\nname = "j"\n[adapter]\nrank = 4\n')
    code, out, err = headway("plan", str(tmp_path / "job.toml"), "--nodes", "2")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "job.toml:adapter.rank: the weights beside the adapter would be random" in err
