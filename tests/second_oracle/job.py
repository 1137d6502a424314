"""The fields of a job file that decide its bits, read from TOML.

docs/jobs/reference.toml shows every key with its default, so the defaults come from that page itself, those of
optimizers that it does not use from its comments.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

DEFAULTS = Path(__file__).resolve().parents[2] / "docs/jobs/reference.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """`[model.rope_scaling]`."""

    rope_type: str
    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float
    high_freq_factor: float
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool
    short_factor: list[float]
    long_factor: list[float]
    llama_4_scaling_beta: float
    partial_rotary_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """`[model]`: the shapes of the decoder."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    initializer_range: float
    tie_word_embeddings: bool
    head_dim: int
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    qk_norm_over: str
    value_norm: bool
    norm_placement: str
    fused_projections: bool
    fused_gate_up: bool
    sliding_window: int
    first_window_layer: int
    layer_types: list[str]
    global_head_dim: int
    num_global_key_value_heads: int
    attention_k_eq_v: bool
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    zero_centered_norms: bool
    layer_scalar: bool
    attn_output_gate: bool
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    router_scoring: str
    router_bias: bool
    num_shared_experts: int
    shared_expert_gate: bool
    routed_scaling_factor: float
    expert_bias: bool
    swiglu_limit: float
    swiglu_alpha: float
    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float
    hidden_act: str
    attention_sinks: bool
    attn_logit_softcapping: float
    final_logit_softcapping: float
    window_rope_theta: float
    partial_rotary_factor: float
    rope_interleaved: bool
    no_rope_layer_interval: int
    rope_scaling: Rope

    def type_of(self, block: int) -> str:
        """What a block mixes tokens with."""
        if self.layer_types:
            return self.layer_types[block % len(self.layer_types)]
        return "sliding_attention" if self.sliding_window > 0 and block >= self.first_window_layer else "full_attention"

    @property
    def width_of_head(self) -> int:
        """Its own, or the heads' share of the hidden states."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def heads_of(self, block: int) -> tuple[int, int]:
        """Width of a head, and number of key/value heads."""
        if self.type_of(block) != "full_attention":
            return self.width_of_head, self.num_key_value_heads
        return self.global_head_dim or self.width_of_head, self.num_global_key_value_heads or self.num_key_value_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """`[adapter]`."""

    rank: int
    alpha: float
    rslora: bool
    targets: list[str]
    dropout: float
    quantize: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """`[train]`: the recurrence. `recompute` is missing because it changes no bit."""

    schedule: str
    sync_batches: int
    batches: int
    microbatches: int
    microbatch_size: int
    sequence_length: int
    dtype: str
    clip_norm: float
    threads: int
    reduction_groups: int
    objective: str
    dpo_beta: float
    loss_chunk: int
    loss_gradient: str
    loss_mask: str
    documents: str
    attention_backend: str
    wire: str
    wire_feedback: bool
    data_order: str
    eval_every: int
    eval_microbatches: int
    router_balance_loss: float
    router_z_loss: float
    eval_patience: int
    eval_min_delta: float

    @property
    def delay(self) -> int:
        """d: how many versions old the weights of a gradient are."""
        return {"2bw": 1, "1f1b": 0, "gpipe": 0}[self.schedule]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One of the two groups of `[optim]`: an optimizer and its settings."""

    name: str
    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    betas: tuple[float, float]
    beta2: float
    beta3: float
    eps: float
    gamma: float
    sign_share: float
    precondition_frequency: int
    max_precondition_dim: int
    newton_schulz_dtype: str
    newton_schulz_steps: int
    newton_schulz_coefficients: str
    adjust_lr: str
    momentum_dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job, every default filled in."""

    seed: int
    weights: list[float]
    """Of each source under `[[data.sources]]`; empty: there is one source."""
    model: Model
    adapter: Adapter
    train: Train
    matrices: Group
    rest: Group
    error_feedback: float
    error_feedback_dtype: str
    lr_schedule: str
    warmup_batches: int
    lr_floor: float
    schedule_batches: int
    after_end: str
    undecayed: list[str]
    router_bias_lr: float


def read_job(text: str) -> Job:
    """The job that TOML text describes. Raises ValueError for compiled layers, whose bits are the compiler's."""
    page = DEFAULTS.read_text(encoding="utf-8")
    given, shown = tomllib.loads(text), tomllib.loads(page)
    section = {name: {**shown[name], **given.get(name, {})} for name in ("job", "model", "adapter", "train", "optim")}
    if section["train"]["compile"]:
        raise ValueError("the second oracle compiles no layers")
    optim = section["optim"]
    rope = {**shown["model"]["rope_scaling"], **given.get("model", {}).get("rope_scaling", {})}
    settings = {**shown["optim"]["matrices"], **shown["optim"]["rest"]}
    for line in re.findall(r"^#   (\{ name = .*\})$", page, re.MULTILINE):
        settings |= tomllib.loads(f"group = {line}")["group"]
    return Job(
        seed=section["job"]["seed"],
        weights=[source.get("weight", 1.0) for source in given.get("data", {}).get("sources", [])],
        model=Model(**{**_known(Model, section["model"]), "rope_scaling": Rope(**rope)}),
        adapter=Adapter(**_known(Adapter, section["adapter"])),
        train=Train(**_known(Train, section["train"])),
        matrices=Group(**_known(Group, {**settings, **optim["matrices"]})),
        rest=Group(**_known(Group, {**settings, **optim["rest"]})),
        error_feedback=optim["error_feedback"],
        error_feedback_dtype=optim["error_feedback_dtype"],
        lr_schedule=optim["lr_schedule"],
        warmup_batches=optim["warmup_batches"],
        lr_floor=optim["lr_floor"],
        schedule_batches=optim["schedule_batches"],
        after_end=optim["after_end"],
        undecayed=optim["undecayed"],
        router_bias_lr=optim["router_bias_lr"],
    )


def _known(kind: Any, table: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: table[field.name] for field in fields(kind)}
