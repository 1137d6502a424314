"""W_0: each parameter is a function of the seed and of its own name (docs/numerics.md, section 9)."""

from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from tests.second_oracle.job import Model

Weights = dict[str, dict[str, Tensor]]
"""Layer name to parameter name to tensor. Layers are in the model's order."""


def parameter_shapes(model: Model) -> dict[str, dict[str, tuple[int, ...]]]:
    """Layer name to parameter name to shape. A linear weight is [outputs, inputs]."""
    hidden, inner = model.hidden_size, model.intermediate_size
    head_dim = hidden // model.num_attention_heads
    keys = model.num_key_value_heads * head_dim
    block: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    blocks = {f"block.{index}": block for index in range(model.num_hidden_layers)}
    vocabulary = (model.vocab_size, hidden)
    return {"embed": {"weight": vocabulary}, **blocks, "head": {"norm.weight": (hidden,), "lm_head.weight": vocabulary}}


def initial_weights(model: Model, *, seed: int) -> Weights:
    """W_0 in float32: norms are ones, everything else is normal."""
    return {
        layer: {
            name: torch.ones(shape)
            if len(shape) == 1
            else _normal(shape, deviation=model.initializer_range, key=f"{seed}/{layer}/{name}")
            for name, shape in shapes.items()
        }
        for layer, shapes in parameter_shapes(model).items()
    }


def _normal(shape: tuple[int, ...], *, deviation: float, key: str) -> Tensor:
    number = int.from_bytes(blake2b(key.encode(), digest_size=16).digest(), "little")
    drawn = np.random.Generator(np.random.Philox(key=number)).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(drawn * np.float32(deviation))
