"""The running mean of a parameter's gradients between two updates, in the dtype that the job has chosen for it.

An optimizer computes with it in fp32: it is widened before a step and rounded once after it. So a buffer of half the
size changes what is remembered, and no formula.
"""

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from headway.optim.spec import GroupSpec

_BUFFERS = {"muon": "momentum_buffer", "adamw": "exp_avg", "lion": "exp_avg", "sgd": "momentum_buffer"}


class StoredMomentum:
    """The buffers of one optimizer's parameters. In float32 it does nothing."""

    def __init__(self, spec: GroupSpec, optimizer: Optimizer) -> None:
        self.slot = _BUFFERS[spec.name]
        """Name of the buffer in the optimizer's state."""
        self.dtype: torch.dtype = getattr(torch, spec.momentum_dtype)
        self._optimizer = optimizer
        self._stored: dict[Parameter, Tensor] = {}

    def widen(self, parameter: Parameter) -> None:
        """Give the optimizer a parameter's buffer in fp32, for a step."""
        state = self._state_of(parameter)
        if self.dtype is not torch.float32 and self.slot in state:
            self._stored[parameter] = state[self.slot]
            state[self.slot] = state[self.slot].float()

    def narrow(self, parameter: Parameter) -> None:
        """Round what the step has left, into the memory from before."""
        state = self._state_of(parameter)
        if self.dtype is torch.float32 or self.slot not in state:
            return
        stored = self._stored.pop(parameter, None)
        if stored is None:
            state[self.slot] = state[self.slot].to(self.dtype)
        else:
            state[self.slot] = stored.copy_(state[self.slot])

    def _state_of(self, parameter: Parameter) -> MutableMapping[str, Any]:
        # Not `state[parameter]`: that is a defaultdict, and reading must not leave entries behind.
        state: MutableMapping[str, Any] = self._optimizer.state.get(parameter, {})
        return state
