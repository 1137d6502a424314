"""Which jobs are impossible, and which need what is not built yet: each rule with its sentence."""

import re
from typing import Any

from headway.daemon.errors import ConfigError
from headway.daemon.jobs.job import JobSpec
from headway.optim.spec import GroupSpec
from headway.stages.codec import is_rounding

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")

BYTE_VOCABULARY = 256
"""Tokens of the built-in source, which is bytes."""

AT_LEAST: dict[str, float] = {
    "job.seed": 0,
    "model.num_hidden_layers": 1,
    "model.hidden_size": 1,
    "model.intermediate_size": 1,
    "model.num_attention_heads": 1,
    "model.num_key_value_heads": 1,
    "model.vocab_size": 2,
    "train.batches": 1,
    "train.microbatches": 1,
    "train.microbatch_size": 1,
    "train.sequence_length": 1,
    "train.clip_norm": 0,
    "train.threads": 1,
    "train.reduction_groups": 1,
    "train.eval_every": 0,
    "optim.error_feedback": 0,
    "optim.warmup_batches": 0,
    "optim.matrices.weight_decay": 0,
    "optim.matrices.newton_schulz_steps": 1,
    "optim.rest.weight_decay": 0,
    "fault.snapshot_every": 0,
    "fault.checkpoint_every": 0,
    "fault.copies": 1,
    "fault.checkpoints_kept": 1,
    "fault.link_timeout_s": 1,
    "placement.min_nodes": 1,
    "placement.max_nodes": 0,
}
"""Smallest value allowed."""

ABOVE_ZERO: tuple[str, ...] = (
    "model.rms_norm_eps",
    "model.rope_theta",
    "model.initializer_range",
    "optim.matrices.lr",
    "optim.matrices.eps",
    "optim.rest.lr",
    "optim.rest.eps",
)

AT_MOST: dict[str, int] = {
    "job.seed": 2**63 - 1,
    "train.threads": 1024,
    "train.batches": 2**31 - 1,
    "train.microbatches": 2**16 - 1,
    "fault.copies": 16,
    "fault.checkpoints_kept": 1000,
    "fault.snapshot_every": 10**6,
    "fault.checkpoint_every": 10**6,
    "fault.link_timeout_s": 3600,
}

LATER: dict[str, tuple[tuple[object, ...], str]] = {
    "train.eval_every": ((0,), "held-out evaluation"),
}
"""What this version does not do yet: the values that leave it off, and its name."""


def check_job(spec: JobSpec, source: str) -> None:
    """Raises ConfigError at `source:section.key` for the first rule that the job breaks."""
    for key, (off, name) in LATER.items():
        if (value := _value(spec, key)) not in off:
            leave = " or ".join(_toml(choice) for choice in off)
            _refuse(source, key, f"{_toml(value)} asks for {name}, which this version does not have; set it to {leave}")
    for key, least in AT_LEAST.items():
        if (value := _value(spec, key)) < least:
            _refuse(source, key, f"must be at least {least:g}, is {value}")
    for key in ABOVE_ZERO:
        if (value := _value(spec, key)) <= 0:
            _refuse(source, key, f"must be above 0, is {value}")
    for key, most in AT_MOST.items():
        if (value := _value(spec, key)) > most:
            _refuse(source, key, f"must be at most {most}, is {value}")
    _check_name(spec, source)
    _check_model(spec, source)
    _check_train(spec, source)
    for group in ("matrices", "rest"):
        _check_group(getattr(spec.optim, group), group, source)
    _check_placement(spec, source)


def _check_name(spec: JobSpec, source: str) -> None:
    name = spec.job.name
    if _NAME.fullmatch(name) is None:
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower())[:63].strip("-")
        hint = f"; {slug!r} would do" if slug else ""
        _refuse(source, "job.name", f"{name!r} is not 1 to 63 lower-case letters, digits and inner hyphens{hint}")


def _check_model(spec: JobSpec, source: str) -> None:
    model = spec.model
    heads, key_value_heads = model.num_attention_heads, model.num_key_value_heads
    if model.tie_word_embeddings:
        _refuse(
            source,
            "model.tie_word_embeddings",
            "true is refused: `embed` and `head` may lie on different nodes; set it to false",
        )
    if model.hidden_size % heads:
        _refuse(
            source,
            "model.num_attention_heads",
            f"{heads} heads do not divide hidden_size {model.hidden_size}; choose a divisor",
        )
    if model.head_dim % 2:
        _refuse(
            source,
            "model.hidden_size",
            f"hidden_size {model.hidden_size} over {heads} heads gives a head of {model.head_dim}; rotary positions "
            "need an even one",
        )
    if heads % key_value_heads:
        _refuse(
            source,
            "model.num_key_value_heads",
            f"{key_value_heads} key/value heads do not divide num_attention_heads {heads}; choose a divisor",
        )
    if spec.data.source == "python-stdlib" and model.vocab_size < BYTE_VOCABULARY:
        _refuse(
            source,
            "model.vocab_size",
            f"{model.vocab_size} is too small for data of {BYTE_VOCABULARY} tokens; set it to {BYTE_VOCABULARY}",
        )


def _check_train(spec: JobSpec, source: str) -> None:
    train = spec.train
    if train.reduction_groups > train.microbatches:
        _refuse(
            source,
            "train.reduction_groups",
            f"{train.reduction_groups} groups cannot be filled by {train.microbatches} microbatches; "
            f"set it to {train.microbatches} or less",
        )
    if train.exactness == "required" and is_rounding(train):
        _refuse(
            source,
            "train.wire",
            f'"{train.wire}" makes the bits depend on the cuts, which exactness = "required" does not allow; '
            'set it to "none"',
        )
    if not spec.data.source:
        _refuse(source, "data.source", "is empty; set it to python-stdlib or a folder of `headway data prepare`")
    if not spec.fault.checkpoint_dir:
        _refuse(source, "fault.checkpoint_dir", "is empty; name a folder or a URL")


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


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


def _refuse(source: str, key: str, what: str) -> None:
    raise ConfigError(what, f"{source}:{key}")
