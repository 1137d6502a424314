"""torch's optimizers without torch's compiler, which their methods import at the first call: a second of each process.

Removing the wrappers keeps the compiler out of the optimizer; no optimizer is compiled here. The rules are torch's.
"""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer


class EagerOptimizer(Optimizer):
    """Base of every optimizer here."""

    add_param_group = inspect.unwrap(Optimizer.add_param_group)


class EagerAdamW(EagerOptimizer, AdamW):
    """AdamW of torch. Never `foreach` or `fused`: a tensor's bits must not depend on its neighbours."""

    def __init__(self, params: Iterable[Tensor], lr: float, **settings: Any) -> None:
        super().__init__(params, lr, foreach=False, fused=False, **settings)

    step = torch.no_grad()(inspect.unwrap(AdamW.step))


class EagerSGD(EagerOptimizer, SGD):
    """SGD of torch, in the same way. Without momentum there is nothing to look ahead with."""

    def __init__(self, params: Iterable[Tensor], lr: float, *, momentum: float, nesterov: bool, **more: Any) -> None:
        nesterov = nesterov and momentum != 0
        super().__init__(params, lr, momentum=momentum, nesterov=nesterov, foreach=False, fused=False, **more)

    step = torch.no_grad()(inspect.unwrap(SGD.step))
