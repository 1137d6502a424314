"""Import and export without training: the files of the origin, byte for byte."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headway.daemon.cluster.state_key import CARRIED_PART
from headway.daemon.jobs.job import JobSpec
from headway.daemon.jobs.job_file import parse_job
from headway.daemon.models.adapter_folder import AdapterFolderWriter
from headway.daemon.models.model_folder import ExportDtype, ModelFolderWriter, planned_shards, read_model
from headway.daemon.models.origin_config import model_opener
from headway.daemon.models.origin_model import initial_weights_of, with_parts
from headway.daemon.models.origin_parts import carried_in, carried_of, read_part
from headway.daemon.text.data_tokenizer import DataTokenizer, tokenizer_json
from headway.stages.model.decoder import trained_shapes
from headway.stages.spec import AdapterSpec, layer_names

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.rigs.tiny_models import write_tiny_model, write_tiny_model_of_pictures

LAYOUTS = {
    "one file": {},
    "shards": {"model_type": "qwen3", "head_dim": 16, "shard_size": "30KB"},
    "bfloat16": {"dtype": torch.bfloat16},
    "Qwen3.5": {"model_type": "qwen3_5_text", "head_dim": 16, "linear_num_value_heads": 16, "shard_size": "30KB"},
    "float16": {"dtype": torch.float16},
}


def job_from(folder: Path) -> JobSpec:
    """A job that starts from a folder."""
    return parse_job('[job]\nname = "j"\n', open_model=model_opener(folder.parent), model_from=str(folder))


def exported(spec: JobSpec, out: Path, *, dtype: ExportDtype | None = None) -> Path:
    """The model at boundary 0."""
    read = initial_weights_of(spec)
    assert read is not None
    with ModelFolderWriter(
        out,
        spec.model,
        sequence_length=16,
        tokenizer=DataTokenizer(text=tokenizer_json()),
        carried=carried_of(spec),
        dtype=dtype,
    ) as writer:
        for layer in reversed(spec.layers):
            writer.add(layer, read(layer))
    return out


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_each_tensor_is_exported_in_the_dtype_that_it_had(tmp_path: Path) -> None:
    """Norms in float32, the rest in bfloat16: the export of other weights has these dtypes, unless one is named."""
    folder = write_tiny_model(tmp_path / "model", dtype=torch.bfloat16)
    mixed = {name: each.float() if "norm" in name else each for name, each in tensors_in(folder).items()}
    save_file(mixed, folder / "model.safetensors", metadata={"format": "pt"})
    spec = job_from(folder)
    read = initial_weights_of(spec)
    assert read is not None
    for dtype in (None, "bfloat16"):
        out = tmp_path / f"{dtype}"
        with ModelFolderWriter(out, spec.model, sequence_length=16, carried=carried_of(spec), dtype=dtype) as writer:
            for layer in spec.layers:
                writer.add(layer, {name: each + 0.125 for name, each in read(layer).items()})
        found = {name: each.dtype for name, each in tensors_in(out).items()}
        assert found == {name: (dtype and torch.bfloat16) or each.dtype for name, each in mixed.items()}


def test_a_model_of_pictures_and_text_gives_its_text_model(tmp_path: Path) -> None:
    """Tensors for pictures and for several tokens at once are left out, and the person is told. Experts that lie in one
    tensor, as in published folders, become as many. The export opens with the same logits.
    """
    text = write_tiny_model(
        tmp_path / "text",
        model_type="qwen3_5_moe_text",
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=20,
        num_hidden_layers=4,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    config = json.loads((text / "config.json").read_text())
    both = {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": config}
    folder = tmp_path / "both"
    folder.mkdir()
    tie = {"tie_word_embeddings": False, "image_token_id": 5, "vision_config": {"depth": 1}}
    (folder / "config.json").write_text(json.dumps(both | tie))
    tensors = {
        name.replace("model.", "model.language_model.", 1): each
        for name, each in AutoModelForCausalLM.from_pretrained(text).state_dict().items()
    }
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in tensors
    beside = {"model.visual.patch_embed.weight": torch.rand(2), "mtp.norm.weight": torch.rand(2)}
    save_file(tensors | beside, folder / "model.safetensors")
    told: list[str] = []
    out = exported(with_parts(job_from(folder), warn=told.append), tmp_path / "out")
    assert "1 tensors of mtp and 1 tensors of visual are left out" in "".join(told)
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen3_5_moe_text"
    theirs, ours = (AutoModelForCausalLM.from_pretrained(path) for path in (text, out))
    tokens = torch.arange(9)[None]
    assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


OF_PICTURES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "Gemma 3": ("gemma3", True, {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 4}),
    "Gemma 4": (
        "gemma4",
        True,
        {"model_type": "gemma4_text", "head_dim": 8, "hidden_size_per_layer_input": 0, "pad_token_id": 0},
    ),
    "Mistral 3": ("mistral3", False, {"model_type": "mistral", "head_dim": 8, "sliding_window": None}),
    "Ministral 3": ("mistral3", True, {"model_type": "ministral3", "head_dim": 16}),
}


@pytest.mark.parametrize("name", OF_PICTURES)
@pytest.mark.parametrize("has_new_names", [False, True])
def test_the_text_of_a_model_of_pictures_has_its_logits(tmp_path: Path, name: str, has_new_names: bool) -> None:
    """A folder with the names that transformers writes and published ones have, or with those in its memory → the
    export is a text model with the bits of the whole one's logits.
    """
    model_type, tied, text = OF_PICTURES[name]
    folder = write_tiny_model_of_pictures(tmp_path / "both", model_type=model_type, tied=tied, text=text)
    whole = AutoModelForImageTextToText.from_pretrained(folder)
    if has_new_names:
        tensors = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
        save_file(
            {name: each for name, each in tensors.items() if not tied or name != "lm_head.weight"},
            folder / "model.safetensors",
        )
    told: list[str] = []
    out = exported(with_parts(job_from(folder), warn=told.append), tmp_path / "out")
    projector = "embed_vision" if model_type == "gemma4" else "multi_modal_projector"
    assert f"tensors of {projector} and " in told[0]
    assert "tensors of vision_tower are left out" in told[0]
    assert json.loads((out / "config.json").read_text())["model_type"] == text["model_type"]
    tokens = torch.arange(9)[None]
    assert torch.equal(AutoModelForCausalLM.from_pretrained(out)(tokens).logits, whole(tokens).logits)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of PEFT's own call
@pytest.mark.parametrize("name", OF_PICTURES)
def test_an_adapter_beside_a_model_of_pictures_lies_beside_its_text(tmp_path: Path, name: str) -> None:
    """PEFT opens the whole folder that the adapter names, and has each B of ours there and none in the tower; a job
    continues it.
    """
    peft = pytest.importorskip("peft")
    model_type, tied, text = OF_PICTURES[name]
    folder = write_tiny_model_of_pictures(tmp_path / "both", model_type=model_type, tied=tied, text=text)
    text_spec = job_from(folder).model
    model = replace(text_spec, adapter=AdapterSpec(rank=2, targets=("q_proj", "down_proj")))
    trained = {
        layer: {key: torch.randn(shape) for key, shape in trained_shapes(layer, model).items()}
        for layer in layer_names(model)
    }
    with AdapterFolderWriter(
        tmp_path / "adapter", model, base=str(folder), carried=carried_of(job_from(folder))
    ) as writer:
        for layer, adapters in trained.items():
            writer.add(layer, adapters)
    opened = peft.PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(folder), tmp_path / "adapter")
    found = {key: value for key, value in opened.named_parameters() if ".lora_" in key}
    ours = [(key, value) for adapters in trained.values() for key, value in adapters.items()]
    assert len(found) == len(ours) > 0
    for layer, adapters in trained.items():
        for key, value in adapters.items():
            place = f"language_model.layers.{layer.removeprefix('block.')}.{key}".replace(".weight", ".default.weight")
            assert torch.equal(found[f"base_model.model.model.{place}"], value)
    assert job_from(tmp_path / "adapter").model.adapter.targets == model.adapter.targets


@pytest.fixture(scope="module", params=LAYOUTS)
def origin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of transformers, with small files beside the weights."""
    folder = write_tiny_model(tmp_path_factory.mktemp("origin") / "model", **LAYOUTS[request.param])  # type: ignore[arg-type]
    (folder / "tokenizer.json").write_text(tokenizer_json())
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "README.md").write_text("not carried over")
    return folder


def test_an_export_without_training_has_the_bytes_of_the_origin(origin: Path, tmp_path: Path) -> None:
    """Equal names, and equal bytes in each file; config.json also says who wrote the folder, and a hidden file what."""
    out = exported(job_from(origin), tmp_path / "out")
    names = {path.name for path in origin.iterdir()} - {"README.md"}
    assert {path.name for path in out.iterdir()} == names | {".headway-files"}
    assert set((out / ".headway-files").read_text().splitlines()) == names
    for name in names - {"config.json"}:
        assert (out / name).read_bytes() == (origin / name).read_bytes(), name
    config = json.loads((out / "config.json").read_text())
    assert config.pop("producer") == "headway"
    assert config == json.loads((origin / "config.json").read_text())
    exported(job_from(origin), tmp_path / "out")  # our own export may be replaced


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_dtype_can_be_asked_for(origin: Path, tmp_path: Path, dtype: ExportDtype) -> None:
    """Each tensor is cast, config.json says the dtype, and transformers opens the folder in it."""
    out = exported(job_from(origin), tmp_path / "out", dtype=dtype)
    ours, theirs = tensors_in(out), tensors_in(origin)
    wanted = getattr(torch, dtype)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name].to(wanted)) for name, tensor in ours.items())
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.dtype == wanted
    assert read_model(out).weights["head"]["lm_head.weight"].dtype == torch.float32


def test_what_a_node_keeps_is_what_the_folder_has(origin: Path, tmp_path: Path) -> None:
    """The carried part, as a node sends it, gives an export the same files as the folder itself."""
    spec = with_parts(job_from(origin))
    path = tmp_path / "part"
    path.write_bytes(b"".join(read_part(spec, CARRIED_PART)))
    assert carried_in(path) == carried_of(spec)


def test_shards_are_filled_up_in_the_order_of_the_layers(tmp_path: Path) -> None:
    """A shard has at most so many bytes, unless one tensor has more; its header is what safetensors writes."""
    shapes = {"a": (4,), "c": (2, 3), "b": (100,), "d": (1,)}
    shards = planned_shards(shapes, "float32", most_bytes=40)
    assert [list(shard.tensors) for shard in shards] == [["a", "c"], ["b"], ["d"]]
    assert shards[0].name == "model-00001-of-00003.safetensors"
    for shard in shards:
        path = tmp_path / shard.name
        save_file({name: torch.zeros(shapes[name]) for name in shard.tensors}, path, metadata={"format": "pt"})
        assert path.read_bytes() == shard.header + bytes(shard.size_bytes - len(shard.header))
