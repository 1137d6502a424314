"""The loss of a microbatch and its gradients, all rows at once or in chunks (docs/numerics.md, section 9)."""

from functools import reduce
from operator import add

import torch
from torch import Tensor
from torch.nn import functional


def differentiated_loss(normed: Tensor, weight: Tensor, targets: Tensor, *, chunk: int) -> float:
    """Mean cross entropy over all tokens, in float32. Every leaf that it depends on gets its gradient."""
    rows, wanted = normed.flatten(0, 1), targets.flatten()
    if chunk:
        return in_chunks(rows, weight, wanted, chunk)
    value = functional.cross_entropy(functional.linear(rows, weight).float(), wanted)
    value.backward()  # type: ignore[no-untyped-call]
    return value.item()


def in_chunks(rows: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> float:
    """Each chunk by itself, from the first to the last."""
    num_rows = len(targets)
    sums, by_rows, by_weight = [], [], []
    for begin in range(0, num_rows, chunk):
        part = rows[begin : begin + chunk].detach().requires_grad_()
        copy = weight.detach().requires_grad_()
        value = functional.cross_entropy(
            functional.linear(part, copy).float(), targets[begin : begin + chunk], reduction="sum"
        )
        value.backward(torch.ones(()) / num_rows)  # type: ignore[no-untyped-call]
        assert part.grad is not None
        assert copy.grad is not None
        sums.append(value.detach())
        by_rows.append(part.grad)
        by_weight.append(copy.grad.float())
    weight.grad = reduce(add, by_weight).to(weight.dtype)
    rows.backward(torch.cat(by_rows))  # type: ignore[no-untyped-call]
    return (reduce(add, sums) / num_rows).item()
