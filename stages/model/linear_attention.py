"""The gated delta rule in place of attention: a state of fixed size for each head, which each token corrects.

Yang et al. 2024, arXiv 2412.06464, as in Qwen3.5; docs/numerics.md, section 9. Tokens are taken in chunks: inside one
they see each other by matrix products, and the state goes from chunk to chunk. Convolution and state begin anew with
each document, and no bit of a document depends on the one before it.
"""

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from headway.stages.spec import RULE_CHUNK, ModelSpec

_NORM_EPS: Final = 1e-6


class GatedDeltaNet(nn.Module):
    """hidden → mixed, both [microbatch, sequence, hidden]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.widths = (spec.linear_key_width, spec.linear_key_width, spec.linear_value_width)
        self.key_dim, self.value_dim = spec.linear_key_head_dim, spec.linear_value_head_dim
        self.eps = spec.rms_norm_eps
        heads, channels = spec.linear_num_value_heads, sum(self.widths)
        self.in_proj_qkv = _linear(spec.hidden_size, channels)
        self.in_proj_z = _linear(spec.hidden_size, spec.linear_value_width)
        self.in_proj_b = _linear(spec.hidden_size, heads)
        self.in_proj_a = _linear(spec.hidden_size, heads)
        self.conv1d = nn.Conv1d(
            channels, channels, spec.linear_conv_kernel_dim, groups=channels, bias=False, device="meta"
        )
        self.A_log = nn.Parameter(torch.empty(heads, device="meta"))
        self.dt_bias = nn.Parameter(torch.empty(heads, device="meta"))
        self.norm = nn.RMSNorm(self.value_dim, eps=spec.rms_norm_eps, device="meta")
        self.out_proj = _linear(spec.linear_value_width, spec.hidden_size)

    def forward(self, hidden: Tensor, positions: Tensor | None = None) -> Tensor:
        """positions: int32 [microbatch, sequence] in documents; None: the row is one."""
        if positions is None:
            positions = torch.arange(hidden.shape[-2], dtype=torch.int32, device=hidden.device)[None]
        # The float32 values between the projections are many times theirs, and cheap to compute: they are never kept.
        mixed: Tensor = checkpoint(
            self._mixed,
            self.in_proj_qkv(hidden),
            self.in_proj_z(hidden),
            self.in_proj_b(hidden),
            self.in_proj_a(hidden),
            self.conv1d.weight,
            self.A_log,
            self.dt_bias,
            self.norm.weight,
            positions,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        return self.out_proj(mixed)  # type: ignore[no-any-return]

    def _mixed(
        self,
        projected: Tensor,
        gate: Tensor,
        rate: Tensor,
        step: Tensor,
        taps: Tensor,
        log_decay: Tensor,
        step_bias: Tensor,
        gain: Tensor,
        positions: Tensor,
    ) -> Tensor:
        """Return what the output's projection reads: [microbatch, sequence, values], in the dtype of `projected`."""
        convolved = functional.silu(causal_convolution(projected.float(), taps.float(), positions))
        query, key, value = torch.split(convolved, list(self.widths), -1)
        decay = functional.softplus(step.float() + step_bias.float()) * -log_decay.float().exp()
        mixed = gated_delta_rule(
            _normed(_heads(query, self.key_dim)) * self.key_dim**-0.5,
            _normed(_heads(key, self.key_dim)),
            _heads(value, self.value_dim),
            decay,
            rate.float().sigmoid(),
            positions,
        )
        normed = functional.rms_norm(mixed, (self.value_dim,), gain.float(), self.eps).flatten(2)
        return (normed * functional.silu(gate.float())).to(projected.dtype)


def causal_convolution(values: Tensor, taps: Tensor, positions: Tensor) -> Tensor:
    """Return each channel's sum over the newest tokens of its document, weighed by taps.

    values float32 [rows, length, channels]; taps [channels, 1, K], the last one for the token itself.
    """
    length, num_taps = values.shape[1], taps.shape[-1]
    padded = functional.pad(values, (0, 0, num_taps - 1, 0))
    made = values * taps[:, 0, -1]
    for back in range(1, num_taps):
        before = padded[:, num_taps - 1 - back : num_taps - 1 - back + length]
        made = torch.addcmul(made, before.masked_fill((positions < back)[..., None], 0.0), taps[:, 0, -1 - back])
    return made


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, positions: Tensor
) -> Tensor:
    """Return what each token reads: float32 [rows, length, value heads, value width].

    From the state S = 0 of a head at its document's begin, each token does

        S ← exp(decay) · S;  S ← S + key ⊗ rate · (value − Sᵀ key);  output = Sᵀ query

    query, key [rows, length, key heads, key width], each for as many value heads in a row; value [rows, length, value
    heads, value width]; decay ≤ 0 and rate in (0, 1) [rows, length, value heads]; all float32.
    positions: int32 [rows or 1, length].
    """
    length, num_shared = query.shape[1], value.shape[2] // query.shape[2]
    query, key = query.repeat_interleave(num_shared, 2), key.repeat_interleave(num_shared, 2)
    query, key, value = _chunked(query), _chunked(key), _chunked(value)  # [rows, heads, chunks, RULE_CHUNK, width]
    decay, rate = _chunked(decay.unsqueeze(-1)).squeeze(-1), _chunked(rate.unsqueeze(-1))
    position = _chunked(positions[..., None, None])
    place = torch.arange(RULE_CHUNK, device=query.device)
    distance = place[:, None] - place
    # Tokens follow each other in a document: those that are no further away than its first one are its own.
    is_own = (distance >= 0) & (distance <= position)  # [rows, 1, chunks, RULE_CHUNK, RULE_CHUNK]
    begins_here = position[..., 0] <= place  # [rows, 1, chunks, RULE_CHUNK]

    # Sums of a document's decays alone: a cumulative sum would carry roundings from the one before.
    since = torch.where(is_own, decay.unsqueeze(-2), 0.0).sum(-1)
    between = (since.unsqueeze(-1) - since.unsqueeze(-2)).masked_fill(~is_own, -torch.inf).exp()
    from_state = since.exp().masked_fill(begins_here, 0.0).unsqueeze(-1)
    to_state = (since[..., -1:] - since).masked_fill(~is_own[..., -1, :], -torch.inf).exp().unsqueeze(-1)

    # Each token's correction depends on those before it: a triangular system, for two right sides at once.
    fed = key * rate
    system = (fed @ key.transpose(-1, -2)) * between
    sides = torch.cat((value * rate, fed * from_state), -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    corrections, reads = solved.split((value.shape[-1], key.shape[-1]), -1)
    attends = (query @ key.transpose(-1, -2)) * between
    query, key = query * from_state, (key * to_state).transpose(-1, -2)

    state = query.new_zeros(*query.shape[:2], query.shape[-1], value.shape[-1])
    outputs = []
    for chunk in range(query.shape[2]):
        written = corrections[:, :, chunk] - reads[:, :, chunk] @ state
        outputs.append(query[:, :, chunk] @ state + attends[:, :, chunk] @ written)
        state = state * from_state[:, :, chunk, -1:] + key[:, :, chunk] @ written
    return torch.stack(outputs, 2).flatten(2, 3)[:, :, :length].transpose(1, 2)


def _chunked(values: Tensor) -> Tensor:
    """[rows, length, heads, width] → [rows, heads, chunks, RULE_CHUNK, width], filled up with zeros.

    Contiguous, because the order of sums depends on it.
    """
    filled = functional.pad(values.transpose(1, 2), (0, 0, 0, -values.shape[1] % RULE_CHUNK))
    return filled.contiguous().view(*filled.shape[:2], -1, RULE_CHUNK, filled.shape[-1])


def _heads(values: Tensor, width: int) -> Tensor:
    """[rows, length, all heads] → [rows, length, heads, width]."""
    return values.view(*values.shape[:-1], -1, width)


def _normed(heads: Tensor) -> Tensor:
    """Return heads of length 1."""
    return heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + _NORM_EPS)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, device="meta")
