"""A folder of adapters as `[model] from`: PEFT's own files are continued, and what is no plain LoRA is refused."""

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.daemon.base.errors import ConfigError
from headway.daemon.cluster.state_key import BASE_PREFIX
from headway.daemon.jobs.job import JobSpec
from headway.daemon.jobs.job_file import parse_job
from headway.daemon.models.adapter_folder import AdapterFolderWriter
from headway.daemon.models.origin_config import model_opener
from headway.daemon.models.origin_model import initial_adapters_of, with_parts
from headway.daemon.models.origin_parts import read_part
from headway.daemon.worker.goal import Source, SourceKind, Start
from headway.daemon.worker.held_layers import Held, load_stage
from headway.stages.device.cpu import CpuDevice
from headway.stages.ids import LayerName
from headway.stages.model.adapters import is_of_adapter
from headway.stages.model.decoder import trained_shapes
from headway.stages.spec import AdapterSpec
from headway.stages.state.layer_state import given_adapters
from headway.stages.state.state_file import read_state

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.rigs.agent_views import plan
from tests.rigs.tiny_models import write_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of PEFT's own call


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    """Adapters beside q_proj and down_proj."""
    targets = ["down_proj", "q_proj"]
    return written_by_peft(tmp_path / "adapter", base, lora_dropout=0.25, use_rslora=True, target_modules=targets)


def written_by_peft(folder: Path, base: Path, **options: Any) -> Path:
    """Adapters that PEFT has written, none of them zeros."""
    import peft
    import transformers

    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "init_lora_weights": False} | options)
    peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(str(folder))
    return folder


def job_from(folder: Path, *, text: str = "") -> JobSpec:
    """The job of a file that names the folder."""
    written = f'[job]\nname = "j"\n[model]\nfrom = "{folder.name}"\n{text}'
    return parse_job(written, "j.toml", open_model=model_opener(folder.parent))


def change(folder: Path, **keys: Any) -> None:
    """Set keys of adapter_config.json."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_rank_alpha_targets_and_base_are_those_of_the_folder(folder: Path, base: Path) -> None:
    """The job file need not say [adapter]; it may add how the base is kept."""
    spec = job_from(folder, text='[adapter]\nquantize = "int8"\n')
    adapter = spec.model.adapter
    assert (adapter.rank, adapter.alpha, adapter.rslora, adapter.quantize) == (4, 6.0, True, "int8")
    assert adapter.dropout == 0.25
    assert job_from(folder, text="[adapter]\ndropout = 0.0\n").model.adapter.dropout == 0.0
    assert adapter.targets == ("q_proj", "down_proj")
    assert (spec.origin.url, spec.origin.adapter) == (str(base), str(folder))


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


def test_half_a_block_begins_with_its_own_part(folder: Path, tmp_path: Path) -> None:
    """The parts of both halves together have the tensors of the block's, each of them once."""
    whole, halves = (
        with_parts(job_from(folder).with_values({"placement.split_blocks": are_split})) for are_split in (False, True)
    )
    found: list[dict[str, torch.Tensor]] = []
    for spec, name in ((whole, "block.1"), (halves, "block.1.attention"), (halves, "block.1.mlp")):
        path = tmp_path / name
        path.write_bytes(b"".join(read_part(spec, name)))
        found.append(read_state(path)[1])
    block, attention, mlp = found
    assert not attention.keys() & mlp.keys()
    assert block.keys() == attention.keys() | mlp.keys()
    assert all(torch.equal(tensor, (attention | mlp)[name]) for name, tensor in block.items())
    assert any(is_of_adapter(name) for name in attention)
    assert any(is_of_adapter(name) for name in mlp)


def test_a_worker_begins_with_the_adapters_of_the_part(folder: Path, tmp_path: Path) -> None:
    """Not with those of the seed: B is not zeros."""
    spec, path = with_parts(job_from(folder)), tmp_path / "part"
    path.write_bytes(b"".join(read_part(spec, "block.1")))
    parts = plan(1, ("a", ("block.1",)), ("b", ("head",)))
    sources = (
        Source("block.1", SourceKind.INITIAL),
        Source(f"{BASE_PREFIX}block.1", SourceKind.FILE, str(path)),
    )
    start = Start(plan=parts, position=0, sources=sources)
    layers, _ = load_stage(start, spec, held=Held(), device=CpuDevice())
    read = initial_adapters_of(spec)
    assert read is not None
    for name, tensor in read("block.1").items():
        assert torch.equal(layers["block.1"].weights()[name], tensor), name


UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:\bq_proj\b|\bdown_proj\b).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:\bq_proj\b|\bdown_proj\b)))"
)
ALL: tuple[str, ...] = ()
TAKEN: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "PEFT's own choice": ({}, ("q_proj", "v_proj")),
    "all-linear": ({"target_modules": "all-linear"}, ALL),
    "all-linear but one": (
        {"target_modules": "all-linear", "exclude_modules": ["down_proj"]},
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"),
    ),
    "a pattern": ({"target_modules": r".*self_attn\.(q|v)_proj"}, ("q_proj", "v_proj")),
    "a pattern that fits beginnings": (
        {"target_modules": r"model\.layers\.\d\.(self_attn\.q_proj|mlp\.up)"},
        ("q_proj",),
    ),
    "a pattern as unsloth writes it": ({"target_modules": UNSLOTH}, ("q_proj", "down_proj")),
    "names with dots": ({"target_modules": ["self_attn.q_proj", "mlp.down_proj"]}, ("q_proj", "down_proj")),
    "names of another family too": ({"target_modules": ["q_proj", "c_attn"]}, ("q_proj",)),
    "each block by its number": ({"target_modules": ["q_proj"], "layers_to_transform": [0, 1, 2]}, ("q_proj",)),
    "another first A": ({"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"}, ("q_proj",)),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_each_way_to_name_matrices_is_read_as_peft_reads_it(base: Path, tmp_path: Path, kind: str) -> None:
    """PEFT writes the folder, and its tensors are those that the targets say."""
    options, targets = TAKEN[kind]
    spec = with_parts(job_from(written_by_peft(tmp_path / "adapter", base, **options)))
    assert spec.model.adapter.targets == targets


def test_adapters_in_half_precision_are_read(folder: Path) -> None:
    """Each value as it is, in float32."""
    path = folder / "adapter_model.safetensors"
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}
    save_file(halves, path)
    read = initial_adapters_of(job_from(folder))
    assert read is not None
    for name, tensor in read("block.0").items():
        assert torch.equal(tensor, halves[f"base_model.model.model.layers.0.{name}"].float())


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("qwen3_moe", {"num_experts": 3, "moe_intermediate_size": 24}), ("mixtral", {"num_local_experts": 3})],
)
def test_exported_adapters_of_experts_are_continued(tmp_path: Path, family: str, sizes: dict[str, Any]) -> None:
    """Each expert begins with its own A and B, in the plain loop and in the part that nodes load."""
    base = write_tiny_model(tmp_path / "model", model_type=family, num_experts_per_tok=2, head_dim=8, **sizes)
    _, model = model_opener(tmp_path)(str(base), ())
    adapter = AdapterSpec(rank=2, alpha=6.0, targets=("q_proj", "gate_proj", "up_proj", "down_proj"))
    model = replace(model, adapter=adapter)
    blocks = [f"block.{index}" for index in range(3)]
    written = {
        block: {name: torch.randn(shape) for name, shape in trained_shapes(block, model).items()} for block in blocks
    }
    with AdapterFolderWriter(tmp_path / "adapter", model, base=str(base)) as writer:
        for block in blocks:
            writer.add(block, written[block])
    spec = with_parts(job_from(tmp_path / "adapter"))
    assert spec.model.adapter == adapter
    read, path = initial_adapters_of(spec), tmp_path / "part"
    assert read is not None
    path.write_bytes(b"".join(read_part(spec, "block.1")))
    loaded = given_adapters(read_state(path)[1], LayerName("block.1"), spec.model)
    assert loaded.keys() == written["block.1"].keys()
    for name, tensor in written["block.1"].items():
        assert torch.equal(read("block.1")[name], tensor)
        assert torch.equal(loaded[name], tensor)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another base": ({"base_model_name_or_path": "Qwen/Qwen3-8B"}, r"is 'Qwen/Qwen3-8B', which is no folder here; wri"),
    "another kind": ({"peft_type": "IA3"}, r"peft_type = 'IA3' is not supported"),
    "DoRA": ({"use_dora": True}, r"use_dora = True is not supported; merge the adapters"),
    "biases": ({"bias": "all"}, r"bias = 'all' is not supported; merge the adapters"),
    "whole matrices": ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\] is not supported; merge"),
    "ranks by matrix": ({"rank_pattern": {"q_proj": 8}}, r"rank_pattern = .* is not supported; merge the adapters"),
    "alphas by matrix": ({"alpha_pattern": {"q": 8} | {"k" * n: 1 for n in range(99)}}, r"not supported; merge the ad"),
    "joined experts": ({"target_parameters": ["experts.down_proj"]}, r"target_parameters = .* is not supported; merge"),
    "a changed base": ({"init_lora_weights": "pissa"}, r"'pissa' changed the weights of the model .*; merge the adap"),
    "a head": ({"target_modules": ["q_proj", "lm_head"]}, r"target_modules has 'lm_head', and adapters lie beside .*;"),
    "the first block": ({"layers_to_transform": 0}, r"q_proj has adapters in some blocks and not in others; merge"),
    "blocks by a pattern": ({"target_modules": r".*\.1\..*q_proj"}, r"q_proj has adapters in some blocks and not"),
    "another matrix": ({"target_modules": ["wq"]}, r"\['wq'\] names no matrix of the blocks; there are q_proj, k_pro"),
    "no pattern": ({"target_modules": "*proj"}, r"'\*proj' is no pattern of modules: nothing to repeat"),
    "a huge alpha": ({"lora_alpha": 10**400}, r"int too large to convert to float"),
    "no list": ({"exclude_modules": 5}, r"5 is no list of modules, such as q_proj"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_plain_lora_is_refused_by_name(folder: Path, case: str) -> None:
    """One line: the file, the key, its value, and what to do."""
    keys, words = REFUSED[case]
    change(folder, **keys)
    with pytest.raises(ConfigError, match=f"adapter/adapter_config.json: .*{words}"):
        job_from(folder)


def test_pickled_adapters_are_refused_with_the_command_that_converts_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes what is read."""
    path = folder / "adapter_model.safetensors"
    torch.save(tensors := load_file(path), folder / "adapter_model.bin")
    path.unlink()
    with pytest.raises(ConfigError, match=r"has adapter_model.bin, which is not read; run this in it once: ") as raised:
        job_from(folder)
    monkeypatch.chdir(folder)
    exec(shlex.split(str(raised.value).partition("once: ")[2])[-1], {})
    assert load_file(path).keys() == tensors.keys()


def test_adapters_beside_whole_weights_are_refused(folder: Path, base: Path) -> None:
    """A config.json beside them says nothing; a second set of weights is one too many."""
    shutil.copy(base / "config.json", folder)
    assert job_from(folder).origin.adapter == str(folder)
    shutil.copy(base / "model.safetensors", folder)
    with pytest.raises(ConfigError, match=r"adapter: has adapter_config.json and model.safetensors; delete the one"):
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
    save_file(tensors | {name: odd, name.replace("q_proj", "k_proj"): odd.clone()}, path)
    with pytest.raises(ConfigError, match=r"k_proj.lora_A.weight, which a model of this adapter_config.json does not"):
        with_parts(job_from(folder))
    save_file(tensors | {name: odd, name.removeprefix("base_model.model."): odd.clone()}, path)
    with pytest.raises(ConfigError, match=r"q_proj.lora_A.weight, and there is model.layers.0.self_attn.q_proj.lora_A"):
        with_parts(job_from(folder))
