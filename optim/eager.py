"""torch's optimizers without torch's compiler, which their methods import at the first call: a second of each process.

Removing the wrappers keeps the compiler out of the optimizer; no optimizer is compiled here. The rules are torch's.
"""

import inspect
from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from headway.optim.spec import STEP_COUNT


class EagerOptimizer(Optimizer):
    """Base of every optimizer here. One of our own has the rule of one parameter, `_step_tensor`."""

    add_param_group = inspect.unwrap(Optimizer.add_param_group)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody has a closure here
        """One update of every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_tensor(parameter, parameter.grad, group)

    def _step_tensor(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Step one parameter in place, by its gradient, which stays as it is, and `self.state[weight]`."""
        raise NotImplementedError


def buffer(state: MutableMapping[str, Any], slot: str, gradient: Tensor) -> Tensor:
    """Return a parameter's buffer of its gradient's shape and dtype: zeros before the first step."""
    if slot not in state:
        state[slot] = torch.zeros_like(gradient, memory_format=torch.contiguous_format)
    found: Tensor = state[slot]
    return found


def count_step(state: MutableMapping[str, Any]) -> int:
    """Return the number of a parameter's step, from 1 on, and count it in its state as torch's AdamW does."""
    counted: Tensor = state.setdefault(STEP_COUNT, torch.zeros(()))
    return int(counted.add_(1))


def matrix_only(gradient: Tensor, name: str) -> None:
    """Raise ValueError for what is no matrix."""
    if gradient.ndim != 2:
        raise ValueError(f"{name} steps matrices, not a parameter of shape {list(gradient.shape)}")


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
