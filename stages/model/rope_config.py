"""Maps rotary positions to and from a config.json: `rope_parameters` of transformers 5, and the two keys before it."""

import math
import sys
from typing import Any, Final

from headway.stages.spec import ModelSpec, RopeSpec

_DEFAULT_THETA: Final = 10_000.0
_MOST: Final = sys.float_info.max
"""Python cannot divide whole numbers above it: a config may have thousands of digits."""
_SHARED: Final = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
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
    ),
}
"""Keys of each type in a config.json; those that RopeSpec has are its settings."""
ROPE_MAY_BE_ZERO: Final = ("truncate", "mscale", "mscale_all_dim")


def rope_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the keys of a config.json that describe the positions, for old and new versions of transformers."""
    scaling = spec.rope_scaling
    rope: dict[str, Any] = {"rope_theta": spec.rope_theta, "rope_type": scaling.rope_type}
    for key in ROPE_SETTINGS[scaling.rope_type]:
        if hasattr(scaling, key):
            rope[key] = getattr(scaling, key)
    config: dict[str, Any] = {"rope_parameters": rope, "rope_theta": spec.rope_theta}
    if scaling.rope_type == "dynamic":
        config["max_position_embeddings"] = scaling.original_max_position_embeddings
    return config


def rope_of(config: dict[str, Any]) -> tuple[float, RopeSpec]:
    """Return theta and the scaling of a config.json. Raises ValueError, naming key and value."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"  # transformers reads them in this order
    rope = config.get(key) or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{key} = {rope!r} is not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_SETTINGS:
        raise ValueError(f"{key}.rope_type = {kind!r} is not supported; known are {', '.join(ROPE_SETTINGS)}")
    for name, value in rope.items():
        if name not in (*_SHARED, *ROPE_SETTINGS[kind]):
            raise ValueError(f"{key}.{name} = {value!r} is not supported with rope_type {kind!r}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{key}.partial_rotary_factor = {rope['partial_rotary_factor']!r} is not supported")
    theta = rope.get("rope_theta", config.get("rope_theta", _DEFAULT_THETA))
    _check_number(theta, "rope_theta")
    return theta, _scaling(
        kind, config, {name: rope[name] for name in ROPE_SETTINGS[kind] if rope.get(name) is not None}
    )


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


def _check_number(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _MOST:
        raise ValueError(f"{name} = {value!r} is no number above 0 that a float can have")
