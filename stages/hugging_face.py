"""The model under Hugging Face's names: where each layer's parameter lies in a checkpoint, and its config.json."""

import dataclasses
from typing import Any, Literal

from headway.stages.spec import ModelSpec

_PREFIXES = {"embed": "model.embed_tokens.", "block": "model.layers.{index}."}


def checkpoint_name(layer: str, parameter: str) -> str:
    """`block.3`, `mlp.up_proj.weight` → `model.layers.3.mlp.up_proj.weight`. Raises ValueError for no layer's name."""
    kind, _, index = layer.partition(".")
    if kind in _PREFIXES:
        return _PREFIXES[kind].format(index=index) + parameter
    if kind == "head":
        return parameter if parameter.startswith("lm_head.") else f"model.{parameter}"
    raise ValueError(f"no layer is called {layer!r}")


def llama_config(spec: ModelSpec, *, dtype: Literal["float32", "bfloat16"], sequence_length: int) -> dict[str, Any]:
    """config.json with which AutoModelForCausalLM opens the folder as a LlamaForCausalLM.

    sequence_length is the longest that the model was trained on.
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


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """The inverse of `llama_config`. Raises ValueError, naming the key, for a model that is not of this kind."""
    if config.get("model_type") != "llama":
        raise ValueError(f"model_type is {config.get('model_type')!r}, not 'llama'")
    unsupported = {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "hidden_act": "silu"}
    for key, value in unsupported.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key} = {config[key]!r} is not supported")
    elsewhere = {"rope_theta", "tie_word_embeddings"}
    fields = [field.name for field in dataclasses.fields(ModelSpec) if field.name not in elsewhere]
    missing = [name for name in fields if name not in config]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    theta = config.get("rope_parameters", config).get("rope_theta", ModelSpec().rope_theta)
    return ModelSpec(**{name: config[name] for name in fields}, rope_theta=theta)
