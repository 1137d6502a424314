"""The parts of a job that decide a stage's computation. No torch here: the command line reads these too."""

from dataclasses import dataclass
from typing import Final, Literal

Recompute = Literal["none", "attention", "block"]
"""The part of each block that a stage's backward computes again instead of keeping it."""
RECOMPUTES: Final[tuple[Recompute, ...]] = ("none", "attention", "block")
"""All of them: the later ones take more time and less memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """`[model]`: the decoder, under the names of Hugging Face's LlamaConfig."""

    num_hidden_layers: int = 8
    hidden_size: int = 256
    intermediate_size: int = 688
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    vocab_size: int = 256
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """`[train]`: the recurrence of docs/numerics.md and the settings that its bits depend on."""

    schedule: Literal["gpipe", "1f1b", "2bw"] = "2bw"
    batches: int = 150
    microbatches: int = 8
    """m: microbatches of one batch."""
    microbatch_size: int = 4
    """Sequences."""
    sequence_length: int = 128
    """Tokens."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    clip_norm: float = 1.0
    """0 turns clipping off."""
    threads: int = 1
    """Number of threads per worker; part of the arithmetic."""
    reduction_groups: int = 1
    """G: microbatch i is summed in group i mod G."""
    exactness: Literal["required", "preferred"] = "preferred"
    recompute: Literal["auto", "none", "attention", "block"] = "none"
    """See `Recompute`; auto: the plan chooses for each stage."""
    compile: bool = False
    allow_tf32: bool = False
    loss_chunk: int = 0
    """Tokens of a microbatch whose logits exist at once; 0: all."""
    attention_backend: Literal["auto", "math", "flash", "efficient"] = "auto"
    """Resolved once, when the job is submitted; never by a node."""
    link: Literal["auto", "grpc", "collective"] = "auto"
    wire: Literal["none", "bf16", "int8"] = "none"
    """Codec of activations and their gradients between stages."""
    wire_between: Literal["sites", "stages"] = "sites"
    """Coded cuts: those between workers of different sites, or all."""
    wire_feedback: bool = True
    """int8: the coding error of a gradient is added to the next one."""
    eval_every: int = 0
    """Batches between held-out evaluations; 0 turns them off."""

    @property
    def delay(self) -> int:
        """Return d: how many versions old the weights of a gradient are."""
        return 1 if self.schedule == "2bw" else 0

    @property
    def tokens_per_batch(self) -> int:
        """Return the tokens of one update."""
        return self.microbatches * self.microbatch_size * self.sequence_length

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        """Return the choices that a plan has for a stage, the fastest one first."""
        if self.recompute != "auto":
            return (self.recompute,)
        # A compiled block is computed again as a whole.
        return ("none", "block") if self.compile else RECOMPUTES


def timed_kind(layer: str, recompute: str) -> str:
    """Return the name under which a layer's times are known: its kind, and what of it the backward computes again."""
    kind = layer.partition(".")[0]
    return f"{kind}+{recompute}" if kind == "block" and recompute in ("attention", "block") else kind


def weight_version(batch: int, delay: int) -> int:
    """Return v(b): the version on which batch b is computed, forward and backward, on every stage."""
    return max(0, batch - delay)


def layer_names(model: ModelSpec) -> tuple[str, ...]:
    """Return the layers in order: `embed`, `block.0` …, `head`."""
    return ("embed", *(f"block.{index}" for index in range(model.num_hidden_layers)), "head")
