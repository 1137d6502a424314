"""Maps rotary positions and mixtures of experts to and from a config.json.

Positions are `rope_parameters` of transformers 5, and the two keys before it.
"""

import math
import sys
from collections.abc import Mapping
from typing import Any, Final

from headway.stages.model.families import MOST_EXPERTS, PLAIN, Family, Mixture
from headway.stages.spec import ModelSpec, RopeSpec

_DEFAULT_THETA: Final = 10_000.0
_MOST: Final = sys.float_info.max
"""Python cannot divide whole numbers above it: a config may have thousands of digits."""
_SHARED: Final = (
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "max_position_embeddings",
    "mrope_section",
    "mrope_interleaved",
)
"""Keys of all types. Those of mrope tell a picture's positions apart, and change nothing in a text."""
_BY_TYPE: Final = ("full_attention", "sliding_attention")
ROPE_SETTINGS: Final[dict[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "llama_4_scaling_beta",
    ),
    "proportional": ("factor", "partial_rotary_factor"),
    "longrope": ("original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
}
"""Keys of each type in a config.json; those that RopeSpec has are its settings."""
ROPE_MAY_BE_ZERO: Final = ("truncate", "mscale", "mscale_all_dim", "llama_4_scaling_beta")


def rope_config(spec: ModelSpec, *, is_by_type: bool) -> dict[str, Any]:
    """Return the keys of a config.json that describe the positions, for old and new versions of transformers.

    is_by_type: the family says them by type of block.
    """
    scaling = spec.rope_scaling
    rope: dict[str, Any] = {"rope_theta": spec.rope_theta, "rope_type": scaling.rope_type}
    for key in ROPE_SETTINGS[scaling.rope_type]:
        if hasattr(scaling, key) and (key != "llama_4_scaling_beta" or scaling.llama_4_scaling_beta):
            value = getattr(scaling, key)
            rope[key] = list(value) if isinstance(value, tuple) else value
    if is_by_type:
        own = {"rope_theta": spec.window_rope_theta, "rope_type": "default"}
        return {"rope_parameters": dict(zip(_BY_TYPE, (rope, own if spec.window_rope_theta else rope), strict=True))}
    config: dict[str, Any] = {"rope_parameters": rope, "rope_theta": spec.rope_theta}
    if spec.partial_rotary_factor != 1.0:
        rope["partial_rotary_factor"] = config["partial_rotary_factor"] = spec.partial_rotary_factor
    if scaling.rope_type == "longrope":
        config["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    if scaling.rope_type == "dynamic":
        config["max_position_embeddings"] = scaling.original_max_position_embeddings
    return config


def rope_of(config: dict[str, Any], *, window_theta: float = 0.0) -> dict[str, Any]:
    """Return the fields of ModelSpec that say the positions. Raises ValueError, naming key and value.

    window_theta: the base in blocks with a window, unless the config names one; 0: the family says no positions by type
    of block.
    """
    if window_theta:
        return _by_type(config, window_theta)
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"  # transformers reads them in this order
    theta, scaling, part = _read(config, config.get(key), key)
    return {"rope_theta": theta, "rope_scaling": scaling, "partial_rotary_factor": part}


def _by_type(config: dict[str, Any], window_theta: float) -> dict[str, Any]:
    """Return the same of a family that says positions by type of block. `rope_scaling` is for those without window."""
    tables = config.get("rope_parameters") or {}
    if not isinstance(tables, dict) or tables.keys() - set(_BY_TYPE):
        raise ValueError(f"rope_parameters = {tables!r} is not supported: it names {' and '.join(_BY_TYPE)} alone")
    full, window = (tables.get(kind) or {} for kind in _BY_TYPE)
    if config.get("rope_scaling"):
        if not isinstance(full, dict) or not isinstance(config["rope_scaling"], dict):
            raise ValueError(f"rope_scaling = {config['rope_scaling']!r} is not supported")
        full = full | config["rope_scaling"]
    theta, scaling, part = _read(config, full, f"rope_parameters.{_BY_TYPE[0]}")
    own = config | {"rope_theta": window_theta}
    own_theta, own_scaling, own_part = _read(own, window, f"rope_parameters.{_BY_TYPE[1]}")
    is_like = (own_theta, own_scaling) == (theta, scaling)
    if own_part != part or (not is_like and own_scaling != RopeSpec()):
        raise ValueError(
            f"rope_parameters.{_BY_TYPE[1]} = {window!r} is not supported: it is neither default nor the other's"
        )
    window_rope_theta = 0.0 if is_like else own_theta
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "partial_rotary_factor": part,
        "window_rope_theta": window_rope_theta,
    }


def _read(config: dict[str, Any], table: object, key: str) -> tuple[float, RopeSpec, float]:
    """Return theta, scaling, and the part of each head that turns."""
    rope = table or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{key} = {rope!r} is not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_SETTINGS:
        raise ValueError(f"{key}.rope_type = {kind!r} is not supported; known are {', '.join(ROPE_SETTINGS)}")
    for name, value in rope.items():
        if name not in (*_SHARED, *ROPE_SETTINGS[kind]) and (kind, name) != ("longrope", "factor"):
            raise ValueError(f"{key}.{name} = {value!r} is not supported with rope_type {kind!r}")
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    _check_number(part, "partial_rotary_factor")
    theta = rope.get("rope_theta", config.get("rope_theta", _DEFAULT_THETA))
    _check_number(theta, "rope_theta")
    settings = {name: rope[name] for name in ROPE_SETTINGS[kind] if rope.get(name) is not None}
    if kind == "proportional":  # the part is one of its pairs, not of the head
        settings, part = {"factor": 1.0, "partial_rotary_factor": 1.0} | settings, 1.0
    if kind == "longrope":
        return theta, _longrope(config, settings, rope.get("factor")), float(part)
    return theta, _scaling(kind, config, settings), float(part)


def _scaling(kind: str, config: dict[str, Any], rope: dict[str, Any]) -> RopeSpec:
    for name, value in rope.items():
        if name != "truncate":
            _check_number(value, name)
        elif not isinstance(value, bool):
            raise ValueError(f"{name} = {value!r} is neither true nor false")
    longest = config.get("max_position_embeddings")
    if kind == "dynamic":
        rope["original_max_position_embeddings"] = longest  # transformers takes no other
    elif "original_max_position_embeddings" in ROPE_SETTINGS[kind]:
        rope.setdefault("original_max_position_embeddings", config.get("original_max_position_embeddings") or longest)
    if kind == "yarn" and "factor" not in rope and longest and rope["original_max_position_embeddings"]:
        _check_number(longest, "max_position_embeddings")
        _check_number(rope["original_max_position_embeddings"], "original_max_position_embeddings")
        rope["factor"] = longest / rope["original_max_position_embeddings"]
    for name in ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"):
        if name in ROPE_SETTINGS[kind] and rope.get(name) is None:
            raise ValueError(f"rope_type {kind!r} needs {name}, which is missing")
    if kind == "yarn":
        rope = _whole_yarn(rope)
    length = rope.get("original_max_position_embeddings", 1)
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ValueError(f"original_max_position_embeddings = {length!r} is no number of tokens")
    return RopeSpec(rope_type=kind, **rope)  # type: ignore[arg-type]


def _whole_yarn(rope: dict[str, Any]) -> dict[str, Any]:
    """Fill in what a config may leave out, as transformers does."""

    def magnitude(scale: float, of: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * of * math.log(scale) + 1.0

    first, whole = rope.pop("mscale", None), rope.pop("mscale_all_dim", None)
    factor = rope["factor"]
    usual = magnitude(factor, first) / magnitude(factor, whole) if first and whole else magnitude(factor)
    filled = {"attention_factor": usual, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
    return filled | {name: value for name, value in rope.items() if value or name == "truncate"}


def _longrope(config: dict[str, Any], rope: dict[str, Any], factor: Any) -> RopeSpec:
    """Return the scaling, with what a config may leave out filled in as transformers does."""
    longest: Any = config.get("max_position_embeddings")
    first: Any = config.get("original_max_position_embeddings")
    first = first or rope.get("original_max_position_embeddings")  # transformers takes them in this order
    if isinstance(first, bool) or not isinstance(first, int) or first < 2:
        raise ValueError(f"original_max_position_embeddings = {first!r} is no number of tokens")
    if factor is None and "attention_factor" not in rope:
        _check_number(longest, "max_position_embeddings")
        factor = longest / first
    if factor is not None:
        _check_number(factor, "factor")
        usual = math.sqrt(1 + math.log(factor) / math.log(first)) if factor > 1 else 1.0
        rope.setdefault("attention_factor", usual)
    _check_number(rope["attention_factor"], "attention_factor")
    divisors = {}
    for name in ("short_factor", "long_factor"):
        numbers = rope.get(name)
        if not isinstance(numbers, list):
            raise ValueError(f"{name} = {numbers!r} is no list of numbers")
        for number in numbers:
            _check_number(number, name)
        divisors[name] = tuple(float(number) for number in numbers)
    return RopeSpec(
        rope_type="longrope",
        original_max_position_embeddings=first,
        attention_factor=rope["attention_factor"],
        short_factor=divisors["short_factor"],
        long_factor=divisors["long_factor"],
    )


def _check_number(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _MOST:
        raise ValueError(f"{name} = {value!r} is no number above 0 that a float can have")


_COUNTS: Final = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


def mixture_keys(mixture: Mixture) -> frozenset[str]:
    """Return the keys of a config.json that `mixture_of` reads."""
    read = {mixture.names.get(field, field) for field in _COUNTS} | {mixture.shared or "num_shared_experts"}
    more = {"num_experts", "num_shared_experts", "norm_topk_prob", "routed_scaling_factor"}
    return frozenset({*read, *more, "shared_expert_intermediate_size", *mixture.only})


def mixture_of(model_type: str, mixture: Mixture, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ModelSpec that a config.json says of a mixture. Raises ValueError, naming key and value."""
    for key, values in mixture.only.items():
        if key in config and config[key] not in values:
            raise ValueError(f"{key} = {config[key]!r} is not supported in a {model_type}")
    fields: dict[str, Any] = {
        field: whole_above_zero(config, _present(config, field, mixture.names.get(field, field))) for field in _COUNTS
    }
    num_experts, width = fields["num_experts"], fields["moe_intermediate_size"]
    if num_experts > MOST_EXPERTS:
        raise ValueError(f"{num_experts} experts are more than the {MOST_EXPERTS} that are read")
    if fields["num_experts_per_tok"] > num_experts:
        raise ValueError(f"num_experts_per_tok = {fields['num_experts_per_tok']} of {num_experts} experts")
    is_normed = config.get("norm_topk_prob", mixture.is_normed)
    if not isinstance(is_normed, bool):
        raise ValueError(f"norm_topk_prob = {is_normed!r} is neither true nor false")
    fields["norm_topk_prob"] = is_normed
    if mixture.is_scaled:
        factor = config.get("routed_scaling_factor", 1.0)
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < 1e6:
            raise ValueError(f"routed_scaling_factor = {factor!r} is no number above 0")
        fields["routed_scaling_factor"] = float(factor)
    if mixture.shared:
        shared = whole_above_zero(config, mixture.shared)
        if mixture.is_shared_by_width and shared % width:
            raise ValueError(f"{mixture.shared} = {shared!r} is no multiple of moe_intermediate_size {width}")
        fields["num_shared_experts"] = shared // width if mixture.is_shared_by_width else shared
    return fields


def mixture_config(spec: ModelSpec, mixture: Mixture) -> dict[str, Any]:
    """Return the keys of a config.json that describe a mixture."""
    config = {mixture.names.get(field, field): getattr(spec, field) for field in _COUNTS} | dict(mixture.written)
    if mixture.has_both_names:
        config["num_experts"] = spec.num_experts
    if mixture.shared:
        width = spec.moe_intermediate_size if mixture.is_shared_by_width else 1
        config[mixture.shared] = spec.num_shared_experts * width
    if not mixture.is_normed:
        config["norm_topk_prob"] = spec.norm_topk_prob
    if mixture.is_scaled:
        config["routed_scaling_factor"] = spec.routed_scaling_factor
    return config


def is_said(spec: ModelSpec, family: Family) -> bool:
    """Return whether a family's config.json says the experts of a model, or that it has none."""
    mixture = family.mixture
    if mixture is None or not spec.has_experts:
        return mixture is None and not spec.has_experts
    is_wide = mixture.names.get("moe_intermediate_size") == "intermediate_size"
    return (
        all(
            getattr(spec, name) == family.options.get(name, getattr(PLAIN, name))
            for name in ("router_scoring", "router_bias", "shared_expert_gate")
        )
        and bool(spec.num_shared_experts) == bool(mixture.shared)
        and (spec.norm_topk_prob or not mixture.is_normed)
        and (spec.routed_scaling_factor == 1.0 or mixture.is_scaled)
        and (spec.moe_intermediate_size == spec.intermediate_size or not is_wide)
    )


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
