"""The gated delta rule of a block of linear attention (docs/numerics.md, section 9)."""

import torch
from torch import Tensor
from torch.nn import functional

from tests.second_oracle.job import Model

Parameters = dict[str, Tensor]
LENGTH = 64
"""Tokens of a chunk."""


def mixed(model: Model, own: Parameters, projected: tuple[Tensor, ...], positions: Tensor | None) -> Tensor:
    """o: [rows, sequence, H·d_v] in float32, from x, z, b, a."""
    x, z, b, a = (each.float() for each in projected)
    rows, length, _ = x.shape
    if positions is None:
        positions = torch.arange(length).repeat(rows, 1)
    keys = model.linear_num_key_heads * model.linear_key_head_dim
    y = functional.silu(convolved(x, own["conv1d.weight"].float(), positions))
    q, k, v = y.split([keys, keys, y.shape[-1] - 2 * keys], -1)  # type: ignore[no-untyped-call]
    q = q.reshape(rows, length, -1, model.linear_key_head_dim)
    k = k.reshape(rows, length, -1, model.linear_key_head_dim)
    v = v.reshape(rows, length, -1, model.linear_value_head_dim)
    g = functional.softplus(a + own["dt_bias"].float()) * (-torch.exp(own["A_log"].float()))
    q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6) * model.linear_key_head_dim**-0.5
    k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    o = rule(q, k, v, g, torch.sigmoid(b), positions)
    o = functional.rms_norm(o, (model.linear_value_head_dim,), own["norm.weight"].float(), model.rms_norm_eps)
    return o.reshape(rows, length, -1) * functional.silu(z)


def convolved(x: Tensor, taps: Tensor, positions: Tensor) -> Tensor:
    """Each channel's weighed sum over the newest tokens of the document."""
    number = taps.shape[2]
    y = x * taps[:, 0, number - 1]
    for i in range(1, number):
        behind = torch.cat([torch.zeros_like(x[:, :i]), x[:, :-i]], 1)[:, : x.shape[1]]
        behind = torch.where((positions >= i).unsqueeze(-1), behind, 0.0)
        y = torch.addcmul(y, behind, taps[:, 0, number - 1 - i])
    return y


def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, positions: Tensor) -> Tensor:
    """o of every token, [rows, sequence, H, d_v], in chunks."""
    length, heads = q.shape[1], v.shape[2]
    missing = (LENGTH - length % LENGTH) % LENGTH

    def chunks(values: Tensor) -> Tensor:
        """[rows, sequence, heads, width] as [rows, heads, chunks, LENGTH, width]."""
        filled = torch.cat([values, values.new_zeros(values.shape[0], missing, *values.shape[2:])], 1)
        return filled.transpose(1, 2).reshape(len(filled), filled.shape[2], -1, LENGTH, filled.shape[3]).contiguous()

    q, k = (chunks(each.repeat_interleave(heads // each.shape[2], 2)) for each in (q, k))
    v, g, beta = chunks(v), chunks(g.unsqueeze(-1)).squeeze(-1), chunks(beta.unsqueeze(-1))
    p = chunks(positions.unsqueeze(-1).unsqueeze(-1)).squeeze(-1)
    i = torch.arange(LENGTH)
    sees = (i.unsqueeze(1) >= i) & (i.unsqueeze(1) - i <= p.unsqueeze(-1))
    sees_before = p > i

    total = torch.where(sees, g.unsqueeze(-2), 0.0).sum(-1)
    d = torch.where(sees, total.unsqueeze(-1) - total.unsqueeze(-2), -torch.inf).exp()
    e = torch.where(sees_before, total.exp(), 0.0)
    r = torch.where(sees[..., LENGTH - 1, :], total[..., LENGTH - 1 :] - total, -torch.inf).exp()
    kappa = k * beta
    a = (kappa @ k.transpose(-1, -2)) * d
    both = torch.linalg.solve_triangular(
        a, torch.cat([v * beta, kappa * e.unsqueeze(-1)], -1), upper=False, unitriangular=True
    )
    u, w = both[..., : v.shape[-1]], both[..., v.shape[-1] :]
    b = (q @ k.transpose(-1, -2)) * d
    q, k = q * e.unsqueeze(-1), k * r.unsqueeze(-1)

    state = torch.zeros(q.shape[0], heads, q.shape[-1], v.shape[-1])
    made = []
    for n in range(q.shape[2]):
        new = u[:, :, n] - w[:, :, n] @ state
        made.append(q[:, :, n] @ state + b[:, :, n] @ new)
        state = state * e[:, :, n, LENGTH - 1, None, None] + k[:, :, n].transpose(-1, -2) @ new
    return torch.cat(made, 2)[:, :, :length].transpose(1, 2)
