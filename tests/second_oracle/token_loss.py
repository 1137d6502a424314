"""The loss of a microbatch and its gradients, all rows at once or in chunks (docs/numerics.md, section 9)."""

from collections.abc import Sequence
from functools import reduce
from operator import add

import torch
from torch import Tensor
from torch.nn import functional


def differentiated_loss(
    normed: Tensor, weight: Tensor, targets: Tensor, *, chunk: int, divisor: Tensor | None, more: Sequence[Tensor] = ()
) -> float:
    """Mean cross entropy over all tokens, or its sum over a divisor, in float32. Every leaf gets its gradient.

    more: losses that are added to the gradient alone.
    """
    rows, wanted = normed.flatten(0, 1), targets.flatten()
    if chunk:
        number = torch.tensor(float(len(wanted)))
        return in_chunks(rows, weight, wanted, chunk, number if divisor is None else divisor, more)
    logits = functional.linear(rows, weight).float()
    if divisor is None:
        value = functional.cross_entropy(logits, wanted)
    else:
        value = functional.cross_entropy(logits, wanted, reduction="sum", ignore_index=-100) / divisor
    torch.autograd.backward([value, *more])
    return value.item()


def in_chunks(
    rows: Tensor, weight: Tensor, targets: Tensor, chunk: int, divisor: Tensor, more: Sequence[Tensor]
) -> float:
    """Each chunk by itself, from the first to the last."""
    num_rows = len(targets)
    sums, by_rows, by_weight = [], [], []
    for begin in range(0, num_rows, chunk):
        part = rows[begin : begin + chunk].detach().requires_grad_()
        copy = weight.detach().requires_grad_()
        value = functional.cross_entropy(
            functional.linear(part, copy).float(), targets[begin : begin + chunk], reduction="sum"
        )
        value.backward(torch.ones(()) / divisor)  # type: ignore[no-untyped-call]
        assert part.grad is not None
        assert copy.grad is not None
        sums.append(value.detach())
        by_rows.append(part.grad)
        by_weight.append(copy.grad.float())
    weight.grad = reduce(add, by_weight).to(weight.dtype)
    torch.autograd.backward([rows, *more], [torch.cat(by_rows), *map(torch.ones_like, more)])
    return (reduce(add, sums) / divisor).item()
