"""Maps the model to Hugging Face's names: each layer's parameter in a checkpoint, and its config.json.

A family is a set of options of one decoder. Whatever a config asks for that is not computed here is refused by its key
and value, because it would silently give other logits.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Final, Literal, get_args

from headway.stages.model.mixture_config import (
    MIXTURES,
    mixture_config,
    mixture_family,
    mixture_keys,
    mixture_of,
    name_from_mixture,
    name_in_mixture,
    whole_above_zero,
)
from headway.stages.model.rope_config import rope_config, rope_of
from headway.stages.spec import LINEAR_SIZES, TIED, LayerType, ModelSpec

_PREFIXES = {"embed": "model.embed_tokens.", "block": "model.layers.{index}."}


def checkpoint_name(layer: str, parameter: str, model: ModelSpec) -> str:
    """Return `model.layers.3.mlp.up_proj.weight` for `block.3`, `mlp.up_proj.weight`. Raises ValueError for an unknown
    layer.

    A checkpoint has a tied matrix once, as the embedding.
    """
    if model.tie_word_embeddings and TIED.get(layer) == parameter:
        layer, parameter = "embed", TIED["embed"]
    kind, _, index = layer.partition(".")
    if kind == "block" and model.has_experts:
        parameter = name_in_mixture(parameter, model)
    elif kind == "block":
        norm, dot, rest = parameter.partition(".")
        parameter = _renamed(model).get(norm, norm) + dot + rest
    if kind in _PREFIXES:
        return _PREFIXES[kind].format(index=index) + parameter
    if kind == "head":
        return parameter if parameter.startswith("lm_head.") else f"model.{parameter}"
    raise ValueError(f"no layer is called {layer!r}")


def layer_parameter(name: str, model: ModelSpec) -> tuple[str, str] | None:
    """Return the layer and the parameter that a checkpoint's name stands for; None: it is the name of neither."""
    if name.startswith("lm_head."):
        return "head", name
    top, _, rest = name.partition(".")
    first, _, parameter = rest.partition(".")
    if top != "model" or not parameter:
        return None
    if first == "embed_tokens":
        return "embed", parameter
    if first != "layers":
        return "head", rest
    index, _, parameter = parameter.partition(".")
    is_number = index.isascii() and index.isdigit() and str(int(index[:9])) == index
    if not is_number or not parameter:
        return None
    norm, dot, rest = parameter.partition(".")
    back = {theirs: ours for ours, theirs in _renamed(model).items()}
    return f"block.{index}", name_from_mixture(back.get(norm, norm) + dot + rest)


@lru_cache(maxsize=8)
def _renamed(model: ModelSpec) -> Mapping[str, str]:
    """Return the norms of a block that have another name in the files of a model's family."""
    return _FAMILIES[family_of(model)].renamed if model.norm_placement != "before" else {}


@dataclass(frozen=True, slots=True)
class _Family:
    """What a `model_type` of transformers computes."""

    architecture: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ModelSpec that all models of the family share."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that a config.json may leave out, where they are not those of `_ABSENT`."""
    has_own_head_dim: bool = True
    """Whether its config.json may name a `head_dim` that is not hidden_size / num_attention_heads."""
    window: Literal["none", "off", "all", "chosen", "layers", "types", "linear"] = "none"
    """Which blocks may have a window. none: no block; off: none, because `use_sliding_window` is refused; all: all of
    them; chosen: those that `use_sliding_window` and `layer_types` say; layers: those from `max_window_layers` on;
    types: those that `layer_types` says; linear: none, and `layer_types` says which ones have linear attention.
    """
    window_period: int = 0
    """n: of a config.json without `layer_types` every n-th block has no window; 0: all blocks have one."""
    window_theta: float = 0.0
    """Base of the positions in blocks with a window, in a family that has them by type of block; 0: it has not."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Fields of ModelSpec that its config.json says by themselves, with their names there."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Norms of a block that have another name in its files."""
    turns_parts: bool = False
    """Whether it may turn a part of each head alone."""
    scales_by_width: bool = False
    """Whether its embeddings are multiplied by √hidden_size, and its scores by query_pre_attn_scalar^(−½)."""
    scales_queries: bool = False
    """Whether it scales queries by their positions."""
    has_blocks_without_rope: bool = False
    """Whether its config.json has `no_rope_layers`."""
    rope_types: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn")
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of its config.json that change the computation, with the values that are computed here."""


_BIASES_OF_ATTENTION: Final = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
_BIASES: Final = {**_BIASES_OF_ATTENTION, "mlp_bias": "mlp_bias"}
_SANDWICH_OF_GLM: Final = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
_OLMO: Final = {"norm_placement": "after", "qk_norm": True, "qk_norm_over": "heads"}
_GLM: Final = {"fused_gate_up": True, "rope_interleaved": True}
_GEMMA: Final = {"norm_placement": "both", "zero_centered_norms": True, "hidden_act": "gelu_pytorch_tanh"}
_ABSENT_IN_GEMMA: Final = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_ONLY_IN_GEMMA: Final = {
    "hidden_act": (None, "gelu", "gelu_pytorch_tanh"),  # transformers does not read it
    "hidden_activation": ("gelu_pytorch_tanh",),
}
_CAPS: Final = ("attn_logit_softcapping", "final_logit_softcapping")
_ABSENT_IN_GLM: Final = {
    "attention_bias": True,
    "head_dim": 128,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-7,
}
_MULTIPLIERS: Final = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")

_ABSENT_IN_QWEN35: Final = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "num_key_value_heads": 4,
    "partial_rotary_factor": 0.25,
}
_QWEN35: Final[dict[str, Any]] = {
    "options": {"qk_norm": True, "zero_centered_norms": True, "attn_output_gate": True},
    "absent": _ABSENT_IN_QWEN35,
    "window": "linear",
    "keys": {name: name for name in LINEAR_SIZES},
    "turns_parts": True,
    "only": {"attn_output_gate": (True,), "mlp_only_layers": ([], None)},
}

_FAMILIES: Final[dict[str, _Family]] = {
    "llama": _Family("LlamaForCausalLM", keys=_BIASES),
    "mistral": _Family("MistralForCausalLM", absent={"sliding_window": 4096}, window="all"),
    "qwen2": _Family("Qwen2ForCausalLM", {"qkv_bias": True}, has_own_head_dim=False, window="chosen"),
    "qwen3": _Family("Qwen3ForCausalLM", {"qk_norm": True}, absent={"head_dim": 128}, window="chosen"),
    "phi3": _Family(
        "Phi3ForCausalLM",
        {"fused_projections": True},
        absent={"original_max_position_embeddings": 4096},
        has_own_head_dim=False,
        window="all",
        turns_parts=True,
        rope_types=("default", "longrope"),
    ),
    "mixtral": _Family("MixtralForCausalLM", absent={"rms_norm_eps": 1e-5}, window="all"),
    "qwen2_moe": _Family("Qwen2MoeForCausalLM", absent={"qkv_bias": True}, window="off", keys={"qkv_bias": "qkv_bias"}),
    "qwen3_moe": _Family("Qwen3MoeForCausalLM", {"qk_norm": True}),
    "dots1": _Family(
        "Dots1ForCausalLM", {"qk_norm": True}, absent={"sliding_window": 4096, "max_window_layers": 62}, window="layers"
    ),
    "granite": _Family(
        "GraniteForCausalLM",
        absent={"attention_multiplier": 1.0},
        has_own_head_dim=False,
        keys={**_BIASES, **{name: name for name in _MULTIPLIERS}},
    ),
    "smollm3": _Family(
        "SmolLM3ForCausalLM",
        absent={"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
        has_own_head_dim=False,
        window="off",
        keys=_BIASES,
        has_blocks_without_rope=True,
    ),
    "olmo2": _Family(
        "Olmo2ForCausalLM",
        _OLMO,
        absent={"rms_norm_eps": 1e-5},
        has_own_head_dim=False,
        keys=_BIASES_OF_ATTENTION,
    ),
    "olmo3": _Family(
        "Olmo3ForCausalLM",
        _OLMO,
        absent={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
        has_own_head_dim=False,
        window="types",
        window_period=4,
        window_theta=5e5,
        keys=_BIASES_OF_ATTENTION,
        rope_types=("default", "linear", "llama3", "yarn"),
    ),
    "ministral": _Family(
        "MinistralForCausalLM", absent={"num_key_value_heads": 8, "sliding_window": 4096}, window="types"
    ),
    "ministral3": _Family(
        "Ministral3ForCausalLM",
        absent={"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        window="all",
        scales_queries=True,
        rope_types=("yarn",),
    ),
    "glm": _Family(
        "GlmForCausalLM",
        _GLM,
        absent=_ABSENT_IN_GLM,
        keys={"qkv_bias": "attention_bias"},
        turns_parts=True,
    ),
    "glm4": _Family(
        "Glm4ForCausalLM",
        _GLM | {"norm_placement": "both"},
        absent=_ABSENT_IN_GLM,
        keys={"qkv_bias": "attention_bias"},
        renamed=_SANDWICH_OF_GLM,
        turns_parts=True,
    ),
    "seed_oss": _Family(
        "SeedOssForCausalLM",
        absent={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 8},
        keys={"qkv_bias": "attention_bias", "output_bias": "attention_out_bias", "mlp_bias": "mlp_bias"},
    ),
    "qwen3_5_text": _Family("Qwen3_5ForCausalLM", **_QWEN35),
    "qwen3_5_moe_text": _Family(
        "Qwen3_5MoeForCausalLM",
        **_QWEN35 | {"absent": _ABSENT_IN_QWEN35 | {"intermediate_size": 1, "num_key_value_heads": 2}},
    ),
    "gemma2": _Family(
        "Gemma2ForCausalLM",
        _GEMMA,
        absent={**_ABSENT_IN_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        window="types",
        window_period=2,
        keys={**_BIASES_OF_ATTENTION, **{name: name for name in _CAPS}},
        scales_by_width=True,
        only=_ONLY_IN_GEMMA,
    ),
    "gemma3_text": _Family(
        "Gemma3ForCausalLM",
        _GEMMA | {"qk_norm": True},
        absent={**_ABSENT_IN_GEMMA, "rope_theta": 1e6},
        window="types",
        window_period=6,
        window_theta=1e4,
        keys={**_BIASES_OF_ATTENTION, "final_logit_softcapping": "final_logit_softcapping"},
        scales_by_width=True,
        rope_types=("default", "linear", "llama3", "yarn"),
        only=_ONLY_IN_GEMMA,
    ),
}
"""Families by `model_type`. The first that can say a model's options names its export."""

_PLAIN: Final = ModelSpec()
_OPTIONS: Final = (
    "qkv_bias",
    "output_bias",
    "mlp_bias",
    "qk_norm",
    "qk_norm_over",
    "norm_placement",
    "zero_centered_norms",
    "attn_output_gate",
    "fused_projections",
    "fused_gate_up",
    "rope_interleaved",
    "hidden_act",
    *_CAPS,
    *LINEAR_SIZES,
    *_MULTIPLIERS,
)
"""Fields of ModelSpec that a family has with one value, unless its config.json says them."""

_PERIOD: Final = ("sliding_window_pattern",)
"""Key of Gemma 3 for the period of its blocks without a window."""

_ABSENT: Final[dict[str, Any]] = {
    "attention_bias": False,
    "attention_multiplier": None,
    **dict.fromkeys(_CAPS),
    "attention_out_bias": False,
    "embedding_multiplier": 1.0,
    "full_attention_interval": 4,
    "head_dim": None,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "layer_types": None,
    **dict.fromkeys(LINEAR_SIZES),
    "logits_scaling": 1.0,
    "max_window_layers": 28,
    "mlp_bias": False,
    "no_rope_layer_interval": 4,
    "no_rope_layers": None,
    "num_key_value_heads": None,
    "partial_rotary_factor": 1.0,
    "qkv_bias": False,
    "residual_multiplier": 1.0,
    "rms_norm_eps": 1e-6,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
"""transformers' values of keys that a config.json leaves out."""

_ONLY: Final[dict[str, tuple[Any, ...]]] = {
    "add_cross_attention": (None, False),
    "hidden_act": ("silu",),
    "hidden_activation": (None, "silu"),
    "full_attn_mod": (None, 1),
    "interpolate_factor": (None, 1),
    "is_causal": (None, True),
    "is_encoder_decoder": (None, False),
    "quantization_config": (None,),
    "rope_interleaved": (None, False),
    "use_bidirectional_attention": (None, False),
    "use_mrope": (None, False),
}
"""Keys that change the computation, with the values that are computed here."""

_READ_ELSEWHERE: Final = frozenset(
    {
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "model_type",
        "num_attention_heads",
        "num_hidden_layers",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "vocab_size",
    }
)

_WITHOUT_EFFECT: Final = re.compile(
    r"_\w+|architectures|auto_map|bos_token_id|eos_token_id|pad_token_id|sep_token_id|dtype|torch_dtype|id2label|label2id|"
    r"output_attentions|output_hidden_states|producer|return_dict|transformers_version|use_cache|cache_implementation|is_decoder|is_llama_config|"
    r"tokenizer_class|task_specific_params|problem_type|chunk_size_feed_forward|unsloth_\w+|transformers\.js_config|"
    r"output_router_logits|router_aux_loss_coef|pretraining_tp|attention_dropout|resid_pdrop|embd_pdrop|hidden_dropout|residual_dropout|"
    r"neftune_noise_alpha|mamba_ssm_dtype|mtp_\w+"
)
"""Keys that change nothing that is computed here. Dropout and noise are settings of a training, not of a model: a job
trains without them.
"""


def hugging_face_config(
    spec: ModelSpec, *, dtype: Literal["float32", "bfloat16"], sequence_length: int
) -> dict[str, Any]:
    """Return the config.json with which AutoModelForCausalLM opens the folder.

    sequence_length is the longest on which the model was trained. Raises ValueError when no family has the options.
    """
    model_type = family_of(spec)
    family = _FAMILIES[model_type]
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": model_type,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": dtype,
        "eos_token_id": None,
        "hidden_act": spec.hidden_act,
        "hidden_size": spec.hidden_size,
        "initializer_range": spec.initializer_range,
        "intermediate_size": spec.intermediate_size,
        "max_position_embeddings": sequence_length,
        "num_attention_heads": spec.num_attention_heads,
        "num_hidden_layers": spec.num_hidden_layers,
        "num_key_value_heads": spec.num_key_value_heads,
        "pad_token_id": None,  # transformers' own may be outside of a small vocabulary
        "rms_norm_eps": spec.rms_norm_eps,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "vocab_size": spec.vocab_size,
        **rope_config(spec, is_by_type=family.window_theta > 0),
        **mixture_config(spec, model_type),
    }
    if family.has_own_head_dim:
        config["head_dim"] = spec.head_width
    config |= {key: getattr(spec, name) for name, key in family.keys.items()}
    if "attention_multiplier" in family.keys:
        config["attention_multiplier"] = spec.attention_multiplier or spec.head_width**-0.5
    if family.has_blocks_without_rope:
        config["no_rope_layers"] = [int(spec.is_turned(block)) for block in range(spec.num_hidden_layers)]
    if family.window == "all":
        config["sliding_window"] = spec.sliding_window or None
    elif family.window == "chosen" and spec.sliding_window:
        config |= {"use_sliding_window": True, "sliding_window": spec.sliding_window}
        config["max_window_layers"] = spec.first_window_layer
        config["layer_types"] = [spec.type_of(block) for block in range(spec.num_hidden_layers)]
    elif family.window == "linear":
        config["layer_types"] = [spec.type_of(block) for block in range(spec.num_hidden_layers)]
    elif family.window == "layers":
        config |= {"sliding_window": spec.sliding_window or None, "max_window_layers": spec.first_window_layer}
    elif family.window == "types":
        config["sliding_window"] = spec.sliding_window or None
        config["layer_types"] = [spec.type_of(block) for block in range(spec.num_hidden_layers)]
    if family.scales_by_width:
        config |= {"hidden_activation": spec.hidden_act, "query_pre_attn_scalar": _scalar_of(spec)}
        config |= {name: getattr(spec, name) or None for name in _CAPS}
    if family.turns_parts:
        config["rope_parameters"]["partial_rotary_factor"] = spec.partial_rotary_factor
    return config


def family_of(spec: ModelSpec) -> str:
    """Return the `model_type` that says all options of a model. Raises ValueError when none does, naming the options
    that the nearest family does not have.
    """
    unsaid = {name: _unsaid(spec, name, family) for name, family in _FAMILIES.items()}
    nearest = min(unsaid, key=lambda name: len(unsaid[name]))  # of several the first one
    if unsaid[nearest]:
        what = ", ".join(f"{name} = {getattr(spec, name)!r}" for name in unsaid[nearest])
        raise ValueError(f"no family of Hugging Face has these options of a model together; {nearest} lacks {what}")
    return nearest


def _unsaid(spec: ModelSpec, model_type: str, family: _Family) -> list[str]:
    """Return the fields whose values a family's config.json cannot say."""
    fixed = {name: getattr(_PLAIN, name) for name in _OPTIONS} | dict(family.options)
    if family.scales_by_width:
        fixed |= {"embedding_multiplier": spec.hidden_size**0.5, "attention_multiplier": _scalar_of(spec) ** -0.5}
    found = [name for name, value in fixed.items() if name not in family.keys and getattr(spec, name) != value]
    of_key: dict[str, object] = {}
    for name, key in family.keys.items():
        if of_key.setdefault(key, getattr(spec, name)) != getattr(spec, name):
            found.append(name)
    if (model_type in MIXTURES) != spec.has_experts or (spec.has_experts and mixture_family(spec) != model_type):
        found.append("num_experts")
    if not family.has_own_head_dim and spec.head_width * spec.num_attention_heads != spec.hidden_size:
        found.append("head_dim")
    if not family.has_blocks_without_rope and spec.no_rope_layer_interval:
        found.append("no_rope_layer_interval")
    if spec.rope_scaling.rope_type not in family.rope_types:
        found.append("rope_scaling")
    if family.window in ("none", "off", "linear") and spec.sliding_window:
        found.append("sliding_window")
    if family.window == "all" and spec.first_window_layer:
        found.append("first_window_layer")
    if family.window not in ("chosen", "types", "linear") and spec.layer_types:
        found.append("layer_types")
    if not family.window_theta and spec.window_rope_theta:
        found.append("window_rope_theta")
    if not family.turns_parts and spec.partial_rotary_factor != 1.0:
        found.append("partial_rotary_factor")
    if family.scales_queries != bool(spec.rope_scaling.llama_4_scaling_beta) and "rope_scaling" not in found:
        found.append("rope_scaling")
    return found


def _scalar_of(spec: ModelSpec) -> int:
    """Return the whole number whose inverse root is the factor of the scores, or the nearest one to it."""
    return round(spec.attention_multiplier**-2) if 0 < spec.attention_multiplier <= 1 else spec.head_width


_TEXT_OF: Final = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""By the `model_type` of a model of pictures and text, that of its text model."""
_OF_PICTURES: Final = frozenset(
    {
        "image_token_id",
        "text_config",
        "tie_word_embeddings",
        "video_token_id",
        "vision_config",
        "vision_end_token_id",
        "vision_start_token_id",
    }
)


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of the text model alone, where a model of pictures and text has it inside its own.

    Raises ValueError, naming key and value.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in _TEXT_OF:
        return config
    text = config.get("text_config")
    if not isinstance(text, dict) or text.get("model_type", _TEXT_OF[name]) != _TEXT_OF[name]:
        raise ValueError(f"text_config is no table of a {_TEXT_OF[name]}")
    tie = config.get("tie_word_embeddings", False)
    if text.get("tie_word_embeddings", tie) != tie:
        raise ValueError(f"tie_word_embeddings = {tie!r}, and its text_config says {text['tie_word_embeddings']!r}")
    family = _FAMILIES[_TEXT_OF[name]]
    of_text = {"architectures": [family.architecture], "model_type": _TEXT_OF[name], "tie_word_embeddings": tie}
    return {key: value for key, value in config.items() if key not in _OF_PICTURES} | text | of_text


def has_more_than_text(spec: ModelSpec) -> bool:
    """Return whether published folders of the model's family have tensors beside those of the text model."""
    return family_of(spec) in _TEXT_OF.values()


def model_spec(config: dict[str, Any], ignored: Sequence[str] = ()) -> ModelSpec:
    """Return what a config.json describes. ignored: keys that nobody here knows, and that do not count.

    Raises ValueError, naming key and value, for an unsupported model.
    """
    config = text_config(config)
    name = config.get("model_type")
    family = _FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        near = "".join(f"; the nearest is {each}" for each in get_close_matches(str(name), _FAMILIES, 1))
        raise ValueError(f"model_type is {name!r}, which is not computed{near}; there are {', '.join(_FAMILIES)}")
    _check_keys(config, family, ignored)
    told = _ABSENT | dict(family.absent) | config
    sizes = {
        key: _number(told, key)
        for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    }
    for key, value in sizes.items():
        if value < 1:
            raise ValueError(f"{key} = {value!r} is not above 0")
    heads = sizes["num_attention_heads"]
    is_shared = told["num_key_value_heads"] is not None
    by_width = {}
    window_theta = family.window_theta
    if family.scales_by_width:
        by_width["embedding_multiplier"] = sizes["hidden_size"] ** 0.5
        by_width["attention_multiplier"] = whole_above_zero(told, "query_pre_attn_scalar") ** -0.5
        window_theta = window_theta and config.get("rope_local_base_freq", window_theta)
    rope = rope_of(dict(family.absent) | config, window_theta=window_theta)
    if (scaling := rope["rope_scaling"]).rope_type not in family.rope_types:
        raise ValueError(f"rope_type = {scaling.rope_type!r} is not supported in a {name}")
    if family.scales_queries != bool(scaling.llama_4_scaling_beta):
        raise ValueError(f"llama_4_scaling_beta = {scaling.llama_4_scaling_beta!r} is not supported in a {name}")
    if rope["partial_rotary_factor"] != 1.0 and not family.turns_parts:
        raise ValueError(f"partial_rotary_factor = {rope['partial_rotary_factor']!r} is not supported in a {name}")
    spec = ModelSpec(
        **sizes,
        **family.options,
        num_key_value_heads=_number(told, "num_key_value_heads") if is_shared else heads,
        rms_norm_eps=_number(told, "rms_norm_eps"),
        initializer_range=_number(told, "initializer_range"),
        tie_word_embeddings=_truth(told, "tie_word_embeddings"),
        **rope,
        **by_width,
        head_dim=_head_dim(told, family),
        **_windows(told, family),
        **_said(told, family),
        **mixture_of(str(name), config),
    )
    if spec.num_key_value_heads < 1 or heads % spec.num_key_value_heads:
        raise ValueError(f"num_key_value_heads = {spec.num_key_value_heads!r} does not divide {heads} heads")
    for factors in (spec.rope_scaling.short_factor, spec.rope_scaling.long_factor):
        if factors and 2 * len(factors) != spec.rotary_width:
            raise ValueError(f"{len(factors)} factors of longrope are not one for each pair of {spec.rotary_width}")
    if spec.rotary_width < 2 or spec.rotary_width % 2 or spec.partial_rotary_factor > 1:
        raise ValueError(f"partial_rotary_factor = {spec.partial_rotary_factor!r} of {spec.head_width} gives no pairs")
    return spec if spec.sliding_window else replace(spec, window_rope_theta=0.0)


def _check_keys(config: dict[str, Any], family: _Family, ignored: Sequence[str]) -> None:
    """Refuse each value that is not computed, and each key that is not known, is on and is not ignored."""
    for key, values in (_ONLY | dict(family.only)).items():
        if key in config and config[key] not in values:
            raise ValueError(f"{key} = {config[key]!r} is not supported")
    said = {key for each in _FAMILIES.values() for key in each.keys.values()} - set(family.keys.values())
    for key in sorted(said & config.keys()):
        if config[key] not in (_ABSENT[key], None):
            raise ValueError(f"{key} = {config[key]!r} is not supported in a {config['model_type']}")
    if not family.has_blocks_without_rope and config.get("no_rope_layers") is not None:
        raise ValueError(f"no_rope_layers = {config['no_rope_layers']!r} is not supported in a {config['model_type']}")
    known = _READ_ELSEWHERE | _ABSENT.keys() | _ONLY.keys() | family.only.keys() | mixture_keys(config["model_type"])
    if family.scales_by_width:
        known |= {"query_pre_attn_scalar"} | ({"rope_local_base_freq", *_PERIOD} if family.window_theta else set())
    for key in ignored:
        if key in known:
            raise ValueError(f"{key} says what the model computes, so it cannot be ignored")
    for key in sorted(config.keys() - known - set(ignored)):
        if config[key] and _WITHOUT_EFFECT.fullmatch(key) is None:
            what = "is not known here, and may change what the model computes; if it does not, set [model]"
            raise ValueError(f"{key} = {config[key]!r} {what} ignore = [{json.dumps(key)}]")


def _head_dim(config: dict[str, Any], family: _Family) -> int:
    """Return a head's own width; 0: that which hidden_size gives."""
    heads, width = config["num_attention_heads"], config["hidden_size"]
    head_dim = config["head_dim"]
    is_given = head_dim is not None
    if is_given and (isinstance(head_dim, bool) or not isinstance(head_dim, int) or head_dim < 1):
        raise ValueError(f"head_dim = {head_dim!r} is not supported")
    usual = width // heads if width % heads == 0 else None
    if usual is None and not is_given:
        raise ValueError(f"head_dim = {head_dim!r} is not supported: {heads} heads share hidden_size {width}")
    if not is_given or head_dim == usual:
        return 0
    if not family.has_own_head_dim:
        raise ValueError(f"head_dim = {head_dim!r} is not supported in a {config['model_type']}")
    return int(head_dim)


def _windows(config: dict[str, Any], family: _Family) -> dict[str, Any]:
    """Return the fields of ModelSpec that say which block has a sliding window."""
    window, num_blocks = config["sliding_window"], config["num_hidden_layers"]
    if family.window == "off":
        if config["use_sliding_window"]:
            raise ValueError(f"use_sliding_window = True is not supported in a {config['model_type']}")
        window = None
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"sliding_window = {window!r} is no number of tokens")
    kinds = config["layer_types"]
    if family.window == "types":
        period = family.window_period
        if family.scales_by_width and family.window_theta and _PERIOD[0] in config:
            period = whole_above_zero(config, _PERIOD[0])
        return _windows_by_type(window, kinds, num_blocks, period)
    if family.window == "linear":
        return {"layer_types": _hybrid_types(config)}
    if family.window in ("none", "off"):
        if window is not None:
            raise ValueError(f"sliding_window = {window!r} is not supported in a {config['model_type']}")
        first = num_blocks
    elif family.window == "all":
        first = 0
    elif family.window == "layers":
        first = _number(config, "max_window_layers")
    else:
        first = _number(config, "max_window_layers") if _truth(config, "use_sliding_window") else num_blocks
    first = num_blocks if window is None else min(first, num_blocks)
    if kinds is None or _are_types(kinds, first, num_blocks):
        return {} if first == num_blocks else {"sliding_window": window, "first_window_layer": first}
    has_choice = family.window == "chosen" and window is not None and config["use_sliding_window"]
    is_row = isinstance(kinds, list) and len(kinds) == num_blocks
    if not has_choice or not is_row or not all(kind in get_args(LayerType) for kind in kinds):
        raise ValueError(f"layer_types = {kinds!r} is not supported: it is not that of the window's other keys")
    return {"sliding_window": window, "layer_types": _shortest(kinds)}


def _hybrid_types(config: dict[str, Any]) -> tuple[LayerType, ...]:
    """Return which blocks have linear attention. Raises ValueError for a block of another kind."""
    types, num_blocks = config["layer_types"], config["num_hidden_layers"]
    if types is None:
        interval = _number(config, "full_attention_interval")
        if not 1 <= interval <= num_blocks:
            raise ValueError(f"full_attention_interval = {interval!r} is not supported with {num_blocks} blocks")
        types = (["linear_attention"] * (interval - 1) + ["full_attention"]) * (num_blocks // interval + 1)
        types = types[:num_blocks]
    is_row = isinstance(types, list) and len(types) == num_blocks
    if not is_row or not all(kind in ("linear_attention", "full_attention") for kind in types):
        raise ValueError(f"layer_types = {types!r} is not supported: linear_attention or full_attention for each block")
    if "linear_attention" not in types:
        raise ValueError(f"layer_types = {types!r} is not supported without any linear_attention")
    return _shortest(types)


def _said(config: dict[str, Any], family: _Family) -> dict[str, Any]:
    """Return the fields of ModelSpec that a family's config.json says by themselves."""
    fields: dict[str, Any] = {}
    for name, key in family.keys.items():
        if isinstance(getattr(_PLAIN, name), bool):
            fields[name] = _truth(config, key)
        elif name in _CAPS and config[key] is None:
            fields[name] = 0.0
        elif isinstance(getattr(_PLAIN, name), int):
            fields[name] = _whole(config, key)
        elif not 0 < _number(config, key) < 1e6:
            raise ValueError(f"{key} = {config[key]!r} is no number above 0")
        else:
            fields[name] = float(config[key])
    if family.has_blocks_without_rope:
        fields["no_rope_layer_interval"] = _no_rope_interval(config)
    return fields


def _no_rope_interval(config: dict[str, Any]) -> int:
    """Return n, if every n-th block knows no positions; 0: all know them. Raises ValueError for another order."""
    num_blocks, turns = config["num_hidden_layers"], config["no_rope_layers"]
    if turns is None:
        interval = _number(config, "no_rope_layer_interval")
        if interval < 1:
            raise ValueError(f"no_rope_layer_interval = {interval!r} is not above 0")
        return int(interval) if interval <= num_blocks else 0
    if not isinstance(turns, list) or len(turns) < num_blocks or set(map(repr, turns)) - {"0", "1"}:
        raise ValueError(f"no_rope_layers = {turns!r} is no list of {num_blocks} blocks")
    turns = turns[:num_blocks]
    interval = turns.index(0) + 1 if 0 in turns else 0
    if any(bool(turn) != bool(interval == 0 or (block + 1) % interval) for block, turn in enumerate(turns)):
        raise ValueError(f"no_rope_layers = {turns!r} is not supported: not every {interval}th block is 0")
    return interval


def _windows_by_type(window: int | None, kinds: object, num_blocks: int, period: int) -> dict[str, Any]:
    """Return the same of a config whose `layer_types` say it; without them all blocks of a period but its last do."""
    known: tuple[LayerType, ...] = ("sliding_attention", "full_attention")
    if kinds is None:
        has_full = 0 < period <= num_blocks
        kinds = [*known[:1] * (period - 1), known[1]] if has_full else [known[0]] * min(num_blocks, 1)
    elif not isinstance(kinds, list) or len(kinds) != num_blocks or not all(kind in known for kind in kinds):
        raise ValueError(f"layer_types = {kinds!r} is not supported: each block has {' or '.join(known)}")
    types = _shortest(kinds)
    if "sliding_attention" not in types:
        return {}
    if window is None:
        raise ValueError("sliding_window is missing, and layer_types names sliding_attention")
    return {"sliding_window": window, "layer_types": types if len(types) > 1 else ()}


def _are_types(raw: object, first: int, num_blocks: int) -> bool:
    """Return whether raw names each block's attention. No list is made by a config's number of blocks."""
    if not isinstance(raw, list) or len(raw) != num_blocks:
        return False
    return all(kind == ("full_attention" if index < first else "sliding_attention") for index, kind in enumerate(raw))


def _shortest(types: list[LayerType]) -> tuple[LayerType, ...]:
    """Return the shortest row that gives all of them when it is repeated."""
    length = next(n for n in range(1, len(types) + 1) if all(types[i] == types[i - n] for i in range(n, len(types))))
    return tuple(types[:length])


def _truth(config: dict[str, Any], key: str) -> bool:
    if not isinstance(config[key], bool):
        raise ValueError(f"{key} = {config[key]!r} is neither true nor false")
    return bool(config[key])


def _whole(config: dict[str, Any], key: str) -> int:
    if isinstance(config[key], bool) or not isinstance(config[key], int) or config[key] < 1:
        raise ValueError(f"{key} = {config[key]!r} is no whole number above 0")
    return int(config[key])


def _number(config: dict[str, Any], key: str) -> Any:
    if key not in config:
        raise ValueError(f"{key} is missing")
    value = config[key]
    is_whole = isinstance(getattr(ModelSpec(), key, 0), int)
    if isinstance(value, bool) or not isinstance(value, int if is_whole else (int, float)):
        raise ValueError(f"{key} = {value!r} is no {'whole ' * is_whole}number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key} = {value!r} is no finite number")
    return value
