"""What the author of a plug-in writes, as types.

A plug-in is a class or a function in a wheel, which a job names by import path: `my_things.lion:Lion`. All of them must
be deterministic: equal inputs give equal bits, in any process, with or without neighbours. They draw no random numbers,
read no clock, file or environment, and keep nothing between calls but what is said below. docs/plugins.md has examples.
"""

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor


class Optimizer(Protocol):
    """`[optim.matrices] name` or `[optim.rest] name`: any `torch.optim.Optimizer` with these arguments.

    It steps each parameter alone, in place, and its bits do not depend on the other parameters. Between two steps it
    keeps tensors in `self.state[parameter]`, of any shape and dtype, from the first step on, and nothing elsewhere:
    they are saved, sent and restored by name, with the layer. A `step` there, a number or a tensor [], counts the
    updates: it is set to the update's index, from 0, before each step. Weights and gradients are float32, also in a job
    of another dtype. A parameter of the blocks with two dimensions is [outputs, inputs].
    """

    def __init__(self, params: Iterable[Tensor], *, lr: float, weight_decay: float, **settings: Any) -> None:
        """lr: changes with the schedule, in each group of `param_groups`. settings: those of the job."""
        ...

    def step(self) -> None:
        """Update each parameter that has a gradient."""
        ...
