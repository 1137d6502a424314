"""What the model computes, as functions of weights and hidden states (docs/numerics.md, section 9)."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.second_oracle.initial_weights import Weights
from tests.second_oracle.job import Model

Parameters = dict[str, Tensor]


Carry = Callable[[str, Tensor], Tensor]
"""From a layer's name and its input as it was sent to the input as it arrives."""


def normed_output(model: Model, weights: Weights, inputs: Tensor, *, attention_backend: str, carry: Carry) -> Tensor:
    """What the vocabulary is multiplied with: the last hidden states after the head's norm."""
    hidden = functional.embedding(inputs, weights["embed"]["weight"])
    for index in range(model.num_hidden_layers):
        name = f"block.{index}"
        hidden = block(model, weights[name], carry(name, hidden), attention_backend=attention_backend)
    hidden = carry("head", hidden)
    return functional.rms_norm(hidden, (model.hidden_size,), weights["head"]["norm.weight"], model.rms_norm_eps)


def block(model: Model, parameters: Parameters, hidden: Tensor, *, attention_backend: str) -> Tensor:
    """One block: attention and the gated feed-forward, each on a normed copy, each added to what came in."""

    def normed(values: Tensor, name: str) -> Tensor:
        return functional.rms_norm(values, (model.hidden_size,), parameters[f"{name}.weight"], model.rms_norm_eps)

    hidden = hidden + attention(model, parameters, normed(hidden, "input_layernorm"), backend=attention_backend)
    return hidden + feed_forward(parameters, normed(hidden, "post_attention_layernorm"))


def attention(model: Model, parameters: Parameters, hidden: Tensor, *, backend: str) -> Tensor:
    """Causal attention with rotary positions; several query heads may share one key and value head."""
    num_rows, length, _ = hidden.shape
    head_dim = model.hidden_size // model.num_attention_heads

    def heads(projection: str) -> Tensor:
        projected = functional.linear(hidden, parameters[f"self_attn.{projection}.weight"])
        return projected.reshape(num_rows, length, -1, head_dim)

    cosine, sine = rotary(length, head_dim, theta=model.rope_theta, dtype=hidden.dtype)
    query = rotated(heads("q_proj"), cosine, sine).transpose(1, 2)
    key = rotated(heads("k_proj"), cosine, sine).transpose(1, 2)
    value = heads("v_proj").transpose(1, 2)
    are_shared = model.num_key_value_heads < model.num_attention_heads
    with chosen(backend):
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=are_shared)
    joined = mixed.transpose(1, 2).reshape(num_rows, length, -1)
    return functional.linear(joined, parameters["self_attn.o_proj.weight"])


def rotary(length: int, head_dim: int, *, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of every position and pair, both [length, 1, head_dim], computed in float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / theta**exponents
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    cosine = torch.cat([angles.cos(), angles.cos()], 1).unsqueeze(1)
    sine = torch.cat([-angles.sin(), angles.sin()], 1).unsqueeze(1)
    return cosine.to(dtype), sine.to(dtype)


def rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """heads [rows, length, heads, head_dim], each pair turned by the angle of its position."""
    half = heads.shape[-1] // 2
    swapped = torch.cat([heads[..., half:], heads[..., :half]], -1)
    return torch.addcmul(heads * cosine, swapped, sine)


def feed_forward(parameters: Parameters, hidden: Tensor) -> Tensor:
    """down(silu(gate(x)) · up(x))."""
    gate = functional.linear(hidden, parameters["mlp.gate_proj.weight"])
    up = functional.linear(hidden, parameters["mlp.up_proj.weight"])
    return functional.linear(functional.silu(gate) * up, parameters["mlp.down_proj.weight"])


def chosen(backend: str) -> AbstractContextManager[None]:
    """The kernel of attention that the job names; `auto` leaves it to torch."""
    named = {
        "math": SDPBackend.MATH,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    return nullcontext() if backend == "auto" else sdpa_kernel(named[backend])
