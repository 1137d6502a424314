"""Elementwise results that no graph keeps: the backward makes them again from what is kept beside them.

The operations of the graph, their order and their inputs stay the same, so no bit changes: only what they keep for
their backward does. A result is made once for all operations that need it, and freed after the last one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Result:
    """A result that can be made again."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make
        self._num_waiting = 0
        self._made: Tensor | None = None

    def keep(self) -> None:
        """Count one more operation that will take it."""
        self._num_waiting += 1

    def seen(self) -> Tensor:
        """Return it, and hold it as long as an operation will take it."""
        if (made := self._made) is None:
            with torch.no_grad():
                made = self._make()
        self._made = made if self._num_waiting > 0 else None
        return made

    def taken(self) -> Tensor:
        """Return it to one of the operations."""
        self._num_waiting -= 1
        return self.seen()


@dataclass(frozen=True, slots=True)
class _View:
    """What an operation would have kept of a result."""

    result: _Result
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def made(self) -> Tensor:
        return self.result.taken().as_strided(self.size, self.stride, self.offset)


@contextmanager
def made_again(tensor: Tensor, result: _Result) -> Iterator[None]:
    """Let the operations inside keep, in place of a tensor or its views, how it is made."""
    storage = tensor.untyped_storage()._cdata  # of a tensor that lives as long as the block inside

    def packed(kept: Tensor) -> Tensor | _View:
        if kept.untyped_storage()._cdata != storage:
            return kept
        result.keep()
        return _View(result, kept.size(), kept.stride(), int(kept.storage_offset()))

    with saved_tensors_hooks(packed, lambda kept: kept.made() if isinstance(kept, _View) else kept):
        yield


def through(compute: Callable[[Tensor], Tensor], values: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    """Return compute(make(values)), whose graph keeps values instead of what is made of them."""
    made = make(values)
    if not (torch.is_grad_enabled() and values.requires_grad):
        return compute(made)
    kept = values.detach()
    with made_again(made, _Result(lambda: make(kept))):
        return compute(made)


def through_product(
    compute: Callable[[Tensor], Tensor], left: Tensor, right: Tensor, make_left: Callable[[], Tensor] | None
) -> Tensor:
    """Return compute(left · right), whose graph keeps neither the product nor left.

    make_left: makes left again from what is kept anyway; None: left is kept.
    """
    if not (torch.is_grad_enabled() and left.requires_grad):
        return compute(left * right)
    kept_right = right.detach()
    of_left = _Result(left.detach if make_left is None else make_left)
    with nullcontext() if make_left is None else made_again(left, of_left):
        product = left * right
    with made_again(product, _Result(lambda: of_left.seen() * kept_right)):
        return compute(product)
