"""A folder of gpt-oss as it is published, with its experts in MXFP4: read into bfloat16 and exported without it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headway.daemon.base.errors import ConfigError
from headway.daemon.jobs.job import JobSpec
from headway.daemon.jobs.job_file import parse_job
from headway.daemon.models.model_folder import write_model
from headway.daemon.models.origin_config import model_opener
from headway.daemon.models.origin_model import initial_weights_of, with_parts
from headway.daemon.models.origin_parts import carried_of, read_part

pytest.importorskip("transformers")

from tests.rigs.tiny_models import write_tiny_model

SIZES: dict[str, Any] = {"head_dim": 8, "hidden_size": 64, "intermediate_size": 32, "num_local_experts": 3}


def write_published(folder: Path, *, is_sharded: bool = False) -> Path:
    """A tiny folder in the published form: random blocks, and scales of usual and of the smallest and largest size."""
    write_tiny_model(folder, model_type="gpt_oss", dtype=torch.bfloat16, num_experts_per_tok=2, **SIZES)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, inputs, outputs = tensors.pop(name).shape
        shape = (num_experts, outputs, inputs // 32)
        scales = torch.randint(115, 122, shape, generator=generator)
        scales[0, 0, 0], scales[1, 1, 0] = 1, 252
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
        tensors[f"{name}_scales"] = scales.to(torch.uint8)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    if not is_sharded:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{1 + name.endswith('_scales')}.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def job_from(folder: Path, *, text: str = "") -> JobSpec:
    """The job of a file that names the folder."""
    written = f'[job]\nname = "j"\n[model]\nfrom = "{folder.name}"\n{text}'
    return parse_job(written, "j.toml", open_model=model_opener(folder.parent))


def weights_of(spec: JobSpec) -> dict[str, dict[str, Tensor]]:
    """W_0 of each layer."""
    read = initial_weights_of(spec)
    assert read is not None
    return {layer: read(layer) for layer in spec.layers}


@pytest.mark.parametrize("is_sharded", [False, True])
def test_the_weights_are_those_that_transformers_dequantizes(tmp_path: Path, is_sharded: bool) -> None:
    """Each matrix of each expert, to the bit, also if blocks and scales lie in two files."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder = write_published(tmp_path / "model", is_sharded=is_sharded)
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    for layer, parameters in weights_of(job_from(folder)).items():
        if not layer.startswith("block."):
            continue
        path = f"model.layers.{layer.removeprefix('block.')}.mlp.experts"
        wholes = {
            kind: convert_moe_packed_tensors(tensors[f"{path}.{kind}_blocks"], tensors[f"{path}.{kind}_scales"])
            for kind in ("gate_up_proj", "down_proj")
        }
        for number in range(SIZES["num_local_experts"]):
            gate_up, down = (wholes[kind][number].float() for kind in ("gate_up_proj", "down_proj"))
            expected = {"gate_proj": gate_up[:, ::2].T, "up_proj": gate_up[:, 1::2].T, "down_proj": down.T}
            for kind, matrix in expected.items():
                assert torch.equal(parameters[f"mlp.experts.{number}.{kind}.weight"], matrix), kind


def test_the_export_is_the_model_that_transformers_reads(tmp_path: Path) -> None:
    """In bfloat16 and without the key of the quantization: every tensor has the bits of transformers' own reading."""
    transformers: Any = pytest.importorskip("transformers")
    folder, out = write_published(tmp_path / "model"), tmp_path / "out"
    spec = job_from(folder)
    write_model(out, spec.model, weights=weights_of(spec), sequence_length=16, carried=carried_of(spec))
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    dequantized = transformers.Mxfp4Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=dequantized).state_dict()
    ours = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype == torch.bfloat16, name
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("text", ["", '[adapter]\nrank = 2\nquantize = "int8"\n'])
def test_a_part_can_be_read_from_any_byte(tmp_path: Path, text: str) -> None:
    """A reader that continues gets the rest of the bytes, also from the middle of a matrix in MXFP4."""
    spec = with_parts(job_from(write_published(tmp_path / "model"), text=text))
    whole = b"".join(read_part(spec, "block.1"))
    digest = spec.origin.digest_of("block.1")
    assert digest is not None
    assert digest.size_bytes == len(whole)
    for offset in range(0, len(whole), 997):
        assert b"".join(read_part(spec, "block.1", offset=offset)) == whole[offset:]


@pytest.mark.parametrize("kind", ["scales", "blocks"])
def test_half_of_a_matrix_is_refused(tmp_path: Path, kind: str) -> None:
    """Blocks without scales, or scales without blocks → one line with a tensor's name."""
    folder = write_published(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.layers.1.mlp.experts.down_proj_{kind}"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.experts\.(down_proj_blocks|0\.down_proj\.weight)"):
        with_parts(job_from(folder))


@pytest.mark.parametrize("second", ["down_proj", "0.down_proj.weight"])
def test_two_copies_of_an_experts_matrix_are_refused(tmp_path: Path, second: str) -> None:
    """In MXFP4 and in bfloat16, of all experts or of one: which of both would be trained?"""
    folder = write_published(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    shape = (3, 32, 64) if second == "down_proj" else (64, 32)
    tensors[f"model.layers.1.mlp.experts.{second}"] = torch.zeros(shape, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"has model\.layers\.1\.mlp\.experts\.down_proj\S*, and there is model\.layers"
    ):
        with_parts(job_from(folder))
