"""A model folder is whole or is no model, and reads back as the same bits."""

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.daemon.base.errors import ConfigError
from headway.daemon.models.model_folder import ModelFolderWriter, planned_shards, read_model, sample, write_model
from headway.daemon.models.model_place import make_out
from headway.daemon.text.data_tokenizer import DataTokenizer, SpecialTokens
from headway.stages.model.initial_weights import initial_parameters
from headway.stages.spec import ModelSpec, layer_names

SPEC = ModelSpec(
    num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2
)


def make_weights(seed: int = 1) -> dict[str, dict[str, Tensor]]:
    return {name: initial_parameters(name, SPEC, seed=seed) for name in layer_names(SPEC)}


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model has five shards."""
    planned = partial(planned_shards, most_bytes=24_000)
    monkeypatch.setattr("headway.daemon.models.model_folder.planned_shards", planned)


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
    """Numbered shards; the index knows each tensor's file and the size of all."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["model.embed_tokens.weight"] == "model-00001-of-00005.safetensors"
    assert index["weight_map"]["lm_head.weight"] == "model-00005-of-00005.safetensors"
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
    write_model(folder, SPEC, weights=make_weights(), sequence_length=24, tokenizer=DataTokenizer(text="{}"))
    assert (folder / "tokenizer.json").read_text() == "{}"
    write_model(folder, SPEC, weights=make_weights(), sequence_length=24)
    assert list(folder.glob("tokenizer*")) == []


def write_half(folder: Path) -> None:
    with ModelFolderWriter(folder, SPEC, sequence_length=24) as writer:
        writer.add("embed", make_weights(seed=2)["embed"])
        raise InterruptedError


def test_an_interrupted_export_leaves_the_model_that_was_there(folder: Path) -> None:
    """Half written over an older model: the old one is whole, to the byte, and nothing is left of the new one."""
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(InterruptedError):
        write_half(folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    read_model(folder)


class Killed(BaseException):
    """Stands for SIGKILL: what comes after it in a function does not happen."""


def test_an_export_that_is_killed_between_any_two_steps_of_the_swap(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each unlink and each rename: the older model, the newer one or none, and the next export needs no force."""
    shutil.copytree(folder, tmp_path / "older")
    steps_done = 0
    while True:
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "older", folder)
        if not _killed_after(steps_done, folder, monkeypatch):
            break
        if (folder / "model.safetensors.index.json").exists():
            assert _seed_of(folder) in (1, 2)
        write_model(folder, SPEC, weights=make_weights(seed=3), sequence_length=24)
        assert _seed_of(folder) == 3
        steps_done += 1
    assert steps_done >= 12, "seven files go, seven come"


def _seed_of(folder: Path) -> int | None:
    embed = read_model(folder).weights["embed"]
    found = [seed for seed in (1, 2, 3) if torch.equal(embed["weight"], make_weights(seed)["embed"]["weight"])]
    return found[0] if found else None


def _killed_after(num_steps: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Swap a newer model in, but no further than so many steps; returns whether it was killed."""
    left = num_steps

    def counted(step: Callable[..., object]) -> Callable[..., object]:
        def run(path: Path, *arguments: Any, **options: Any) -> object:
            nonlocal left
            if path.suffix == ".owner":
                return step(path, *arguments, **options)
            if not left:
                raise Killed
            left -= 1
            return step(path, *arguments, **options)

        return run

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", counted(Path.unlink))
        patched.setattr(Path, "replace", counted(Path.replace))
        try:
            write_model(folder, SPEC, weights=make_weights(seed=2), sequence_length=24)
        except Killed:
            return True
    return False


def test_the_next_export_deletes_a_killed_exports_draft(folder: Path) -> None:
    """A draft that is being written stays."""
    code = (
        "import sys, time; from pathlib import Path; from headway.daemon.models.model_place import Draft\n"
        "draft = Draft(Path(sys.argv[1])); (draft.folder / 'large').write_text('x'); print(draft.folder, flush=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, folder], stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None
            draft = Path(writer.stdout.readline().strip())
            write_model(folder, SPEC, weights=make_weights(), sequence_length=24)
            assert draft.exists()
        finally:
            writer.kill()
    write_model(folder, SPEC, weights=make_weights(), sequence_length=24)
    assert not list(folder.glob(".export-*"))


def test_a_file_that_cannot_be_replaced_costs_neither_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's file in the folder: one line with its name, and where the new model is."""

    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    with monkeypatch.context() as patched:
        patched.setattr("headway.daemon.models.model_place.OwnedFolder.release", lambda _: None)
        patched.setattr(Path, "unlink", refuse)
        with pytest.raises(
            ConfigError, match=r"index\.json: Operation not permitted; the new one is in .*/\.export-"
        ) as told:
            write_model(folder, SPEC, weights=make_weights(seed=2), sequence_length=24)
    assert _seed_of(folder) == 1
    assert _seed_of(Path(told.value.what.rsplit(" ", 1)[-1])) == 2


def test_a_full_disk_during_an_export_is_one_line(folder: Path) -> None:
    """While a layer is written: the folder's name and the reason; the older model is whole, and no draft is left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(ConfigError, match=r"model: cannot be written to: .*"):
            write_model(folder, SPEC, weights=make_weights(seed=2), sequence_length=24)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert _seed_of(folder) == 1
    assert not list(folder.glob(".export-*"))


def test_an_interrupted_export_into_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    """Nothing is there that could be opened."""
    with pytest.raises(InterruptedError):
        write_half(tmp_path / "model")
    assert list((tmp_path / "model").iterdir()) == []


def test_an_export_of_fewer_layers_leaves_nothing_of_the_larger_one(folder: Path) -> None:
    """The old shards go when the new model is whole; a file that is no model's stays."""
    (folder / "notes.md").write_text("mine")
    spec = replace(SPEC, num_hidden_layers=1)
    write_model(
        folder,
        spec,
        weights={name: initial_parameters(name, spec, seed=1) for name in layer_names(spec)},
        sequence_length=24,
    )
    assert read_model(folder).spec == spec
    assert len(list(folder.glob("*.safetensors"))) == 4
    assert (folder / "notes.md").read_text() == "mine"


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "adapter_config.json", "config.json"])
def test_a_foreign_model_is_not_replaced_without_force(tmp_path: Path, name: str) -> None:
    """AutoModel would open the other file: refused before anything is written; with force it is gone afterwards."""
    (tmp_path / name).write_text("{}")
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match=rf"holds {name} of a model that was not exported here; name another folder"):
        write_model(tmp_path, SPEC, weights=make_weights(), sequence_length=24)
    assert {file.name for file in tmp_path.iterdir()} == {name, "thesis.tex"}
    with ModelFolderWriter(tmp_path, SPEC, sequence_length=24, force=True) as writer:
        for layer, parameters in make_weights().items():
            writer.add(layer, parameters)
    assert read_model(tmp_path).spec == SPEC
    assert (tmp_path / "thesis.tex").exists()
    assert name == "config.json" or not (tmp_path / name).exists()


def test_an_export_over_another_one_is_told_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run into a folder with a model says so before it begins; into an empty one it says nothing."""
    make_out(folder.parent, folder)
    assert (
        capsys.readouterr().err == f"headway: {folder} holds a model, which the new one replaces when it is complete\n"
    )
    make_out(folder.parent / "new", folder.parent / "new/model")
    assert capsys.readouterr().err == ""


def test_a_foreign_file_beside_an_export_is_noticed(folder: Path) -> None:
    """A `model.safetensors` that came later is what AutoModel would load: refused."""
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"holds model\.safetensors of a model"):
        write_model(folder, SPEC, weights=make_weights(), sequence_length=24)


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "chat_template.jinja"])
def test_what_somebody_added_to_an_export_is_not_replaced(folder: Path, name: str) -> None:
    """Headway writes files of these names too, but it did not write this one. Without it the export is replaced."""
    (folder / name).write_text("mine")
    with pytest.raises(ConfigError, match=rf"holds {name} of a model that was not exported here; name another folder"):
        write_model(folder, SPEC, weights=make_weights(), sequence_length=24)
    assert (folder / name).read_text() == "mine"
    (folder / name).unlink()
    write_model(folder, SPEC, weights=make_weights(), sequence_length=24)
    assert read_model(folder).spec == SPEC


def test_all_files_have_the_mode_of_new_files(folder: Path) -> None:
    """Whoever may read config.json may read the weights."""
    (folder / "new").write_text("")
    modes = {file.stat().st_mode & 0o777 for file in folder.iterdir()}
    assert len(modes) == 1


def test_special_tokens_go_along(tmp_path: Path) -> None:
    """End, beginning and padding are in config.json by id, and in tokenizer_config.json by name."""
    special = SpecialTokens(eos_token_id=3, eos_token="<end>", pad_token_id=3, pad_token="<end>")
    told = DataTokenizer(text="{}", special=special)
    write_model(tmp_path, SPEC, weights=make_weights(), sequence_length=24, tokenizer=told)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"], config["pad_token_id"]) == (3, None, 3)
    names = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert names == {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "pad_token": "<end>"}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_type 'llama3' needs low_freq_factor"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "original_max_position_embeddings = None"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_parameters.full_attention = "),
        ({"rope_scaling": {"type": "su", "factor": 4.0}}, "rope_scaling.rope_type = 'su'"),
        ({"rope_scaling": {"rope_type": "default", "factor": 4.0}}, "rope_scaling.factor = 4.0"),
        ({"rope_scaling": "linear"}, "rope_scaling = 'linear'"),
        ({"head_dim": 16}, "model.layers.0.self_attn.q_proj.weight is [32, 32], and config.json asks for [64, 32]"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"attention_bias": True}, "model.layers.0.self_attn.q_proj.bias is missing"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = "),
        ({"hidden_size": "32"}, "hidden_size = '32' is no whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0 is not above 0"),
        ({"rope_theta": "big", "rope_parameters": None}, "rope_theta = 'big' is no number"),
    ],
)
def test_a_model_that_computes_something_else_is_refused(folder: Path, change: dict[str, Any], line: str) -> None:
    """Scaled positions, heads of another width and what else this model has not: refused by key and value."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError) as refused:
        read_model(folder)
    assert line in str(refused.value)


def test_a_damaged_model_is_refused(folder: Path) -> None:
    """A cut file, an absent file, another kind of model, no folder: one line each that names the folder."""
    file = folder / "model-00002-of-00005.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:100])
    with pytest.raises(ConfigError, match="not a readable model"):
        read_model(folder)
    file.unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00005\.safetensors is missing"):
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
