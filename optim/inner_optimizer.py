"""The optimizers that a job can name, as torch optimizers that step one tensor at a time, and the state of each."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from headway.optim.eager import EagerAdamW, EagerSGD
from headway.optim.lion import Lion
from headway.optim.muon import Muon
from headway.optim.spec import GroupSpec

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def inner_optimizer(spec: GroupSpec, parameters: Sequence[Tensor]) -> Optimizer:
    """Return the optimizer of one group. Never `foreach` or `fused`: a tensor's bits must not depend on its
    neighbours.
    """
    match spec.name:
        case "muon":
            return Muon(
                parameters,
                spec.lr,
                weight_decay=spec.weight_decay,
                momentum=spec.momentum,
                nesterov=spec.nesterov,
                newton_schulz_dtype=_DTYPES[spec.newton_schulz_dtype],
                newton_schulz_steps=spec.newton_schulz_steps,
            )
        case "adamw":
            return EagerAdamW(
                parameters,
                spec.lr,
                betas=spec.betas,
                eps=spec.eps,
                weight_decay=spec.weight_decay,
                foreach=False,
                fused=False,
            )
        case "lion":
            return Lion(parameters, spec.lr, betas=spec.betas, weight_decay=spec.weight_decay)
        case "sgd":
            return EagerSGD(
                parameters,
                spec.lr,
                momentum=spec.momentum,
                nesterov=spec.nesterov and spec.momentum != 0,
                weight_decay=spec.weight_decay,
                foreach=False,
                fused=False,
            )


def state_slots(spec: GroupSpec) -> tuple[str, ...]:
    """Return names of the tensors that the optimizer keeps for each parameter, once update 0 was applied.

    AdamW's step count is not among them: it is the update's index, which a boundary knows anyway.
    """
    match spec.name:
        case "muon":
            return ("momentum_buffer",)
        case "adamw":
            return ("exp_avg", "exp_avg_sq")
        case "lion":
            return ("exp_avg",)
        case "sgd":
            return ("momentum_buffer",) if spec.momentum != 0 else ()
