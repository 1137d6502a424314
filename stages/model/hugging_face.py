"""Maps the model to Hugging Face's names: each layer's parameter in a checkpoint, and its config.json."""

import dataclasses
from typing import Any, Final, Literal

from headway.stages.spec import ModelSpec

_PREFIXES = {"embed": "model.embed_tokens.", "block": "model.layers.{index}."}


def checkpoint_name(layer: str, parameter: str) -> str:
    """Return `model.layers.3.mlp.up_proj.weight` for `block.3`, `mlp.up_proj.weight`. Raises ValueError for an unknown
    layer.
    """
    kind, _, index = layer.partition(".")
    if kind in _PREFIXES:
        return _PREFIXES[kind].format(index=index) + parameter
    if kind == "head":
        return parameter if parameter.startswith("lm_head.") else f"model.{parameter}"
    raise ValueError(f"no layer is called {layer!r}")


def llama_config(spec: ModelSpec, *, dtype: Literal["float32", "bfloat16"], sequence_length: int) -> dict[str, Any]:
    """Return the config.json with which AutoModelForCausalLM opens the folder as a LlamaForCausalLM.

    sequence_length is the longest on which the model was trained.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": dtype,
        "eos_token_id": None,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "initializer_range": spec.initializer_range,
        "intermediate_size": spec.intermediate_size,
        "max_position_embeddings": sequence_length,
        "mlp_bias": False,
        "num_attention_heads": spec.num_attention_heads,
        "num_hidden_layers": spec.num_hidden_layers,
        "num_key_value_heads": spec.num_key_value_heads,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_parameters": {"rope_theta": spec.rope_theta, "rope_type": "default"},
        "rope_theta": spec.rope_theta,
        "tie_word_embeddings": False,
        "vocab_size": spec.vocab_size,
    }


_COMPUTED: Final[dict[str, tuple[Any, ...]]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "tie_word_embeddings": (False,),
    "hidden_act": ("silu",),
    "attention_dropout": (0, 0.0),
    "partial_rotary_factor": (1, 1.0),
    "sliding_window": (None,),
    "use_sliding_window": (False,),
    "rope_scaling": (None,),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}
"""Keys of Hugging Face configs that change the computation, with the values that are computed here."""
_ROPE_TYPES: Final = ("rope_type", "type")


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """Return the inverse of `llama_config`. Raises ValueError, naming key and value, for an unsupported model.

    Another rotation of the positions, or heads of another width, would silently give other logits.
    """
    if config.get("model_type") != "llama":
        raise ValueError(f"model_type is {config.get('model_type')!r}, not 'llama'")
    if isinstance(scaling := config.get("rope_scaling"), dict):  # the form of transformers before 5
        _check_rope(scaling, "rope_scaling")
        config = config | {"rope_scaling": None}
    rope = config.get("rope_parameters") or {}
    _check_rope(rope, "rope_parameters")
    for key, values in _COMPUTED.items():
        if key in config and config[key] not in values:
            raise ValueError(f"{key} = {config[key]!r} is not supported")
    elsewhere = {"rope_theta", "tie_word_embeddings"}
    fields = [field.name for field in dataclasses.fields(ModelSpec) if field.name not in elsewhere]
    numbers = {name: _number(config, name) for name in fields}
    theta = _number({"rope_theta": config.get("rope_theta", ModelSpec().rope_theta)} | rope, "rope_theta")
    heads, width = numbers["num_attention_heads"], numbers["hidden_size"]
    head_dim = config.get("head_dim")
    if heads < 1 or width % heads or head_dim not in (None, width // heads):
        raise ValueError(f"head_dim = {head_dim!r} is not supported: {heads} heads share hidden_size {width}")
    return ModelSpec(**numbers, rope_theta=theta)


def _check_rope(rope: Any, key: str) -> None:
    """Check that positions rotate by plain powers of theta."""
    if not isinstance(rope, dict):
        raise ValueError(f"{key} = {rope!r} is not supported")
    for name, value in rope.items():
        is_plain = value == "default" if name in _ROPE_TYPES else name == "rope_theta"
        if not is_plain and (name, value) != ("partial_rotary_factor", 1.0):
            raise ValueError(f"{key}.{name} = {value!r} is not supported")


def _number(config: dict[str, Any], key: str) -> Any:
    if key not in config:
        raise ValueError(f"{key} is missing")
    value = config[key]
    is_whole = isinstance(getattr(ModelSpec(), key), int)
    if isinstance(value, bool) or not isinstance(value, int if is_whole else (int, float)):
        raise ValueError(f"{key} = {value!r} is no {'whole ' * is_whole}number")
    return value
