"""Each family against transformers itself: logits, greedy text, gradients; and its config.json both ways."""

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from headway.stages.model.decoder import build_layer, parameter_shapes, token_loss
from headway.stages.model.expert_stacks import unstacked
from headway.stages.model.hugging_face import (
    checkpoint_name,
    family_of,
    hugging_face_config,
    layer_parameter,
    model_spec,
)
from headway.stages.spec import ROUTER_BIAS, ModelSpec, layer_names

transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
HYBRID = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
    "rms_norm_eps": 1e-2,  # norms of values near zero enlarge the roundings of both
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "attention_factor": 1.3,
}
PHI4_MINI = {
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.0, 2.0, 4.0]},
}
GEMMA = {
    "head_dim": 12,
    "query_pre_attn_scalar": 10,
    "sliding_window": 8,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-2,  # norms of values near zero enlarge the roundings of both
}
GEMMA4 = {
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 2,
    "head_dim": 12,
    "global_head_dim": 20,
    "attention_k_eq_v": True,
    "sliding_window": 8,
    "final_logit_softcapping": 3.0,
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": "vision",
    "rms_norm_eps": 1e-2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 2": ("llama", {}),
    "Llama 3": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}),
    "Llama 3.1": ("llama", {"rope_parameters": LLAMA3}),
    "Llama 3.2": ("llama", {"rope_parameters": LLAMA3 | {"factor": 32.0}, "head_dim": 16}),
    "Llama 3.2, tied": ("llama", {"rope_parameters": LLAMA3 | {"factor": 32.0}, "tie_word_embeddings": True}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}}),
    "dynamic": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0},
            "max_position_embeddings": 16,
        },
    ),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "yarn, factor 1": ("llama", {"rope_parameters": YARN | {"factor": 1.0}, "max_position_embeddings": 16}),
    "yarn of DeepSeek": ("llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 8}}),
    "yarn, not truncated": ("llama", {"rope_parameters": YARN | {"truncate": False, "attention_factor": 1.3}}),
    "Llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "Mistral": ("mistral", {"sliding_window": 8, "head_dim": 12}),
    "Mistral without window": ("mistral", {"sliding_window": None}),
    "Qwen2": ("qwen2", {}),
    "Qwen2 with windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "Qwen2 with a window on every other block": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "Qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen3": ("qwen3", {"head_dim": 16}),
    "Qwen3, tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "Phi-3": ("phi3", {"sliding_window": 8}),
    "Qwen3.5": ("qwen3_5_text", HYBRID),
    "Qwen3.5, tied, another order": (
        "qwen3_5_text",
        HYBRID
        | {
            "tie_word_embeddings": True,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "linear_conv_kernel_dim": 3,
        },
    ),
    "Qwen3.5-MoE": (
        "qwen3_5_moe_text",
        HYBRID
        | {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 40,
            "rms_norm_eps": 0.1,
        },
    ),
    "Mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Mixtral, tied, with a window": (
        "mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 8, "tie_word_embeddings": True},
    ),
    "Qwen3-MoE": (
        "qwen3_moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 16},
    ),
    "Qwen3-MoE, normed": (
        "qwen3_moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True},
    ),
    "dots.llm1": (
        "dots1",
        {
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "max_window_layers": 2,
            "sliding_window": 8,
        },
    ),
    "Phi-4-mini": ("phi3", PHI4_MINI | {"tie_word_embeddings": True}),
    "Phi-3, longer": ("phi3", {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE}),
    "Qwen2-MoE": (
        "qwen2_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 40,
            "norm_topk_prob": False,
        },
    ),
    "Gemma 2": (
        "gemma2",
        GEMMA | {"num_hidden_layers": 4, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "Gemma 3": (
        "gemma3_text",
        GEMMA
        | {
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "Gemma 3, positions as its files have them": (
        "gemma3_text",
        GEMMA | {"num_hidden_layers": 4, "sliding_window_pattern": 2, "rope_local_base_freq": 2e4, "rope_theta": 5e5},
    ),
    "Gemma 4": ("gemma4_text", GEMMA4),
    "Gemma 4, values of their own, another order": (
        "gemma4_text",
        GEMMA4
        | {
            "attention_k_eq_v": False,
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "num_hidden_layers": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "rope_theta": 1e4, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "Granite": (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "SmolLM3": ("smollm3", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "SmolLM3, every second block without positions": ("smollm3", {"no_rope_layers": [1, 0, 1], "mlp_bias": True}),
    "Olmo 2": ("olmo2", {"attention_bias": True}),
    "Olmo 3": (
        "olmo3",
        {
            "num_hidden_layers": 5,
            "sliding_window": 8,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "Olmo 3, positions as its files have them": (
        "olmo3",
        {"num_hidden_layers": 4, "sliding_window": 8, "rope_theta": 1e5, "rope_scaling": YARN | {"rope_theta": 1e5}},
    ),
    "Ministral": (
        "ministral",
        {
            "sliding_window": 8,
            "head_dim": 12,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "Ministral 3": (
        "ministral3",
        {"head_dim": 12, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
    ),
    "GLM-4 9B": ("glm", {"head_dim": 12, "partial_rotary_factor": 0.5}),
    "GLM-4": ("glm4", {"head_dim": 16}),
    "gpt-oss": (
        "gpt_oss",
        {
            "head_dim": 12,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "swiglu_limit": 0.3,
            "rope_parameters": YARN | {"truncate": False, "factor": 32.0},
        },
    ),
    "gpt-oss, another order": (
        "gpt_oss",
        {
            "attention_bias": False,
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "swiglu_alpha": 0.7,
        },
    ),
    "Seed-OSS": ("seed_oss", {"head_dim": 12, "attention_out_bias": True}),
}


@pytest.fixture(params=FAMILIES, scope="module")
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny random model of a family, and the folder that transformers has written."""
    model_type, options = FAMILIES[request.param]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        model_type, **deepcopy(SHAPE | options)
    )  # it writes into what it is given
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        kept = ("e_score_correction_bias", "layer_scalar")
        buffers = [buffer for name, buffer in model.named_buffers() if name.endswith(kept)]
        for parameter in [*model.parameters(), *buffers]:  # norms that are not ones, biases that are not zeros
            parameter.add_(0.2 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("theirs")
    model.save_pretrained(folder)
    return model, folder


class Ours(nn.Module):
    """The layers in a row, with the weights of a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.spec = model_spec(json.loads((folder / "config.json").read_text()))
        tensors = load_file(folder / "model.safetensors")
        if self.spec.expert_bias:
            tensors = unstacked(tensors)
        self.layers = nn.ModuleList(build_layer(name, self.spec) for name in layer_names(self.spec))
        left = set(tensors)
        for name, layer in self.named_layers():
            names = {key: self.stored(name, key) for key in parameter_shapes(name, self.spec)}
            layer.load_state_dict({key: tensors[stored].clone() for key, stored in names.items()}, assign=True)
            left -= set(names.values())
        assert not left, "each tensor of the folder has its place"

    def stored(self, layer: str, parameter: str) -> str:
        return checkpoint_name(layer, parameter, self.spec)

    def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        return zip(layer_names(self.spec), self.layers, strict=True)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = tokens
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def test_logits_and_greedy_text_are_theirs(theirs: Any) -> None:
    """Longer than every window and than every first training."""
    model, folder = theirs
    ours = Ours(folder)
    tokens = torch.randint(0, 64, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), model(tokens).logits, rtol=1e-5, atol=1e-5)
        text = tokens[:1, :9]
        for _ in range(12):
            text = torch.cat((text, ours(text)[:, -1:].argmax(-1)), 1)
        again = tokens[:1, :9]
        for _ in range(12):
            again = torch.cat((again, model(again, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    assert text.tolist() == again.tolist()


def their_gradients(model: Any, spec: ModelSpec) -> dict[str, Tensor]:
    """Gradients by the names of a checkpoint: in memory the experts of a block are two stacks."""
    gradients: dict[str, Tensor] = {}
    named = {name: parameter.grad for name, parameter in model.named_parameters()}
    if spec.expert_bias:
        named = unstacked(named)
    for name, whole in named.items():
        path, _, last = name.rpartition(".")
        if not path.endswith(".experts"):
            gradients[name] = whole
            continue
        for number, gradient in enumerate(whole):
            parts = zip(("gate_proj", "up_proj"), gradient.chunk(2), strict=True) if last == "gate_up_proj" else ()
            for kind, part in parts or [("down_proj", gradient)]:
                gradients[f"{path}.{number}.{kind}.weight"] = part
    layers = [layer_parameter(name, spec) for name in gradients]
    places = [("head", "lm_head.weight") if place is None else place for place in layers]
    return {checkpoint_name(*place, spec): gradient for place, gradient in zip(places, gradients.values(), strict=True)}


def test_gradients_are_theirs(theirs: Any) -> None:
    """Of one step, for every parameter."""
    model, folder = theirs
    ours = Ours(folder)
    tokens = torch.randint(0, 64, (2, 25), generator=torch.Generator().manual_seed(2))
    token_loss(ours(tokens[:, :-1]), tokens[:, 1:]).backward()  # type: ignore[no-untyped-call]
    model.zero_grad()
    token_loss(model(tokens[:, :-1]).logits, tokens[:, 1:]).backward()  # type: ignore[no-untyped-call]
    expected = their_gradients(model, ours.spec)
    found: dict[str, Tensor] = {}
    for name, layer in ours.named_layers():
        for key, parameter in layer.named_parameters():
            if key.endswith(ROUTER_BIAS):
                continue  # its gradient is the load, which theirs does not have
            assert parameter.grad is not None
            if key == "layer_scalar":  # a buffer of theirs
                assert not parameter.grad.any()
                continue
            stored = ours.stored(name, key)  # two copies of a tied matrix have one gradient together
            found[stored] = found[stored] + parameter.grad if stored in found else parameter.grad
    assert found.keys() == expected.keys()
    for stored, gradient in found.items():
        torch.testing.assert_close(gradient, expected[stored], rtol=1e-5, atol=1e-5)


def test_a_config_is_written_as_it_is_read(theirs: Any, tmp_path: Path) -> None:
    """transformers opens our config.json as the family that it was, and it says the same model."""
    model, folder = theirs
    spec = model_spec(json.loads((folder / "config.json").read_text()))
    longest = 16 if spec.rope_scaling.rope_type == "dynamic" else 64
    ours = hugging_face_config(spec, dtype="float32", sequence_length=longest)
    assert model_spec(ours) == spec
    (tmp_path / "config.json").write_text(json.dumps(ours))
    opened = transformers.AutoConfig.from_pretrained(tmp_path)
    wanted = transformers.AutoModelForCausalLM.from_config(opened, attn_implementation="eager").eval()
    wanted.load_state_dict(model.state_dict())
    tokens = torch.randint(0, 64, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(wanted(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)


def test_options_that_no_family_has_are_named() -> None:
    """A model that transformers could not open is refused before it is trained."""
    for spec in (
        ModelSpec(qk_norm=True, qkv_bias=True),
        ModelSpec(output_bias=True, qk_norm=True),
        ModelSpec(fused_projections=True, mlp_bias=True),
    ):
        with pytest.raises(ValueError, match="no family"):
            family_of(spec)


MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
SMALL_GEMMA = {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0}
ONE_FACTOR = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
BASE = {"model_type": "llama"} | {key: value for key, value in SHAPE.items() if value is not None}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "lfm2"}, "model_type is 'lfm2'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "original_max_position_embeddings = None"),
        ({"model_type": "phi3", "rope_scaling": ONE_FACTOR}, "1 factors of longrope"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "rope_type = 'proportional' is not supported in a llama"),
        ({"rope_parameters": {"rope_type": "su"}}, "rope_parameters.rope_type = 'su'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1}}, "rope_scaling.beta = 1"),
        ({"rope_scaling": {"type": "linear"}}, "needs factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor = '2'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor = 0.25"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"rope_interleaved": True}, "rope_interleaved = True"),
        ({"use_mrope": True}, "use_mrope = True"),
        ({"is_causal": False}, "is_causal = False"),
        (
            {"use_new_trick": True},
            r'use_new_trick = True is not known here, .* set \[model\] ignore = \["use_new_trick"\]',
        ),
        ({"sliding_window": 16}, "sliding_window = 16"),
        ({"model_type": "mistral", "sliding_window": "all"}, "sliding_window = 'all'"),
        ({"model_type": "qwen2", "head_dim": 16}, "head_dim = 16"),
        (MIXTRAL | {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        (MIXTRAL | {"num_local_experts": 10**9}, "1000000000 experts are more than"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 of 4 experts"),
        (MIXTRAL | {"n_group": 2}, "n_group = 2"),
        (MIXTRAL | {"model_type": "qwen3_moe", "mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
        (MIXTRAL | {"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ({"model_type": "dots1", "n_routed_experts": 4, "num_experts_per_tok": 2}, "moe_intermediate_size = None"),
        ({"model_type": "qwen2", "attention_bias": True}, "attention_bias = True"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types"),
        ({"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier = 12.0"),
        ({"model_type": "gemma4_text"}, "hidden_size_per_layer_input = 256 .*the nearest family that works is gemma3"),
        (SMALL_GEMMA | {"num_kv_shared_layers": 2}, "num_kv_shared_layers = 2 is not supported: keys and values that"),
        (SMALL_GEMMA | {"layer_types": ["sliding_attention"] * 3}, "the last block has full_attention"),
        (
            SMALL_GEMMA | {"per_layer_config": {"1": {"head_dim": 8}}},
            "per_layer_config = .*one for each full_attention",
        ),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    """Never ignored: another rotation or activation would silently give other logits."""
    with pytest.raises(ValueError, match=named):
        model_spec(BASE | change)


@pytest.mark.parametrize(
    "change",
    [
        {"is_llama_config": True, "rope_interleaved": False},
        {"use_mrope": False, "unsloth_fixed": True, "unsloth_version": "2026.8.1"},
        {"attention_dropout": 0.1, "neftune_noise_alpha": 5.0, "transformers.js_config": {"dtype": "q4"}},
        {"a_new_trick": False, "another": None, "more": [], "layers_with_it": 0},
    ],
)
def test_a_key_without_effect_or_that_is_off_is_taken(change: dict[str, Any]) -> None:
    """Notes of programs, settings of a training, and tricks that are off → the model without them."""
    assert model_spec(BASE | change) == model_spec(BASE)


def test_an_unknown_key_may_be_ignored_and_a_known_one_may_not() -> None:
    """`ignore` lets a key go that nobody here knows; an activation stays refused."""
    assert model_spec(BASE | {"use_new_trick": 7}, ["use_new_trick"]) == model_spec(BASE)
    with pytest.raises(ValueError, match="hidden_act says what the model computes, so it cannot be ignored"):
        model_spec(BASE | {"hidden_act": "silu"}, ["hidden_act"])
