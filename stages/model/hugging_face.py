"""Maps the model to Hugging Face's names: each layer's parameter in a checkpoint, and its config.json.

A family is a set of options of one decoder. Whatever a config asks for that is not computed here is refused by its key
and value, because it would silently give other logits.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Final, Literal

from headway.stages.model.config_parts import (
    is_said,
    mixture_config,
    mixture_keys,
    mixture_of,
    rope_config,
    rope_of,
    whole_above_zero,
)
from headway.stages.model.families import (
    ABSENT,
    CAPS,
    FAMILIES,
    GLOBAL_HEADS,
    NOT_COMPUTED,
    ONLY,
    OPTIONS,
    PERIOD,
    PLAIN,
    READ_ELSEWHERE,
    WHY_NOT,
    WITHOUT_EFFECT,
    Family,
)
from headway.stages.spec import TIED, LayerType, ModelSpec, whole_layer

_PREFIXES = {"embed": "model.embed_tokens.", "block": "model.layers.{index}."}


def checkpoint_name(layer: str, parameter: str, model: ModelSpec) -> str:
    """Return `model.layers.3.mlp.up_proj.weight` for `block.3`, `mlp.up_proj.weight`, or for its half. Raises
    ValueError for an unknown layer.

    A checkpoint has a tied matrix once, as the embedding.
    """
    if model.tie_word_embeddings and TIED.get(layer) == parameter:
        layer, parameter = "embed", TIED["embed"]
    kind, _, index = whole_layer(layer).partition(".")
    if kind == "block":
        parameter = _with_names(parameter, _renamed(model))
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
    return f"block.{index}", _with_names(parameter, {theirs: ours for ours, theirs in _renamed(model).items()})


@lru_cache(maxsize=8)
def _renamed(model: ModelSpec) -> Mapping[str, str]:
    """Return the parts of a block that have another name in the files of a model's family."""
    is_plain = model.has_own_block or (model.norm_placement == "before" and not model.has_experts)
    return {} if is_plain else FAMILIES[family_of(model)].renamed


def _with_names(parameter: str, names: Mapping[str, str]) -> str:
    """Return a parameter's path with other names of its parts, such as Mixtral's `w1`."""
    found = "|".join(map(re.escape, names))
    return re.sub(rf"(?<![^.])(?:{found})(?=\.)", lambda part: names[part[0]], parameter) if names else parameter


_WINDOW_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "none": (),
    "off": (),
    "all": ("sliding_window",),
    "chosen": ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    "layers": ("sliding_window", "max_window_layers"),
    "types": ("sliding_window", "layer_types"),
    "linear": ("layer_types",),
}
"""By `Family.window`, the keys with which a config.json says the kind of each block."""


OWN_BLOCK: Final = "headway-plug-in"
"""The `model_type` of a model with a plug-in's block."""


def hugging_face_config(
    spec: ModelSpec, *, dtype: Literal["float32", "bfloat16"], sequence_length: int
) -> dict[str, Any]:
    """Return the config.json with which AutoModelForCausalLM opens the folder.

    sequence_length is the longest on which the model was trained. Raises ValueError when no family has the options.
    """
    if spec.has_own_block:  # no class of transformers opens it: what made it is said
        return asdict(spec) | {"model_type": OWN_BLOCK, "dtype": dtype, "max_position_embeddings": sequence_length}
    model_type = family_of(spec)
    family = FAMILIES[model_type]
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
        **(mixture_config(spec, family.mixture) if family.mixture else {}),
    }
    if family.has_own_head_dim:
        config["head_dim"] = spec.head_width
    config |= {key: getattr(spec, name) for name, key in family.keys.items()}
    if "attention_multiplier" in family.keys:
        config["attention_multiplier"] = spec.attention_multiplier or spec.head_width**-0.5
    if family.has_blocks_without_rope:
        config["no_rope_layers"] = [int(spec.is_turned(block)) for block in range(spec.num_hidden_layers)]
    if spec.sliding_window or family.window != "chosen":
        told = {
            "use_sliding_window": True,
            "sliding_window": spec.sliding_window or None,
            "max_window_layers": spec.first_window_layer,
            "layer_types": [spec.type_of(block) for block in range(spec.num_hidden_layers)],
        }
        config |= {key: told[key] for key in _WINDOW_KEYS[family.window]}
    if family.scales_by_width:
        config |= {"hidden_activation": spec.hidden_act, **{name: getattr(spec, name) or None for name in CAPS}}
        if family.has_scalar:
            config["query_pre_attn_scalar"] = _scalar_of(spec)
    if GLOBAL_HEADS[0] in family.keys:
        config["global_head_dim"] = spec.global_head_dim or spec.head_width
        config["num_global_key_value_heads"] = spec.num_global_key_value_heads or None
        config |= {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    if family.turns_parts:
        config["rope_parameters"]["partial_rotary_factor"] = spec.partial_rotary_factor
    return config


def family_of(spec: ModelSpec) -> str:
    """Return the `model_type` that says all options of a model. Raises ValueError when none does, naming the options
    that the nearest family does not have.
    """
    unsaid = {name: _unsaid(spec, family) for name, family in FAMILIES.items()}
    nearest = min(unsaid, key=lambda name: len(unsaid[name]))  # of several the first one
    if unsaid[nearest]:
        what = ", ".join(f"{name} = {getattr(spec, name)!r}" for name in unsaid[nearest])
        raise ValueError(f"no family of Hugging Face has these options of a model together; {nearest} lacks {what}")
    return nearest


def _unsaid(spec: ModelSpec, family: Family) -> list[str]:
    """Return the fields whose values a family's config.json cannot say."""
    fixed = {name: getattr(PLAIN, name) for name in OPTIONS} | dict(family.options)
    if family.scales_by_width:
        fixed["embedding_multiplier"] = spec.hidden_size**0.5
        if family.has_scalar:
            fixed["attention_multiplier"] = _scalar_of(spec) ** -0.5
    found = [name for name, value in fixed.items() if name not in family.keys and getattr(spec, name) != value]
    of_key: dict[str, object] = {}
    for name, key in family.keys.items():
        if of_key.setdefault(key, getattr(spec, name)) != getattr(spec, name):
            found.append(name)
    if not is_said(spec, family):
        found.append("num_experts")
    if not family.has_own_head_dim and spec.head_width * spec.num_attention_heads != spec.hidden_size:
        found.append("head_dim")
    if not family.has_blocks_without_rope and spec.no_rope_layer_interval:
        found.append("no_rope_layer_interval")
    if spec.rope_scaling.rope_type not in family.rope_types:
        found.append("rope_scaling")
    if spec.sliding_window and "sliding_window" not in _WINDOW_KEYS[family.window]:
        found.append("sliding_window")
    if family.window == "all" and spec.first_window_layer:
        found.append("first_window_layer")
    has_other_types = bool(spec.layer_types) and "layer_types" not in _WINDOW_KEYS[family.window]
    lacks_linear = family.window == "linear" and not spec.has_linear_attention
    ends_otherwise = family.ends_full and spec.type_of(spec.num_hidden_layers - 1) != "full_attention"
    if has_other_types or lacks_linear or ends_otherwise:
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
    factor = spec.attention_multiplier
    return round(factor**-2) if 1e-150 < factor <= 1 else spec.head_width  # below, the square overflows


_TEXT_OF: Final = {
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "mistral3": ("mistral", "ministral3"),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
}
"""By the `model_type` of a model of pictures and text, those that its text model may have; the first unless it says."""
_OF_PICTURES: Final = re.compile(
    r"(audio|boa|boi|eoa|eoi|image|mm|multimodal_projector|projector|video|vision)_\w+|spatial_merge_size|"
    r"text_config|tie_word_embeddings"
)
"""Keys of such a model that its text model does not have, or has in its own table."""


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of the text model alone, where a model of pictures and text has it inside its own.

    As in transformers, the outer `tie_word_embeddings` counts if both say one. Raises ValueError, naming key and value.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in _TEXT_OF:
        return config
    text = config.get("text_config")
    kind = text.get("model_type", _TEXT_OF[name][0]) if isinstance(text, dict) else None
    if not isinstance(text, dict) or kind not in _TEXT_OF[name]:
        raise ValueError(f"text_config is no table of a {' or '.join(_TEXT_OF[name])}")
    of_text = {"architectures": [FAMILIES[kind].architecture], "model_type": kind}
    if "tie_word_embeddings" in config:
        of_text["tie_word_embeddings"] = config["tie_word_embeddings"]
    return {key: value for key, value in config.items() if not _OF_PICTURES.fullmatch(key)} | text | of_text


def is_opened_whole(config: dict[str, Any]) -> bool:
    """Return whether transformers opens a folder of this config with all its parts, the text as `language_model`.

    AutoModelForCausalLM opens a Qwen3.5 of pictures and text as its text alone.
    """
    return config.get("model_type") in ("gemma3", "gemma4", "mistral3")


def has_more_than_text(config: dict[str, Any]) -> bool:
    """Return whether published folders of a config's family have tensors beside those of the text model."""
    return any(config.get("model_type") in (name, *kinds) for name, kinds in _TEXT_OF.items())


def model_spec(config: dict[str, Any], ignored: Sequence[str] = ()) -> ModelSpec:
    """Return what a config.json describes. ignored: keys that nobody here knows, and that do not count.

    Raises ValueError, naming key and value, for an unsupported model.
    """
    config = text_config(config)
    name = config.get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise ValueError(_why_not_computed(name))
    if GLOBAL_HEADS[0] in family.keys:
        config = _with_global_heads(config)
    _check_keys(config, family, ignored)
    told = ABSENT | dict(family.absent) | config
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
        if family.has_scalar:
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
        **(mixture_of(str(name), family.mixture, config) if family.mixture else {}),
    )
    _check_heads(spec)
    return spec if spec.sliding_window else replace(spec, window_rope_theta=0.0)


def _check_heads(spec: ModelSpec) -> None:
    """Raise ValueError for heads that do not share keys evenly, or that rotary positions do not fit."""
    heads = spec.num_attention_heads
    for number in (spec.num_key_value_heads, spec.num_global_key_value_heads or 1):
        if number < 1 or heads % number:
            raise ValueError(f"num_key_value_heads = {number!r} does not divide {heads} heads")
    for factors in (spec.rope_scaling.short_factor, spec.rope_scaling.long_factor):
        if factors and 2 * len(factors) != spec.rotary_width:
            raise ValueError(f"{len(factors)} factors of longrope are not one for each pair of {spec.rotary_width}")
    if spec.partial_rotary_factor == 1 and spec.head_width % 2:
        raise ValueError(f"heads of {spec.head_width} values are odd; rotary positions need an even number of them")
    if spec.rotary_width < 2 or spec.rotary_width % 2 or spec.partial_rotary_factor > 1:
        raise ValueError(f"partial_rotary_factor = {spec.partial_rotary_factor!r} of {spec.head_width} gives no pairs")


def _why_not_computed(model_type: object) -> str:
    if isinstance(model_type, str) and model_type in NOT_COMPUTED:
        missing, nearest = NOT_COMPUTED[model_type]
        return f"model_type is {model_type!r}: {missing} not computed; the nearest family that works is {nearest}"
    near = "".join(f"; the nearest is {each}" for each in get_close_matches(str(model_type), FAMILIES, 1))
    return f"model_type is {model_type!r}, which is not computed{near}; there are {', '.join(FAMILIES)}"


def _check_keys(config: dict[str, Any], family: Family, ignored: Sequence[str]) -> None:
    """Refuse each value that is not computed, and each key that is not known, is on and is not ignored."""
    told = dict(family.absent) | config
    quantized = config.get("quantization_config")
    is_read = isinstance(quantized, dict) and quantized.get("quant_method") in family.quantized
    for key, values in (ONLY | dict(family.only)).items():
        if key in told and told[key] not in values and not (is_read and key == "quantization_config"):
            raise ValueError(f"{key} = {_short(told[key])} is not supported{WHY_NOT.get(key, '')}")
    said = {key for each in FAMILIES.values() for key in each.keys.values()} - set(family.keys.values())
    for key in sorted(said & config.keys()):
        if config[key] not in (ABSENT[key], None):
            raise ValueError(f"{key} = {config[key]!r} is not supported in a {config['model_type']}")
    if not family.has_blocks_without_rope and config.get("no_rope_layers") is not None:
        raise ValueError(f"no_rope_layers = {config['no_rope_layers']!r} is not supported in a {config['model_type']}")
    known = READ_ELSEWHERE | ABSENT.keys() | ONLY.keys() | family.only.keys()
    if family.mixture is not None:
        known |= mixture_keys(family.mixture)
    if family.has_scalar:
        known |= {"query_pre_attn_scalar"} | ({"rope_local_base_freq", *PERIOD} if family.window_theta else set())
    for key in ignored:
        if key in known:
            raise ValueError(f"{key} says what the model computes, so it cannot be ignored")
    for key in sorted(config.keys() - known - set(ignored)):
        if config[key] and WITHOUT_EFFECT.fullmatch(key) is None:
            what = "is not known here, and may change what the model computes; if it does not, set [model]"
            raise ValueError(f"{key} = {config[key]!r} {what} ignore = [{json.dumps(key)}]")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _head_dim(config: dict[str, Any], family: Family) -> int:
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


_MOST_BLOCKS: Final = 1024
"""The rules of a job refuse more. No list is made by a larger number of a config."""
_CHOICES: Final[dict[str, tuple[LayerType, ...]]] = {
    "types": ("sliding_attention", "full_attention"),
    "linear": ("linear_attention", "full_attention"),
    "chosen": ("sliding_attention", "full_attention"),
}
"""By `Family.window`, what `layer_types` may say of a block. In other families the window's other keys say it all."""


def _windows(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return the fields of ModelSpec that say which block has a sliding window, or linear attention."""
    window, kinds = config["sliding_window"], config["layer_types"]
    if family.window == "off":
        if config["use_sliding_window"]:
            raise ValueError(f"use_sliding_window = True is not supported in a {config['model_type']}")
        window = None
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"sliding_window = {window!r} is no number of tokens")
    if window is not None and family.window == "none":
        raise ValueError(f"sliding_window = {window!r} is not supported in a {config['model_type']}")
    if config["num_hidden_layers"] > _MOST_BLOCKS:
        return {}
    usual = _usual_types(config, family, window)
    if kinds is None:
        kinds = usual
    known = _CHOICES.get(family.window, ())
    if family.window == "chosen" and (window is None or not config["use_sliding_window"]):
        known = ()
    if kinds != usual and not known:
        raise ValueError(f"layer_types = {kinds!r} is not supported: it is not that of the window's other keys")
    if not isinstance(kinds, list) or len(kinds) != len(usual) or (known and any(kind not in known for kind in kinds)):
        raise ValueError(f"layer_types = {kinds!r} is not supported: each block has {' or '.join(known)}")
    if family.ends_full and kinds[-1] != "full_attention":
        raise ValueError(f"layer_types = {kinds!r} is not supported: the last block has full_attention")
    types = _shortest(kinds)
    if family.window == "linear":
        if "linear_attention" not in kinds:
            raise ValueError(f"layer_types = {kinds!r} is not supported without any linear_attention")
        return {"layer_types": types}
    if "sliding_attention" not in kinds:
        return {}
    if window is None:
        raise ValueError("sliding_window is missing, and layer_types names sliding_attention")
    if family.window != "types" and kinds == usual:
        return {"sliding_window": window, "first_window_layer": kinds.index("sliding_attention")}
    return {"sliding_window": window, "layer_types": types if len(types) > 1 else ()}


def _usual_types(config: dict[str, Any], family: Family, window: int | None) -> list[LayerType]:
    """Return the kind of each block of a config.json without `layer_types`."""
    is_told, blocks = config["layer_types"] is not None, range(config["num_hidden_layers"])
    if family.window == "linear":
        interval = _number(config, "full_attention_interval")
        if not is_told and not 1 <= interval <= len(blocks):
            raise ValueError(f"full_attention_interval = {interval!r} is not supported with {len(blocks)} blocks")
        return ["full_attention" if not (block + 1) % max(interval, 1) else "linear_attention" for block in blocks]
    if family.window == "types":
        period = family.window_period
        if family.has_scalar and family.window_theta and PERIOD[0] in config:
            period = whole_above_zero(config, PERIOD[0])
        if family.ends_full and not is_told and len(blocks) % period:
            raise ValueError(f"layer_types is missing, and {period} does not divide num_hidden_layers = {len(blocks)}")
        return ["full_attention" if period and not (block + 1) % period else "sliding_attention" for block in blocks]
    has_first = family.window == "layers" or (family.window == "chosen" and _truth(config, "use_sliding_window"))
    first = _number(config, "max_window_layers") if has_first else 0 if family.window == "all" else len(blocks)
    return ["full_attention" if window is None or block < first else "sliding_attention" for block in blocks]


def _said(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return the fields of ModelSpec that a family's config.json says by themselves."""
    fields: dict[str, Any] = {}
    for name, key in family.keys.items():
        if isinstance(getattr(PLAIN, name), bool):
            fields[name] = _truth(config, key)
        elif name in CAPS and config[key] is None:
            fields[name] = 0.0
        elif name in GLOBAL_HEADS:
            fields[name] = _of_full_attention(config, name)
        elif isinstance(getattr(PLAIN, name), int):
            fields[name] = _whole(config, key)
        elif not 0 < _number(config, key) < 1e6:
            raise ValueError(f"{key} = {config[key]!r} is no number above 0")
        else:
            fields[name] = float(config[key])
    if family.has_blocks_without_rope:
        fields["no_rope_layer_interval"] = _no_rope_interval(config)
    return fields


def _with_global_heads(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config that says heads of full attention as published ones do, and not by block as in transformers 5.

    Raises ValueError when blocks of one type differ.
    """
    table, kinds = config.get("per_layer_config"), config.get("layer_types")
    if table is None:
        return config
    full = {str(block) for block, kind in enumerate(kinds or ()) if kind == "full_attention"}
    heads: object = next(iter(table.values()), {}) if isinstance(table, dict) else None
    usual = {"head_dim": config.get("head_dim"), "num_key_value_heads": config.get("num_key_value_heads")}
    is_by_type = isinstance(heads, dict) and table == dict.fromkeys(full if table else (), heads)
    if not isinstance(heads, dict) or not is_by_type or heads.keys() - usual.keys():
        raise ValueError(f"per_layer_config = {table!r} is not supported: it is not one for each full_attention")
    if (usual | heads)["num_key_value_heads"] != usual["num_key_value_heads"] and not config.get("attention_k_eq_v"):
        raise ValueError(f"per_layer_config = {table!r} is not supported without attention_k_eq_v")
    told = dict(zip(GLOBAL_HEADS, (usual | heads).values(), strict=True))
    return {key: value for key, value in config.items() if key != "per_layer_config"} | told


def _of_full_attention(config: dict[str, Any], name: str) -> int:
    """Return a size of heads in blocks of full attention; 0: it is that of the other blocks."""
    usual = config["head_dim" if name == "global_head_dim" else "num_key_value_heads"]
    is_told = config[name] is not None and (name == "global_head_dim" or config["attention_k_eq_v"])
    return 0 if not is_told or config[name] == usual else _whole(config, name)


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
