"""The parts of a job that decide a stage's computation. No torch here: the command line reads these too.

The type of a number says its bounds: the least, the largest, and why it is no larger. `daemon/jobs/rules.py` refuses
others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import sqrt
from typing import Annotated, Final, Literal

from headway.stages.plugin_names import Settings

ABOVE_0: Final = "above 0"
"""The least that a number does not reach."""
WEIGHTS: Final = "no layer's weights would fit a device"
OVERFLOW: Final = "float32 overflows beyond it"
Factor = Annotated[float, (ABOVE_0, 1e6, OVERFLOW)]
Cap = Annotated[float, (0, 1e6, OVERFLOW)]

ScheduleName = Literal["gpipe", "1f1b", "2bw", "auto"]
AUTO: Final = "auto"
Recompute = Literal["none", "elementwise", "attention", "block"]
"""The part of each block that a stage's backward computes again instead of keeping it: the results of norms and of the
MLP's product; attention too; all.
"""
Quantizer = Literal["none", "nf4", "int8"]
"""How a frozen matrix of a block is kept: in the job's dtype, in 4 bits, or in 8 bits."""
RECOMPUTES: Final[tuple[Recompute, ...]] = ("none", "elementwise", "attention", "block")
"""All of them: the later ones take more time and less memory."""

NF4_BLOCK: Final = 64
"""Consecutive values of a flattened matrix that have one scale in NF4. In int8 a row has one."""

LayerType = Literal["full_attention", "sliding_attention", "linear_attention"]
"""What a block mixes tokens with: attention to all tokens before, or to those in a window, or the gated delta rule."""

RULE_CHUNK: Final = 64
"""Tokens whose pairs the gated delta rule computes at once. Part of the arithmetic."""

TIED: Final = {"embed": "weight", "head": "lm_head.weight"}
"""By layer, the parameter that is the tied matrix in a model with `tie_word_embeddings`."""

ROUTER_BIAS: Final = "e_score_correction_bias"
"""Last part of the name of a router's bias, whose gradient is the load of the experts."""

MIXING_HALF: Final = "attention"
MLP_HALF: Final = "mlp"
"""Last parts of the names of a block's halves: what mixes its tokens, and the MLP or the experts. Each adds to the
residual stream by itself, so a job may have them as layers.
"""

MLP_MATRICES: Final = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
"""Last parts of the names of an MLP's matrices, and of an expert's."""

BLOCKS: Final = {"decoder": "headway.stages.model.decoder:Block"}
"""The kinds of blocks, and the class of each; a job's own have the import path of a plug-in instead."""

LOSSES: Final = {"cross_entropy": "headway.stages.model.decoder:token_loss"}
"""The losses of next tokens, in the same way."""

LINEAR_SIZES: Final = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
"""Fields of `ModelSpec` that linear attention needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """`[model.rope_scaling]`: how positions turn beyond the length of the first training. docs/numerics.md, section 9.

    The names are those of Hugging Face's `rope_scaling`. A setting that the type does not use is 0.
    """

    rope_type: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"] = "default"
    factor: Cap = 0.0
    original_max_position_embeddings: Annotated[int, (0, 2**31 - 1, "no sequence is so long")] = 0
    """Tokens of a sequence in the first training. Used by dynamic, llama3, yarn, longrope."""
    low_freq_factor: Cap = 0.0
    """Used by llama3."""
    high_freq_factor: Cap = 0.0
    """Used by llama3."""
    beta_fast: Cap = 0.0
    """Used by yarn."""
    beta_slow: Cap = 0.0
    """Used by yarn."""
    attention_factor: Annotated[float, (0, 1e3, OVERFLOW)] = 0.0
    """Used by yarn and longrope: the factor of cosines and sines."""
    truncate: bool = False
    """Used by yarn: the range of interpolated pairs is rounded to whole pairs."""
    short_factor: tuple[float, ...] = ()
    """Used by longrope: the divisor of each pair's angle in sequences that are no longer than the first training's."""
    long_factor: tuple[float, ...] = ()
    """The same in longer ones."""
    llama_4_scaling_beta: Annotated[float, (0, 1e3, OVERFLOW)] = 0.0
    """May be used with yarn: queries grow with the logarithm of their positions beyond the first training."""
    partial_rotary_factor: Annotated[float, (0, 1, "a head has no more pairs")] = 0.0
    """Used by proportional: part of a head's pairs that turn, the fastest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """`[adapter]`: two small matrices beside each chosen matrix of the blocks are trained, and nothing else."""

    rank: Annotated[int, (0, 8192, "an adapter is smaller than its matrix")] = 0
    """Rows of A and columns of B; 0: there is no adapter, and all weights are trained."""
    alpha: Factor = 16.0
    rslora: bool = False
    """Whether B·A is divided by the root of the rank (Kalajdzievski 2023, arXiv 2312.03732), not by the rank."""
    targets: tuple[str, ...] = ()
    """Matrices by the last part of their names, such as q_proj; empty: all of the blocks but those of experts."""
    dropout: Annotated[float, (0, 0.9375, "nothing would be left")] = 0.0
    quantize: Quantizer = "none"
    """Of the blocks' frozen matrices."""

    @property
    def scale(self) -> float:
        """Return the factor of B·A."""
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)

    def adapts(self, matrix: str) -> bool:
        """Return whether a matrix of a block has an adapter."""
        return self.rank > 0 and (not self.targets or matrix in self.targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """`[model]`: the decoder, under the names of Hugging Face's configs."""

    num_hidden_layers: Annotated[int, (1, 1024, "the planner weighs every layer against every device")] = 8
    hidden_size: Annotated[int, (1, 2**16, WEIGHTS)] = 256
    intermediate_size: Annotated[int, (1, 2**18, WEIGHTS)] = 688
    num_attention_heads: Annotated[int, (1, 1024, "each head is a matrix product of its own")] = 8
    num_key_value_heads: Annotated[int, (1, 1024, "each head is a matrix product of its own")] = 4
    vocab_size: Annotated[int, (2, 2**20, WEIGHTS)] = 256
    rms_norm_eps: Annotated[float, (ABOVE_0, 1, "it would drown what it is added to")] = 1e-5
    rope_theta: Annotated[float, (ABOVE_0, 1e12, OVERFLOW)] = 10_000.0
    initializer_range: Annotated[float, (ABOVE_0, 100, OVERFLOW)] = 0.02
    tie_word_embeddings: bool = False
    head_dim: Annotated[int, (0, 1024, WEIGHTS)] = 0
    """Width of one attention head; 0: hidden_size / num_attention_heads."""
    rope_scaling: RopeSpec = field(default_factory=RopeSpec)
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have biases."""
    output_bias: bool = False
    """Whether attention's output projection has one."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys are normed before they turn."""
    qk_norm_over: Literal["head", "heads"] = "head"
    """What one norm of queries and keys is over: each head by itself, or all heads together."""
    value_norm: bool = False
    """Whether values are normed too, each head by itself and without a gain."""
    norm_placement: Literal["before", "after", "both"] = "before"
    """Where attention and MLP have their norms."""
    zero_centered_norms: bool = False
    """Whether the gain of a norm is 1 + its weight."""
    layer_scalar: bool = False
    """Whether a number of its own multiplies each block's output. It is kept as it is, and not trained."""
    attn_output_gate: bool = False
    """Whether q_proj makes a gate beside each query, whose sigmoid multiplies what attention returns."""
    fused_projections: bool = False
    """Whether q, k, v are one matrix, and gate and up another, as in Phi-3."""
    fused_gate_up: bool = False
    """Whether gate and up alone are one matrix, as in GLM-4."""
    sliding_window: Annotated[int, (0, 2**31 - 1, "no sequence is so long")] = 0
    """Number of newest tokens that a token attends to, with itself; 0: all before it."""
    first_window_layer: Annotated[int, (0, 1024, "no model has so many blocks")] = 0
    """Number of blocks at the beginning that attend to all tokens all the same."""
    layer_types: tuple[LayerType, ...] = ()
    """Types of the blocks, repeated until each has one; empty: as the two keys before say."""
    global_head_dim: Annotated[int, (0, 1024, WEIGHTS)] = 0
    """Width of one head in blocks of full attention; 0: that of the other blocks."""
    num_global_key_value_heads: Annotated[int, (0, 1024, "each head is a matrix product of its own")] = 0
    """Key/value heads in blocks of full attention; 0: as many as in the other blocks."""
    attention_k_eq_v: bool = False
    """Whether values are the keys before their norm and turn, in blocks of full attention."""
    linear_num_key_heads: Annotated[int, (0, 1024, "each head has a state of its own")] = 0
    """Heads of queries and keys in blocks of linear attention."""
    linear_num_value_heads: Annotated[int, (0, 1024, "each head has a state of its own")] = 0
    linear_key_head_dim: Annotated[int, (0, 1024, WEIGHTS)] = 0
    linear_value_head_dim: Annotated[int, (0, 1024, WEIGHTS)] = 0
    linear_conv_kernel_dim: Annotated[int, (0, 64, "each of its taps is a pass over the tokens")] = 0
    """Newest tokens that the convolution before it weighs, with the token itself."""
    num_experts: Annotated[int, (0, 512, "each expert of each block is three matrices by themselves")] = 0
    """Experts of each block, in place of its MLP; 0: there are none."""
    num_experts_per_tok: Annotated[int, (0, 512, "there are no more experts")] = 0
    """k: experts that each token goes to."""
    moe_intermediate_size: Annotated[int, (0, 2**18, WEIGHTS)] = 0
    """Width of one expert."""
    norm_topk_prob: bool = False
    """Whether the weights of a token's experts add up to 1."""
    router_scoring: Literal["softmax", "sigmoid"] = "softmax"
    router_bias: bool = False
    """Whether a bias that balances the load takes part in the choice, and in nothing else."""
    num_shared_experts: Annotated[int, (0, 64, WEIGHTS)] = 0
    """Experts that every token goes to, as one of their width together."""
    shared_expert_gate: bool = False
    """Whether each token weighs what they return."""
    routed_scaling_factor: Factor = 1.0
    """Factor of the weights of a token's experts."""
    expert_bias: bool = False
    """Whether router and experts have biases, and a file has the matrices of a block's experts as one, transposed."""
    swiglu_limit: Cap = 0.0
    """Largest gate of an expert, and largest size of up, whose product is gate · sigmoid(alpha · gate) · (up + 1) then;
    0: it is silu(gate) · up, of any size.
    """
    swiglu_alpha: Cap = 0.0
    embedding_multiplier: Factor = 1.0
    """Factor of the embeddings."""
    attention_multiplier: Cap = 0.0
    """Factor of the scores of attention; 0: 1 / √head_dim."""
    residual_multiplier: Factor = 1.0
    """Factor of what attention and MLP add to the hidden states."""
    logits_scaling: Factor = 1.0
    """Divisor of the logits."""
    hidden_act: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    """Activation of an MLP's gate."""
    attention_sinks: bool = False
    """Whether each head has a logit that takes part in the softmax of attention, and has no value."""
    attn_logit_softcapping: Cap = 0.0
    """Largest score of attention, by a tanh; 0: there is none."""
    final_logit_softcapping: Cap = 0.0
    """Largest logit, in the same way."""
    window_rope_theta: Annotated[float, (0, 1e12, OVERFLOW)] = 0.0
    """Base of the positions in blocks with a sliding window, which are not scaled then; 0: that of the other blocks."""
    partial_rotary_factor: Annotated[float, (ABOVE_0, 1, "a head has no more values")] = 1.0
    """Part of each head that turns, its first values."""
    rope_interleaved: bool = False
    """Whether neighbours in a head turn together, and not values that are half of its turning part apart."""
    no_rope_layer_interval: Annotated[int, (0, 1024, "no model has so many blocks")] = 0
    """n: every n-th block, the n-th first, turns no queries and keys by their positions; 0: all blocks turn them."""
    block: str = "decoder"
    """One of `BLOCKS`, or the import path of a plug-in, which reads of the other keys what it likes."""
    block_settings: Settings = ()
    """Of a plug-in: its keywords."""
    block_shapes: tuple[tuple[str, tuple[int, ...]], ...] = field(default=(), metadata={"not_in_files": True})
    """Of a plug-in: names and shapes of its parameters, counted when the job is submitted."""
    adapter: AdapterSpec = field(default_factory=AdapterSpec, metadata={"not_in_files": True})
    """The section `[adapter]` of a job file."""

    @property
    def has_own_block(self) -> bool:
        """Return whether its blocks are a plug-in's."""
        return self.block not in BLOCKS

    @property
    def has_adapter(self) -> bool:
        """Return whether the weights are frozen, and adapters beside them are trained."""
        return self.adapter.rank > 0

    @property
    def base(self) -> "ModelSpec":
        """Return the model without its adapter."""
        return replace(self, adapter=AdapterSpec()) if self.has_adapter else self

    @property
    def has_experts(self) -> bool:
        """Return whether each block is a mixture of experts."""
        return self.num_experts > 0

    @property
    def trains_tie(self) -> bool:
        """Return whether `embed` and `head` train one matrix: each has a copy, and both do the same update."""
        return self.tie_word_embeddings and not self.has_adapter

    @property
    def head_width(self) -> int:
        """Return the width of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def fuses_gate_up(self) -> bool:
        """Return whether an MLP's gate and up are one matrix."""
        return self.fused_projections or self.fused_gate_up

    @property
    def rotary_width(self) -> int:
        """Return how many values of a head turn."""
        return int(self.head_width * self.partial_rotary_factor)

    def head_width_of(self, block: int) -> int:
        """Return the width of one attention head of a block."""
        is_full = self.type_of(block) == "full_attention"
        return self.global_head_dim if is_full and self.global_head_dim else self.head_width

    def key_value_heads_of(self, block: int) -> int:
        """Return the number of key/value heads of a block."""
        is_full = self.type_of(block) == "full_attention"
        return (
            self.num_global_key_value_heads if is_full and self.num_global_key_value_heads else self.num_key_value_heads
        )

    def rotary_width_of(self, block: int) -> int:
        """Return how many values of a head turn in a block."""
        return int(self.head_width_of(block) * self.partial_rotary_factor)

    def has_values_of_keys(self, block: int) -> bool:
        """Return whether a block's values are its keys before their norm and turn."""
        return self.attention_k_eq_v and self.type_of(block) == "full_attention"

    @property
    def turns_by_type(self) -> bool:
        """Return whether blocks with a sliding window turn heads otherwise than those without."""
        return self.sliding_window > 0 and (self.window_rope_theta > 0 or self.global_head_dim > 0)

    @property
    def linear_key_width(self) -> int:
        """Return the width of all queries of linear attention, or of all its keys."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_width(self) -> int:
        """Return the width of all its values."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def has_linear_attention(self) -> bool:
        """Return whether some block has linear attention."""
        return "linear_attention" in self.layer_types

    def type_of(self, block: int) -> LayerType:
        """Return what a block mixes tokens with."""
        if self.layer_types:
            return self.layer_types[block % len(self.layer_types)]
        return "sliding_attention" if self.sliding_window and block >= self.first_window_layer else "full_attention"

    def kind_of(self, layer: str) -> str:
        """Return `embed`, `block` or `head`: layers of one kind compute and cost the same. Blocks that differ in what
        mixes their tokens are of several kinds, such as `block linear_attention`. Halves have kinds of their own.
        """
        kind, _, rest = layer.partition(".")
        index, _, half = rest.partition(".")
        if kind != "block" or half == MLP_HALF:
            return f"{kind} {half}".rstrip()
        is_mixed = len(set(self.layer_types)) > 1 or 0 < self.first_window_layer < self.num_hidden_layers
        name = f"block {self.type_of(int(index))}" if is_mixed else kind
        name = name if self.is_turned(int(index)) else f"{name} without positions"
        return f"{name} {half}".rstrip()

    def window_of(self, block: int) -> int:
        """Return the sliding window of a block; 0: it has none."""
        return self.sliding_window if self.type_of(block) == "sliding_attention" else 0

    def rope_of(self, block: int) -> tuple[float, RopeSpec]:
        """Return the base and the scaling of a block's positions."""
        if self.window_rope_theta and self.window_of(block):
            return self.window_rope_theta, RopeSpec()
        return self.rope_theta, self.rope_scaling

    def is_turned(self, block: int) -> bool:
        """Return whether a block turns queries and keys by their positions."""
        return not self.no_rope_layer_interval or (block + 1) % self.no_rope_layer_interval != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """`[train]`: the recurrence of docs/numerics.md and the settings that its bits depend on."""

    schedule: ScheduleName = "2bw"
    """auto: that with which the cluster comes to a loss sooner. Resolved when the job is submitted."""
    sync_batches: Annotated[int, (0, 2**31 - 1, "a batch's number has 31 bits")] = 0
    """k of 2bw: so many batches have no delay before the others have one. Where a file leaves it out, `sync_share`
    decides.
    """
    sync_share: Annotated[float, (0, 1, "it is a share of the batches")] = 0.1
    """Share of the batches that have no delay."""
    batches: Annotated[int, (1, 2**31 - 1, "a boundary's number has 31 bits")] = 150
    microbatches: Annotated[int, (1, 2**16 - 1, "a microbatch's number has 16 bits")] = 8
    """m: microbatches of one batch."""
    microbatch_size: Annotated[int, (1, 2**16, "its hidden states travel as one tensor")] = 4
    """Sequences."""
    sequence_length: Annotated[int, (1, 2**20, "its hidden states travel as one tensor")] = 128
    """Tokens."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    clip_norm: Annotated[float, (0, 1e30, OVERFLOW)] = 1.0
    """0 turns clipping off."""
    threads: Annotated[int, (1, 1024, "no machine has so many cores")] = 1
    """Number of threads per worker; part of the arithmetic."""
    reduction_groups: Annotated[int, (1, 1024, "each group keeps its own gradient")] = 1
    """G: microbatch i is summed in group i mod G."""
    exactness: Literal["required", "preferred"] = "preferred"
    recompute: Literal["auto", "none", "elementwise", "attention", "block"] = "none"
    """See `Recompute`; auto: the plan chooses for each stage."""
    compile: bool = False
    allow_tf32: bool = False
    objective: Literal["next_token", "dpo"] = "next_token"
    """What is learned: each next token, or which answer of a pair is preferred, against the frozen model (DPO)."""
    loss: str = "cross_entropy"
    """Of each next token: one of `LOSSES`, or the import path of a plug-in."""
    loss_settings: Settings = ()
    """Of a plug-in: its keywords."""
    dpo_beta: Annotated[float, (ABOVE_0, 1e3, OVERFLOW)] = 0.1
    """How much the model holds on to the frozen one. Used by dpo."""
    loss_chunk: Annotated[int, (0, 2**24, "no microbatch has so many tokens")] = 0
    """Tokens of a microbatch whose logits exist at once; 0: all."""
    loss_gradient: Literal["chunks", "whole"] = "chunks"
    """How the gradient of the vocabulary's matrix is made: added up chunk by chunk, or as one product of all tokens."""
    attention_backend: Literal["auto", "math", "flash", "flash3", "efficient"] = "auto"
    """Resolved once, when the job is submitted; never by a node."""
    link: Literal["auto", "grpc", "collective"] = "auto"
    wire: Literal["none", "bf16", "int8"] = "none"
    """Codec of activations and their gradients between stages."""
    wire_between: Literal["sites", "stages"] = "sites"
    """Coded cuts: those between workers of different sites, or all."""
    wire_feedback: bool = True
    """int8: the coding error of a gradient is added to the next one."""
    loss_mask: Literal["auto", "none", "data"] = "auto"
    """Which targets count: all, or those that the data's flags name. Resolved when the job is submitted."""
    documents: Literal["auto", "joined", "separate"] = "auto"
    """Whether attention and positions end with each document. Resolved when the job is submitted."""
    data_order: Literal["sample", "epochs"] = "sample"
    """sample: rows are drawn anew each time; epochs: each row once an epoch."""
    epochs: Annotated[int, (0, 10**6, "no data is worth more")] = 0
    """Times that every row is seen; 0: `batches` says how long the job is. Resolved into `batches` at submission."""
    eval_every: Annotated[int, (0, 2**31 - 1, "a batch's number has 31 bits")] = 0
    """Batches between held-out evaluations, the first of which is batch 0's; 0 turns them off."""
    eval_microbatches: Annotated[int, (0, 2**16 - 1, "a microbatch's number has 16 bits")] = 0
    """E: microbatches of the validation split that an evaluation takes, at most m; 0: m."""
    router_balance_loss: Annotated[float, (0, 1e3, OVERFLOW)] = 0.0
    """Factor of the loss by which each block's router learns to load its experts evenly."""
    router_z_loss: Annotated[float, (0, 1e3, OVERFLOW)] = 0.0
    """Factor of the loss that keeps a router's logits small."""
    eval_patience: Annotated[int, (0, 2**31 - 1, "a batch's number has 31 bits")] = 0
    """P: the job ends when so many evaluations in a row have not lowered the best loss; 0: it never does."""
    eval_min_delta: Annotated[float, (0, 1e3, "no loss can fall by more")] = 0.0
    """By how much an evaluation has to lower it."""

    @property
    def delay(self) -> int:
        """Return d: how many versions old the weights of a gradient are, after `sync_batches`."""
        return 1 if self.schedule == "2bw" else 0

    @property
    def of_optimizers(self) -> dict[str, int]:
        """Return what optimizers have to know of the recurrence, as keywords."""
        return {"num_batches": self.batches, "delay": self.delay, "sync_batches": self.sync_batches}

    def weight_version(self, batch: int) -> int:
        """Return v(b) of a batch."""
        return weight_version(batch, self.delay, self.sync_batches)

    @property
    def has_mask(self) -> bool:
        """Return whether only some targets count, so that a batch's losses are divided by their number."""
        return self.loss_mask == "data"

    @property
    def separates_documents(self) -> bool:
        """Return whether attention and positions end with each document."""
        return self.documents == "separate"

    @property
    def has_own_loss(self) -> bool:
        """Return whether the loss is a plug-in's."""
        return self.loss not in LOSSES

    @property
    def learns_preferences(self) -> bool:
        """Return whether the loss is that of pairs of answers."""
        return self.objective == "dpo"

    @property
    def hidden_rows(self) -> int:
        """Return the rows of hidden states of a microbatch: under dpo those of the frozen model lie below its own."""
        return self.microbatch_size * (2 if self.learns_preferences else 1)

    @property
    def num_evaluated(self) -> int:
        """Return E: the microbatches of one evaluation."""
        return self.eval_microbatches or self.microbatches

    @property
    def stops_early(self) -> bool:
        """Return whether evaluations may end the job before its last batch."""
        return self.eval_every > 0 and self.eval_patience > 0

    @property
    def evaluated_share(self) -> float:
        """Return the held-out microbatches for each microbatch of the training, the mean over all batches."""
        return self.num_evaluated / (self.microbatches * self.eval_every) if self.eval_every else 0.0

    def evaluates(self, batch: int, microbatch: int = 0) -> bool:
        """Return whether a held-out microbatch of this number is computed beside a microbatch of a batch."""
        return self.eval_every > 0 and batch % self.eval_every == 0 and microbatch < self.num_evaluated

    @property
    def tokens_per_batch(self) -> int:
        """Return the tokens of one update."""
        return self.microbatches * self.microbatch_size * self.sequence_length

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        """Return the choices that a plan has for a stage, the fastest one first."""
        if self.recompute != "auto":
            return (self.recompute,)
        # Compiled code makes elementwise results again in any case.
        return RECOMPUTES[1:] if self.compile else RECOMPUTES


def matrix_names(model: ModelSpec, block: int | None = None) -> tuple[str, ...]:
    """Return the last parts of the names of matrices that may have an adapter, in the module's order.

    block: of this one alone; None: of all blocks, without repetition.
    """
    if block is None:
        names = [matrix_names(model, each) for each in range(len(model.layer_types) or 1)]
        return tuple(dict.fromkeys(name for of_block in names for name in of_block))
    mixing: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    if model.type_of(block) == "linear_attention":
        mixing = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
    elif model.fused_projections:
        mixing = ("qkv_proj", "o_proj")
    elif model.has_values_of_keys(block):
        mixing = ("q_proj", "k_proj", "o_proj")
    return (*mixing, *(("gate_up_proj",) if model.fuses_gate_up else ("gate_proj", "up_proj")), "down_proj")


def adapted_names(model: ModelSpec, block: int | None = None) -> tuple[str, ...]:
    """Return those of `matrix_names` that have an adapter: all, or the named ones. An expert's must be named."""
    adapter = model.adapter
    return tuple(
        name
        for name in matrix_names(model, block)
        if adapter.adapts(name) and (adapter.targets or not model.has_experts or name not in MLP_MATRICES)
    )


def timed_kind(layer: str, recompute: str) -> str:
    """Return the name under which a layer's times are known: its kind, and what of it the backward computes again.

    layer: its kind as `ModelSpec.kind_of` has it, or its name where all blocks are of one kind.
    """
    kind = layer.partition(".")[0]
    return f"{kind}+{recompute}" if kind.startswith("block") and recompute in RECOMPUTES[1:] else kind


def weight_version(batch: int, delay: int, sync_batches: int = 0) -> int:
    """Return v(b): the version on which batch b is computed, forward and backward, on every stage."""
    return batch if batch < sync_batches else max(sync_batches, batch - delay)


def layer_names(model: ModelSpec, *, are_split: bool = False) -> tuple[str, ...]:
    """Return the layers in order: `embed`, `block.0` …, `head`. are_split: `block.0.attention`, `block.0.mlp` …"""
    blocks = (f"block.{index}" for index in range(model.num_hidden_layers))
    if are_split:
        blocks = (f"{block}.{half}" for block in blocks for half in (MIXING_HALF, MLP_HALF))
    return ("embed", *blocks, "head")


def computed_layers(layers: Sequence[str]) -> tuple[str, ...]:
    """Return what a stage of these layers computes, one after another: both halves of a block as the whole block."""
    groups = [(whole, [*names]) for whole, names in groupby(layers, whole_layer)]
    return tuple(whole if len(names) > 1 else names[0] for whole, names in groups)


def whole_layer(layer: str) -> str:
    """Return the layer of which one is a half, `block.3` of `block.3.mlp`: weights and dropout go by its name."""
    return ".".join(layer.split(".")[:2])
