"""The loss of a microbatch and its gradients, all rows at once or in chunks (docs/numerics.md, section 9)."""

from collections.abc import Sequence
from functools import reduce
from operator import add

import torch
from torch import Tensor
from torch.nn import functional


def differentiated_loss(
    normed: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    scaling: tuple[float, float],
    chunk: int,
    is_whole: bool,
    divisor: Tensor | None,
    more: Sequence[Tensor] = (),
) -> float:
    """Mean cross entropy over all tokens, or its sum over a divisor, in float32. Every leaf gets its gradient.

    more: losses that are added to the gradient alone.
    """
    rows, wanted = normed.flatten(0, 1), targets.flatten()
    if chunk:
        number = torch.tensor(float(len(wanted)))
        divisor = number if divisor is None else divisor
        return in_chunks(rows, weight, wanted, scaling, chunk, divisor, more, is_whole=is_whole)
    logits = logits_of(functional.linear(rows, weight), scaling)
    if divisor is None:
        value = functional.cross_entropy(logits, wanted)
    else:
        value = functional.cross_entropy(logits, wanted, reduction="sum", ignore_index=-100) / divisor
    torch.autograd.backward([value, *more])
    return value.item()


def logits_of(products: Tensor, scaling: tuple[float, float]) -> Tensor:
    """In float32, from products in the job's dtype."""
    divisor, cap = scaling
    if divisor != 1:
        products = products / divisor
    return (torch.tanh(products / cap) * cap if cap else products).float()


def differentiated_preference(
    normed: Tensor,
    weight: Tensor,
    targets: Tensor,
    positions: Tensor,
    *,
    scaling: tuple[float, float],
    chunk: int,
    beta: float,
    divisor: Tensor,
) -> float:
    """The loss of pairs of documents, in float32. Every leaf gets its gradient."""

    def by_tokens(hidden: Tensor) -> Tensor:
        rows, wanted = hidden.flatten(0, 1), targets.flatten()
        size = chunk or len(wanted)
        parts = [(rows[at : at + size], wanted[at : at + size]) for at in range(0, len(wanted), size)]
        return torch.cat(
            [
                functional.cross_entropy(logits_of(functional.linear(r, weight), scaling), w, reduction="none")
                for r, w in parts
            ]
        )

    upper, lower = normed.chunk(2)
    with torch.no_grad():
        before = by_tokens(lower)
    more = (before - by_tokens(upper)).view(targets.shape)
    documents, places = (positions == 0).cumsum(1) - 1, (targets.shape[1] + 1) // 2
    losses = []
    for row in range(len(targets)):
        for k in range(places):
            sums = []
            for document in (2 * k, 2 * k + 1):
                chosen = (documents[row] == document) & (targets[row] != -100)
                terms = more[row][chosen]
                sums.append(reduce(add, terms) if len(terms) else None)
            preferred, other = sums
            if preferred is None or other is None:
                losses.append(more[row].sum() * 0)
            else:
                losses.append(-functional.logsigmoid(beta * (preferred - other)))
    value = torch.stack(losses).sum() / divisor
    value.backward()  # type: ignore[no-untyped-call]
    return value.item()


def in_chunks(
    rows: Tensor,
    weight: Tensor,
    targets: Tensor,
    scaling: tuple[float, float],
    chunk: int,
    divisor: Tensor,
    more: Sequence[Tensor],
    *,
    is_whole: bool,
) -> float:
    """Each chunk by itself, from the first to the last. is_whole: one product gives the gradient of the weight."""
    num_rows = len(targets)
    sums, by_rows, by_weight, by_products = [], [], [], []
    for begin in range(0, num_rows, chunk):
        part = rows[begin : begin + chunk].detach().requires_grad_()
        copy = weight.detach().requires_grad_()
        products = functional.linear(part, copy)
        products.retain_grad()
        value = functional.cross_entropy(logits_of(products, scaling), targets[begin : begin + chunk], reduction="sum")
        value.backward(torch.ones(()) / divisor)  # type: ignore[no-untyped-call]
        assert part.grad is not None
        assert copy.grad is not None
        assert products.grad is not None
        by_products.append(products.grad)
        sums.append(value.detach())
        by_rows.append(part.grad)
        by_weight.append(copy.grad.float())
    if is_whole:
        weight.grad = torch.cat(by_products).t() @ rows.detach()
    else:
        weight.grad = reduce(add, by_weight).to(weight.dtype)
    torch.autograd.backward([rows, *more], [torch.cat(by_rows), *map(torch.ones_like, more)])
    return (reduce(add, sums) / divisor).item()
