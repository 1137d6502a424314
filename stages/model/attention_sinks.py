"""Attention with a sink: one learned logit of each head takes part in the softmax, for a value of zero.

Xiao et al. 2023, arXiv 2309.17453, as in gpt-oss; docs/numerics.md, section 9. With ℓ the log-sum-exp of a token's
scores and s its head's sink, the plain mix is multiplied by exp(ℓ − ℓ'), where ℓ' = log(exp(ℓ) + exp(s)). The backward
of the plain kernel, given ℓ' and the smaller mix, is that of the whole softmax. So no scores are kept.
"""

from typing import Any

import torch
from torch import Tensor

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
