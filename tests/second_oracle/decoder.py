"""What the model computes, as functions of weights and hidden states (docs/numerics.md, section 9)."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.second_oracle.experts import Routed, mixture
from tests.second_oracle.initial_weights import Weights
from tests.second_oracle.job import Model, Rope
from tests.second_oracle.linear_attention import mixed as delta_rule

Parameters = dict[str, Tensor]


Carry = Callable[[str, Tensor], Tensor]
"""From a layer's name and its input as it was sent to the input as it arrives."""


def normed_output(
    model: Model,
    weights: Weights,
    inputs: Tensor,
    positions: Tensor | None,
    *,
    attention_backend: str,
    carry: Carry,
    routed: Routed,
    frozen: Weights | None = None,
) -> Tensor:
    """What the vocabulary is multiplied with: the last hidden states after the head's norm.

    frozen: weights without adapters, whose hidden states are carried below the others.
    """
    hidden = functional.embedding(inputs, weights["embed"]["weight"])
    if model.embedding_multiplier != 1:
        hidden = hidden * torch.tensor(model.embedding_multiplier).to(hidden.dtype)
    if frozen is not None:
        hidden = torch.cat([hidden, hidden])
    for index in range(model.num_hidden_layers):
        name = f"block.{index}"
        window = model.sliding_window if model.type_of(index) == "sliding_attention" else 0
        arrived = carry(name, hidden)
        n = model.no_rope_layer_interval
        one = partial(
            block,
            model,
            attention_backend=attention_backend,
            window=window,
            heads_of=model.heads_of(index),
            has_values=not (model.attention_k_eq_v and model.type_of(index) == "full_attention"),
            knows_positions=n == 0 or (index + 1) % n != 0,
            is_linear=model.type_of(index) == "linear_attention",
            routed=routed,
        )
        if frozen is None:
            hidden = one(weights[name], arrived, positions)
            continue
        upper, lower = arrived.chunk(2)
        with torch.no_grad():
            of_frozen = one(frozen[name], lower, positions)
        hidden = torch.cat([one(weights[name], upper, positions), of_frozen])
    hidden = carry("head", hidden)
    return normalized(model, hidden, weights["head"]["norm.weight"])


def normalized(model: Model, values: Tensor, weight: Tensor) -> Tensor:
    """rms_norm over the last dimension, whose gain may be 1 + weight."""
    if not model.zero_centered_norms:
        return functional.rms_norm(values, weight.shape, weight, model.rms_norm_eps)
    return functional.rms_norm(values.float(), weight.shape, 1.0 + weight.float(), model.rms_norm_eps).to(values.dtype)


def block(
    model: Model,
    parameters: Parameters,
    hidden: Tensor,
    positions: Tensor | None,
    *,
    attention_backend: str,
    window: int,
    heads_of: tuple[int, int],
    has_values: bool,
    knows_positions: bool,
    is_linear: bool,
    routed: Routed,
) -> Tensor:
    """One block: attention and the gated feed-forward, each on a normed copy, each added to what came in."""

    def normed(values: Tensor, name: str) -> Tensor:
        return normalized(model, values, parameters[f"{name}_layernorm.weight"])

    is_before, is_after = model.norm_placement != "after", model.norm_placement != "before"
    before = normed(hidden, "input") if is_before else hidden
    if is_linear:
        mixed = linear_attention(model, parameters, before, positions)
    else:
        mixed = attention(
            model,
            parameters,
            before,
            positions,
            backend=attention_backend,
            window=window,
            heads_of=heads_of,
            has_values=has_values,
            knows_positions=knows_positions,
        )
    if is_after:
        mixed = normed(mixed, "post_attention")
    hidden = hidden + multiplied(model, mixed)
    n = hidden
    if is_before:
        n = normed(hidden, "pre_feedforward" if is_after else "post_attention")
    made = mixture(model, parameters, n, routed) if model.num_experts else feed_forward(model, parameters, n)
    if is_after:
        made = normed(made, "post_feedforward")
    hidden = hidden + multiplied(model, made)
    if not model.layer_scalar:
        return hidden
    constant = parameters["layer_scalar"]
    return hidden * (constant.detach() + 0 * constant)


def multiplied(model: Model, branch: Tensor) -> Tensor:
    """What is added to the hidden states."""
    return branch if model.residual_multiplier == 1 else branch * model.residual_multiplier


def linear(parameters: Parameters, name: str, values: Tensor) -> Tensor:
    """values · weightᵀ, with the bias if there is one."""
    plain = functional.linear(values, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))
    if f"{name}.lora_A.weight" not in parameters:
        return plain
    if f"{name}.kept" in parameters:
        values = torch.where(parameters[f"{name}.kept"], values * (1 / (1 - parameters["dropout"].item())), 0.0)
    low = functional.linear(values, parameters[f"{name}.lora_A.weight"])
    return plain + functional.linear(low, parameters[f"{name}.lora_B.weight"]) * parameters["scale"].item()


def linear_attention(model: Model, parameters: Parameters, hidden: Tensor, positions: Tensor | None) -> Tensor:
    """The gated delta rule between its projections."""
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    projected = tuple(linear(parameters, f"linear_attn.{name}", hidden) for name in names)
    own = {name.removeprefix("linear_attn."): each for name, each in parameters.items()}
    return linear(parameters, "linear_attn.out_proj", delta_rule(model, own, projected, positions).to(hidden.dtype))


def attention(
    model: Model,
    parameters: Parameters,
    hidden: Tensor,
    positions: Tensor | None,
    *,
    backend: str,
    window: int,
    heads_of: tuple[int, int],
    has_values: bool,
    knows_positions: bool,
) -> Tensor:
    """Causal attention with rotary positions; several query heads may share one key and value head."""
    num_rows, length, _ = hidden.shape
    head_dim, num_keys = heads_of
    queries, keys = model.num_attention_heads * head_dim, num_keys * head_dim
    cosine, sine = rotary(model, length, head_dim, has_window=window > 0, dtype=hidden.dtype)
    growth = scales_of_queries(model.rope_scaling, length).to(hidden.dtype)
    if positions is not None:
        cosine, sine, growth = cosine[positions], sine[positions], growth[positions]

    def heads(projected: Tensor) -> Tensor:
        return projected.reshape(num_rows, length, -1, head_dim)

    def turned(projected: Tensor, norm: str) -> Tensor:
        values, scale = projected, parameters.get(f"self_attn.{norm}.weight")
        if model.qk_norm_over == "head":
            values = heads(values)
        if scale is not None:
            values = normalized(model, values, scale)
        values = heads(values)
        if knows_positions:
            width = cosine.shape[-1]
            first = rotated(values[..., :width], cosine, sine, interleaved=model.rope_interleaved)
            values = torch.cat([first, values[..., width:]], -1) if width < head_dim else first
        if norm == "q_norm" and model.rope_scaling.llama_4_scaling_beta:
            values = values * growth
        return values.transpose(1, 2)

    gate = None
    if model.fused_projections:
        q, k, v = linear(parameters, "self_attn.qkv_proj", hidden).split([queries, keys, keys], -1)  # type: ignore[no-untyped-call]
        query, key, value = turned(q, "q_norm"), turned(k, "k_norm"), heads(v).transpose(1, 2)
    else:
        q = linear(parameters, "self_attn.q_proj", hidden)
        if model.attn_output_gate:
            q, gate = q.reshape(num_rows, length, -1, 2, head_dim).unbind(3)
        query = turned(q, "q_norm")
        k = linear(parameters, "self_attn.k_proj", hidden)
        key = turned(k, "k_norm")
        v = heads(linear(parameters, "self_attn.v_proj", hidden) if has_values else k)
        if model.value_norm:
            v = functional.rms_norm(v, (head_dim,), None, model.rms_norm_eps)
        value = v.transpose(1, 2)
    are_shared = num_keys < model.num_attention_heads
    mask = None
    if 0 < window < length:
        behind = torch.arange(length).unsqueeze(1) - torch.arange(length)
        mask = (behind >= 0) & (behind < window)
    if positions is not None:
        mask = same_document(positions) if mask is None else same_document(positions) & mask
    if model.attention_sinks and backend != "math":
        added = None if mask is None else torch.zeros(mask.shape, dtype=hidden.dtype).masked_fill(~mask, -math.inf)
        mixed = Sunk.apply(query, key, value, parameters["self_attn.sinks"], added)  # type: ignore[no-untyped-call]
        return linear(parameters, "self_attn.o_proj", mixed.transpose(1, 2).reshape(num_rows, length, -1))
    if model.attn_logit_softcapping or model.attention_sinks:
        sinks = parameters.get("self_attn.sinks")
        mixed = written_out(model, query, key, value, mask, sinks, are_documents=positions is not None)
        return linear(parameters, "self_attn.o_proj", mixed.transpose(1, 2).reshape(num_rows, length, -1))
    with chosen(backend):
        mixed = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=model.attention_multiplier or None,
            enable_gqa=are_shared,
        )
    mixed = mixed.transpose(1, 2)
    if gate is not None:
        mixed = mixed * torch.sigmoid(gate)
    return linear(parameters, "self_attn.o_proj", mixed.reshape(num_rows, length, -1))


class Sunk(torch.autograd.Function):
    """Fused attention whose softmax has one more logit a head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None) -> Tensor:
        """o' = o · exp(l − l')."""
        causal = mask is None
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask)
        whole = torch.logaddexp(lse, sinks.float().view(1, -1, 1))
        made: Tensor = (o.float() * torch.exp(lse - whole).unsqueeze(3)).to(q.dtype)
        ctx.mask = mask
        ctx.save_for_backward(q, k, v, sinks, made, whole)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The kernel's own of o' and l'; a sink gets minus its share of what its row has."""
        q, k, v, sinks, o, whole = ctx.saved_tensors
        rows = torch.sum(gradients[0].float() * o.float(), 3)
        share = torch.exp(sinks.float().view(1, -1, 1) - whole)
        own = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradients[0], q, k, v, o, whole, 0.0, ctx.mask is None, attn_mask=ctx.mask
        )
        return *own, -(share * rows).sum((0, 2)).to(sinks.dtype), None


def written_out(
    model: Model,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    *,
    are_documents: bool,
) -> Tensor:
    """Attention step by step."""
    times, length = model.num_attention_heads // model.num_key_value_heads, query.shape[2]
    keys, values = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    scores = torch.matmul(query, keys.mT) * (model.attention_multiplier or model.width_of_head**-0.5)
    if model.attn_logit_softcapping:
        scores = torch.tanh(scores / model.attn_logit_softcapping) * model.attn_logit_softcapping
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool).tril()
    if are_documents:
        scores = scores + torch.zeros(mask.shape, dtype=scores.dtype).masked_fill(~mask, -math.inf)
    else:
        scores = scores.masked_fill(~mask, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(len(scores), -1, length, 1)], -1)
    shares = torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype)
    return torch.matmul(shares[..., :length], values)


def same_document(positions: Tensor) -> Tensor:
    """Which tokens attend to which: each to those of its document that are not after it."""
    number = (positions == 0).cumsum(1)
    is_same = number.unsqueeze(2) == number.unsqueeze(1)
    return is_same.tril().unsqueeze(1)


def scales_of_queries(rope: Rope, length: int) -> Tensor:
    """What queries are multiplied with, [length, 1, 1]."""
    if not rope.llama_4_scaling_beta:
        return torch.ones(length, 1, 1)
    times = torch.floor(torch.arange(length) / rope.original_max_position_embeddings)
    return (1 + rope.llama_4_scaling_beta * torch.log(1 + times)).view(length, 1, 1)


def rotary(model: Model, length: int, head_dim: int, *, has_window: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of every position and value that turns, both [length, 1, w], computed in float32."""
    is_own = has_window and model.window_rope_theta > 0
    width = int(head_dim * model.partial_rotary_factor)
    if is_own:
        speeds = 1.0 / model.window_rope_theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    else:
        speeds = turns(model, length, width)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), speeds)
    if model.rope_interleaved:
        cosine = angles.cos().repeat_interleave(2, 1).unsqueeze(1)
        sine = (angles.sin().repeat_interleave(2, 1) * torch.tensor([-1.0, 1.0]).repeat(len(speeds))).unsqueeze(1)
    else:
        cosine = torch.cat([angles.cos(), angles.cos()], 1).unsqueeze(1)
        sine = torch.cat([-angles.sin(), angles.sin()], 1).unsqueeze(1)
    if model.rope_scaling.rope_type in ("yarn", "longrope") and not is_own:
        cosine, sine = cosine * model.rope_scaling.attention_factor, sine * model.rope_scaling.attention_factor
    return cosine.to(dtype), sine.to(dtype)


def turns(model: Model, length: int, width: int) -> Tensor:
    """f_j: the angle of each pair for one token."""
    rope, theta = model.rope_scaling, model.rope_theta
    first = rope.original_max_position_embeddings
    if rope.rope_type == "dynamic":
        grown = rope.factor * (max(length, first) / first) - (rope.factor - 1)
        theta = theta * grown ** (width / (width - 2))
    powers = theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    plain = 1.0 / powers
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "proportional":
        stays = torch.arange(width // 2) >= int(rope.partial_rotary_factor * width // 2)
        return torch.where(stays, 0.0, plain) / rope.factor
    if rope.rope_type == "llama3":
        wave = 2 * math.pi / plain
        low, high = rope.low_freq_factor, rope.high_freq_factor
        slow = torch.where(wave > first / low, plain / rope.factor, plain)
        share = (first / wave - low) / (high - low)
        middle = (1 - share) * slow / rope.factor + share * slow
        return torch.where((wave < first / high) | (wave > first / low), slow, middle)
    if rope.rope_type == "longrope":
        return 1.0 / (torch.tensor(rope.long_factor if length > first else rope.short_factor) * powers)
    if rope.rope_type == "yarn":
        bounds = [
            width * math.log(first / (n * 2 * math.pi)) / (2 * math.log(theta))
            for n in (rope.beta_fast, rope.beta_slow)
        ]
        begin, end = bounds
        if rope.truncate:
            begin, end = math.floor(begin), math.ceil(end)
        begin, end = max(begin, 0), min(end, width - 1)
        spread = end - begin if end != begin else 0.001
        ramp = ((torch.arange(width // 2, dtype=torch.float32) - begin) / spread).clamp(0, 1)
        kept = 1 - ramp
        return 1.0 / (rope.factor * powers) * (1 - kept) + plain * kept
    return plain


def rotated(heads: Tensor, cosine: Tensor, sine: Tensor, *, interleaved: bool) -> Tensor:
    """heads [rows, length, heads, w], each pair turned by the angle of its position."""
    if interleaved:
        order = torch.arange(heads.shape[-1]).view(-1, 2)[:, [1, 0]].flatten()
        return torch.addcmul(heads * cosine, heads[..., order], sine)
    half = heads.shape[-1] // 2
    swapped = torch.cat([heads[..., half:], heads[..., :half]], -1)
    return torch.addcmul(heads * cosine, swapped, sine)


def feed_forward(model: Model, parameters: Parameters, hidden: Tensor) -> Tensor:
    """down(act(gate(x)) · up(x))."""
    if "mlp.gate_up_proj.weight" in parameters:
        gate, up = linear(parameters, "mlp.gate_up_proj", hidden).chunk(2, -1)
    else:
        gate = linear(parameters, "mlp.gate_proj", hidden)
        up = linear(parameters, "mlp.up_proj", hidden)
    act = functional.silu(gate) if model.hidden_act == "silu" else functional.gelu(gate, approximate="tanh")
    return linear(parameters, "mlp.down_proj", act * up)


def chosen(backend: str) -> AbstractContextManager[None]:
    """The kernel of attention that the job names; `auto` leaves it to torch."""
    named = {
        "math": SDPBackend.MATH,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    return nullcontext() if backend == "auto" else sdpa_kernel(named[backend])
