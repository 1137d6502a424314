"""Reads PEFT's adapter_config.json as `[adapter]`. No torch here: `headway plan` reads it too."""

from typing import Any, Final

from headway.stages.spec import AdapterSpec, ModelSpec, matrix_names

_READ: Final = frozenset(
    {"bias", "init_lora_weights", "lora_alpha", "lora_dropout", "peft_type", "r", "target_modules", "use_rslora"}
)
_WITHOUT_EFFECT: Final = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "inference_mode",
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


def adapter_spec(config: dict[str, Any], model: ModelSpec) -> AdapterSpec:
    """Return what an adapter_config.json describes. Raises ValueError, naming key and value, for what is no LoRA."""
    if config.get("peft_type") != "LORA":
        raise ValueError(f"peft_type = {config.get('peft_type')!r} is not supported; LORA is")
    if config.get("bias", "none") != "none":
        raise ValueError(f"bias = {config['bias']!r} is not supported; none is")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_ALTERING_STARTS):
        raise ValueError(f"init_lora_weights = {start!r} changed the weights of the model beside the adapters")
    for key in sorted(config.keys() - _READ - _WITHOUT_EFFECT):
        if config[key]:
            raise ValueError(f"{key} = {config[key]!r} is not supported")
    rank, rslora = config.get("r"), config.get("use_rslora", False)
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"r = {rank!r} is no whole number above 0")
    for key in ("lora_alpha", "lora_dropout"):
        if isinstance(config.get(key, 0.0), bool) or not isinstance(config.get(key, 0.0), int | float):
            raise ValueError(f"{key} = {config[key]!r} is no number")
    if not isinstance(rslora, bool):
        raise ValueError(f"use_rslora = {rslora!r} is neither true nor false")
    return AdapterSpec(
        rank=rank,
        alpha=float(config.get("lora_alpha", 8)),  # PEFT's own
        rslora=rslora,
        targets=_targets(config, model),
        dropout=float(config.get("lora_dropout", 0.0)),
    )


def _targets(config: dict[str, Any], model: ModelSpec) -> tuple[str, ...]:
    """Return the adapted matrices in the module's order; empty: all."""
    named, known = config.get("target_modules"), matrix_names(model)
    if named == "all-linear":
        return ()
    if not isinstance(named, list) or not named or not all(isinstance(name, str) for name in named):
        raise ValueError(f"target_modules = {named!r} is no list of matrices, such as {', '.join(known[:3])}")
    if odd := sorted(set(named) - set(known)):
        raise ValueError(
            f"target_modules has {odd[0]!r}, which is no matrix of the blocks; there are {', '.join(known)}"
        )
    return () if set(named) == set(known) else tuple(name for name in known if name in named)
