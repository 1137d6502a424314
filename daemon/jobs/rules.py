"""Refuses impossible jobs, and jobs that need unbuilt features: each rule with its sentence."""

import re
from dataclasses import fields
from typing import Any

from headway.daemon.addresses import JOB_NAME_RULE, is_job_name
from headway.daemon.errors import ConfigError
from headway.daemon.jobs.bounds import (
    ABOVE_ZERO,
    AT_LEAST,
    AT_MOST,
    MAX_PARAMETERS,
    MAX_SITES,
    MAX_SOURCES,
    MAX_TEXT,
    MAX_TOKENS_PER_MICROBATCH,
    WEIGHT_RANGE,
)
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.jobs.places import is_url, why_no_place, why_no_url
from headway.daemon.jobs.typed_toml import nearest
from headway.optim.spec import GroupSpec
from headway.stages.links.codec import is_rounding
from headway.stages.model.hugging_face import family_of
from headway.stages.model.rope_config import ROPE_MAY_BE_ZERO, ROPE_SETTINGS
from headway.stages.spec import LINEAR_SIZES, AdapterSpec, ModelSpec, TrainSpec, matrix_names

BYTE_VOCABULARY = 256
"""Number of tokens of the built-in source, which is bytes."""

_SHA256 = re.compile(r"[0-9a-f]{64}")

MAX_TARGETS = 16
"""Names of `[adapter] targets` that are looked at: a block has fewer matrices, and none twice."""


def check_job(spec: JobSpec, source: str) -> None:
    """Raise ConfigError at `source:section.key` for the first rule that the job breaks."""
    _check_bounds(spec, source)
    _check_data(spec, source)
    _check_texts(spec, source)
    _check_name(spec, source)
    _check_model(spec.model, source)
    is_of_bytes = any(part.source == "python-stdlib" for part in spec.data.parts)
    if is_of_bytes and spec.model.vocab_size < BYTE_VOCABULARY:
        what = f"{spec.model.vocab_size} is too small for data of {BYTE_VOCABULARY} tokens; set it to {BYTE_VOCABULARY}"
        if spec.origin.url:
            what = f"its data of {BYTE_VOCABULARY} tokens is not of this model; name other data"
        _refuse(source, "data.source" if spec.origin.url else "model.vocab_size", what)
    _check_train(spec, source)
    for group in ("matrices", "rest"):
        _check_group(getattr(spec.optim, group), group, source)
    _check_placement(spec, source)


def check_model(model: ModelSpec, config: str) -> None:
    """Raise ConfigError at `config:key` for the first rule that a model breaks, whatever trains it."""
    spec = JobSpec(job=JobSection(name=""), model=model)
    try:
        _check_bounds(spec, config, "model.")
        _check_model(model, config)
    except ConfigError as error:
        raise ConfigError(error.what, error.where.replace(":model.", ":")) from error


def _check_bounds(spec: JobSpec, source: str, section: str = "") -> None:
    for key, least in AT_LEAST.items():
        if key.startswith(section) and not (value := _value(spec, key)) >= least:  # NaN is refused too
            _refuse(source, key, f"must be at least {least:g}, is {_number(value)}")
    for key in ABOVE_ZERO:
        if key.startswith(section) and not (value := _value(spec, key)) > 0:
            _refuse(source, key, f"must be above 0, is {value}")
    for key, (most, why) in AT_MOST.items():
        if key.startswith(section) and not (value := _value(spec, key)) <= most:
            _refuse(source, key, f"must be at most {most:.17g}, is {_number(value)}: {why}")


def _check_name(spec: JobSpec, source: str) -> None:
    name = spec.job.name
    if not is_job_name(name):
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower())[:63].strip("-")
        hint = f"; {slug!r} would do" if slug else ""
        _refuse(source, "job.name", f"{_short(name)} is not {JOB_NAME_RULE}{hint}")


def _check_data(spec: JobSpec, source: str) -> None:
    """Check each source's text, weight and checksum, and that several sources are drawn by weight."""
    data = spec.data
    if len(data.sources) > MAX_SOURCES:
        _refuse(source, "data.sources", f"names {len(data.sources)} sources; at most {MAX_SOURCES} are allowed")
    for key, part, weight in zip(data.part_keys, data.parts, data.weights, strict=True):
        _check_text(source, f"{key}.source", part.source)
        if not part.source:
            _refuse(source, f"{key}.source", "is empty; set it to python-stdlib or a folder of `headway data prepare`")
        if is_url(part.source) and (why := why_no_url(part.source)):
            _refuse(source, f"{key}.source", why)
        least, most = WEIGHT_RANGE
        if not least <= weight <= most:
            _refuse(source, f"{key}.weight", f"must be from {least:g} to {most:g}, is {weight:g}")
        _check_sha256(source, f"{key}.sha256", part.sha256)
    _check_sha256(source, "data.sha256", data.sha256)
    if data.sources and (spec.train.epochs or spec.train.data_order == "epochs"):
        key = "train.epochs" if spec.train.epochs else "train.data_order"
        what = "several sources are drawn by weight, and an epoch would have each row once"
        _refuse(source, key, f"{what}; leave it out, or make one folder of all documents with `headway data prepare`")


def _check_sha256(source: str, key: str, text: str) -> None:
    if text and _SHA256.fullmatch(text) is None:
        _refuse(source, key, f"{_short(text)} is not a SHA-256, which has 64 digits of 0-9 and a-f")


def _check_text(source: str, key: str, text: str) -> None:
    if len(text) > MAX_TEXT:
        _refuse(source, key, f"has {len(text)} characters; at most {MAX_TEXT} are allowed")
    if not text.isprintable():
        _refuse(source, key, f"{_short(text)} has a character that cannot be printed; leave it out")


def _check_texts(spec: JobSpec, source: str) -> None:
    """Check texts, which become paths and lines on terminals: they have a maximum and no control characters."""
    texts = {"fault.checkpoint_dir": spec.fault.checkpoint_dir, "model.from": spec.origin.url}
    texts["adapter_config.json"] = spec.origin.adapter
    texts |= {f"placement.sites[{index}]": site for index, site in enumerate(spec.placement.sites[: MAX_SITES + 1])}
    for key, text in texts.items():
        _check_text(source, key, text)
    if len(spec.placement.sites) > MAX_SITES:
        _refuse(source, "placement.sites", f"names {len(spec.placement.sites)} sites; at most {MAX_SITES} are allowed")
    if "::" in spec.origin.url:
        _refuse(
            source, "model.from", f"{_short(spec.origin.url)} chains file systems with `::`; name the folder itself"
        )


def _check_model(model: ModelSpec, source: str) -> None:
    heads = model.num_attention_heads
    if not model.head_dim and model.hidden_size % heads:
        _refuse(
            source,
            "model.num_attention_heads",
            f"{heads} heads do not divide hidden_size {model.hidden_size}; choose a divisor, or set head_dim",
        )
    if model.head_width % 2:
        key, what = "model.head_dim", f"a head of {model.head_width} is odd"
        if not model.head_dim:
            key = "model.hidden_size"
            what = f"hidden_size {model.hidden_size} over {heads} heads gives a head of {model.head_width}"
        _refuse(source, key, f"{what}; rotary positions need an even one")
    for name in ("num_key_value_heads", "num_global_key_value_heads"):
        if heads % (number := getattr(model, name) or heads):
            what = f"{number} key/value heads do not divide num_attention_heads {heads}; choose a divisor"
            _refuse(source, f"model.{name}", what)
    if model.global_head_dim % 2:
        what = f"a head of {model.global_head_dim} is odd; rotary positions need an even one"
        _refuse(source, "model.global_head_dim", what)
    _check_options(model, source)
    _check_adapter(model, source)
    if (number := num_parameters(model)) > MAX_PARAMETERS:
        _refuse(
            source,
            "model",
            f"asks for {number:.2g} parameters; at most {MAX_PARAMETERS:.0e} are planned for. Make it narrower",
        )


def _check_options(model: ModelSpec, source: str) -> None:
    """Check what belongs together, and that transformers can open the trained model."""
    rope, used = model.rope_scaling, ROPE_SETTINGS[model.rope_scaling.rope_type]
    for name in (field.name for field in fields(rope) if field.name != "rope_type"):
        is_set = bool(getattr(rope, name))
        if is_set and name not in used:
            _refuse(
                source, f"model.rope_scaling.{name}", f'is not used with rope_type = "{rope.rope_type}"; leave it out'
            )
        if not is_set and name in used and name not in ROPE_MAY_BE_ZERO:
            _refuse(source, f"model.rope_scaling.{name}", f'must be above 0 with rope_type = "{rope.rope_type}"')
    if rope.rope_type == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        _refuse(source, "model.rope_scaling.high_freq_factor", "must be above low_freq_factor")
    if model.rotary_width < 2 or model.rotary_width % 2:
        what = f"turns {model.rotary_width} of the {model.head_width} values of a head; they turn in pairs"
        _refuse(source, "model.partial_rotary_factor", what)
    if model.hidden_act != "silu" and model.has_experts:
        _refuse(source, "model.hidden_act", "is silu in experts; leave it out")
    if model.qk_norm_over != "head" and not model.qk_norm:
        _refuse(source, "model.qk_norm_over", "is not used without qk_norm; leave it out")
    if model.window_rope_theta and not model.sliding_window:
        _refuse(source, "model.window_rope_theta", "is not used without sliding_window; leave it out")
    for name in ("short_factor", "long_factor"):
        if (factors := getattr(rope, name)) and (2 * len(factors) != model.rotary_width or min(factors) <= 0):
            what = f"must be {model.rotary_width // 2} numbers above 0, one for each pair that turns"
            _refuse(source, f"model.rope_scaling.{name}", what)
    if rope.rope_type == "dynamic" and model.head_width < 4:
        _refuse(source, "model.rope_scaling.rope_type", "dynamic needs heads wider than 2")
    if model.num_global_key_value_heads and not model.attention_k_eq_v:
        _refuse(source, "model.num_global_key_value_heads", "is not used without attention_k_eq_v; leave it out")
    if model.first_window_layer and not model.sliding_window:
        _refuse(source, "model.first_window_layer", "is not used without sliding_window; leave it out")
    _check_types(model, source)
    _check_linear_attention(model, source)
    _check_experts(model, source)
    try:
        family_of(model)
    except ValueError as error:
        _refuse(source, "model", str(error))


def _check_types(model: ModelSpec, source: str) -> None:
    """Check that the blocks' types are said once, and that a window is there for those that have one."""
    types = model.layer_types
    if not types:
        return
    if len(types) > model.num_hidden_layers:
        _refuse(source, "model.layer_types", f"names {len(types)} blocks of {model.num_hidden_layers}")
    if model.first_window_layer:
        _refuse(source, "model.first_window_layer", "is not used with layer_types; leave it out")
    if bool(model.sliding_window) != ("sliding_attention" in types):
        _refuse(source, "model.layer_types", "names sliding_attention if there is a sliding_window, and not otherwise")


def _check_linear_attention(model: ModelSpec, source: str) -> None:
    """Check that the keys of linear attention are there together, or not at all."""
    for name in LINEAR_SIZES:
        is_set = bool(getattr(model, name))
        if is_set and not model.has_linear_attention:
            _refuse(source, f"model.{name}", "is not used without linear_attention in layer_types; leave it out")
        if not is_set and model.has_linear_attention:
            _refuse(source, f"model.{name}", "must be above 0 with linear_attention in layer_types")
    if model.has_linear_attention and model.linear_num_value_heads % model.linear_num_key_heads:
        what = f"{model.linear_num_key_heads} heads do not divide the {model.linear_num_value_heads} value heads"
        _refuse(source, "model.linear_num_key_heads", f"{what}; choose a divisor")


def _check_experts(model: ModelSpec, source: str) -> None:
    """Check that the keys of a mixture of experts are there together, or not at all."""
    plain = ModelSpec()
    others = ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "router_scoring", "router_bias")
    if not model.has_experts:
        of_experts = ("expert_bias", "swiglu_limit", "swiglu_alpha")
        for name in (*others, "num_shared_experts", "shared_expert_gate", "routed_scaling_factor", *of_experts):
            if getattr(model, name) != getattr(plain, name):
                _refuse(source, f"model.{name}", "is not used without num_experts; leave it out")
        return
    if not 1 <= model.num_experts_per_tok <= model.num_experts:
        what = f"{model.num_experts_per_tok} experts a token of {model.num_experts}; choose 1 to {model.num_experts}"
        _refuse(source, "model.num_experts_per_tok", what)
    if model.shared_expert_gate and not model.num_shared_experts:
        _refuse(source, "model.shared_expert_gate", "is not used without num_shared_experts; leave it out")
    if bool(model.swiglu_limit) != bool(model.swiglu_alpha):
        _refuse(source, "model.swiglu_limit", "is used with swiglu_alpha; set both, or leave both out")
    if not model.moe_intermediate_size:
        _refuse(source, "model.moe_intermediate_size", "must be above 0 with num_experts")


def _check_adapter(model: ModelSpec, source: str) -> None:
    """Check that each target is a matrix of the blocks, once, and that an adapter is there to have it."""
    adapter = model.adapter
    if not adapter.rank:
        if adapter != AdapterSpec():
            _refuse(source, "adapter.rank", "is 0, so there is no adapter; set it, or leave the other keys out")
        return
    known = matrix_names(model)
    for index, name in enumerate(adapter.targets[:MAX_TARGETS]):
        key = f"adapter.targets[{index}]"
        if name not in known:
            _refuse(source, key, _why_no_target(name, known))
        if name in adapter.targets[:index]:
            _refuse(source, key, f"{name} is named twice")
    if model.has_experts and {*adapter.targets} & {"gate_proj", "up_proj", "down_proj"}:
        # What PEFT cannot say of experts, whose matrices transformers has joined.
        if model.expert_bias:
            what = "PEFT has no adapter beside experts that lie in one tensor, transposed"
            _refuse(source, "adapter.targets", f"{what}; name matrices of attention alone")
        if ("gate_proj" in adapter.targets) != ("up_proj" in adapter.targets):
            _refuse(source, "adapter.targets", "gate_proj and up_proj of experts are one matrix for PEFT; name both")
        if model.num_shared_experts:
            what = "PEFT drops the adapters of shared experts, or of the others; name matrices of attention alone"
            _refuse(source, "adapter.targets", what)
        if adapter.rslora:
            what = "PEFT scales gate_proj and up_proj of experts by another factor; write alpha times √rank as alpha"
            _refuse(source, "adapter.rslora", what)
        if adapter.dropout:
            _refuse(source, "adapter.dropout", "PEFT has none beside experts; set it to 0, or name attention alone")


def _why_no_target(name: str, known: tuple[str, ...]) -> str:
    if name == "all-linear":  # PEFT's word
        return f"{name} is what an empty list means; leave targets out"
    what = f"{_short(name)} is no matrix of this model's blocks"
    last = name.rpartition(".")[2]
    hint = f"; did you mean `{last}`?" if last in known else nearest(name, list(known))
    return what + (hint or f"; there are {', '.join(known)}")


def num_parameters(model: ModelSpec) -> int:
    """Return the parameters of the whole model without biases and heads' norms, counted without building it."""
    width, inner = model.hidden_size, model.intermediate_size
    of_mlp = 3 * width * inner
    if model.has_experts:
        num_inner = (model.num_experts + model.num_shared_experts) * model.moe_intermediate_size
        of_mlp = 3 * width * num_inner + width * model.num_experts
    linear = width * (2 * model.linear_key_width + 3 * model.linear_value_width + 2 * model.linear_num_value_heads)
    num_blocks = model.num_hidden_layers
    mixing = 0
    for block in range(num_blocks):
        if model.type_of(block) == "linear_attention":
            mixing += linear
            continue
        queries = (2 + model.attn_output_gate) * model.num_attention_heads
        keys = (2 - model.has_values_of_keys(block)) * model.key_value_heads_of(block)
        mixing += width * model.head_width_of(block) * (queries + keys)
    of_norms = (4 if model.norm_placement == "both" else 2) * width
    return mixing + num_blocks * (of_mlp + of_norms) + 2 * model.vocab_size * width + width


def _check_train(spec: JobSpec, source: str) -> None:
    train = spec.train
    for name in ("router_balance_loss", "router_z_loss"):
        if getattr(train, name) and not spec.model.has_experts:
            _refuse(source, f"train.{name}", "is not used without model.num_experts; leave it out")
    if train.compile and spec.model.has_experts:
        _refuse(source, "train.compile", "true is refused with experts: how many tokens each gets differs every time")
    _check_objective(spec, source)
    for name in ("quantize", "dropout"):
        if train.compile and getattr(spec.model.adapter, name) != getattr(AdapterSpec(), name):
            _refuse(source, "train.compile", f"true is refused with [adapter] {name}; leave one of them out")
    if train.reduction_groups > train.microbatches:
        _refuse(
            source,
            "train.reduction_groups",
            f"{train.reduction_groups} groups cannot be filled by {train.microbatches} microbatches; "
            f"set it to {train.microbatches} or less",
        )
    if train.eval_microbatches > train.microbatches:
        _refuse(
            source,
            "train.eval_microbatches",
            f"{train.eval_microbatches} held-out microbatches are computed beside {train.microbatches} microbatches, "
            f"one beside each; set it to {train.microbatches} or less, or to 0 for as many",
        )
    if train.eval_patience and not train.eval_every:
        _refuse(source, "train.eval_patience", "needs evaluations; set eval_every, or leave it out")
    if train.eval_min_delta and not train.eval_patience:
        _refuse(source, "train.eval_min_delta", "is not used without eval_patience; leave it out")
    if (number := train.microbatch_size * train.sequence_length) > MAX_TOKENS_PER_MICROBATCH:
        _refuse(
            source,
            "train.microbatch_size",
            f"{train.microbatch_size} sequences of {train.sequence_length} tokens are {number} in one microbatch; "
            f"at most {MAX_TOKENS_PER_MICROBATCH} are allowed. Take more microbatches instead",
        )
    if train.recompute == "attention" and train.compile:
        _refuse(
            source,
            "train.recompute",
            "compiled blocks are computed again as a whole; set it to block, or compile to false",
        )
    if train.loss_chunk and train.compile:
        _refuse(source, "train.loss_chunk", "a compiled head has all logits at once; set it to 0, or compile to false")
    if train.exactness == "required" and is_rounding(train):
        _refuse(
            source,
            "train.wire",
            f'"{train.wire}" makes the bits depend on the cuts, which exactness = "required" does not allow; '
            'set it to "none"',
        )
    if why := why_no_place(spec.fault.checkpoint_dir):
        _refuse(source, "fault.checkpoint_dir", why)


def _check_objective(spec: JobSpec, source: str) -> None:
    """Check that preferences are learned beside a frozen model, and that nothing else is in the loss."""
    train = spec.train
    if not train.learns_preferences:
        if train.dpo_beta != TrainSpec().dpo_beta:
            _refuse(source, "train.dpo_beta", 'is not used without objective = "dpo"; leave it out')
        return
    if not spec.model.has_adapter:
        what = '"dpo" compares with the frozen model, so it needs [adapter] with a rank'
        _refuse(source, "train.objective", what)
    for name in ("router_balance_loss", "router_z_loss"):
        if getattr(train, name):
            _refuse(source, f"train.{name}", 'is no part of objective = "dpo"; leave it out')
    if train.compile:
        _refuse(source, "train.compile", 'true is refused with objective = "dpo", which computes each block twice')
    for name, value in (("loss_mask", train.loss_mask), ("documents", train.documents)):
        if value not in ("auto", "data", "separate"):
            _refuse(source, f"train.{name}", f'is "{value}", and pairs are documents of packed rows; leave it out')


def _check_group(group: GroupSpec, name: str, source: str) -> None:
    key = f"optim.{name}"
    if name == "rest" and group.name == "muon":
        _refuse(
            source,
            f"{key}.name",
            "muon takes 2-D weights inside the blocks only; choose adamw, lion or sgd for the rest",
        )
    if not 0 <= group.momentum < 1:
        _refuse(source, f"{key}.momentum", f"must be at least 0 and below 1, is {group.momentum}")
    for beta in group.betas:
        if not 0 <= beta < 1:
            _refuse(source, f"{key}.betas", f"each must be at least 0 and below 1, got {beta}")
    if group.name == "sgd" and group.nesterov and group.momentum == 0:
        _refuse(source, f"{key}.nesterov", "needs a momentum above 0; set nesterov = false")
    if group.name == "sgd" and group.momentum_dtype != "float32" and group.momentum == 0:
        _refuse(source, f"{key}.momentum_dtype", "sgd has no momentum here; leave it out")


def _check_placement(spec: JobSpec, source: str) -> None:
    placement = spec.placement
    if placement.max_nodes and placement.max_nodes < placement.min_nodes:
        _refuse(
            source,
            "placement.max_nodes",
            f"{placement.max_nodes} is below min_nodes {placement.min_nodes}; 0 means no limit",
        )
    if placement.min_nodes > len(spec.layers):
        _refuse(
            source,
            "placement.min_nodes",
            f"{placement.min_nodes} nodes cannot share {len(spec.layers)} layers; set it to {len(spec.layers)} or less",
        )
    if not all(placement.sites):
        _refuse(source, "placement.sites", "a site's name is empty")
    _check_replicas(spec, source)


def _check_replicas(spec: JobSpec, source: str) -> None:
    key, replicas, groups = "placement.replicas", spec.placement.replicas, spec.train.reduction_groups
    most = min(len(spec.layers), spec.train.microbatches)
    if len(replicas) > most:
        what = f"{len(spec.layers)} layers and {spec.train.microbatches} microbatches allow {most} stages at most"
        _refuse(source, key, f"names {len(replicas)} stages, but {what}")
    for number in replicas:
        if number < 1:
            _refuse(source, key, f"each stage has at least 1 worker, not {number}")
        if number > groups:
            _refuse(
                source,
                key,
                f"{number} replicas cannot share {groups} reduction group{'s' * (groups != 1)}; "
                f"set train.reduction_groups to {number} or more",
            )


def _value(spec: JobSpec, key: str) -> Any:
    value: Any = spec
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _number(value: float) -> str:
    """Return a number as it was given, unless it has too many digits to read."""
    is_readable = isinstance(value, float) or abs(value) < 10**30
    return str(value) if is_readable else f"a number of {int(value).bit_length()} bits"


def _short(text: str) -> str:
    shown = repr(text[:60])
    return shown if len(text) <= 60 else f"{shown}…"


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


def _refuse(source: str, key: str, what: str) -> None:
    raise ConfigError(what, f"{source}:{key.replace('model.adapter.', 'adapter.')}")
