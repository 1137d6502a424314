"""Every command refuses what `submit` refuses: other weights than the config's, data of another tokenizer, an adapter
beside random weights.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import save_file

from headway.stages.data.shard_writer import DataForm, writing_shards
from headway.stages.model.decoder import parameter_shapes
from headway.stages.model.hugging_face import checkpoint_name, model_spec
from headway.stages.spec import layer_names

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


def write_weights(folder: Path, *, without: str = "") -> None:
    """A folder of CONFIG's model, perhaps without a tensor."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model = model_spec(CONFIG)
    tensors = {
        checkpoint_name(layer, name, model): np.zeros(shape, np.float32)
        for layer in layer_names(model)
        for name, shape in parameter_shapes(layer, model).items()
    }
    tensors.pop(without, None)
    save_file(tensors, folder / "model.safetensors")


def write_tokenizer(folder: Path, *, shift: int) -> None:
    vocabulary = {f"t{number}": (number + shift) % 256 for number in range(256)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))


@pytest.mark.parametrize("command", [("plan", "--nodes", "2"), ("reference", "--out", "out")], ids=lambda it: it[0])
def test_data_of_another_tokenizer_is_refused(headway: Headway, tmp_path: Path, command: tuple[str, ...]) -> None:
    """The data's tokens have other numbers in the model's folder: one line with the command that helps."""
    write_weights(tmp_path / "model")
    write_tokenizer(tmp_path / "model", shift=0)
    with writing_shards(tmp_path / "data", DataForm(vocab_size=256), tokenizer="tokenizer.json") as writer:
        writer.append(np.zeros(64, dtype=np.uint8))
    write_tokenizer(tmp_path / "data", shift=1)
    (tmp_path / "job.toml").write_text(JOB)
    name, *options = command
    options = [str(tmp_path / option) if option == "out" else option for option in options]
    code, out, err = headway(name, str(tmp_path / "job.toml"), *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "job.toml:data.source: " in err
    assert "run `headway data prepare` with --tokenizer" in err


@pytest.mark.parametrize(("num_tokens", "is_taken"), [(200, True), (257, False)])
def test_data_may_have_fewer_tokens_than_the_model(
    headway: Headway, tmp_path: Path, num_tokens: int, is_taken: bool
) -> None:
    """As folders of the Hub pad the model's vocabulary; a token that the model has not is refused by the numbers."""
    write_weights(tmp_path / "model")
    with writing_shards(tmp_path / "data", DataForm(vocab_size=num_tokens), tokenizer="tokenizer.json") as writer:
        writer.append(np.zeros(64, dtype=np.uint8))
    (tmp_path / "job.toml").write_text(JOB)
    code, _, err = headway("plan", str(tmp_path / "job.toml"), "--nodes", "2")
    assert (code == 0) == is_taken, err
    assert is_taken or "has 257 tokens, and the model 256; prepare it with its tokenizer" in err


@pytest.mark.parametrize("command", ["plan", "submit", "reference", "run"])
def test_a_missing_tensor_is_told_in_the_same_words(
    headway: Headway, tmp_path: Path, command: str, fake_cluster: ModuleType
) -> None:
    """A folder without one tensor of its config → one line, the same from all commands, and nothing is made."""
    write_weights(tmp_path / "model", without="model.layers.1.mlp.up_proj.weight")
    (tmp_path / "job.toml").write_text('[job]\nname = "j"\n[model]\nfrom = "model"\n')
    options = ["--out", str(tmp_path / "out")] if command in ("reference", "run") else []
    told = headway(command, str(tmp_path / "job.toml"), *options)
    what = "has no tensor model.layers.1.mlp.up_proj.weight, which a model of its config.json has"
    assert told == (2, "", f"headway: {tmp_path}/model: {what}\n")
    assert not (tmp_path / "out").exists()


def test_a_config_alone_is_planned_with_a_warning(headway: Headway, tmp_path: Path) -> None:
    """Who sizes a cluster need not have the weights: `plan` says what the others would."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "job.toml").write_text('[job]\nname = "j"\n[model]\nfrom = "model"\n')
    code, _, err = headway("plan", str(tmp_path / "job.toml"), "--nodes", "2")
    what = f"{tmp_path}/model: has neither model.safetensors nor model.safetensors.index.json; `hf download"
    assert (code, err.count("\n")) == (0, 1)
    assert err.startswith(f"headway: `headway submit` would refuse the job: {what}")
    refused = headway("reference", str(tmp_path / "job.toml"), "--out", str(tmp_path / "out"))
    assert refused[0] == 2
    assert refused[2].startswith(f"headway: {what}")


def test_a_plan_of_an_adapter_beside_random_weights_is_refused(headway: Headway, tmp_path: Path) -> None:
    """`[adapter]` without `[model] from`: the line that `submit` prints."""
    (tmp_path / "job.toml").write_text('[job]\nname = "j"\n[adapter]\nrank = 4\n')
    code, out, err = headway("plan", str(tmp_path / "job.toml"), "--nodes", "2")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "job.toml:adapter.rank: the weights beside the adapter would be random" in err
