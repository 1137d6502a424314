"""Refuses impossible jobs, and jobs that need unbuilt features: each rule with its sentence.

A fault is the key that breaks a rule, and what is wrong with it. The rules of one part look at that part in order, and
the first fault is told.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import chain
from typing import Annotated, Any, Final, cast, get_args, get_origin, get_type_hints

from headway.daemon.base.addresses import JOB_NAME_RULE, is_job_name
from headway.daemon.base.errors import ConfigError
from headway.daemon.base.places import is_url, why_no_place, why_no_url
from headway.daemon.base.terminal import counted
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.jobs.typed_toml import nearest
from headway.optim.spec import OPTIMIZERS, GroupSpec
from headway.stages.data.source_choice import BUILT_IN_SOURCES, STDLIB
from headway.stages.links.codec import is_rounding
from headway.stages.model.config_parts import ROPE_MAY_BE_ZERO, ROPE_SETTINGS
from headway.stages.model.hugging_face import family_of
from headway.stages.plugin_names import is_import_path
from headway.stages.spec import ABOVE_0, AUTO, BLOCKS, LINEAR_SIZES, LOSSES, AdapterSpec, ModelSpec, matrix_names

BYTE_VOCABULARY: Final = 256
"""Number of tokens of the built-in source, which is bytes."""
MAX_PARAMETERS: Final = 10**13
"""Maximum parameters of a whole model: ten trillion."""
MAX_TOKENS_PER_MICROBATCH: Final = 2**24
MAX_TEXT: Final = 1024
"""Maximum characters of a path, a URL or a site's name."""
MAX_SOURCES: Final = 64
"""Maximum number of data sources: a row compares its number with all of them."""
WEIGHT_RANGE: Final = (1e-6, 1e6)
"""Smallest and largest weight of a source: fewer rows than one in a million are a mistake."""
MAX_SITES: Final = 1000
MAX_TARGETS: Final = 16
"""Names of `[adapter] targets` that are looked at: a block has fewer matrices, and none twice."""
OF_EXPERTS: Final = (
    *("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "router_scoring", "router_bias"),
    *("num_shared_experts", "shared_expert_gate", "routed_scaling_factor"),
    *("expert_bias", "swiglu_limit", "swiglu_alpha"),
)
_SHA256: Final = re.compile(r"[0-9a-f]{64}")

Faults = Iterator[tuple[str, str]]
WITH_DEFAULTS: Final = ("model.", "train.", "optim.", "fault.", "placement.")


def check_job(spec: JobSpec, source: str, *, named: Collection[str] | None = None) -> None:
    """Raise ConfigError at `source:section.key` for the first rule that the job breaks.

    named: keys that the file names: of another the error says that it has its default; None: not known.
    """
    for key, what in _faults(spec):
        if named is not None and key.startswith(WITH_DEFAULTS) and key not in named:
            what += " (the file leaves this key at its default)"
        raise ConfigError(what, f"{source}:{key.replace('model.adapter.', 'adapter.')}")


def check_model(model: ModelSpec, config: str) -> None:
    """Raise ConfigError at `config:key` for the first rule that a model breaks, whatever trains it."""
    spec = JobSpec(job=JobSection(name=""), model=model)
    of_bounds = (fault for fault in _bound_faults(spec) if fault[0].startswith("model."))
    for key, what in chain(of_bounds, _model_faults(model)):  # the rules count blocks, so the bounds come first
        raise ConfigError(what, f"{config}:{key.replace('model.adapter.', 'adapter.').removeprefix('model.')}")


def _faults(spec: JobSpec) -> Faults:
    yield from _bound_faults(spec)
    yield from _data_faults(spec)
    yield from _text_faults(spec)
    yield from _name_faults(spec.job.name)
    yield from _model_faults(spec.model)
    yield from _vocabulary_faults(spec)
    yield from _train_faults(spec)
    for group in ("matrices", "rest"):
        yield from _group_faults(getattr(spec.optim, group), f"optim.{group}")
    yield from _placement_faults(spec)
    yield from _plugin_faults(spec)


@cache
def bounds_of(kind: type, section: str = "") -> dict[str, tuple[float | str, float, str]]:
    """Return the least and the largest number, and why it is no larger, that the fields of a dataclass say, by key."""
    found: dict[str, tuple[float | str, float, str]] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if is_dataclass(hint):
            found |= bounds_of(cast(type, hint), f"{section}{name}.")
        elif get_origin(hint) is Annotated:
            found[f"{section}{name}"] = get_args(hint)[1]
    return found


def _bound_faults(spec: JobSpec) -> Faults:
    for key, (least, most, why) in bounds_of(JobSpec).items():
        value = spec.value_of(key)
        if least == ABOVE_0:
            if not value > 0:  # NaN is refused too
                yield key, f"must be above 0, is {value}"
        elif not value >= least:
            yield key, f"must be at least {least:g}, is {_number(value)}"
        if not value <= most:
            yield key, f"must be at most {most:.17g}, is {_number(value)}: {why}"


def _name_faults(name: str) -> Faults:
    if not is_job_name(name):
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower())[:63].strip("-")
        hint = f"; {slug!r} would do" if slug else ""
        yield "job.name", f"{_short(name)} is not {JOB_NAME_RULE}{hint}"


def _data_faults(spec: JobSpec) -> Faults:
    """Check each source's text, weight and checksum, and that several sources are drawn by weight."""
    data, (least, most) = spec.data, WEIGHT_RANGE
    if len(data.sources) > MAX_SOURCES:
        yield "data.sources", f"names {len(data.sources)} sources; at most {MAX_SOURCES} are allowed"
    for key, part, weight in zip(data.part_keys, data.parts, data.weights, strict=True):
        yield from _faults_of_text(f"{key}.source", part.source)
        if not part.source:
            yield f"{key}.source", f"is empty; set it to {STDLIB} or a folder of `headway data prepare`"
        if is_url(part.source) and (why := why_no_url(part.source)):
            yield f"{key}.source", why
        if not least <= weight <= most:
            yield f"{key}.weight", f"must be from {least:g} to {most:g}, is {weight:g}"
        yield from _faults_of_sha256(f"{key}.sha256", part.sha256)
        if data.sources and is_import_path(part.source):
            yield f"{key}.source", f"{part.source} is a plug-in, which is a job's only source: name it in [data]"
    if data.settings and not is_import_path(data.source):
        yield "data.settings", f"is not used by {data.source or 'several sources'}; leave it out"
    yield from _faults_of_sha256("data.sha256", data.sha256)
    if data.sources and (spec.train.epochs or spec.train.data_order == "epochs"):
        key = "train.epochs" if spec.train.epochs else "train.data_order"
        what = "several sources are drawn by weight, and an epoch would have each row once"
        yield key, f"{what}; leave it out, or make one folder of all documents with `headway data prepare`"


def is_sha256(text: str) -> bool:
    """Return whether a text is a SHA-256."""
    return _SHA256.fullmatch(text) is not None


def _faults_of_sha256(key: str, text: str) -> Faults:
    if text and not is_sha256(text):
        yield key, f"{_short(text)} is not a SHA-256, which has 64 digits of 0-9 and a-f"


def _faults_of_text(key: str, text: str) -> Faults:
    """Check a text that becomes a path or a line on a terminal."""
    if len(text) > MAX_TEXT:
        yield key, f"has {len(text)} characters; at most {MAX_TEXT} are allowed"
    if not text.isprintable():
        yield key, f"{_short(text)} has a character that cannot be printed; leave it out"


def _text_faults(spec: JobSpec) -> Faults:
    yield from _faults_of_text("fault.checkpoint_dir", spec.fault.checkpoint_dir)
    yield from _faults_of_text("model.from", spec.origin.url)
    yield from _faults_of_text("adapter_config.json", spec.origin.adapter)
    for index, site in enumerate(spec.placement.sites[: MAX_SITES + 1]):
        yield from _faults_of_text(f"placement.sites[{index}]", site)
    if (number := len(spec.placement.sites)) > MAX_SITES:
        yield "placement.sites", f"names {number} sites; at most {MAX_SITES} are allowed"
    if "::" in spec.origin.url:
        yield "model.from", f"{_short(spec.origin.url)} chains file systems with `::`; name the folder itself"


def _vocabulary_faults(spec: JobSpec) -> Faults:
    is_of_bytes = any(part.source in BUILT_IN_SOURCES for part in spec.data.parts)
    if not is_of_bytes or spec.model.vocab_size >= BYTE_VOCABULARY:
        return
    if spec.origin.url:
        yield "data.source", f"its data of {BYTE_VOCABULARY} tokens is not of this model; name other data"
    what = f"{spec.model.vocab_size} is too small for data of {BYTE_VOCABULARY} tokens; set it to {BYTE_VOCABULARY}"
    yield "model.vocab_size", what


def _unused(part: Any, section: str, needed: str, *names: str) -> Faults:
    """Refuse settings that differ from their defaults and would have no effect without another."""
    plain = {item.name: item.default for item in fields(part)}
    for name in names:
        if getattr(part, name) != plain[name]:
            yield f"{section}.{name}", f"is not used without {needed}; leave it out"


def _model_faults(model: ModelSpec) -> Faults:
    if model.has_own_block:
        yield from _faults_of_name("model.block", model.block, BLOCKS)
        if model.has_adapter:
            yield "adapter.rank", "is refused with a block of the job's own; leave [adapter] out"
        return
    if model.block_settings:
        yield "model.block_settings", f"is not used by the block {model.block}; leave it out"
    heads = model.num_attention_heads
    if not model.head_dim and model.hidden_size % heads:
        what = f"{heads} heads do not divide hidden_size {model.hidden_size}; choose a divisor, or set head_dim"
        yield "model.num_attention_heads", what
    if model.head_width % 2:
        key, what = "model.head_dim", f"a head of {model.head_width} is odd"
        if not model.head_dim:
            key = "model.hidden_size"
            what = f"hidden_size {model.hidden_size} over {heads} heads gives a head of {model.head_width}"
        yield key, f"{what}; rotary positions need an even one"
    for name in ("num_key_value_heads", "num_global_key_value_heads"):
        if heads % (number := getattr(model, name) or heads):
            what = f"{number} key/value heads do not divide num_attention_heads {heads}; choose a divisor"
            yield f"model.{name}", what
    if model.global_head_dim % 2:
        yield "model.global_head_dim", f"a head of {model.global_head_dim} is odd; rotary positions need an even one"
    yield from _option_faults(model)
    yield from _adapter_faults(model)
    if (number := num_parameters(model)) > MAX_PARAMETERS:
        what = f"asks for {number:.2g} parameters; at most {MAX_PARAMETERS:.0e} are planned for. Make it narrower"
        yield "model", what


def _option_faults(model: ModelSpec) -> Faults:
    """Check what belongs together, and that transformers can open the trained model."""
    yield from _rope_faults(model)
    if model.hidden_act != "silu" and model.has_experts:
        yield "model.hidden_act", "is silu in experts; leave it out"
    if not model.qk_norm:
        yield from _unused(model, "model", "qk_norm", "qk_norm_over")
    if not model.sliding_window:
        yield from _unused(model, "model", "sliding_window", "window_rope_theta", "first_window_layer")
    if not model.attention_k_eq_v:
        yield from _unused(model, "model", "attention_k_eq_v", "num_global_key_value_heads")
    if (types := model.layer_types) and len(types) > model.num_hidden_layers:
        yield "model.layer_types", f"names {len(types)} blocks of {model.num_hidden_layers}"
    if types and model.first_window_layer:
        yield "model.first_window_layer", "is not used with layer_types; leave it out"
    if types and bool(model.sliding_window) != ("sliding_attention" in types):
        what = "names sliding_attention if there is a sliding_window, and not otherwise"
        yield "model.layer_types", what
    yield from _linear_attention_faults(model)
    yield from _expert_faults(model)
    try:
        family_of(model)
    except ValueError as error:
        yield "model", str(error)


def _rope_faults(model: ModelSpec) -> Faults:
    rope, used, section = model.rope_scaling, ROPE_SETTINGS[model.rope_scaling.rope_type], "model.rope_scaling"
    for name in (field.name for field in fields(rope) if field.name != "rope_type"):
        is_set = bool(getattr(rope, name))
        if is_set and name not in used:
            yield f"{section}.{name}", f'is not used with rope_type = "{rope.rope_type}"; leave it out'
        if not is_set and name in used and name not in ROPE_MAY_BE_ZERO:
            yield f"{section}.{name}", f'must be above 0 with rope_type = "{rope.rope_type}"'
    if rope.rope_type == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        yield f"{section}.high_freq_factor", "must be above low_freq_factor"
    if model.rotary_width < 2 or model.rotary_width % 2:
        what = f"turns {model.rotary_width} of the {model.head_width} values of a head; they turn in pairs"
        yield "model.partial_rotary_factor", what
    for name in ("short_factor", "long_factor"):
        if (factors := getattr(rope, name)) and (2 * len(factors) != model.rotary_width or min(factors) <= 0):
            what = f"must be {model.rotary_width // 2} numbers above 0, one for each pair that turns"
            yield f"{section}.{name}", what
    if rope.rope_type == "dynamic" and model.head_width < 4:
        yield f"{section}.rope_type", "dynamic needs heads wider than 2"


def _linear_attention_faults(model: ModelSpec) -> Faults:
    """Check that the keys of linear attention are there together, or not at all."""
    if not model.has_linear_attention:
        yield from _unused(model, "model", "linear_attention in layer_types", *LINEAR_SIZES)
        return
    for name in LINEAR_SIZES:
        if not getattr(model, name):
            yield f"model.{name}", "must be above 0 with linear_attention in layer_types"
    if model.linear_num_value_heads % model.linear_num_key_heads:
        what = f"{model.linear_num_key_heads} heads do not divide the {model.linear_num_value_heads} value heads"
        yield "model.linear_num_key_heads", f"{what}; choose a divisor"


def _expert_faults(model: ModelSpec) -> Faults:
    """Check that the keys of a mixture of experts are there together, or not at all."""
    if not model.has_experts:
        yield from _unused(model, "model", "num_experts", *OF_EXPERTS)
        return
    if not 1 <= model.num_experts_per_tok <= model.num_experts:
        what = f"{model.num_experts_per_tok} experts a token of {model.num_experts}; choose 1 to {model.num_experts}"
        yield "model.num_experts_per_tok", what
    if not model.num_shared_experts:
        yield from _unused(model, "model", "num_shared_experts", "shared_expert_gate")
    if bool(model.swiglu_limit) != bool(model.swiglu_alpha):
        yield "model.swiglu_limit", "is used with swiglu_alpha; set both, or leave both out"
    if not model.moe_intermediate_size:
        yield "model.moe_intermediate_size", "must be above 0 with num_experts"


def _adapter_faults(model: ModelSpec) -> Faults:
    """Check that each target is a matrix of the blocks, once, and that an adapter is there to have it."""
    adapter = model.adapter
    if not adapter.rank:
        if adapter != AdapterSpec():
            yield "adapter.rank", "is 0, so there is no adapter; set it, or leave the other keys out"
        return
    known = matrix_names(model)
    for index, name in enumerate(adapter.targets[:MAX_TARGETS]):
        key = f"adapter.targets[{index}]"
        if name not in known:
            yield key, _why_no_target(name, known)
        if name in adapter.targets[:index]:
            yield key, f"{name} is named twice"
    if model.has_experts and {*adapter.targets} & {"gate_proj", "up_proj", "down_proj"}:
        # What PEFT cannot say of experts, whose matrices transformers has joined.
        if model.expert_bias:
            what = "PEFT has no adapter beside experts that lie in one tensor, transposed"
            yield "adapter.targets", f"{what}; name matrices of attention alone"
        if ("gate_proj" in adapter.targets) != ("up_proj" in adapter.targets):
            yield "adapter.targets", "gate_proj and up_proj of experts are one matrix for PEFT; name both"
        if model.num_shared_experts:
            what = "PEFT drops the adapters of shared experts, or of the others; name matrices of attention alone"
            yield "adapter.targets", what
        if adapter.rslora:
            what = "PEFT scales gate_proj and up_proj of experts by another factor; write alpha times √rank as alpha"
            yield "adapter.rslora", what
        if adapter.dropout:
            yield "adapter.dropout", "PEFT has none beside experts; set it to 0, or name attention alone"


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


def _train_faults(spec: JobSpec) -> Faults:
    train, groups, m = spec.train, spec.train.reduction_groups, spec.train.microbatches
    if not spec.model.has_experts:
        yield from _unused(train, "train", "model.num_experts", "router_balance_loss", "router_z_loss")
    yield from _objective_faults(spec)
    if train.has_own_loss:
        yield from _faults_of_name("train.loss", train.loss, LOSSES)
        if train.loss_chunk:
            yield "train.loss_chunk", "a loss of the job's own has all logits at once; leave it out"
        if train.learns_preferences:
            yield "train.loss", 'is that of next tokens, and objective = "dpo" has its own; leave it out'
    elif train.loss_settings:
        yield "train.loss_settings", f"is not used by the loss {train.loss}; leave it out"
    if not train.loss_chunk or spec.model.has_adapter:
        yield from _unused(train, "train", "loss_chunk and a head that is trained", "loss_gradient")
    if spec.model.has_own_block and (train.compile or train.recompute in ("elementwise", "attention")):
        key, value = ("compile", "true") if train.compile else ("recompute", f'"{train.recompute}"')
        yield f"train.{key}", f"{value} is refused with a block of the job's own; leave it out"
    if groups > m:
        yield "train.reduction_groups", f"{groups} groups cannot be filled by {m} microbatches; set it to {m} or less"
    if (number := train.eval_microbatches) > m:
        what = f"{number} held-out microbatches are computed beside {m} microbatches, one beside each"
        yield "train.eval_microbatches", f"{what}; set it to {m} or less, or to 0 for as many"
    if train.eval_patience and not train.eval_every:
        yield "train.eval_patience", "needs evaluations; set eval_every, or leave it out"
    if not train.eval_patience:
        yield from _unused(train, "train", "eval_patience", "eval_min_delta")
    if (number := train.microbatch_size * train.sequence_length) > MAX_TOKENS_PER_MICROBATCH:
        what = f"{train.microbatch_size} sequences of {train.sequence_length} tokens are {number} in one microbatch"
        most = f"at most {MAX_TOKENS_PER_MICROBATCH} are allowed"
        yield "train.microbatch_size", f"{what}; {most}. Take more microbatches instead"
    if train.schedule not in ("2bw", AUTO):
        yield from _unused(train, "train", 'schedule = "2bw"', "sync_batches")
    if train.compile:
        yield from _compile_faults(spec)
    if train.exactness == "required" and is_rounding(train):
        what = f'"{train.wire}" makes the bits depend on the cuts, which exactness = "required" does not allow'
        yield "train.wire", f'{what}; set it to "none"'
    if why := why_no_place(spec.fault.checkpoint_dir):
        yield "fault.checkpoint_dir", why


def _compile_faults(spec: JobSpec) -> Faults:
    plain = AdapterSpec()
    if spec.model.has_experts:
        what = "true is refused with experts: how many tokens each gets differs every time"
        yield "train.compile", what
    for name in ("quantize", "dropout"):
        if getattr(spec.model.adapter, name) != getattr(plain, name):
            yield "train.compile", f"true is refused with [adapter] {name}; leave one of them out"


def _objective_faults(spec: JobSpec) -> Faults:
    """Check that preferences are learned beside a frozen model, and that nothing else is in the loss."""
    train = spec.train
    if not train.learns_preferences:
        yield from _unused(train, "train", 'objective = "dpo"', "dpo_beta")
        return
    if not spec.model.has_adapter:
        yield "train.objective", '"dpo" compares with the frozen model, so it needs [adapter] with a rank'
    for name in ("router_balance_loss", "router_z_loss"):
        if getattr(train, name):
            yield f"train.{name}", 'is no part of objective = "dpo"; leave it out'
    if train.compile:
        yield "train.compile", 'true is refused with objective = "dpo", which computes each block twice'
    for name, value in (("loss_mask", train.loss_mask), ("documents", train.documents)):
        if value not in ("auto", "data", "separate"):
            yield f"train.{name}", f'is "{value}", and pairs are documents of packed rows; leave it out'


def _group_faults(group: GroupSpec, key: str) -> Faults:
    if key == "optim.rest" and group.kind.takes_matrices_only:
        others = ", ".join(name for name, kind in OPTIMIZERS.items() if not kind.takes_matrices_only)
        what = f"{group.name} takes 2-D weights inside the blocks only; choose one of {others} for the rest"
        yield f"{key}.name", what
    if not 0 <= group.momentum < 1:
        yield f"{key}.momentum", f"must be at least 0 and below 1, is {group.momentum}"
    for beta in group.betas:
        if not 0 <= beta < 1:
            yield f"{key}.betas", f"each must be at least 0 and below 1, got {beta}"
    if group.name == "sgd" and group.nesterov and group.momentum == 0:
        yield f"{key}.nesterov", "needs a momentum above 0; set nesterov = false"
    if group.name == "sgd" and group.momentum_dtype != "float32" and group.momentum == 0:
        yield f"{key}.momentum_dtype", "sgd has no momentum here; leave it out"


def _faults_of_name(key: str, name: str, known: Iterable[str]) -> Faults:
    if not is_import_path(name):
        what = f"{_short(name)} is not {' or '.join(known)}, nor the import path of a plug-in, as my_things:Own"
        yield key, what + nearest(name, [*known])


def _plugin_faults(spec: JobSpec) -> Faults:
    yield from _faults_of_text("plugins.wheel", spec.plugins.wheel)
    yield from _faults_of_sha256("plugins.sha256", spec.plugins.sha256)
    named = spec.plugin_names
    if named and not spec.plugins.wheel:
        key, path = next(iter(named.items()))
        folder = f"; a folder of this name is ./{path}" if key == "data.source" else ""
        yield (
            key,
            f'{path} is a plug-in: name the file that has it, [plugins] wheel = "{path.partition(":")[0]}.py"{folder}',
        )
    if spec.plugins.wheel and not named:
        yield "plugins.wheel", "no key of the job names a plug-in, such as my_things.lion:Lion; leave the wheel out"


def _placement_faults(spec: JobSpec) -> Faults:
    placement, num_layers, groups = spec.placement, len(spec.layers), spec.train.reduction_groups
    if placement.max_nodes and placement.max_nodes < placement.min_nodes:
        what = f"{placement.max_nodes} is below min_nodes {placement.min_nodes}; 0 means no limit"
        yield "placement.max_nodes", what
    if placement.min_nodes > num_layers:
        what = f"{placement.min_nodes} nodes cannot share {num_layers} layers; set it to {num_layers} or less"
        yield "placement.min_nodes", what
    if not all(placement.sites):
        yield "placement.sites", "a site's name is empty"
    if placement.split_blocks and (why := why_no_halves(spec)):
        yield "placement.split_blocks", f"true is refused with {why}"
    most, key = min(num_layers, spec.train.microbatches), "placement.replicas"
    if len(placement.replicas) > most:
        what = f"{num_layers} layers and {spec.train.microbatches} microbatches allow {counted(most, 'stage')} at most"
        yield key, f"names {len(placement.replicas)} stages, but {what}"
    for number in placement.replicas:
        if number < 1:
            yield key, f"each stage has at least 1 worker, not {number}"
        if number > groups:
            what = f"{number} replicas cannot share {counted(groups, 'reduction group')}"
            yield key, f"{what}; set train.reduction_groups to {number} or more"


def why_no_halves(spec: JobSpec) -> str:
    """Return what keeps the blocks of a job from being two layers each; empty: nothing."""
    if spec.model.has_own_block:
        return "a block of the job's own, which has no halves; set it to false"
    if spec.train.compile:
        return "train.compile, whose codes are of whole blocks; set one to false"
    if spec.train.wire != "none":
        return f'train.wire = "{spec.train.wire}": it would round in the middle of blocks, too; set it to false'
    return ""


def _number(value: float) -> str:
    """Return a number as it was given, unless it has too many digits to read."""
    is_readable = isinstance(value, float) or abs(value) < 10**30
    return str(value) if is_readable else f"a number of {int(value).bit_length()} bits"


def _short(text: str) -> str:
    shown = repr(text[:60])
    return shown if len(text) <= 60 else f"{shown}…"
