"""Sums a batch's gradients, in the one order that gives equal bits everywhere.

Inside a reduction group gradients are added in order of the microbatch, starting from the first, not from zero. The
groups' sums are added in order of the group. The total is multiplied once by 1/m, in fp32.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class GradientSums:
    """One sum per reduction group, of all of a stage's parameters in a fixed order. One batch at a time.

    A batch ends with `reduce` on a worker that holds all groups, with `take` on one of several replicas. Where groups
    are reduced here, a group that is complete is added to the total as soon as all groups before it are: then its sum
    takes no memory.
    """

    def __init__(self, *, num_microbatches: int, num_groups: int, is_reduced_here: bool = True) -> None:
        self._num_microbatches = num_microbatches
        self._is_reduced_here = is_reduced_here
        self._sums: list[list[Tensor] | None] = [None] * num_groups
        self._next = list(range(num_groups))
        self._num_folded = 1
        """Groups whose sum is, or becomes, the first group's: the total."""

    @property
    def is_empty(self) -> bool:
        """Return whether no microbatch has been added since the last reduction."""
        return all(sums is None for sums in self._sums)

    @property
    def num_open(self) -> int:
        """Return how many sums are in memory, with the total."""
        return sum(sums is not None for sums in self._sums)

    @torch.no_grad()
    def add(self, microbatch: int, gradients: list[Tensor], *, others: Iterable[Tensor] = ()) -> None:
        """Add a microbatch's gradients, fresh from autograd. A group's first is kept, not copied, if that is safe.

        others: further tensors that this backward used or made, and that other code will read.
        """
        group = microbatch % len(self._sums)
        assert microbatch == self._next[group], f"microbatch {microbatch} of group {group} out of order"
        self._next[group] += len(self._sums)
        sums = self._sums[group]
        if sums is None:
            self._sums[group] = _owned(gradients, others)
        elif sums:
            # A bf16 summand is cast to fp32 before it is added: torch adds to an fp32 tensor in this way.
            torch._foreach_add_(sums, gradients)
        if self._is_reduced_here:
            self._fold()

    def _fold(self) -> None:
        """Add to the total what is complete, in order of the group."""
        m = self._num_microbatches
        while self._num_folded < len(self._sums) and min(self._next[: self._num_folded + 1]) >= m:
            total, sums = self._sums[0], self._sums[self._num_folded]
            assert total is not None
            assert sums is not None
            if total:  # frozen layers have no gradients
                torch._foreach_add_(total, sums)
            self._sums[self._num_folded] = None
            self._num_folded += 1

    @torch.no_grad()
    def reduce(self) -> list[Tensor]:
        """End the batch: return the mean gradient over its microbatches, fp32, in the parameters' order."""
        total = self._sums[0]
        assert total is not None, "no gradients were added"
        assert self._num_folded == len(self._sums), "a reduction group has no gradients"
        if total:
            torch._foreach_mul_(total, 1 / self._num_microbatches)
        self._begin()
        return total

    def take(self) -> list[list[Tensor]]:
        """End the batch: return the sums of each group that was added to, in order of the group."""
        held = [sums for sums in self._sums if sums is not None]
        self._begin()
        return held

    def _begin(self) -> None:
        self._sums = [None] * len(self._sums)
        self._next = list(range(len(self._sums)))
        self._num_folded = 1


def _owned(gradients: Sequence[Tensor], others: Iterable[Tensor]) -> list[Tensor]:
    """Return contiguous fp32 tensors that may be written to: autograd's own if no other tensor shares their memory."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in others}
    owned = []
    for gradient in gradients:
        tensor = gradient.float().contiguous()
        if tensor is gradient:
            storage = tensor.untyped_storage()
            if storage.data_ptr() in taken or storage.nbytes() != tensor.nbytes:
                tensor = tensor.clone()
            taken.add(storage.data_ptr())
        owned.append(tensor)
    return owned
