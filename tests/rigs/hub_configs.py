"""Values of `config.json` files as their owners publish them on the Hub, by the name of the model.

Facts alone: keys and values. Long lists are written as expressions.
"""

from typing import Any, Final

Config = dict[str, Any]


def _of(
    kind: str,
    sizes: tuple[int, int, int, int, int, int],
    *,
    act: str | None = "silu",
    eps: float = 1e-6,
    theta: float | None = 10_000.0,
    **more: Any,
) -> Config:
    """A config with what nearly all have. sizes: hidden, intermediate, blocks, heads, key/value heads, vocabulary."""
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    )
    common = {"model_type": kind, "rms_norm_eps": eps, "initializer_range": 0.02, "use_cache": True}
    common |= {"torch_dtype": "bfloat16", "transformers_version": "4.40.0", "attention_dropout": 0.0}
    named = {"hidden_act": act} if act else {}
    turned = {"rope_theta": theta} if theta else {}
    return common | named | turned | dict(zip(names, sizes, strict=True)) | more


def _gemma3(**text: Any) -> Config:
    """A Gemma 3 of pictures and text, which leaves out what transformers gives it anyway."""
    rope: Config = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text"} | rope | text,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model"},
    }


def _mistral3(text: Config, **more: Any) -> Config:
    """A Mistral 3 of pictures and text."""
    return {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": 10,
        "model_type": "mistral3",
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "text_config": text,
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1024, "image_size": 1540, "model_type": "pixtral", "num_hidden_layers": 24},
        "vision_feature_layer": -1,
    } | more


def _gemma4(sizes: tuple[int, int, int, int, int, int], period: int, **text: Any) -> Config:
    """A Gemma 4 of pictures and text."""
    named = _of("gemma4_text", sizes, act=None, theta=None, **GEMMA4 | text)
    kinds = ["sliding_attention"] * (period - 1) + ["full_attention"]
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": None,
        "boi_token_id": 255999,
        "eoi_token_id": 258882,
        "image_token_id": 258880,
        "model_type": "gemma4",
        "text_config": named | {"layer_types": kinds * (sizes[2] // period)},
        "tie_word_embeddings": True,
        "video_token_id": 258884,
        "vision_config": {"model_type": "gemma4_vision"},
    }


GEMMA4: Final[Config] = {
    "attention_bias": False,
    "attention_k_eq_v": True,
    "enable_moe_block": False,
    "expert_intermediate_size": None,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": None,
    "num_experts": None,
    "num_kv_shared_layers": 0,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
    },
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "top_k_experts": None,
    "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
    "vocab_size_per_layer_input": 262144,
}
LLAMA3: Final[Config] = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
MINISTRAL3: Final[Config] = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 16.0,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16384,
    "rope_theta": 1_000_000.0,
    "rope_type": "yarn",
    "type": "yarn",
}
SMOLLM: Final[Config] = {"is_llama_config": True, "rope_interleaved": False, "rope_scaling": None, "pretraining_tp": 1}
LLAMA: Final[Config] = {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rope_scaling": None}
QWEN2: Final[Config] = {"sliding_window": 32768, "use_sliding_window": False, "use_mrope": False}
QWEN3: Final[Config] = {
    "attention_bias": False,
    "head_dim": 128,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
}
GRANITE: Final[Config] = {
    "attention_bias": False,
    "attention_dropout": 0.1,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "logits_scaling": 16.0,
    "mlp_bias": False,
    "residual_multiplier": 0.22,
    "rope_scaling": None,
    "tie_word_embeddings": True,
}
PHI: Final[Config] = {
    "attention_bias": False,
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "embd_pdrop": 0.0,
    "original_max_position_embeddings": 4096,
    "resid_pdrop": 0.0,
    "tie_word_embeddings": False,
}
GEMMA2: Final[Config] = {
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
GEMMA3: Final[Config] = {
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "sliding_window": 512,
}
QWEN35: Final[Config] = {
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
}


def _mixed(number: int) -> list[str]:
    return (["linear_attention"] * 3 + ["full_attention"]) * (number // 4)


CONFIGS: Final[dict[str, Config]] = {
    "HuggingFaceTB/SmolLM2-135M": _of(
        "llama", (576, 1536, 30, 9, 3, 49152), eps=1e-5, theta=100_000, tie_word_embeddings=True, **SMOLLM
    ),
    "HuggingFaceTB/SmolLM2-360M-Instruct": _of(
        "llama",
        (960, 2560, 32, 15, 5, 49152),
        eps=1e-5,
        theta=100_000,
        tie_word_embeddings=True,
        **SMOLLM | {"transformers.js_config": {"dtype": "q4", "kv_cache_dtype": {"q4f16": "float16"}}},
    ),
    "HuggingFaceTB/SmolLM2-1.7B": _of(
        "llama", (2048, 8192, 24, 32, 32, 49152), eps=1e-5, theta=130_000, tie_word_embeddings=True, **LLAMA
    ),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _of(
        "llama", (2048, 5632, 22, 32, 4, 32000), eps=1e-5, attention_bias=False, pretraining_tp=1, rope_scaling=None
    ),
    "meta-llama/Llama-2-7b-hf": _of(
        "llama", (4096, 11008, 32, 32, 32, 32000), eps=1e-5, theta=None, pretraining_tp=1, rope_scaling=None
    ),
    "meta-llama/Meta-Llama-3-8B": _of("llama", (4096, 14336, 32, 32, 8, 128256), eps=1e-5, theta=500_000.0, **LLAMA),
    "meta-llama/Llama-3.1-70B-Instruct": _of(
        "llama", (8192, 28672, 80, 64, 8, 128256), eps=1e-5, theta=500_000.0, **LLAMA | {"rope_scaling": LLAMA3}
    ),
    "meta-llama/Llama-3.2-1B-Instruct": _of(
        "llama",
        (2048, 8192, 16, 32, 8, 128256),
        eps=1e-5,
        theta=500_000.0,
        head_dim=64,
        tie_word_embeddings=True,
        **LLAMA | {"rope_scaling": LLAMA3 | {"factor": 32.0}},
    ),
    "unsloth/Llama-3.2-3B-Instruct": _of(
        "llama",
        (3072, 8192, 28, 24, 8, 128256),
        eps=1e-5,
        theta=500_000.0,
        head_dim=128,
        pad_token_id=128004,
        tie_word_embeddings=True,
        unsloth_fixed=True,
        **LLAMA | {"rope_scaling": LLAMA3 | {"factor": 32.0}},
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": _of(
        "llama", (4096, 14336, 32, 32, 8, 128256), eps=1e-5, theta=500_000.0, **LLAMA | {"rope_scaling": LLAMA3}
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _of(
        "qwen2", (1536, 8960, 28, 12, 2, 151936), max_window_layers=21, **QWEN2 | {"sliding_window": 4096}
    ),
    "mistralai/Mistral-7B-v0.1": _of(
        "mistral", (4096, 14336, 32, 32, 8, 32000), eps=1e-5, sliding_window=4096, tie_word_embeddings=False
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": _of(
        "mistral", (4096, 14336, 32, 32, 8, 32768), eps=1e-5, theta=1e6, sliding_window=None
    ),
    "mistralai/Mistral-Nemo-Base-2407": _of(
        "mistral", (5120, 14336, 40, 32, 8, 131072), eps=1e-5, theta=1e6, head_dim=128, sliding_window=None
    ),
    "mistralai/Mixtral-8x7B-v0.1": _of(
        "mixtral",
        (4096, 14336, 32, 32, 8, 32000),
        eps=1e-5,
        theta=1e6,
        num_experts_per_tok=2,
        num_local_experts=8,
        output_router_logits=False,
        router_aux_loss_coef=0.02,
        sliding_window=None,
    ),
    "Qwen/Qwen2.5-0.5B": _of(
        "qwen2", (896, 4864, 24, 14, 2, 151936), theta=1e6, max_window_layers=24, tie_word_embeddings=True, **QWEN2
    ),
    "Qwen/Qwen2.5-7B-Instruct": _of(
        "qwen2",
        (3584, 18944, 28, 28, 4, 152064),
        theta=1e6,
        max_window_layers=28,
        tie_word_embeddings=False,
        sliding_window=131072,
        use_sliding_window=False,
    ),
    "Qwen/Qwen2.5-Coder-32B": _of(
        "qwen2", (5120, 27648, 64, 40, 8, 152064), theta=1e6, max_window_layers=64, **QWEN2 | {"sliding_window": 131072}
    ),
    "Qwen/Qwen3-0.6B": _of(
        "qwen3",
        (1024, 3072, 28, 16, 8, 151936),
        theta=1_000_000,
        max_window_layers=28,
        tie_word_embeddings=True,
        **QWEN3,
    ),
    "Qwen/Qwen3-8B": _of(
        "qwen3",
        (4096, 12288, 36, 32, 8, 151936),
        theta=1_000_000,
        max_window_layers=36,
        tie_word_embeddings=False,
        **QWEN3,
    ),
    "unsloth/Qwen3-4B-Instruct-2507": _of(
        "qwen3",
        (2560, 9728, 36, 32, 8, 151936),
        theta=5_000_000,
        max_window_layers=36,
        tie_word_embeddings=True,
        unsloth_fixed=True,
        unsloth_version="2025.8.1",
        **QWEN3,
    ),
    "Qwen/Qwen3-30B-A3B": _of(
        "qwen3_moe",
        (2048, 6144, 48, 32, 4, 151936),
        theta=1_000_000.0,
        attention_bias=False,
        decoder_sparse_step=1,
        head_dim=128,
        max_window_layers=48,
        mlp_only_layers=[],
        moe_intermediate_size=768,
        norm_topk_prob=True,
        num_experts=128,
        num_experts_per_tok=8,
        output_router_logits=False,
        rope_scaling=None,
        router_aux_loss_coef=0.001,
        sliding_window=None,
        use_sliding_window=False,
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": _of(
        "qwen2_moe",
        (2048, 5632, 24, 16, 16, 151936),
        theta=1e6,
        decoder_sparse_step=1,
        max_window_layers=21,
        moe_intermediate_size=1408,
        norm_topk_prob=False,
        num_experts=60,
        num_experts_per_tok=4,
        output_router_logits=False,
        router_aux_loss_coef=0.001,
        shared_expert_intermediate_size=5632,
        sliding_window=32768,
        use_sliding_window=False,
    ),
    "Qwen/Qwen3.5-4B": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": "qwen3_5",
        "text_config": _of(
            "qwen3_5_text",
            (2560, 9216, 32, 16, 4, 248320),
            theta=None,
            layer_types=_mixed(32),
            linear_num_value_heads=32,
            tie_word_embeddings=True,
            **QWEN35,
        ),
        "tie_word_embeddings": True,
        "transformers_version": "4.57.0.dev0",
        "video_token_id": 248057,
        "vision_config": {"depth": 24, "hidden_size": 1024, "model_type": "qwen3_5", "num_heads": 16},
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    },
    "Qwen/Qwen3.6-35B-A3B": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": "qwen3_5_moe",
        "text_config": {
            key: value
            for key, value in _of(
                "qwen3_5_moe_text",
                (2048, 0, 40, 16, 2, 248320),
                theta=None,
                layer_types=_mixed(40),
                linear_num_value_heads=32,
                moe_intermediate_size=512,
                num_experts=256,
                num_experts_per_tok=8,
                router_aux_loss_coef=0.001,
                shared_expert_intermediate_size=512,
                tie_word_embeddings=False,
                **QWEN35,
            ).items()
            if key != "intermediate_size"
        },
        "tie_word_embeddings": False,
        "video_token_id": 248057,
        "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5_moe", "num_heads": 16},
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    },
    "microsoft/Phi-3-mini-4k-instruct": _of(
        "phi3", (3072, 8192, 32, 32, 32, 32064), eps=1e-5, rope_scaling=None, sliding_window=2047, **PHI
    ),
    "microsoft/Phi-3-mini-128k-instruct": _of(
        "phi3",
        (3072, 8192, 32, 32, 32, 32064),
        eps=1e-5,
        max_position_embeddings=131072,
        rope_scaling={"long_factor": [1.08] * 48, "short_factor": [1.05] * 48, "type": "longrope"},
        sliding_window=262144,
        **PHI,
    ),
    "microsoft/phi-4": _of(
        "phi3",
        (5120, 17920, 40, 40, 10, 100352),
        eps=1e-5,
        theta=250_000,
        rope_scaling=None,
        sliding_window=None,
        **PHI | {"original_max_position_embeddings": 16384},
    ),
    "microsoft/Phi-4-mini-instruct": _of(
        "phi3",
        (3072, 8192, 32, 24, 8, 200064),
        eps=1e-5,
        full_attn_mod=1,
        interpolate_factor=1,
        lm_head_bias=False,
        max_position_embeddings=131072,
        mlp_bias=False,
        partial_rotary_factor=0.75,
        rope_scaling={"long_factor": [1.2] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
        sliding_window=262144,
        **PHI | {"tie_word_embeddings": True},
    ),
    "ibm-granite/granite-3.3-8b-instruct": _of(
        "granite", (4096, 12800, 40, 32, 8, 49159), eps=1e-5, theta=10_000_000.0, **GRANITE
    ),
    "ibm-granite/granite-4.1-3b": _of(
        "granite",
        (2560, 8192, 40, 40, 8, 100352),
        eps=1e-5,
        theta=10_000_000,
        **GRANITE | {"attention_dropout": 0.0, "attention_multiplier": 0.015625, "logits_scaling": 10.0},
    ),
    "HuggingFaceTB/SmolLM3-3B": _of(
        "smollm3",
        (2048, 11008, 36, 16, 4, 128256),
        theta=5_000_000.0,
        attention_bias=False,
        layer_types=["full_attention"] * 36,
        max_window_layers=28,
        mlp_bias=False,
        no_rope_layer_interval=4,
        no_rope_layers=[1, 1, 1, 0] * 9,
        pretraining_tp=2,
        rope_scaling=None,
        sliding_window=None,
        tie_word_embeddings=True,
        use_sliding_window=False,
    ),
    "allenai/OLMo-2-1124-7B": _of(
        "olmo2", (4096, 11008, 32, 32, 32, 100352), theta=500_000, attention_bias=False, rope_scaling=None
    ),
    "allenai/Olmo-3-1025-7B": _of(
        "olmo3",
        (4096, 11008, 32, 32, 32, 100278),
        theta=500_000,
        attention_bias=False,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8,
        max_position_embeddings=65536,
        rope_scaling={
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        sliding_window=4096,
    ),
    "THUDM/GLM-4-9B-0414": _of(
        "glm4",
        (4096, 13696, 40, 32, 2, 151552),
        eps=1e-5,
        attention_bias=True,
        head_dim=128,
        partial_rotary_factor=0.5,
        rope_scaling=None,
        tie_word_embeddings=False,
    ),
    "ByteDance-Seed/Seed-OSS-36B-Base": _of(
        "seed_oss",
        (5120, 27648, 64, 80, 8, 155136),
        theta=10_000_000.0,
        attention_bias=True,
        attention_dropout=0.1,
        attention_out_bias=False,
        head_dim=128,
        mlp_bias=False,
        residual_dropout=0.1,
        rope_scaling={"rope_type": "default"},
        tie_word_embeddings=False,
    ),
    "google/gemma-2-2b": _of("gemma2", (2304, 9216, 26, 8, 4, 256000), act="gelu_pytorch_tanh", **GEMMA2),
    "google/gemma-3-1b-it": _of(
        "gemma3_text", (1152, 6912, 26, 4, 1, 262144), act=None, theta=1_000_000, sliding_window_pattern=6, **GEMMA3
    ),
    "google/gemma-3-4b-it": _gemma3(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34),
    "google/gemma-3-12b-it": _gemma3(
        hidden_size=3840, intermediate_size=15360, num_attention_heads=16, num_hidden_layers=48, num_key_value_heads=8
    ),
    "google/gemma-3-27b-it": _gemma3(
        head_dim=128,
        hidden_size=5376,
        intermediate_size=21504,
        num_attention_heads=32,
        num_hidden_layers=62,
        num_key_value_heads=16,
        query_pre_attn_scalar=168,
    ),
    "google/gemma-4-31B-it": _gemma4((5376, 21504, 60, 32, 16, 262144), 6, num_global_key_value_heads=4),
    "google/gemma-4-26B-A4B-it": _gemma4(
        (2816, 2112, 30, 16, 8, 262144),
        6,
        enable_moe_block=True,
        moe_intermediate_size=704,
        num_experts=128,
        num_global_key_value_heads=2,
        top_k_experts=8,
    ),
    "google/gemma-4-E2B-it": _gemma4(
        (1536, 6144, 35, 8, 1, 262144),
        5,
        attention_k_eq_v=False,
        hidden_size_per_layer_input=256,
        max_position_embeddings=131072,
        num_global_key_value_heads=None,
        num_kv_shared_layers=20,
        sliding_window=512,
        use_bidirectional_attention=None,
        use_double_wide_mlp=True,
    ),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": _mistral3(
        _of(
            "mistral",
            (5120, 32768, 40, 32, 8, 131072),
            eps=1e-5,
            theta=1_000_000_000.0,
            head_dim=128,
            max_position_embeddings=131072,
            sliding_window=None,
        )
    ),
    "mistralai/Ministral-3-8B-Base-2512": _mistral3(
        _of(
            "ministral3",
            (4096, 14336, 34, 32, 8, 131072),
            eps=1e-5,
            theta=None,
            head_dim=128,
            max_position_embeddings=262144,
            rope_parameters=MINISTRAL3,
            sliding_window=None,
        )
    ),
    "mistralai/Ministral-3-8B-Instruct-2512": _mistral3(
        _of(
            "ministral3",
            (4096, 14336, 34, 32, 8, 131072),
            eps=1e-5,
            theta=None,
            head_dim=128,
            max_position_embeddings=262144,
            rope_parameters=MINISTRAL3,
            sliding_window=None,
        ),
        quantization_config={"activation_scheme": "static", "quant_method": "fp8", "weight_block_size": None},
    ),
    "openai/gpt-oss-20b": _of(
        "gpt_oss",
        (2880, 2880, 24, 64, 8, 201088),
        eps=1e-5,
        theta=150_000,
        attention_bias=True,
        experts_per_token=4,
        head_dim=64,
        initial_context_length=4096,
        layer_types=["sliding_attention", "full_attention"] * 12,
        num_experts_per_tok=4,
        num_local_experts=32,
        output_router_logits=False,
        quantization_config={
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
            "quant_method": "mxfp4",
        },
        rope_scaling={
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        router_aux_loss_coef=0.9,
        sliding_window=128,
        swiglu_limit=7.0,
        tie_word_embeddings=False,
    ),
    "rednote-hilab/dots.llm1.base": _of(
        "dots1",
        (4096, 10944, 62, 32, 32, 152064),
        eps=1e-5,
        theta=10_000_000,
        attention_bias=False,
        first_k_dense_replace=1,
        head_dim=128,
        max_window_layers=62,
        moe_intermediate_size=1408,
        moe_layer_freq=1,
        n_group=1,
        n_routed_experts=128,
        n_shared_experts=2,
        norm_topk_prob=True,
        num_experts_per_tok=6,
        routed_scaling_factor=2.5,
        sliding_window=None,
        topk_group=1,
        use_sliding_window=False,
    ),
    "deepseek-ai/DeepSeek-V2-Lite": _of(
        "deepseek_v2",
        (2048, 10944, 27, 16, 16, 102400),
        first_k_dense_replace=1,
        kv_lora_rank=512,
        moe_intermediate_size=1408,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
    "ibm-granite/granite-4.0-h-tiny": _of(
        "granitemoehybrid", (1536, 512, 40, 12, 4, 100352), eps=1e-5, mamba_n_heads=48, num_local_experts=64
    ),
    "LiquidAI/LFM2-1.2B": _of("lfm2", (2048, 12288, 16, 32, 8, 65536), act=None, eps=1e-5, conv_L_cache=3),
    "unsloth/Meta-Llama-3.1-8B-bnb-4bit": _of(
        "llama",
        (4096, 14336, 32, 32, 8, 128256),
        eps=1e-5,
        theta=500_000.0,
        quantization_config={"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "quant_method": "bitsandbytes"},
        unsloth_version="2024.9",
        **LLAMA | {"rope_scaling": LLAMA3},
    ),
    "google/gemma-2b": _of("gemma", (2048, 16384, 18, 8, 1, 256000), act="gelu", head_dim=256, hidden_activation=None),
    "EleutherAI/pythia-160m": {"model_type": "gpt_neox", "hidden_size": 768, "use_parallel_residual": True},
    "deepseek-ai/DeepSeek-V3": _of(
        "deepseek_v3",
        (7168, 18432, 61, 128, 128, 129280),
        first_k_dense_replace=3,
        kv_lora_rank=512,
        moe_intermediate_size=2048,
        n_group=8,
        n_routed_experts=256,
        num_experts_per_tok=8,
        q_lora_rank=1536,
    ),
    "moonshotai/Kimi-K2-Instruct": _of(
        "kimi_k2", (7168, 18432, 61, 64, 64, 163840), theta=50_000.0, kv_lora_rank=512, n_routed_experts=384
    ),
    "mistralai/Mamba-Codestral-7B-v0.1": {"model_type": "mamba2", "hidden_size": 4096, "state_size": 128},
    "tiiuae/Falcon-H1-1.5B-Deep-Instruct": {"model_type": "falcon_h1", "mamba_d_state": 256},
    "nvidia/Nemotron-H-8B-Base-8K": {"model_type": "nemotron_h", "hidden_size": 4096, "ssm_state_size": 128},
    "meta-llama/Llama-4-Scout-17B-16E": {
        "model_type": "llama4",
        "text_config": {"model_type": "llama4_text", "hidden_size": 5120, "attention_chunk_size": 8192},
    },
    "CohereForAI/c4ai-command-r7b-12-2024": {
        "model_type": "cohere2",
        "hidden_size": 4096,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.25,
    },
    "MiniMaxAI/MiniMax-Text-01-hf": {
        "model_type": "minimax",
        "hidden_size": 6144,
        "linear_attn_alpha_factor": 3.5565588200778455,
    },
    "openai-community/gpt2": {"model_type": "gpt2", "n_embd": 768, "n_positions": 1024},
    "bigscience/bloom-560m": {"model_type": "bloom", "hidden_size": 1024, "n_layer": 24},
}
