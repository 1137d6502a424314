"""Maps mixtures of experts to and from a config.json, and to the names of their tensors.

Six families have them. Mixtral's experts have the width of its MLP and names of their own; gpt-oss's have that width
and biases. The others have Qwen's names. Qwen2-MoE, Qwen3.5-MoE and dots.llm1 have experts for all tokens. dots.llm1
scores with a sigmoid, and has a bias for the choice.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from headway.stages.spec import ModelSpec

MIXTURES: Final = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_5_moe_text", "dots1", "gpt_oss")
"""The families, by `model_type`."""

MOST_EXPERTS: Final = 512
"""Each expert of each block is three matrices by themselves, which are listed before a weight is read."""

_KEYS: Final[dict[str, Mapping[str, str]]] = {
    "mixtral": {"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
    "qwen2_moe": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_experts": "num_local_experts"},
    "qwen3_5_moe_text": {},
    "dots1": {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
    "gpt_oss": {"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
}
"""Names in a config.json of the fields of ModelSpec that have another one there."""
EXPERT_PARTS: Final = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""By the name of a tensor that has a matrix of all experts of a block, the matrices of each."""
EXPERT_STACK: Final = re.compile(
    r"(model\.layers\.\d{1,6}\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias|_blocks|_scales)?", re.ASCII
)
_COUNTS: Final = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_ONLY: Final[dict[str, dict[str, tuple[Any, ...]]]] = {
    "mixtral": {"router_jitter_noise": (0, 0.0)},
    "qwen2_moe": {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    "qwen3_moe": {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    "qwen3_5_moe_text": {"norm_topk_prob": (True,)},
    "gpt_oss": {"norm_topk_prob": (True,)},
    "dots1": {"first_k_dense_replace": (0,), "moe_layer_freq": (1,), "n_group": (1,), "topk_group": (1,)},
}
"""Keys that change the computation, with the values that are computed here."""
_WITH_GATE: Final = ("qwen2_moe", "qwen3_5_moe_text")
"""Families whose expert for all tokens has a gate."""
_OF_MIXTRAL: Final = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def mixture_keys(model_type: str) -> frozenset[str]:
    """Return the keys of a config.json that `mixture_of` reads."""
    if model_type not in MIXTURES:
        return frozenset()
    names = _KEYS[model_type]
    read = {names.get(field, field) for field in (*_COUNTS, "num_shared_experts")}
    more = {"num_experts", "norm_topk_prob", "routed_scaling_factor", "shared_expert_intermediate_size"}
    return frozenset({*read, *more, *_ONLY[model_type]})


def mixture_of(model_type: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ModelSpec of a mixture; none for other families. Raises ValueError, naming key and value."""
    if model_type not in MIXTURES:
        return {}
    for key, values in _ONLY[model_type].items():
        if key in config and config[key] not in values:
            raise ValueError(f"{key} = {config[key]!r} is not supported in a {model_type}")
    names = _KEYS[model_type]
    fields: dict[str, Any] = {
        field: whole_above_zero(config, _present(config, field, names.get(field, field))) for field in _COUNTS
    }
    if fields["num_experts"] > MOST_EXPERTS:
        raise ValueError(f"{fields['num_experts']} experts are more than the {MOST_EXPERTS} that are read")
    if fields["num_experts_per_tok"] > fields["num_experts"]:
        raise ValueError(f"num_experts_per_tok = {fields['num_experts_per_tok']} of {fields['num_experts']} experts")
    is_normed = config.get("norm_topk_prob", model_type in ("mixtral", "qwen3_5_moe_text", "gpt_oss"))
    if not isinstance(is_normed, bool):
        raise ValueError(f"norm_topk_prob = {is_normed!r} is neither true nor false")
    fields["norm_topk_prob"] = is_normed
    if model_type in _WITH_GATE:
        width = whole_above_zero(config, "shared_expert_intermediate_size")
        if width % fields["moe_intermediate_size"]:
            of = fields["moe_intermediate_size"]
            raise ValueError(
                f"shared_expert_intermediate_size = {width!r} is no multiple of moe_intermediate_size {of}"
            )
        fields |= {"num_shared_experts": width // fields["moe_intermediate_size"], "shared_expert_gate": True}
    if model_type == "dots1":
        factor = config.get("routed_scaling_factor", 1.0)
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < 1e6:
            raise ValueError(f"routed_scaling_factor = {factor!r} is no number above 0")
        fields["num_shared_experts"] = whole_above_zero(config, "n_shared_experts")
        fields |= {"routed_scaling_factor": float(factor), "router_scoring": "sigmoid", "router_bias": True}
    return fields


def mixture_config(spec: ModelSpec, model_type: str) -> dict[str, Any]:
    """Return the keys of a config.json that describe a mixture; none for other families."""
    if model_type not in MIXTURES:
        return {}
    names = _KEYS[model_type]
    config: dict[str, Any] = {names.get(field, field): getattr(spec, field) for field in _COUNTS}
    if model_type in _WITH_GATE:
        config["shared_expert_intermediate_size"] = spec.num_shared_experts * spec.moe_intermediate_size
    if model_type in ("qwen3_5_moe_text", "gpt_oss"):
        return config
    if model_type == "mixtral":
        return config | {"output_router_logits": False, "router_jitter_noise": 0.0}
    config["norm_topk_prob"] = spec.norm_topk_prob
    if model_type in ("qwen2_moe", "qwen3_moe"):
        return config | {"num_experts": spec.num_experts, "decoder_sparse_step": 1, "mlp_only_layers": []}
    config |= {"n_shared_experts": spec.num_shared_experts, "routed_scaling_factor": spec.routed_scaling_factor}
    return config | {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}


def mixture_family(spec: ModelSpec) -> str | None:
    """Return the family that says all options of a mixture; None when none does."""
    is_plain = spec.router_scoring == "softmax" and not spec.router_bias
    if is_plain and spec.routed_scaling_factor == 1.0 and spec.num_shared_experts and spec.shared_expert_gate:
        if not spec.has_linear_attention:
            return "qwen2_moe"
        return "qwen3_5_moe_text" if spec.norm_topk_prob else None
    if spec.shared_expert_gate:
        return None
    is_simple = not spec.num_shared_experts and spec.routed_scaling_factor == 1.0
    if is_plain and is_simple:
        if spec.qk_norm:
            return "qwen3_moe"
        is_as_wide = spec.norm_topk_prob and spec.moe_intermediate_size == spec.intermediate_size
        return ("gpt_oss" if spec.expert_bias else "mixtral") if is_as_wide else None
    is_dots = spec.router_scoring == "sigmoid" and spec.router_bias and spec.num_shared_experts
    return "dots1" if is_dots and spec.qk_norm else None


def name_in_mixture(parameter: str, model: ModelSpec) -> str:
    """Return a block's parameter under its family's name, such as Mixtral's `block_sparse_moe.experts.3.w1.weight`."""
    if model.shared_expert_gate:
        return parameter.replace("mlp.shared_experts.", "mlp.shared_expert.")
    family = mixture_family(model)
    if family == "gpt_oss":
        return parameter.replace("mlp.gate.", "mlp.router.")
    if family != "mixtral":
        return parameter
    found = re.fullmatch(r"mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.(.+)", parameter)
    if found is not None:
        return f"block_sparse_moe.experts.{found[1]}.{_OF_MIXTRAL[found[2]]}.{found[3]}"
    return parameter.replace("mlp.gate.", "block_sparse_moe.gate.")


def name_from_mixture(name: str) -> str:
    """Return the inverse of `name_in_mixture`; any other name as it is."""
    found = re.fullmatch(r"block_sparse_moe\.experts\.(\d{1,6})\.(w[123])\.(.+)", name, re.ASCII)
    if found is not None:
        back = {theirs: ours for ours, theirs in _OF_MIXTRAL.items()}
        return f"mlp.experts.{found[1]}.{back[found[2]]}.{found[3]}"
    if name.startswith("mlp.shared_expert."):
        return name.replace("mlp.shared_expert.", "mlp.shared_experts.")
    return re.sub(r"^(block_sparse_moe\.gate|mlp\.router)\.", "mlp.gate.", name)


def _present(config: Mapping[str, Any], field: str, name: str) -> str:
    """Return the key that a config.json has: transformers 5 renamed `num_experts`. Raises ValueError for two values."""
    if name != field and field in config and config.get(name, config[field]) != config[field]:
        raise ValueError(f"{name} = {config[name]!r} is not {field} = {config[field]!r}")
    return field if name not in config and field in config else name


def whole_above_zero(config: Mapping[str, Any], key: str) -> int:
    """Return a count of a config.json. Raises ValueError, naming key and value."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} = {value!r} is no number above 0")
    return value
