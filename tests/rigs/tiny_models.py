"""Tiny random models in Hugging Face's layout, written by transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers

SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
WITH_SHARED = EXPERTS | {"shared_expert_intermediate_size": 40}
WINDOWED = {"head_dim": 8, "sliding_window": 8}
LINEAR = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 8.0]}
FAMILIES: dict[str, dict[str, Any]] = {
    **{plain: {"head_dim": 8} for plain in ("granite", "smollm3", "olmo2", "ministral3", "glm", "glm4", "seed_oss")},
    **dict.fromkeys(("olmo3", "ministral", "gemma2", "gemma3_text"), WINDOWED),
    "gemma4_text": WINDOWED | {"hidden_size_per_layer_input": 0, "global_head_dim": 16, "attention_k_eq_v": True},
    "phi3": {"rope_scaling": LONGROPE, "original_max_position_embeddings": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": EXPERTS,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    "qwen2_moe": WITH_SHARED,
    "gpt_oss": WINDOWED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR | WITH_SHARED,
}
"""Options of families that have names, positions, norms or experts of their own."""


def write_tiny_model(
    folder: Path,
    *,
    model_type: str = "llama",
    dtype: torch.dtype = torch.float32,
    shard_size: str = "5GB",
    **options: Any,
) -> Path:
    """Write a model whose every weight is random, norms and biases too."""
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(model_type, **(SHAPE | options))
    model: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    return folder


VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


def write_tiny_model_of_pictures(folder: Path, *, model_type: str, tied: bool, text: dict[str, Any]) -> Path:
    """Write a random model of pictures and text, whose text model is `text` on top of `SHAPE`."""
    torch.manual_seed(7)
    sizes = SHAPE | {"tie_word_embeddings": tied} | text
    vision = {"model_type": "pixtral", "head_dim": 8} if model_type == "mistral3" else {}
    more = {"mm_tokens_per_image": 1} if model_type == "gemma3" else {}
    config = transformers.AutoConfig.for_model(
        model_type, text_config=sizes, vision_config=VISION | vision, tie_word_embeddings=tied, **more
    )
    model: Any = transformers.AutoModelForImageTextToText.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder
