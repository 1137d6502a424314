"""A model folder is whole or is no model, and reads back as the same bits."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headway.daemon.errors import ConfigError
from headway.daemon.results.model_folder import ModelFolderWriter, read_model, write_model
from headway.daemon.results.sample import sample
from headway.stages.initial_weights import initial_parameters
from headway.stages.spec import ModelSpec, layer_names

SPEC = ModelSpec(
    num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2
)


def make_weights(seed: int = 1) -> dict[str, dict[str, Tensor]]:
    return {name: initial_parameters(name, SPEC, seed=seed) for name in layer_names(SPEC)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", SPEC, weights=make_weights(), sequence_length=24)
    return tmp_path / "model"


def test_a_model_reads_back_as_the_same_bits(folder: Path) -> None:
    """Spec, context length and every tensor."""
    model = read_model(folder)
    assert (model.spec, model.sequence_length) == (SPEC, 24)
    for layer, parameters in make_weights().items():
        assert list(model.weights[layer]) == list(parameters)
        assert all(torch.equal(model.weights[layer][name], tensor) for name, tensor in parameters.items())


def test_files_are_named_as_hugging_face_names_them(folder: Path) -> None:
    """One numbered file a layer; the index knows each tensor's file and the size of all."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["model.embed_tokens.weight"] == "model-00001-of-00004.safetensors"
    assert index["weight_map"]["lm_head.weight"] == "model-00004-of-00004.safetensors"
    num_bytes = sum(tensor.nbytes for layer in make_weights().values() for tensor in layer.values())
    assert index["metadata"]["total_size"] == num_bytes


def test_layers_may_come_in_any_order(tmp_path: Path, folder: Path) -> None:
    """Written from last to first: the same files, byte for byte."""
    with ModelFolderWriter(tmp_path / "other", SPEC, sequence_length=24) as writer:
        for layer, parameters in reversed(make_weights().items()):
            writer.add(layer, parameters)
    for file in folder.iterdir():
        assert (tmp_path / "other" / file.name).read_bytes() == file.read_bytes()


def test_a_model_does_not_inherit_an_older_ones_tokenizer(folder: Path) -> None:
    """Written with a tokenizer, then again without: none is left that does not belong."""
    write_model(folder, SPEC, weights=make_weights(), sequence_length=24, tokenizer_json="{}")
    assert (folder / "tokenizer.json").read_text() == "{}"
    write_model(folder, SPEC, weights=make_weights(), sequence_length=24)
    assert list(folder.glob("tokenizer*")) == []


def write_half(folder: Path) -> None:
    with ModelFolderWriter(folder, SPEC, sequence_length=24) as writer:
        writer.add("embed", make_weights()["embed"])
        raise InterruptedError


def test_an_interrupted_export_is_no_model(folder: Path) -> None:
    """Half written over an older model: neither the old one nor a mixture can be opened."""
    with pytest.raises(InterruptedError):
        write_half(folder)
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json is missing"):
        read_model(folder)
    assert sorted(file.name for file in folder.glob("*.safetensors")) == ["model-00001-of-00004.safetensors"]


def test_a_damaged_model_is_refused(folder: Path) -> None:
    """A cut file, an absent file, another kind of model, no folder: one line each that names the folder."""
    file = folder / "model-00002-of-00004.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:100])
    with pytest.raises(ConfigError, match="not a model that can be read"):
        read_model(folder)
    file.unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00004\.safetensors is missing"):
        read_model(folder)
    file.write_bytes(whole)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    with pytest.raises(ConfigError, match="model_type is 'mamba'"):
        read_model(folder)
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        read_model(folder / "none")


def test_sampling_repeats_itself(folder: Path) -> None:
    """A seed gives its text again and another seed another; temperature 0 needs no seed; the prompt may be long."""
    prompt = "x" * 60
    first = sample(folder, prompt, num_tokens=30, temperature=1.0, seed=1)
    assert sample(folder, prompt, num_tokens=30, temperature=1.0, seed=1) == first
    assert sample(folder, prompt, num_tokens=30, temperature=1.0, seed=2) != first
    greedy = {sample(folder, "", num_tokens=10, temperature=0, seed=seed) for seed in range(2)}
    assert len(greedy) == 1


def test_sampling_needs_byte_tokens(tmp_path: Path) -> None:
    """A vocabulary of words has no bytes to show."""
    spec = ModelSpec(**{**{name: getattr(SPEC, name) for name in SPEC.__slots__}, "vocab_size": 300})
    weights = {name: initial_parameters(name, spec, seed=1) for name in layer_names(spec)}
    write_model(tmp_path, spec, weights=weights, sequence_length=8)
    with pytest.raises(ConfigError, match="vocabulary of 300"):
        sample(tmp_path, "text")
