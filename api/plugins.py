"""What the author of a plug-in writes, as types: nothing has to be imported from here. docs/plugins.md has examples.

A plug-in is a class or a function in a wheel, which a job names by import path: `my_things.lion:Lion`. All of them must
be deterministic: equal inputs give equal bits, in any process. They draw no random numbers, read no clock, file or
environment, and keep nothing between calls but what is said below.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from headway.stages.model.positions import DocumentRows
    from headway.stages.spec import ModelSpec


class Optimizer(Protocol):
    """`[optim.matrices] name` or `[optim.rest] name`: any `torch.optim.Optimizer` with these arguments.

    It steps each parameter alone, in place, and its bits do not depend on the other parameters. Between two steps it
    keeps tensors in `self.state[parameter]`, of any shape and dtype, from the first step on, and nothing elsewhere:
    they are saved, sent and restored by name, with the layer. A `step` there, a number or a tensor [], counts the
    updates: it is set to the update's index, from 0, before each step. Weights and gradients are float32, also in a job
    of another dtype. A parameter of the blocks with two dimensions is [outputs, inputs].
    """

    def __init__(self, params: "Iterable[Tensor]", *, lr: float, weight_decay: float, **settings: Any) -> None:
        """lr: changes with the schedule, in each group of `param_groups`. settings: those of the job."""
        ...

    def step(self) -> None:
        """Update each parameter that has a gradient."""
        ...


class Loss(Protocol):
    """`[train] loss`: of the tokens of a microbatch."""

    def __call__(self, logits: "Tensor", targets: "Tensor", mean_tokens: "Tensor | None", **settings: Any) -> "Tensor":
        """Return the loss, a float32 tensor [], with its graph.

        logits: [microbatch, sequence, vocabulary], in the job's dtype. targets: int64 [microbatch, sequence], -100
        where none counts. mean_tokens: [], the divisor of a sum over the targets that count, so that all of a batch
        weigh the same; None: all count, and the loss is their mean.
        """
        ...


class Block(Protocol):
    """`[model] block`: a `torch.nn.Module` in the place of each block. All blocks have parameters of the same shapes.

    It has no buffers. Its tensors of parameters are on the meta device when it is made. Vectors begin as ones, or as
    zeros if their names end in `bias`; all else is normal with `initializer_range`. A backward may compute its forward
    again.
    """

    def __init__(self, model: "ModelSpec", **settings: Any) -> None:
        """model: `[model]` of the job, with fields such as hidden_size."""
        ...

    def forward(self, hidden: "Tensor", documents: "DocumentRows | None" = None) -> "Tensor":
        """Return hidden states as the input: [microbatch, sequence, hidden], of its dtype; a token sees none after it.

        documents: only given if `[train] documents` is "separate". Its positions [microbatch, sequence] begin at 0 with
        each document, and no token may see another document.
        """
        ...


class Source(Protocol):
    """`[data] source`: runs once, where the job is submitted. Its random numbers come from a seed of its own."""

    def __call__(self, **settings: Any) -> "Iterable[bytes | Sequence[int]]":
        """Return the documents, of which the data is one stream: numbers of tokens below `[model] vocab_size`."""
        ...
