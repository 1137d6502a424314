"""A block's mixture of experts and the losses of its router (docs/numerics.md, section 9)."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from tests.second_oracle.job import Model

Parameters = dict[str, Tensor]


@dataclass
class Routed:
    """What a microbatch leaves beside its loss, from all blocks."""

    balance: float
    z: float
    losses: list[Tensor] = field(default_factory=list)
    """Added to the gradient of the microbatch."""
    overloads: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """A router's bias, and its gradient."""


def mixture(model: Model, parameters: Parameters, hidden: Tensor, routed: Routed) -> Tensor:
    """o of [rows, sequence, hidden]."""
    n, k = hidden.reshape(-1, model.hidden_size), model.num_experts_per_tok
    gate, bias = parameters["mlp.gate.weight"], parameters.get("mlp.gate.e_score_correction_bias")
    if model.router_scoring == "sigmoid":
        z = functional.linear(n.float(), gate.float())
        s = z.sigmoid()
    else:
        z = functional.linear(n, gate, parameters.get("mlp.gate.bias")).float()
        s = functional.softmax(z, -1)
    c = torch.topk((s if bias is None else s + bias.float()).detach(), k).indices
    w = s.gather(1, c)
    if model.norm_topk_prob:
        w = w / (w.sum(-1, keepdim=True) + (1e-20 if model.router_scoring == "sigmoid" else 0))
    if model.routed_scaling_factor != 1:
        w = w * model.routed_scaling_factor
    w = w.to(hidden.dtype)

    order = c.flatten().argsort(stable=True)
    rows = n.index_select(0, order // k)
    counts = torch.stack([(c == e).sum() for e in range(model.num_experts)])
    made, begin = [], 0
    for e, number in enumerate(counts.tolist()):
        made.append(expert(model, parameters, f"mlp.experts.{e}", rows[begin : begin + number]))
        begin += number
    y = torch.cat(made).index_select(0, order.argsort()).reshape(*c.shape, -1)
    o = (y * w.unsqueeze(-1)).sum(1)
    if model.num_shared_experts:
        u = expert(model, parameters, "mlp.shared_experts", n)
        if model.shared_expert_gate:
            u = u * functional.linear(n, parameters["mlp.shared_expert_gate.weight"]).sigmoid()
        o = o + u
    if routed.balance:
        p = s / s.sum(-1, keepdim=True) if model.router_scoring == "sigmoid" else s
        routed.losses.append((counts.float() / len(n) * p.mean(0)).sum() * model.num_experts * routed.balance)
    if routed.z:
        routed.losses.append(torch.logsumexp(z, -1).square().mean() * routed.z)
    if bias is not None:
        routed.overloads.append((bias, counts.float() * (model.num_experts / (len(n) * k)) - 1))
    return o.reshape(hidden.shape)


def expert(model: Model, parameters: Parameters, name: str, rows: Tensor) -> Tensor:
    """down(silu(gate(x)) · up(x)), or the same inside a limit."""
    gate = beside_adapter(parameters, f"{name}.gate_proj", rows)
    up = beside_adapter(parameters, f"{name}.up_proj", rows)
    made = functional.silu(gate) * up if not model.swiglu_limit else limited(model, gate, up)
    return beside_adapter(parameters, f"{name}.down_proj", made)


def limited(model: Model, gate: Tensor, up: Tensor) -> Tensor:
    """(up + 1) · gate · sigmoid(alpha · gate)."""
    gate, up = torch.clamp(gate, max=model.swiglu_limit), torch.clamp(up, -model.swiglu_limit, model.swiglu_limit)
    return (up + 1) * (gate * (gate * model.swiglu_alpha).sigmoid())


def beside_adapter(parameters: Parameters, name: str, rows: Tensor) -> Tensor:
    """rows · weightᵀ, and what its adapter adds, if it has one."""
    plain = functional.linear(rows, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))
    if f"{name}.lora_A.weight" not in parameters:
        return plain
    low = functional.linear(rows, parameters[f"{name}.lora_A.weight"])
    return plain + functional.linear(low, parameters[f"{name}.lora_B.weight"]) * parameters["scale"].item()
