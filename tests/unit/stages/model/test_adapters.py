"""Adapters: what is trained, what a file of a boundary has, what a merged weight is."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from headway.daemon.models.adapter_folder import AdapterFolderWriter
from headway.optim.layer_optimizer import optimizer_factory
from headway.optim.spec import OptimSpec
from headway.stages.ids import Boundary, LayerName
from headway.stages.model.adapters import adapt, kept_values, merged
from headway.stages.model.decoder import build_layer, parameter_shapes, trained_shapes
from headway.stages.model.hugging_face import checkpoint_name, model_spec
from headway.stages.model.initial_weights import frozen_beside, initial_adapters, initial_parameters
from headway.stages.spec import AdapterSpec, ModelSpec, TrainSpec, layer_names
from headway.stages.state.layer_state import LayerState

MODEL = ModelSpec(
    num_hidden_layers=1, hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1,
    vocab_size=8, adapter=AdapterSpec(rank=2, alpha=6.0, targets=("q_proj", "down_proj")),
)  # fmt: skip
BLOCK = LayerName("block.0")
ADAPTED = ("self_attn.q_proj", "mlp.down_proj")


def random_adapters() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {name: torch.randn(shape) for name, shape in trained_shapes(BLOCK, MODEL).items()}


def test_adapters_alone_are_trained() -> None:
    """Two targets → four matrices of the block; nothing of embedding and head."""
    assert set(trained_shapes(BLOCK, MODEL)) == {f"{matrix}.lora_{end}.weight" for matrix in ADAPTED for end in "AB"}
    assert not trained_shapes("embed", MODEL)
    assert not trained_shapes("head", MODEL)


def test_a_layer_that_moves_takes_its_adapters_along() -> None:
    """A state's tensors have no frozen weight, and the state that is made from them has the same adapters."""
    given, train = random_adapters(), TrainSpec(batches=4, schedule="1f1b")
    make = optimizer_factory(OptimSpec(), num_batches=4, delay=0)
    state: Mapping[str, Tensor] = {f"current/{name}": tensor for name, tensor in given.items()}
    slots = {f"optim/momentum_buffer/{name}": torch.zeros_like(tensor) for name, tensor in given.items()}
    layer = LayerState.from_tensors(
        BLOCK, {**state, **slots}, MODEL, train, boundary=Boundary(1), device="cpu", optimizer_factory=make
    )
    written = layer.tensors()
    assert written.keys() == state.keys() | slots.keys()
    assert all(torch.equal(written[f"current/{name}"], tensor) for name, tensor in given.items())


def test_merged_weights_compute_what_adapters_do() -> None:
    """The block with adapters, and the plain block with merged weights: equal outputs but for rounding."""
    base, adapters = initial_parameters(BLOCK, MODEL, seed=1), random_adapters()
    hidden = torch.randn(2, 5, 16)
    outputs = []
    for spec, weights in ((MODEL, base | adapters), (MODEL.base, merged(base, adapters, MODEL.adapter))):
        block = build_layer(BLOCK, spec)
        block.load_state_dict(weights, assign=True)
        outputs.append(block(hidden))
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-4, rtol=1e-4)
    plain = build_layer(BLOCK, MODEL.base)
    plain.load_state_dict(base, assign=True)
    assert (plain(hidden) - outputs[0]).abs().max() > 0.01


def test_b_begins_with_zeros_and_a_within_its_bound() -> None:
    """So the first forward is that of the frozen model; A is uniform up to 1/√inputs."""
    found = initial_adapters(BLOCK, MODEL, seed=5)
    assert not found["mlp.down_proj.lora_B.weight"].any()
    largest = found["mlp.down_proj.lora_A.weight"].abs().max()
    assert 0.7 / 24**0.5 < largest <= 1 / 24**0.5


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern:RuntimeWarning")  # PEFT's own patterns
@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [("qwen3_moe", {"num_experts": 3, "moe_intermediate_size": 24}), ("mixtral", {"num_local_experts": 3})],
)
def test_peft_opens_adapters_of_experts(tmp_path: Path, model_type: str, sizes: dict[str, int]) -> None:
    """PEFT joins them as transformers joins experts, and merges each expert to the weights that we merge."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(
        model_type, num_hidden_layers=1, hidden_size=16, intermediate_size=24, head_dim=8, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=8, num_experts_per_tok=2, **sizes,
    )  # fmt: skip
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    before = {name: tensor.clone() for name, tensor in theirs.model.layers[0].mlp.experts.named_parameters()}
    targets = ("q_proj", "gate_proj", "up_proj", "down_proj")
    spec = replace(model_spec(config.to_dict()), adapter=AdapterSpec(rank=2, alpha=6.0, targets=targets))
    adapters = {name: torch.randn(shape) for name, shape in trained_shapes(BLOCK, spec).items()}
    with AdapterFolderWriter(tmp_path, spec, base="nowhere") as writer:
        writer.add(BLOCK, adapters)
    merged_model = peft.PeftModel.from_pretrained(theirs, tmp_path).merge_and_unload()
    after = dict(merged_model.model.layers[0].mlp.experts.named_parameters())
    for expert in range(3):
        base = {f"mlp.experts.{expert}.{name}.weight": torch.zeros(24, 16) for name in ("gate_proj", "up_proj")}
        base[f"mlp.experts.{expert}.down_proj.weight"] = torch.zeros(16, 24)
        own = {name: tensor for name, tensor in adapters.items() if name.startswith(f"mlp.experts.{expert}.")}
        gate, up, down = merged(base, own, spec.adapter).values()
        joined = {"gate_up_proj": torch.cat([gate, up]), "down_proj": down}
        for name, product in joined.items():
            torch.testing.assert_close(after[name][expert] - before[name][expert], product, atol=1e-4, rtol=1e-4)


def test_dropout_keeps_its_share_and_another_one_each_time() -> None:
    """About p of the values are dropped, the others grow by as much; other microbatches and matrices drop others."""
    shape = torch.Size((100, 1003))
    found = [kept_values(key, shape, 0.1, torch.device("cpu")) for key in ("0/1/2/block.0/q", "0/1/3/block.0/q")]
    for is_kept in found:
        assert abs(is_kept.float().mean().item() - 0.9) < 0.005
    both = (found[0] & found[1]).float().mean().item()
    assert abs(both - 0.81) < 0.005, "two draws hang together"


def test_a_layer_without_adapter_stays_as_it_is() -> None:
    """No rank → all parameters are trained."""
    layer = adapt(torch.nn.Linear(2, 2), AdapterSpec(), "head")
    assert all(parameter.requires_grad for parameter in layer.parameters())


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("rslora", [False, True])
def test_peft_opens_the_folder(tmp_path: Path, rslora: bool) -> None:
    """PEFT finds an adapter in transformers' model for each tensor, and merges it to the weights that we merge."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    spec = replace(MODEL, adapter=replace(MODEL.adapter, rslora=rslora))
    with AdapterFolderWriter(tmp_path, spec, base="nowhere") as writer:
        writer.add(BLOCK, random_adapters())
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=8,
    )  # fmt: skip
    model = peft.PeftModel.from_pretrained(transformers.LlamaForCausalLM(config), tmp_path)
    opened = {name.replace(".default", ""): tensor for name, tensor in model.state_dict().items() if "lora_" in name}
    wanted = load_file(tmp_path / "adapter_model.safetensors")
    assert opened.keys() == wanted.keys()
    assert all(torch.equal(opened[name], tensor) for name, tensor in wanted.items())
    base = {
        name: model.base_model.model.model.layers[0].get_parameter(f"{name}.base_layer.weight").detach().clone()
        for name in ADAPTED
    }
    ours = merged({f"{name}.weight": weight for name, weight in base.items()}, random_adapters(), spec.adapter)
    theirs = model.merge_and_unload().model.layers[0]
    for name in ADAPTED:
        torch.testing.assert_close(ours[f"{name}.weight"], theirs.get_parameter(f"{name}.weight"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_peft_opens_the_folder_beside_a_base_in_4_bits(tmp_path: Path) -> None:
    """transformers loads the folder with load_in_4bit, PEFT adds the adapters: the logits of our frozen W' and A, B."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    pytest.importorskip("bitsandbytes")
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=64, intermediate_size=128, num_attention_heads=2, vocab_size=32
    )  # fmt: skip
    torch.manual_seed(2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    spec = replace(model_spec(config.to_dict()), adapter=AdapterSpec(rank=2, alpha=6.0, quantize="nf4"))
    given = load_file(tmp_path / "model/model.safetensors")
    tokens = torch.arange(24).reshape(2, 12) * 7 % 32
    hidden = tokens
    with AdapterFolderWriter(tmp_path / "adapter", spec, base=str(tmp_path / "model")) as writer:
        for name in layer_names(spec):
            weights = {key: given[checkpoint_name(name, key, spec)] for key in parameter_shapes(name, spec)}
            adapters = {key: 0.1 * torch.randn(shape) for key, shape in trained_shapes(name, spec).items()}
            layer = build_layer(name, spec)
            frozen = frozen_beside(weights, LayerName(name), spec, TrainSpec(), device="cpu")
            layer.load_state_dict(frozen | adapters, assign=True)
            hidden = layer(hidden)
            writer.add(name, adapters)
    in_4_bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", quantization_config=in_4_bits, dtype=torch.float32, device_map="cpu"
    )
    opened = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    opened.train()  # for evaluations on some CPUs bitsandbytes rounds to bfloat16
    torch.testing.assert_close(opened(tokens).logits, hidden, atol=1e-4, rtol=1e-4)
