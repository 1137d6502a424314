"""A folder of adapters as `[model] from`: PEFT's own files are continued, and what is no plain LoRA is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.daemon.errors import ConfigError
from headway.daemon.jobs.job import JobSpec
from headway.daemon.jobs.job_file import parse_job
from headway.daemon.origin.origin_config import model_opener
from headway.daemon.origin.origin_model import initial_adapters_of, with_parts
from headway.daemon.origin.origin_parts import read_part
from headway.daemon.storage.state_key import BASE_PREFIX
from headway.daemon.worker.held_layers import HeldSession, load_stage
from headway.proto.control_pb2 import StageAssignment, Start
from headway.stages.device.cpu import CpuDevice
from headway.stages.ids import LayerName
from headway.stages.state.layer_state import given_adapters
from headway.stages.state.state_file import read_state

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.fakes.tiny_models import write_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of PEFT's own call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Adapters that PEFT has written, beside q_proj and down_proj of a tiny model."""
    import peft
    import transformers

    base = write_tiny_model(tmp_path / "model")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        lora_dropout=0.25,
        use_rslora=True,
        target_modules=["down_proj", "q_proj"],
        init_lora_weights=False,
    )
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), config)
    model.save_pretrained(str(tmp_path / "adapter"))
    return tmp_path / "adapter"


def job_from(folder: Path, *, text: str = "") -> JobSpec:
    """The job of a file that names the folder."""
    written = f'[job]\nname = "j"\n[model]\nfrom = "{folder.name}"\n{text}'
    return parse_job(written, "j.toml", open_model=model_opener(folder.parent))


def change(folder: Path, **keys: Any) -> None:
    """Set keys of adapter_config.json."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_rank_alpha_targets_and_base_are_those_of_the_folder(folder: Path) -> None:
    """The job file need not say [adapter]; it may add how the base is kept."""
    spec = job_from(folder, text='[adapter]\nquantize = "int8"\n')
    adapter = spec.model.adapter
    assert (adapter.rank, adapter.alpha, adapter.rslora, adapter.quantize) == (4, 6.0, True, "int8")
    assert adapter.dropout == 0.25
    assert job_from(folder, text="[adapter]\ndropout = 0.0\n").model.adapter.dropout == 0.0
    assert adapter.targets == ("q_proj", "down_proj")
    assert (spec.origin.url, spec.origin.adapter) == (str(folder.parent / "model"), str(folder))


def test_a_layer_begins_with_the_tensors_of_the_folder(folder: Path, tmp_path: Path) -> None:
    """In the plain loop and in the part that nodes load, from any byte of it: the bits that PEFT has written."""
    spec = with_parts(job_from(folder))
    read, path = initial_adapters_of(spec), tmp_path / "part"
    assert read is not None
    path.write_bytes(whole := b"".join(read_part(spec, "block.1")))
    ours = read("block.1")
    loaded = given_adapters(read_state(path)[1], LayerName("block.1"), spec.model)
    theirs = load_file(folder / "adapter_model.safetensors")
    assert len(ours) == 4
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[f"base_model.model.model.layers.1.{name}"])
        assert torch.equal(tensor, loaded[name])
    assert all(b"".join(read_part(spec, "block.1", offset=at)) == whole[at:] for at in range(0, len(whole), 997))


def test_a_worker_begins_with_the_adapters_of_the_part(folder: Path, tmp_path: Path) -> None:
    """Not with those of the seed: B is not zeros."""
    spec, path = with_parts(job_from(folder)), tmp_path / "part"
    path.write_bytes(b"".join(read_part(spec, "block.1")))
    start = Start(job_name="j", stage=StageAssignment(index=0, num_stages=2, layers=["block.1"]))
    start.sources.add(layer="block.1", initial=True)
    start.sources.add(layer=f"{BASE_PREFIX}block.1", path=str(path))
    layers, _ = load_stage(start, spec, session=HeldSession(), device=CpuDevice())
    read = initial_adapters_of(spec)
    assert read is not None
    for name, tensor in read("block.1").items():
        assert torch.equal(layers["block.1"].weights()[name], tensor), name


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another base": ({"base_model_name_or_path": "Qwen/Qwen3-8B"}, r"is 'Qwen/Qwen3-8B', which is no folder here; wri"),
    "another kind": ({"peft_type": "IA3"}, r"peft_type = 'IA3' is not supported"),
    "DoRA": ({"use_dora": True}, r"use_dora = True is not supported"),
    "whole matrices": ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\] is not supported"),
    "ranks by matrix": ({"rank_pattern": {"q_proj": 8}}, r"rank_pattern = .* is not supported"),
    "a changed base": ({"init_lora_weights": "pissa"}, r"'pissa' changed the weights of the model"),
    "another matrix": ({"target_modules": ["wq"]}, r"has 'wq', which is no matrix of the blocks"),
    "a pattern": ({"target_modules": ".*proj"}, r"is no list of matrices, such as q_proj"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_plain_lora_is_refused_by_name(folder: Path, case: str) -> None:
    """One line: the file, the key, its value."""
    keys, words = REFUSED[case]
    change(folder, **keys)
    with pytest.raises(ConfigError, match=f"adapter/adapter_config.json: .*{words}"):
        job_from(folder)


def test_a_base_whose_name_is_too_long_is_no_path(folder: Path) -> None:
    """One short line, from whichever file the name comes."""
    change(folder, base_model_name_or_path="a/" * 5000)
    with pytest.raises(ConfigError, match=r"is no path: .*too long") as raised:
        job_from(folder)
    assert len(str(raised.value)) < 700


def test_a_key_beside_the_folder_must_agree(folder: Path) -> None:
    """Another rank than the folder's is refused; the same may stand there."""
    assert job_from(folder, text="[adapter]\nrank = 4\n").model.adapter.rank == 4
    with pytest.raises(ConfigError, match=r"j.toml:adapter.rank: is 8, but the adapters of .* have 4; leave it out"):
        job_from(folder, text="[adapter]\nrank = 8\n")


def test_tensors_that_the_config_does_not_say_are_refused(folder: Path) -> None:
    """An adapter of another matrix, and a missing one, at the submission."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    odd = tensors.pop(name)
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=r"has no tensor model.layers.0.self_attn.q_proj.lora_A.weight"):
        with_parts(job_from(folder))
    save_file(tensors | {name.replace("q_proj", "k_proj"): odd}, path)
    with pytest.raises(ConfigError, match=r"k_proj.lora_A.weight, which a model of this adapter_config.json does not"):
        with_parts(job_from(folder))
