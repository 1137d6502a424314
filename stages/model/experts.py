"""Mixtures of experts: a router sends each token to the best few of a block's MLPs, and weighs what they return.

docs/numerics.md, section 9. Tokens are sorted by expert, so that each expert computes one matrix product, and a token's
results are added at their old places. Two losses of the router, and the load that its bias learns from, enter the graph
where the block is: no frame carries them, and no cut changes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headway.stages.model.recomputation import through_product
from headway.stages.spec import ModelSpec, TrainSpec


@dataclass(frozen=True, slots=True)
class RouterLosses:
    """The factors of what is added to the loss of each microbatch, for each block."""

    balance: float = 0.0
    """Of the load-balancing loss (Fedus et al. 2021, arXiv 2101.03961)."""
    z: float = 0.0
    """Of the squared log-sum-exp of the router's logits (Zoph et al. 2022, arXiv 2202.08906)."""


class ExpertLinear(nn.Linear):
    """A matrix of an expert. Its own class, because adapters are put beside plain linear layers alone."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias, device="meta")


class Expert(nn.Module):
    """down(silu(gate(x)) · up(x)) on some rows, perhaps none: [rows, hidden] → [rows, hidden].

    With a limit it is down((up(x) + 1) · g · sigmoid(alpha · g)), of a gate g and an up inside the limit.
    """

    def __init__(self, spec: ModelSpec, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = ExpertLinear(spec.hidden_size, intermediate_size, bias=spec.expert_bias)
        self.up_proj = ExpertLinear(spec.hidden_size, intermediate_size, bias=spec.expert_bias)
        self.down_proj = ExpertLinear(intermediate_size, spec.hidden_size, bias=spec.expert_bias)
        self.limit, self.alpha = spec.swiglu_limit, spec.swiglu_alpha
        self.recomputes_product = False

    def forward(self, rows: Tensor) -> Tensor:
        gate, up = self.gate_proj(rows), self.up_proj(rows)
        if not self.limit:
            return self._down(functional.silu(gate), up, gate)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self._down(up + 1, gate * torch.sigmoid(gate * self.alpha), None)

    def _down(self, left: Tensor, right: Tensor, gate: Tensor | None) -> Tensor:
        """gate: what left is the silu of; None: left is kept."""
        if not self.recomputes_product:
            return self.down_proj(left * right)  # type: ignore[no-any-return]
        make_left = None if gate is None else partial(functional.silu, gate.detach())
        return through_product(self.down_proj, left, right, make_left)


class Router(nn.Module):
    """Chooses k experts for each row, and their weights."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.num_chosen = spec.num_experts_per_tok
        self.is_normed = spec.norm_topk_prob
        self.is_sigmoid = spec.router_scoring == "sigmoid"
        self.scale = spec.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(spec.num_experts, spec.hidden_size, device="meta"))
        if spec.expert_bias:
            self.bias = nn.Parameter(torch.empty(spec.num_experts, device="meta"))
        if spec.router_bias:
            self.e_score_correction_bias = nn.Parameter(torch.empty(spec.num_experts, device="meta"))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return logits and scores [rows, experts] in float32, the chosen experts [rows, k], and their weights."""
        if self.is_sigmoid:
            logits = functional.linear(rows.float(), self.weight.float())
            scores = logits.sigmoid()
        else:
            logits = functional.linear(rows, self.weight, getattr(self, "bias", None)).float()
            scores = functional.softmax(logits, -1)
        with torch.no_grad():
            ranked = (
                scores + self.e_score_correction_bias.float() if hasattr(self, "e_score_correction_bias") else scores
            )
            chosen = ranked.topk(self.num_chosen, -1).indices
        weights = scores.gather(1, chosen)
        if self.is_normed:
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total + 1e-20 if self.is_sigmoid else total)
        if self.scale != 1.0:
            weights = weights * self.scale
        return logits, scores, chosen, weights.to(rows.dtype)


class Mixture(nn.Module):
    """hidden → hidden, both [microbatch, sequence, hidden]: the experts of a block, in place of its MLP."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate = Router(spec)
        self.experts = nn.ModuleList(Expert(spec, spec.moe_intermediate_size) for _ in range(spec.num_experts))
        if spec.num_shared_experts:
            self.shared_experts = Expert(spec, spec.num_shared_experts * spec.moe_intermediate_size)
        if spec.shared_expert_gate:
            self.shared_expert_gate = ExpertLinear(spec.hidden_size, 1)
        self.losses = RouterLosses()
        """Set by whoever trains the block."""

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, -2)
        logits, scores, chosen, weights = self.gate(rows)
        loads = torch.bincount(chosen.flatten(), minlength=len(self.experts))
        mixed = (self._computed(rows, chosen, loads) * weights.unsqueeze(-1)).sum(1)
        if hasattr(self, "shared_experts"):
            shared = self.shared_experts(rows)
            if hasattr(self, "shared_expert_gate"):
                shared = shared * self.shared_expert_gate(rows).sigmoid()
            mixed = mixed + shared
        if torch.is_grad_enabled():
            mixed = self._with_losses(mixed, logits, scores, loads)
        output: Tensor = mixed.view_as(hidden)
        return output

    def _computed(self, rows: Tensor, chosen: Tensor, loads: Tensor) -> Tensor:
        """Return what each chosen expert makes of each row: [rows, k, hidden]. loads: rows that each expert gets."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        sent = rows.index_select(0, order.div(chosen.shape[1], rounding_mode="floor"))
        parts: Sequence[Tensor] = torch.split(sent, loads.tolist())
        made = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return made.index_select(0, order.argsort()).view(*chosen.shape, -1)

    def _with_losses(self, mixed: Tensor, logits: Tensor, scores: Tensor, loads: Tensor) -> Tensor:
        num_rows, num_experts = scores.shape
        if self.losses.balance:
            probable = scores / scores.sum(-1, keepdim=True) if self.gate.is_sigmoid else scores
            balance = (loads.float() / num_rows * probable.mean(0)).sum() * num_experts
            mixed = _WithLoss.apply(mixed, balance * self.losses.balance)  # type: ignore[no-untyped-call]
        if self.losses.z:
            squares = logits.logsumexp(-1).square().mean()
            mixed = _WithLoss.apply(mixed, squares * self.losses.z)  # type: ignore[no-untyped-call]
        if hasattr(self.gate, "e_score_correction_bias"):
            overload = loads.float() * (num_experts / (num_rows * self.gate.num_chosen)) - 1.0
            mixed = _WithOverload.apply(mixed, self.gate.e_score_correction_bias, overload)  # type: ignore[no-untyped-call]
        return mixed


def set_router_losses(layer: nn.Module, train: TrainSpec) -> nn.Module:
    """Give a layer the losses of its router, if it has one. Returns the layer."""
    mixture = getattr(layer, "mlp", None)
    if isinstance(mixture, Mixture):
        mixture.losses = RouterLosses(train.router_balance_loss, train.router_z_loss)
    return layer


class _WithLoss(torch.autograd.Function):
    """The identity, with a further loss beside it: its gradient is 1 once the backward passes here."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones_like(ctx.like)


class _WithOverload(torch.autograd.Function):
    """The identity. A router's bias gets its experts' overload as gradient (Wang et al. 2024, arXiv 2408.15664)."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, bias: Tensor, overload: Tensor) -> Tensor:
        ctx.overload = overload.to(bias.dtype)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], ctx.overload, None
