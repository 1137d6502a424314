"""The decoder as a list of layers: the arithmetic of Hugging Face's Llama and its kin, cut where a pipeline may be cut.

Shapes: tokens int64 [microbatch, sequence] → `embed` → hidden [microbatch, sequence, hidden] → `block.0` … →
`head` → logits [microbatch, sequence, vocabulary]. A layer knows nothing of its neighbours, so that cutting between any
two gives bit for bit the gradients of the whole model.

Layers are built on the meta device: they are the formula, and the weights come with every call
(`torch.func.functional_call(layer, weights, (hidden,))`).
"""

import pkgutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from headway.stages.model.adapters import adapt
from headway.stages.model.experts import Expert, Mixture
from headway.stages.model.linear_attention import GatedDeltaNet
from headway.stages.model.positions import DocumentRows, added_mask, query_scales, rotary_table
from headway.stages.model.recomputation import through, through_product
from headway.stages.plugin_names import PluginError, imported, told_by
from headway.stages.spec import BLOCKS, MIXING_HALF, MLP_HALF, ModelSpec, Recompute, RopeSpec, whole_layer

# Attention with a sink: one learned logit of each head takes part in the softmax, for a value of zero.
#
# Xiao et al. 2023, arXiv 2309.17453, as in gpt-oss; docs/numerics.md, section 9. With ℓ the log-sum-exp of a token's
# scores and s its head's sink, the plain mix is multiplied by exp(ℓ − ℓ'), where ℓ' = log(exp(ℓ) + exp(s)). The
# backward of the plain kernel, given ℓ' and the smaller mix, is that of the whole softmax. So no scores are kept.

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class AttentionWithSinks(torch.autograd.Function):
    """torch's fused attention on a CPU, and sinks beside it. Heads are [microbatch, heads, sequence, head_dim]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        """sinks: [heads of the query]. mask: is added to the scores; None: each token attends to all before it."""
        plain, plain_sums = _forward(query, key, value, is_causal=mask is None, attn_mask=mask, scale=scale)
        sums = torch.logaddexp(plain_sums, sinks.float()[:, None])
        mixed: Tensor = (plain.float() * (plain_sums - sums).exp()[..., None]).to(plain.dtype)
        ctx.save_for_backward(query, key, value, sinks, mask, mixed, sums)
        ctx.scale = scale
        return mixed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (query, key, value, sinks, mask, mixed, sums) = gradients, ctx.saved_tensors
        of_heads = _backward(
            gradient, query, key, value, mixed, sums, 0.0, mask is None, attn_mask=mask, scale=ctx.scale
        )
        of_sinks = None
        if ctx.needs_input_grad[3]:
            shares = (sinks.float()[:, None] - sums).exp()
            of_sinks = -(shares * (gradient.float() * mixed.float()).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return *of_heads, of_sinks, None, None


AttentionBackend = Literal["auto", "math", "flash", "flash3", "efficient"]

_BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "flash3": SDPBackend.FLASH_ATTENTION,  # which `flash3.choose_flash` has replaced
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def build_layer(name: str, spec: ModelSpec, *, attention_backend: AttentionBackend = "auto") -> nn.Module:
    """Return the layer `embed`, `block.<i>`, half of that, or `head`, with its parameters on the meta device.

    Raises ValueError for a name that the model does not have.
    """
    if name == "embed":
        return adapt(Embedding(spec), spec.adapter, name)
    if name == "head":
        return adapt(Head(spec), spec.adapter, name)
    kind, index, half = _parts(name)
    if kind == "block" and index.isdecimal() and int(index) < spec.num_hidden_layers:
        if spec.has_own_block and not half:
            return _own_block(spec)
        if not spec.has_own_block and half in ("", MIXING_HALF, MLP_HALF):
            make = pkgutil.resolve_name(BLOCKS[spec.block])
            return adapt(make(spec, attention_backend, index=int(index), half=half), spec.adapter, whole_layer(name))
    raise ValueError(f"a model of {spec.num_hidden_layers} blocks has no layer {name!r}")


def _parts(name: str) -> tuple[str, str, str]:
    """Return the kind, the index and the half of a layer, as far as its name has them."""
    kind, _, rest = name.partition(".")
    index, _, half = rest.partition(".")
    return kind, index, half


def _own_block(spec: ModelSpec) -> nn.Module:
    """Return the block of a plug-in, whose output is looked at. Raises PluginError."""
    name = spec.block
    with told_by(name), torch.device("meta"):
        block = imported(name)(spec, **dict(spec.block_settings))
        if not isinstance(block, nn.Module):
            raise PluginError(name, f"makes a {type(block).__name__}, which is no torch.nn.Module")
        if held := next((key for key, _ in block.named_buffers()), ""):
            raise PluginError(name, f"has a buffer, {held}; make it in forward, or a parameter of it")
    compute = block.forward

    def forward(hidden: Tensor, *documents: DocumentRows) -> Tensor:
        with told_by(name):
            output = compute(hidden, *documents)
            if not isinstance(output, Tensor) or (output.shape, output.dtype) != (hidden.shape, hidden.dtype):
                found = described(output)
                raise PluginError(name, f"returns {found} for {described(hidden)}; both have to be alike")
        return output

    block.forward = forward
    return block


def described(value: object) -> str:
    """Return what a plug-in has made, for its author."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a {type(value).__name__}"


def parameter_shapes(name: str, spec: ModelSpec) -> dict[str, torch.Size]:
    """Return the shape of each parameter of a layer without adapters, in the module's order. Allocates nothing."""
    return {parameter: shape for parameter, shape, *_ in _shapes(_kind(name, spec), spec.base)}


def trained_shapes(name: str, spec: ModelSpec) -> dict[str, torch.Size]:
    """Return the shape of each parameter of a layer that is trained: the adapters, or all if there are none."""
    return {parameter: shape for parameter, shape, is_trained, _ in _shapes(_kind(name, spec), spec) if is_trained}


def frozen_shapes(name: str, spec: ModelSpec) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of what a layer has beside its adapters; float32 stands for the job's dtype, except that
    of scales.
    """
    shapes = _shapes(_kind(name, spec), spec)
    return {parameter: (shape, dtype) for parameter, shape, is_trained, dtype in shapes if not is_trained}


def _kind(name: str, spec: ModelSpec) -> str:
    """Return the first layer of a layer's kind, whose parameters are alike. Raises ValueError as `build_layer`."""
    kind, index, half = _parts(name)
    is_block = kind == "block" and index.isdecimal() and int(index) < spec.num_hidden_layers
    period = len(spec.layer_types) or 1
    return f"block.{int(index) % period}.{half}".rstrip(".") if is_block else name


@lru_cache(maxsize=16)
def _shapes(name: str, spec: ModelSpec) -> tuple[tuple[str, torch.Size, bool, torch.dtype], ...]:
    """Return each parameter of a layer, its shape, whether it is trained, and its dtype. Many experts take their time
    to build.
    """
    if spec.has_own_block and name.startswith("block.") and spec.block_shapes:  # processes without its code ask too
        return tuple((parameter, torch.Size(shape), True, torch.float32) for parameter, shape in spec.block_shapes)
    named = build_layer(name, spec).named_parameters()
    return tuple((parameter, tensor.shape, tensor.requires_grad, tensor.dtype) for parameter, tensor in named)


def token_loss(logits: Tensor, targets: Tensor, mean_tokens: Tensor | None = None) -> Tensor:
    """Return the mean cross entropy over the tokens of a microbatch, in nats: fp32 [] for any dtype of the logits.

    logits [microbatch, sequence, vocabulary], targets int64 [microbatch, sequence]. mean_tokens: the sum over targets
    other than -100 is divided by it instead.
    """
    rows, wanted = logits.float().view(-1, logits.shape[-1]), targets.reshape(-1)
    if mean_tokens is None:
        return functional.cross_entropy(rows, wanted)
    return functional.cross_entropy(rows, wanted, reduction="sum") / mean_tokens


_NORMS: Final = {
    "before": ("input_layernorm", "", "post_attention_layernorm", ""),
    "after": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "both": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
"""Names of a block's norms before and after attention, and before and after the MLP, by their placement."""


class Embedding(nn.Module):
    """tokens int64 [microbatch, sequence] → hidden [microbatch, sequence, hidden]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.vocab_size, spec.hidden_size, device="meta"))
        self.multiplier = spec.embedding_multiplier

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = functional.embedding(tokens, self.weight)
        if self.multiplier == 1.0:
            return hidden
        # a tensor, because the factor is rounded to the job's dtype
        return hidden * torch.full((), self.multiplier, dtype=hidden.dtype, device=hidden.device)


class Block(nn.Module):
    """hidden → hidden, both [microbatch, sequence, hidden]: attention and SwiGLU, each normed before or after or both,
    and added. Or one half of that: the other one's operations follow, or came before, in a layer of its own.
    """

    def __init__(self, spec: ModelSpec, attention_backend: AttentionBackend, *, index: int, half: str = "") -> None:
        super().__init__()
        self.mixes, self.has_mlp = half != MLP_HALF, half != MIXING_HALF
        if self.mixes and spec.type_of(index) == "linear_attention":
            self.linear_attn = GatedDeltaNet(spec)
        elif self.mixes:
            self.self_attn = Attention(spec, attention_backend, block=index)
        if self.has_mlp:
            self.mlp = Mixture(spec) if spec.has_experts else SwiGlu(spec)
        self.norms = _NORMS[spec.norm_placement]
        for place, name in enumerate(self.norms):
            if name and (self.mixes if place < 2 else self.has_mlp):
                setattr(self, name, _rms_norm(spec, spec.hidden_size))
        self.residual_multiplier = spec.residual_multiplier
        if spec.layer_scalar and self.has_mlp:
            self.layer_scalar = nn.Parameter(torch.empty(1, device="meta"))
        self.recomputes_attention = False
        """Whether the backward computes attention and its norm again, from the block's input."""
        self.norms_made_again: tuple[int, ...] = ()
        """Places of the norms whose results it makes again, beside the MLP's product."""

    def compute_again(self, recompute: Recompute) -> None:
        """Say what the backward computes again of what is inside the block."""
        self.recomputes_attention = recompute == "attention"
        # What is computed again as a whole has its norm inside.
        self._make_again({"elementwise": (0, 2), "attention": (2,)}.get(recompute, ()))

    def _make_again(self, norms: tuple[int, ...]) -> None:
        self.norms_made_again = norms
        for part in self.modules():
            if isinstance(part, SwiGlu | Expert):
                part.recomputes_product = bool(norms)

    def compile_parts(self, compiled: Callable[[Any], Any]) -> None:
        """Compile attention and what follows it each by itself, so that attention alone can be computed again.

        Which elementwise results are made again is the compiler's choice. It is the same whatever the job or a plan
        says, and so are the bits.
        """
        self._make_again(())
        self._attention = compiled(self._attention)  # type: ignore[method-assign]
        self._after_attention = compiled(self._after_attention)  # type: ignore[method-assign]

    def forward(self, hidden: Tensor, documents: DocumentRows | None = None) -> Tensor:
        if not self.mixes:
            return self._through_mlp(hidden)
        if self.recomputes_attention:
            # No randomness is inside, so there is no generator's state to keep.
            mixed = checkpoint(self._attention, hidden, documents, use_reentrant=False, preserve_rng_state=False)
        else:
            mixed = self._attention(hidden, documents)
        return self._after_attention(hidden, mixed)

    def _after_attention(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        hidden = self._added(hidden, mixed)
        return self._through_mlp(hidden) if self.has_mlp else hidden

    def _through_mlp(self, hidden: Tensor) -> Tensor:
        hidden = self._added(hidden, self._normed(self._through_norm(self.mlp, hidden, 2), 3))
        if not hasattr(self, "layer_scalar"):
            return hidden
        scaled: Tensor = _TimesConstant.apply(hidden, self.layer_scalar)  # type: ignore[no-untyped-call]
        return scaled

    def _added(self, hidden: Tensor, branch: Tensor) -> Tensor:
        return hidden + (branch if self.residual_multiplier == 1.0 else branch * self.residual_multiplier)

    def _attention(self, hidden: Tensor, documents: DocumentRows | None) -> Tensor:
        def mixed(normed: Tensor) -> Tensor:
            if hasattr(self, "linear_attn"):
                return self.linear_attn(normed, documents and documents.positions)  # type: ignore[no-any-return]
            return self.self_attn(normed, documents)  # type: ignore[no-any-return]

        return self._normed(self._through_norm(mixed, hidden, 0), 1)

    def _through_norm(self, compute: Callable[[Tensor], Tensor], hidden: Tensor, place: int) -> Tensor:
        if place in self.norms_made_again and self.norms[place]:
            return through(compute, hidden, getattr(self, self.norms[place]))
        return compute(self._normed(hidden, place))

    def _normed(self, values: Tensor, place: int) -> Tensor:
        name = self.norms[place]
        return getattr(self, name)(values) if name else values


class Head(nn.Module):
    """hidden [microbatch, sequence, hidden] → logits [microbatch, sequence, vocabulary]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.norm = _rms_norm(spec, spec.hidden_size)
        self.lm_head = _linear(spec.hidden_size, spec.vocab_size)
        self.logits_scaling = spec.logits_scaling
        self.cap = spec.final_logit_softcapping

    def forward(self, hidden: Tensor) -> Tensor:
        return self.scaled(self.lm_head(self.norm(hidden)))

    def sum_of_losses(self, products: Tensor, targets: Tensor) -> Tensor:
        """Return the summed cross entropy of products with the vocabulary [rows, vocabulary]: fp32 []."""
        return functional.cross_entropy(self.scaled(products).float(), targets, reduction="sum")

    def scaled(self, logits: Tensor) -> Tensor:
        """Return what the model says, from products with the vocabulary [..., vocabulary]."""
        scaled = logits if self.logits_scaling == 1.0 else logits / self.logits_scaling
        return _capped(scaled, self.cap) if self.cap else scaled


class _TimesConstant(torch.autograd.Function):
    """hidden · scalar. The scalar is a constant, whose gradient is zero: transformers has it as a buffer."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, scalar: Tensor) -> Tensor:
        ctx.save_for_backward(scalar)
        return hidden * scalar

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (scalar,) = ctx.saved_tensors
        return gradients[0] * scalar, torch.zeros_like(scalar)


class ZeroCenteredNorm(nn.RMSNorm):
    """A norm whose gain is 1 + weight, in float32: near 1 bfloat16 is coarse."""

    def forward(self, x: Tensor) -> Tensor:
        normed = functional.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps)
        return normed.to(x.dtype)


class Attention(nn.Module):
    """Causal attention with rotary positions and fewer key/value heads than query heads (Ainslie et al. 2023)."""

    def __init__(self, spec: ModelSpec, backend: AttentionBackend, *, block: int) -> None:
        super().__init__()
        self.head_dim, num_keys = spec.head_width_of(block), spec.key_value_heads_of(block)
        self.num_groups = spec.num_attention_heads // num_keys
        self.rope_theta, self.rope_scaling = spec.rope_of(block)
        self.rotary_width = spec.rotary_width_of(block)
        self.is_interleaved = spec.rope_interleaved
        self.is_turned = spec.is_turned(block)
        self.has_gate = spec.attn_output_gate
        self.backend = backend
        self.window = spec.window_of(block)
        self.scale = spec.attention_multiplier or None
        self.cap = spec.attn_logit_softcapping
        self.value_eps = spec.rms_norm_eps if spec.value_norm else None
        self.sizes = (spec.num_attention_heads * self.head_dim, *[num_keys * self.head_dim] * 2)
        if spec.fused_projections:
            self.qkv_proj = _linear(spec.hidden_size, sum(self.sizes), bias=spec.qkv_bias)
        else:
            self.q_proj = _linear(spec.hidden_size, self.sizes[0] * (1 + self.has_gate), bias=spec.qkv_bias)
            self.k_proj = _linear(spec.hidden_size, self.sizes[1], bias=spec.qkv_bias)
            if not spec.has_values_of_keys(block):
                self.v_proj = _linear(spec.hidden_size, self.sizes[2], bias=spec.qkv_bias)
        self.o_proj = _linear(self.sizes[0], spec.hidden_size, bias=spec.output_bias)
        if spec.attention_sinks:
            self.sinks = nn.Parameter(torch.empty(spec.num_attention_heads, device="meta"))
        if spec.qk_norm:
            self.norms_heads_together = spec.qk_norm_over == "heads"
            queries, keys = self.sizes[:2] if self.norms_heads_together else (self.head_dim, self.head_dim)
            self.q_norm, self.k_norm = _rms_norm(spec, queries), _rms_norm(spec, keys)

    def forward(self, hidden: Tensor, documents: DocumentRows | None = None) -> Tensor:
        """documents: attention and positions end with each document; None: the row is one."""
        query, key, value, gate = self._turned_heads(hidden, documents)
        is_grouped = self.num_groups > 1
        if is_grouped and hidden.is_cuda and (hidden.dtype == torch.float32 or self.backend == "efficient"):
            # Of the fused kernels on CUDA, only flash reads shared key/value heads in place, and it takes no fp32.
            key, value = key.repeat_interleave(self.num_groups, 1), value.repeat_interleave(self.num_groups, 1)
            is_grouped = False
        mask = self._mask(hidden, documents)
        has_sinks = hasattr(self, "sinks")
        if has_sinks and not self.cap and not hidden.is_cuda and self.backend in ("auto", "flash"):
            added = added_mask(mask, hidden.dtype) if mask is not None and mask.dtype == torch.bool else mask
            mixed = AttentionWithSinks.apply(query, key, value, self.sinks, added, self.scale)  # type: ignore[no-untyped-call]
        elif has_sinks or self.cap:
            mixed = self._written_out(query, key, value, mask)
        else:
            with _chosen(self.backend):
                mixed = functional.scaled_dot_product_attention(
                    query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=is_grouped
                )
        mixed = mixed.transpose(1, 2)
        if gate is not None:
            mixed = mixed * gate.sigmoid()
        return self.o_proj(mixed.flatten(2))  # type: ignore[no-any-return]

    def _written_out(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return what attention mixes from capped scores or beside sinks, step by step: no kernel of torch has them."""
        groups, length = query.shape[1] // key.shape[1], query.shape[2]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.transpose(2, 3) * (self.scale or self.head_dim**-0.5)
        if self.cap:
            scores = _capped(scores, self.cap)
        if mask is None:
            mask = kept_window_mask(length, length, query.device)
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        if hasattr(self, "sinks"):
            scores = torch.cat((scores, self.sinks[:, None, None].expand(*scores.shape[:-1], 1)), -1)
        shares = functional.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
        return shares[..., :length] @ value

    def _mask(self, hidden: Tensor, documents: DocumentRows | None) -> Tensor | None:
        """Return who attends to whom; None: each token to all before it."""
        length = hidden.shape[-2]
        is_windowed = 0 < self.window < length
        if documents is not None:
            return documents.window_mask if is_windowed else documents.mask
        return kept_window_mask(length, self.window, hidden.device) if is_windowed else None

    def _angles(self, hidden: Tensor, documents: DocumentRows | None) -> tuple[Tensor, Tensor] | None:
        if not self.is_turned:
            return None
        if documents is not None:
            if self.window and documents.window_cosine is not None and documents.window_sine is not None:
                return documents.window_cosine, documents.window_sine
            return documents.cosine, documents.sine
        return kept_rotary_table(
            hidden.shape[-2],
            self.rotary_width,
            theta=self.rope_theta,
            scaling=self.rope_scaling,
            is_interleaved=self.is_interleaved,
            device=hidden.device,
            dtype=hidden.dtype,
        )

    def _query_scales(self, hidden: Tensor, documents: DocumentRows | None) -> Tensor | None:
        if documents is not None:
            return documents.query_scales
        return kept_query_scales(hidden.shape[-2], self.rope_scaling, device=hidden.device, dtype=hidden.dtype)

    def _turned_heads(
        self, hidden: Tensor, documents: DocumentRows | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries, keys and values [microbatch, heads, sequence, head_dim], and the gate before its sigmoid,
        [microbatch, sequence, heads, head_dim]; None: there is none.
        """
        gate = None
        angles = self._angles(hidden, documents)
        if hasattr(self, "qkv_proj"):
            query, key, value = self.qkv_proj(hidden).split(self.sizes, -1)
            query, key = self._turned(query, "q_norm", angles), self._turned(key, "k_norm", angles)
        else:
            # One after another: the order of the calls is that of the gradients' sum.
            query = self.q_proj(hidden)
            if self.has_gate:
                query, gate = query.view(*query.shape[:-1], -1, 2 * self.head_dim).chunk(2, -1)
            query = self._turned(query, "q_norm", angles)
            keys = self.k_proj(hidden)
            key = self._turned(keys, "k_norm", angles)
            value = self.v_proj(hidden) if hasattr(self, "v_proj") else keys
        value = self._split(value)
        if self.value_eps is not None:
            value = functional.rms_norm(value, (self.head_dim,), eps=self.value_eps)
        if (scales := self._query_scales(hidden, documents)) is not None:
            query = query * scales
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), gate

    def _split(self, projected: Tensor) -> Tensor:
        """Return the heads of a projection: [microbatch, sequence, heads, head_dim]."""
        return projected if projected.dim() == 4 else projected.view(*projected.shape[:-1], -1, self.head_dim)

    def _turned(self, projected: Tensor, norm: str, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        if not hasattr(self, norm):
            heads = self._split(projected)
        elif self.norms_heads_together:
            heads = self._split(getattr(self, norm)(projected))
        else:
            heads = getattr(self, norm)(self._split(projected))
        return heads if angles is None else _rotate(heads, *angles, is_interleaved=self.is_interleaved)


class SwiGlu(nn.Module):
    """down(act(gate(x)) · up(x)), with silu (Shazeer 2020) or another activation."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        if spec.fuses_gate_up:
            self.gate_up_proj = _linear(spec.hidden_size, 2 * spec.intermediate_size, bias=spec.mlp_bias)
        else:
            self.gate_proj = _linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
            self.up_proj = _linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.down_proj = _linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)
        self.activation = spec.hidden_act
        self.recomputes_product = False

    def forward(self, hidden: Tensor) -> Tensor:
        if hasattr(self, "gate_up_proj"):
            gate, up = self.gate_up_proj(hidden).chunk(2, -1)
            activated = self._activated(gate)
        else:
            gate = self.gate_proj(hidden)
            activated = self._activated(gate)
            up = self.up_proj(hidden)
        if not self.recomputes_product:
            return self.down_proj(activated * up)  # type: ignore[no-any-return]
        kept = gate.detach()
        return through_product(self.down_proj, activated, up, lambda: self._activated(kept))

    def _activated(self, gate: Tensor) -> Tensor:
        return functional.silu(gate) if self.activation == "silu" else functional.gelu(gate, approximate="tanh")


def kept_rotary_table(
    length: int,
    width: int,
    *,
    theta: float,
    scaling: RopeSpec,
    is_interleaved: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return `rotary_table` in a form that a compiler takes for a constant: without the cache's wrapper."""
    return rotary_table(
        length, width, theta=theta, scaling=scaling, is_interleaved=is_interleaved, device=device, dtype=dtype
    )


def kept_query_scales(length: int, scaling: RopeSpec, *, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """Return `query_scales` in the same way."""
    return query_scales(length, scaling, device=device, dtype=dtype)


def kept_window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Return `_window_mask` in the same way."""
    return _window_mask(length, window, device)


@lru_cache(maxsize=8)
def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Return which tokens each token attends to, bool [length, length]: itself and the window - 1 before it."""
    with torch.inference_mode(False):
        distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
        return (distance >= 0) & (distance < window)


def _rotate(heads: Tensor, cosine: Tensor, sine: Tensor, *, is_interleaved: bool) -> Tensor:
    """Turn heads [microbatch, sequence, heads, head_dim], or their first values, by their positions' angles."""
    if (width := cosine.shape[-1]) < heads.shape[-1]:
        turned = _rotate(heads[..., :width], cosine, sine, is_interleaved=is_interleaved)
        return torch.cat((turned, heads[..., width:]), -1)
    partners = (
        heads.reshape(*heads.shape[:-1], -1, 2).flip(-1).flatten(-2) if is_interleaved else heads.roll(width // 2, -1)
    )
    return torch.addcmul(heads * cosine, partners, sine)


def _capped(values: Tensor, cap: float) -> Tensor:
    return torch.tanh(values / cap) * cap


def _chosen(backend: AttentionBackend) -> AbstractContextManager[None]:
    return nullcontext() if backend == "auto" else sdpa_kernel(_BACKENDS[backend])


def _linear(inputs: int, outputs: int, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias, device="meta")


def _rms_norm(spec: ModelSpec, width: int) -> nn.RMSNorm:
    kind = ZeroCenteredNorm if spec.zero_centered_norms else nn.RMSNorm
    return kind(width, eps=spec.rms_norm_eps, device="meta")
