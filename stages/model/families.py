"""The table of families: which options of the decoder each `model_type` has, and what its config.json may say.

Pure data. hugging_face.py reads and writes a config.json by it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from headway.stages.spec import LINEAR_SIZES, ModelSpec

MOST_EXPERTS: Final = 512
"""Each expert of each block is three matrices by themselves, which are listed before a weight is read."""
EXPERT_PARTS: Final = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""By the name of a tensor that has a matrix of all experts of a block, the matrices of each."""
EXPERT_STACK: Final = re.compile(
    r"(model\.layers\.\d{1,6}\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias|_blocks|_scales)?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Mixture:
    """What the config.json of a family says of its experts."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Fields of ModelSpec that have another name there."""
    has_both_names: bool = False
    """Whether it is written with `num_experts` too, as before transformers 5."""
    is_normed: bool = False
    """Whether the weights of a token's experts always add up to 1; else `norm_topk_prob` says it."""
    shared: str = ""
    """Key of the experts for all tokens, their number or their common width; empty: it has none."""
    is_scaled: bool = False
    """Whether it has `routed_scaling_factor`."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that change the computation, with the values that are computed here."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """Further keys, with the values that say what is computed here."""

    @property
    def is_shared_by_width(self) -> bool:
        """Return whether the experts for all tokens are said by their common width."""
        return self.shared.endswith("_size")


@dataclass(frozen=True, slots=True)
class Family:
    """What a `model_type` of transformers computes."""

    architecture: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ModelSpec that all models of the family share."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that a config.json may leave out, where they are not those of `ABSENT`."""
    has_own_head_dim: bool = True
    """Whether its config.json may name a `head_dim` that is not hidden_size / num_attention_heads."""
    window: Literal["none", "off", "all", "chosen", "layers", "types", "linear"] = "none"
    """Which blocks may have a window. none: no block; off: none, because `use_sliding_window` is refused; all: all of
    them; chosen: those that `use_sliding_window` and `layer_types` say; layers: those from `max_window_layers` on;
    types: those that `layer_types` says; linear: none, and `layer_types` says which ones have linear attention.
    """
    window_period: int = 0
    """n: of a config.json without `layer_types` every n-th block has no window; 0: all blocks have one."""
    ends_full: bool = False
    """Whether its last block has no window."""
    window_theta: float = 0.0
    """Base of the positions in blocks with a window, in a family that has them by type of block; 0: it has not."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Fields of ModelSpec that its config.json says by themselves, with their names there."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parts of a block that have another name in its files: norms, or those of a mixture."""
    mixture: Mixture | None = None
    """Its experts; None: it has none."""
    turns_parts: bool = False
    """Whether it may turn a part of each head alone."""
    quantized: tuple[str, ...] = ()
    """Forms of quantized weights that are read, by their `quant_method`."""
    scales_by_width: bool = False
    """Whether its embeddings are multiplied by √hidden_size. Unless `options` say another factor, its scores are then
    multiplied by query_pre_attn_scalar^(−½).
    """
    scales_queries: bool = False
    """Whether it scales queries by their positions."""
    has_blocks_without_rope: bool = False
    """Whether its config.json has `no_rope_layers`."""
    rope_types: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn")
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of its config.json that change the computation, with the values that are computed here."""

    @property
    def has_scalar(self) -> bool:
        """Return whether its config.json has `query_pre_attn_scalar`."""
        return self.scales_by_width and "attention_multiplier" not in self.options


_BIASES_OF_ATTENTION: Final = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
_BIASES: Final = {**_BIASES_OF_ATTENTION, "mlp_bias": "mlp_bias"}
_SANDWICH_OF_GLM: Final = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
_OLMO: Final = {"norm_placement": "after", "qk_norm": True, "qk_norm_over": "heads"}
_GLM: Final = {"fused_gate_up": True, "rope_interleaved": True}
_GEMMA: Final = {"norm_placement": "both", "zero_centered_norms": True, "hidden_act": "gelu_pytorch_tanh"}
_ABSENT_IN_GEMMA: Final = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_ONLY_IN_GEMMA: Final = {
    "hidden_act": (None, "gelu", "gelu_pytorch_tanh"),  # transformers does not read it
    "hidden_activation": ("gelu_pytorch_tanh",),
}
CAPS: Final = ("attn_logit_softcapping", "final_logit_softcapping")
GLOBAL_HEADS: Final = ("global_head_dim", "num_global_key_value_heads")
_ABSENT_IN_GLM: Final = {
    "attention_bias": True,
    "head_dim": 128,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-7,
}
_MULTIPLIERS: Final = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")

_ABSENT_IN_QWEN35: Final = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "num_key_value_heads": 4,
    "partial_rotary_factor": 0.25,
}
_QWEN35: Final[dict[str, Any]] = {
    "options": {"qk_norm": True, "zero_centered_norms": True, "attn_output_gate": True},
    "absent": _ABSENT_IN_QWEN35,
    "window": "linear",
    "keys": {name: name for name in LINEAR_SIZES},
    "turns_parts": True,
    "only": {"attn_output_gate": (True,), "mlp_only_layers": ([], None)},
}

_ABSENT_IN_GPT_OSS: Final = {
    "attention_bias": True,
    "head_dim": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "rope_theta": 1.5e5,
    "sliding_window": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}

_LOCAL: Final = {"num_experts": "num_local_experts"}
_LOCAL_OF_WIDTH: Final = _LOCAL | {"moe_intermediate_size": "intermediate_size"}
_SPARSE: Final[dict[str, Any]] = {
    "names": _LOCAL,
    "has_both_names": True,
    "only": {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    "written": {"decoder_sparse_step": 1, "mlp_only_layers": []},
}
_SHARED_WIDTH: Final = "shared_expert_intermediate_size"
_ONE_SHARED: Final = {"mlp.shared_experts": "mlp.shared_expert"}

FAMILIES: Final[dict[str, Family]] = {
    "llama": Family("LlamaForCausalLM", keys=_BIASES),
    "mistral": Family("MistralForCausalLM", absent={"sliding_window": 4096}, window="all"),
    "qwen2": Family("Qwen2ForCausalLM", {"qkv_bias": True}, has_own_head_dim=False, window="chosen"),
    "qwen3": Family("Qwen3ForCausalLM", {"qk_norm": True}, absent={"head_dim": 128}, window="chosen"),
    "phi3": Family(
        "Phi3ForCausalLM",
        {"fused_projections": True},
        absent={"original_max_position_embeddings": 4096},
        has_own_head_dim=False,
        window="all",
        turns_parts=True,
        rope_types=("default", "longrope"),
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        absent={"rms_norm_eps": 1e-5},
        window="all",
        renamed={
            "mlp.gate": "block_sparse_moe.gate",
            "mlp.experts": "block_sparse_moe.experts",
            "gate_proj": "w1",
            "up_proj": "w3",
            "down_proj": "w2",
        },
        mixture=Mixture(
            _LOCAL_OF_WIDTH,
            is_normed=True,
            only={"router_jitter_noise": (0, 0.0)},
            written={"output_router_logits": False, "router_jitter_noise": 0.0},
        ),
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        {"shared_expert_gate": True},
        absent={"qkv_bias": True},
        window="off",
        keys={"qkv_bias": "qkv_bias"},
        renamed=_ONE_SHARED,
        mixture=Mixture(**_SPARSE, shared=_SHARED_WIDTH),
    ),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", {"qk_norm": True}, mixture=Mixture(**_SPARSE)),
    "dots1": Family(
        "Dots1ForCausalLM",
        {"qk_norm": True, "router_scoring": "sigmoid", "router_bias": True},
        absent={"sliding_window": 4096, "max_window_layers": 62},
        window="layers",
        mixture=Mixture(
            {"num_experts": "n_routed_experts"},
            shared="n_shared_experts",
            is_scaled=True,
            only={"first_k_dense_replace": (0,), "moe_layer_freq": (1,), "n_group": (1,), "topk_group": (1,)},
            written={"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
        ),
    ),
    "granite": Family(
        "GraniteForCausalLM",
        absent={"attention_multiplier": 1.0},
        has_own_head_dim=False,
        keys={**_BIASES, **{name: name for name in _MULTIPLIERS}},
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        absent={"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
        has_own_head_dim=False,
        window="off",
        keys=_BIASES,
        has_blocks_without_rope=True,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        _OLMO,
        absent={"rms_norm_eps": 1e-5},
        has_own_head_dim=False,
        keys=_BIASES_OF_ATTENTION,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        _OLMO,
        absent={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
        has_own_head_dim=False,
        window="types",
        window_period=4,
        window_theta=5e5,
        keys=_BIASES_OF_ATTENTION,
        rope_types=("default", "linear", "llama3", "yarn"),
    ),
    "ministral": Family(
        "MinistralForCausalLM", absent={"num_key_value_heads": 8, "sliding_window": 4096}, window="types"
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        absent={"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        window="all",
        scales_queries=True,
        rope_types=("yarn",),
    ),
    "glm": Family(
        "GlmForCausalLM",
        _GLM,
        absent=_ABSENT_IN_GLM,
        keys={"qkv_bias": "attention_bias"},
        turns_parts=True,
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        _GLM | {"norm_placement": "both"},
        absent=_ABSENT_IN_GLM,
        keys={"qkv_bias": "attention_bias"},
        renamed=_SANDWICH_OF_GLM,
        turns_parts=True,
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        absent={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 8},
        keys={"qkv_bias": "attention_bias", "output_bias": "attention_out_bias", "mlp_bias": "mlp_bias"},
    ),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", **_QWEN35),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        **_QWEN35
        | {
            "options": _QWEN35["options"] | {"shared_expert_gate": True},
            "absent": _ABSENT_IN_QWEN35 | {"intermediate_size": 1, "num_key_value_heads": 2},
        },
        renamed=_ONE_SHARED,
        mixture=Mixture(is_normed=True, shared=_SHARED_WIDTH, only={"norm_topk_prob": (True,)}),
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _GEMMA,
        absent={**_ABSENT_IN_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        window="types",
        window_period=2,
        keys={**_BIASES_OF_ATTENTION, **{name: name for name in CAPS}},
        scales_by_width=True,
        only=_ONLY_IN_GEMMA,
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM",
        {
            "norm_placement": "both",
            "hidden_act": "gelu_pytorch_tanh",
            "qk_norm": True,
            "value_norm": True,
            "layer_scalar": True,
            "attention_multiplier": 1.0,
        },
        absent={
            **_ABSENT_IN_GEMMA,
            "enable_moe_block": False,
            "global_head_dim": 512,
            "hidden_size_per_layer_input": 256,
            "num_attention_heads": 8,
            "num_kv_shared_layers": 0,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "sliding_window": 512,
            "vocab_size": 262_144,
        },
        window="types",
        window_period=6,
        window_theta=1e4,
        ends_full=True,
        keys={
            **_BIASES_OF_ATTENTION,
            "attention_k_eq_v": "attention_k_eq_v",
            "final_logit_softcapping": "final_logit_softcapping",
            **{name: name for name in GLOBAL_HEADS},
        },
        scales_by_width=True,
        rope_types=("default", "proportional"),
        only={
            **_ONLY_IN_GEMMA,
            "enable_moe_block": (False,),
            "hidden_size_per_layer_input": (0, None),
            "num_kv_shared_layers": (0,),
            "use_bidirectional_attention": (None, False, "vision"),  # of pictures alone
        },
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _GEMMA | {"qk_norm": True},
        absent={**_ABSENT_IN_GEMMA, "num_attention_heads": 8, "rope_theta": 1e6, "vocab_size": 262_208},
        window="types",
        window_period=6,
        window_theta=1e4,
        keys={**_BIASES_OF_ATTENTION, "final_logit_softcapping": "final_logit_softcapping"},
        scales_by_width=True,
        rope_types=("default", "linear", "llama3", "yarn"),
        only=_ONLY_IN_GEMMA,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {"attention_sinks": True, "expert_bias": True},
        absent=_ABSENT_IN_GPT_OSS,
        window="types",
        window_period=2,
        keys={**_BIASES_OF_ATTENTION, "swiglu_alpha": "swiglu_alpha", "swiglu_limit": "swiglu_limit"},
        renamed={"mlp.gate": "mlp.router"},
        mixture=Mixture(_LOCAL_OF_WIDTH, is_normed=True, only={"norm_topk_prob": (True,)}),
        quantized=("mxfp4",),
        rope_types=("default", "linear", "llama3", "yarn"),
    ),
}
"""Families by `model_type`. The first that can say a model's options names its export."""

PLAIN: Final = ModelSpec()
OPTIONS: Final = (
    "qkv_bias",
    "output_bias",
    "mlp_bias",
    "qk_norm",
    "qk_norm_over",
    "value_norm",
    "norm_placement",
    "layer_scalar",
    "attention_k_eq_v",
    *GLOBAL_HEADS,
    "zero_centered_norms",
    "attn_output_gate",
    "attention_sinks",
    "expert_bias",
    "swiglu_alpha",
    "swiglu_limit",
    "fused_projections",
    "fused_gate_up",
    "rope_interleaved",
    "hidden_act",
    *CAPS,
    *LINEAR_SIZES,
    *_MULTIPLIERS,
)
"""Fields of ModelSpec that a family has with one value, unless its config.json says them."""

PERIOD: Final = ("sliding_window_pattern",)
"""Key of Gemma 3 for the period of its blocks without a window."""

ABSENT: Final[dict[str, Any]] = {
    "attention_bias": False,
    "attention_k_eq_v": False,
    "attention_multiplier": None,
    **dict.fromkeys(CAPS),
    "attention_out_bias": False,
    "embedding_multiplier": 1.0,
    "full_attention_interval": 4,
    **dict.fromkeys(GLOBAL_HEADS),
    "head_dim": None,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "layer_types": None,
    **dict.fromkeys(LINEAR_SIZES),
    "logits_scaling": 1.0,
    "max_window_layers": 28,
    "mlp_bias": False,
    "no_rope_layer_interval": 4,
    "no_rope_layers": None,
    "num_key_value_heads": None,
    "partial_rotary_factor": 1.0,
    "qkv_bias": False,
    "residual_multiplier": 1.0,
    "rms_norm_eps": 1e-6,
    "sliding_window": None,
    "swiglu_alpha": None,
    "swiglu_limit": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
"""transformers' values of keys that a config.json leaves out."""

ONLY: Final[dict[str, tuple[Any, ...]]] = {
    "add_cross_attention": (None, False),
    "hidden_act": ("silu",),
    "hidden_activation": (None, "silu"),
    "full_attn_mod": (None, 1),
    "interpolate_factor": (None, 1),
    "is_causal": (None, True),
    "is_encoder_decoder": (None, False),
    "quantization_config": (None,),
    "rope_interleaved": (None, False),
    "use_bidirectional_attention": (None, False),
    "use_mrope": (None, False),
}
"""Keys that change the computation, with the values that are computed here."""

READ_ELSEWHERE: Final = frozenset(
    {
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "model_type",
        "num_attention_heads",
        "num_hidden_layers",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "vocab_size",
    }
)

WITHOUT_EFFECT: Final = re.compile(
    r"_\w+|architectures|auto_map|bos_token_id|eos_token_id|pad_token_id|sep_token_id|dtype|torch_dtype|id2label|label2id|"
    r"output_attentions|output_hidden_states|producer|return_dict|transformers_version|use_cache|cache_implementation|is_decoder|is_llama_config|"
    r"tokenizer_class|task_specific_params|problem_type|chunk_size_feed_forward|unsloth_\w+|transformers\.js_config|"
    r"output_router_logits|router_aux_loss_coef|pretraining_tp|attention_dropout|resid_pdrop|embd_pdrop|hidden_dropout|residual_dropout|"
    r"experts_per_token|initial_context_length|neftune_noise_alpha|mamba_ssm_dtype|mtp_\w+|vocab_size_per_layer_input"
)
"""Keys that change nothing that is computed here. Dropout and noise are settings of a training, not of a model: a job
trains without them.
"""

_LATENT: Final = ("kv_lora_rank, multi-head latent attention, is", "dots1")
_LEARNED: Final = "learned positions with LayerNorm, are"
NOT_COMPUTED: Final[Mapping[str, tuple[str, str]]] = {
    "bloom": ("ALiBi and LayerNorm are", "llama"),
    "cohere2": ("layer_norm_eps, LayerNorm before attention and MLP side by side, is", "smollm3"),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "falcon": ("parallel_attn, attention and MLP side by side, is", "llama"),
    "falcon_h1": ("mamba_d_state, Mamba-2 beside attention, is", "qwen3_5_text"),
    "gemma": ("the scale of its embeddings without query_pre_attn_scalar is", "gemma2"),
    "gpt2": (f"n_positions, {_LEARNED}", "llama"),
    "gpt_neox": ("use_parallel_residual, attention and MLP side by side, is", "llama"),
    "granitemoehybrid": ("mamba_n_heads, a block of Mamba-2, is", "granite"),
    "jamba": ("mamba_d_state, a block of Mamba, is", "mixtral"),
    "kimi_k2": _LATENT,
    "lfm2": ("conv_L_cache, a short convolution in place of attention, is", "qwen3"),
    "llama4": ("attention_chunk_size, attention in chunks, is", "llama"),
    "llama4_text": ("attention_chunk_size, attention in chunks, is", "llama"),
    "mamba2": ("state_size, a block of Mamba-2, is", "qwen3_5_text"),
    "minimax": ("linear_attn_alpha_factor, lightning attention, is", "qwen3_5_moe_text"),
    "nemotron_h": ("ssm_state_size, a block of Mamba-2, is", "qwen3_5_text"),
    "opt": (f"do_layer_norm_before, {_LEARNED}", "llama"),
    "starcoder2": ("norm_epsilon, LayerNorm with biases, is", "qwen2"),
}
"""By `model_type`, the key or the arithmetic that is missing, and the nearest family."""

_OF_SMALL_GEMMA: Final = "which Gemma 4 E2B and E4B have; the nearest family that works is gemma3_text"
WHY_NOT: Final[Mapping[str, str]] = {
    "enable_moe_block": ": experts beside the MLP, which Gemma 4 26B-A4B has; the nearest family that works is "
    "qwen3_5_moe_text",
    "hidden_size_per_layer_input": f": inputs of their own for blocks, {_OF_SMALL_GEMMA}",
    "quantization_config": '; take the model without it (bfloat16); [adapter] quantize = "nf4" makes it small here',
    "num_kv_shared_layers": f": keys and values that blocks share, {_OF_SMALL_GEMMA}",
}
"""By key, what is to be said beside its value when it is refused."""
