"""Reads PEFT's adapter_config.json as `[adapter]`. No torch here: `headway plan` reads it too."""

import re
from dataclasses import replace
from typing import Any, Final

from headway.stages.model.hugging_face import checkpoint_name
from headway.stages.spec import MLP_MATRICES, AdapterSpec, ModelSpec, adapted_names, matrix_names

_READ: Final = frozenset(
    {
        "bias",
        "exclude_modules",
        "init_lora_weights",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "peft_type",
        "r",
        "target_modules",
        "use_rslora",
    }
)
_WITHOUT_EFFECT: Final = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "inference_mode",
        "layers_pattern",  # models have one list of blocks
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
_ALTERING_STARTS: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to draw first adapters that also subtract them from the model's own weights."""
_MERGE: Final = "merge the adapters with PEFT's merge_and_unload(), and begin with the folder that you save then"
_OUTSIDE: Final = ("lm_head", "model.embed_tokens")
"""Modules beside the blocks that PEFT adapts if they are named."""
_MOST_SHOWN: Final = 120
"""Characters of a foreign value that a sentence quotes, so that the remedy after it is seen."""


def adapter_spec(config: dict[str, Any], model: ModelSpec) -> AdapterSpec:
    """Return what an adapter_config.json describes. Raises ValueError, naming key and value, for what is no LoRA."""
    if config.get("peft_type") != "LORA":
        raise ValueError(f"peft_type = {_shown(config.get('peft_type'))} is not supported; LORA is")
    if config.get("bias", "none") != "none":
        raise ValueError(f"bias = {_shown(config['bias'])} is not supported; {_MERGE}")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_ALTERING_STARTS):
        what = f"init_lora_weights = {_shown(start)} changed the weights of the model beside the adapters"
        raise ValueError(f"{what}; {_MERGE}")
    for key in sorted(config.keys() - _READ - _WITHOUT_EFFECT):
        if config[key]:
            raise ValueError(f"{key} = {_shown(config[key])} is not supported; {_MERGE}")
    rank, rslora = config.get("r"), config.get("use_rslora", False)
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"r = {_shown(rank)} is no whole number above 0")
    for key in ("lora_alpha", "lora_dropout"):
        if isinstance(config.get(key, 0.0), bool) or not isinstance(config.get(key, 0.0), int | float):
            raise ValueError(f"{key} = {_shown(config[key])} is no number")
    if not isinstance(rslora, bool):
        raise ValueError(f"use_rslora = {_shown(rslora)} is neither true nor false")
    return AdapterSpec(
        rank=rank,
        alpha=float(config.get("lora_alpha", 8)),  # PEFT's own
        rslora=rslora,
        targets=_targets(config, model),
        dropout=float(config.get("lora_dropout", 0.0)),
    )


def _targets(config: dict[str, Any], model: ModelSpec) -> tuple[str, ...]:
    """Return the adapted matrices in the module's order; empty: those that a job adapts without `targets`."""
    named, without = config.get("target_modules"), adapted_names(replace(model, adapter=AdapterSpec(rank=1)))
    if isinstance(named, str) and named.lower() == "all-linear":
        return ()
    for module in _OUTSIDE:
        if _is_named(module, named):
            raise ValueError(f"target_modules has {module!r}, and adapters lie beside the blocks' matrices; {_MERGE}")
    found: dict[str, set[bool]] = {name: set() for name in matrix_names(model)}
    for block in range(model.num_hidden_layers):
        for name in matrix_names(model, block):
            found[name].add(_is_adapted(_module(name, block, model), block, config))
    for name, answers in found.items():
        if len(answers) > 1:
            raise ValueError(f"{name} has adapters in some blocks and not in others; {_MERGE}")
    targets = tuple(name for name, answers in found.items() if True in answers)
    if not targets:
        known = ", ".join(_module(name, 0, model).rpartition(".")[2] for name in found)
        raise ValueError(f"target_modules = {_shown(named)} names no matrix of the blocks; there are {known}")
    return () if targets == without else targets


def _is_adapted(module: str, block: int, config: dict[str, Any]) -> bool:
    """Return whether PEFT puts an adapter beside a module of a block."""
    named, chosen = config.get("target_modules"), config.get("layers_to_transform")
    blocks = chosen if isinstance(chosen, list) else [] if chosen is None else [chosen]
    if isinstance(named, list) and blocks and block not in blocks:
        return False
    return _is_named(module, named) and not _is_named(module, config.get("exclude_modules"))


def _is_named(module: str, names: object) -> bool:
    """Return whether names of PEFT have a module: ends of its whole name, or a pattern for it. Raises ValueError."""
    if isinstance(names, str):
        try:
            places = (module, module.replace("model.", "model.language_model.", 1))  # also beside a model of pictures
            return any(re.fullmatch(names, place) for place in places)
        except re.error as error:
            raise ValueError(f"{_shown(names)} is no pattern of modules: {error}") from error
    if names is None:
        return False
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{_shown(names)} is no list of modules, such as q_proj")
    return any(f".{module}".endswith(f".{name}") for name in names)


def _module(matrix: str, block: int, model: ModelSpec) -> str:
    """Return a matrix's module in the family's model; for an expert's, that of the first one."""
    part = "linear_attn" if matrix.startswith("in_proj") or matrix == "out_proj" else "self_attn"
    if matrix in MLP_MATRICES:
        part = "mlp.experts.0" if model.has_experts else "mlp"
    return checkpoint_name(f"block.{block}", f"{part}.{matrix}.weight", model).removesuffix(".weight")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
