"""Adds up the gradient of a tied embedding, which the first and the last stage both use.

Each end has sums of its own for every reduction group. An end holds the groups of its worker, and the other end's
worker that holds a group sends its sum of it. docs/numerics.md, section 9.

Only tensors and accounts are here: no link, no clock.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.stages.device.device import DeviceCopy
from headway.stages.model.decoder import trained_shapes
from headway.stages.spec import TIED, ModelSpec


def tied_positions(layers: Sequence[str], model: ModelSpec) -> tuple[int, ...]:
    """Return where the tied matrix is among the trained parameters of some layers: at the embedding, at the head."""
    if not model.trains_tie:
        return ()
    names = [(layer, parameter) for layer in layers for parameter in trained_shapes(layer, model)]
    return tuple(names.index(place) for place in TIED.items() if place in names)


class TiedSums:
    """One worker's part, for all batches of a generation, on a stage that has the embedding or the head or both."""

    def __init__(
        self, positions: Sequence[int], groups: Sequence[int], *, num_microbatches: int, first_batch: int
    ) -> None:
        """positions: see `tied_positions`. groups: reduction groups of this worker, rising."""
        self._positions = tuple(positions)
        self._groups = tuple(groups)
        self._num_microbatches = num_microbatches
        self.has_both_ends = len(self._positions) == 2
        self._next = dict.fromkeys(() if self.has_both_ends else self._groups, first_batch)
        """Each group that the other end has to send, and the batch of its next sum."""
        self._next_own = first_batch
        self._own: dict[int, list[list[Tensor]]] = {}
        """By batch, for each group: the own sums, of the embedding first."""
        self._arrived: dict[int, dict[int, DeviceCopy]] = {}
        """Batch to group to the other end's sum."""

    @property
    def is_empty(self) -> bool:
        """Return whether no batch is half added up."""
        return not self._own and not self._arrived

    def split(self, gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return a microbatch's gradients without those of the tied matrix, and these."""
        others = [tensor for place, tensor in enumerate(gradients) if place not in self._positions]
        return others, [gradients[place] for place in self._positions]

    def joined(self, others: Sequence[Tensor], tied: Tensor) -> list[Tensor]:
        """Return the gradients in the parameters' order. Each copy of the matrix has a tensor of its own."""
        whole = list(others)
        for number, place in enumerate(self._positions):
            whole.insert(place, tied if number == 0 else tied.clone())
        return whole

    def expects(self, group: int, batch: int) -> bool:
        """Return whether a sum would be the other end's next one. The caller limits how far it may be ahead."""
        return batch == self._next.get(group)

    def missing(self, batch: int) -> int | None:
        """Return the first group of which the other end's sum is not here; None when all are."""
        return next((group for group, next_batch in self._next.items() if next_batch <= batch), None)

    def contribute(self, batch: int, sums: Sequence[list[Tensor]]) -> dict[int, Tensor]:
        """End this worker's backwards of a batch. sums: for each group, of the embedding first.

        Returns the sum to send to the other end's holder of each group. It must not be written to afterwards.
        """
        assert batch == self._next_own, f"sums of batch {batch} out of order"
        assert len(sums) == len(self._groups), "a reduction group has no gradients"
        self._next_own = batch + 1
        self._own[batch] = list(sums)
        return {} if self.has_both_ends else {group: own for group, (own,) in zip(self._groups, sums, strict=True)}

    def add(self, batch: int, group: int, arrived: DeviceCopy) -> None:
        """Add the other end's sum of a group."""
        assert self.expects(group, batch), f"tied sums of batch {batch}, group {group}, out of order"
        self._next[group] = batch + 1
        self._arrived.setdefault(batch, {})[group] = arrived

    def is_whole(self, batch: int) -> bool:
        """Return whether a batch waits here, with all sums of both ends on the device."""
        if batch not in self._own or self.missing(batch) is not None:
            return False
        return all(copy.is_done for copy in self._arrived.get(batch, {}).values())

    @torch.no_grad()
    def take(self, batch: int) -> list[Tensor]:
        """Return the matrix's sum of each group. Sums of two numbers have no order, so both ends have equal bits."""
        own, arrived = self._own.pop(batch), self._arrived.pop(batch, {})
        if self.has_both_ends:
            return [of_embedding + of_head for of_embedding, of_head in own]
        return [sums + arrived[group].take()[0] for group, (sums,) in zip(self._groups, own, strict=True)]

    @torch.no_grad()
    def mean(self, of_groups: Sequence[Tensor]) -> Tensor:
        """Return the mean gradient over the microbatches from the sums of all groups, in order of the group."""
        total, *others = of_groups
        for of_group in others:
            total.add_(of_group)
        return total.mul_(1 / self._num_microbatches)
