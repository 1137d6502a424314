"""Sums the gradients of a stage's reduction groups across its replicas: each owns a slice, and adds in one order.

All parameters' sums, one after the other in backward's order, are cut into as many contiguous slices as there are
replicas. Each replica sends each owner its groups' part of that slice. The owner adds all groups in order of the group,
starting from the first, multiplies once by 1/m in fp32, and sends the slice to the others. Slicing does not change
elementwise sums. So the bits are those of `GradientSums.reduce` on a worker that is alone on its stage.

Only tensors and accounts are here: no link, no clock. What arrives is still being copied to the device when it is
added; it is used when all of it is there.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from headway.stages.device.cpu import Held
from headway.stages.device.device import DeviceCopy
from headway.stages.sums import slice_bounds


class GroupReduction:
    """One replica's part, for all batches of a generation. Replicas are known by their position in the stage."""

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        replica_groups: Sequence[Sequence[int]],
        *,
        replica_index: int,
        num_microbatches: int,
        first_batch: int,
        device: torch.device,
    ) -> None:
        """shapes: of the stage's parameters, in backward's order."""
        self._shapes = tuple(shapes)
        self._offsets = (0, *accumulate(shape.numel() for shape in shapes))
        self._groups = tuple(map(tuple, replica_groups))
        self._index = replica_index
        self._num_microbatches = num_microbatches
        self._device = device
        self._bounds = slice_bounds(self._offsets[-1], len(self._groups))
        self._others = tuple(k for k in range(len(self._groups)) if k != replica_index)
        self._next_sums = dict.fromkeys(range(len(self._groups)), first_batch)
        self._next_reduced = dict.fromkeys(range(len(self._groups)), first_batch)
        self._sums: dict[int, dict[int, DeviceCopy]] = {}
        """Batch to replica to [its groups, own slice]."""
        self._slices: dict[int, dict[int, DeviceCopy]] = {}
        """Batch to replica to its slice of the mean gradient."""
        self._reduced: dict[int, Tensor] = {}
        """Batch to the mean gradient as one row; filled slice by slice."""

    @property
    def is_empty(self) -> bool:
        """Return whether no batch is half reduced."""
        return not (self._sums or self._slices or self._reduced)

    def expects_sums(self, replica: int, batch: int) -> bool:
        """Return whether sums of a batch would be the replica's next ones. The schedule limits how far it may
        be ahead.
        """
        return replica in self._others and batch == self._next_sums[replica]

    def expects_reduced(self, replica: int, batch: int) -> bool:
        """Return whether a reduced slice would be the replica's next one, of a batch to which this replica has
        contributed.
        """
        return replica in self._others and batch == self._next_reduced[replica] and self.has_contributed(batch)

    def has_contributed(self, batch: int) -> bool:
        """Return whether this replica has ended its backwards of a batch. Before, no other has its gradient."""
        return batch < self._next_sums[self._index]

    def missing(self, batch: int) -> int | None:
        """Return the first replica that has not sent its part of this batch; None when nothing is missing."""
        late = (k for k in self._others if self._next_sums[k] <= batch)
        return next(late, next((k for k in self._others if self._next_reduced[k] <= batch), None))

    @torch.no_grad()
    def contribute(self, batch: int, sums: Sequence[Sequence[Tensor]]) -> dict[int, Tensor]:
        """End this replica's backwards of a batch. sums: per held group, in order, the parameters' sums.

        Returns the part for each other replica: [groups of this replica, its slice].
        """
        assert batch == self._next_sums[self._index], f"sums of batch {batch} out of order"
        parts = [self._cut(sums, *bounds) for bounds in self._bounds]
        self._take_sums(batch, self._index, Held((parts[self._index],)))
        self._reduced[batch] = torch.empty(self._offsets[-1], dtype=torch.float32, device=self._device)
        return {k: parts[k] for k in self._others}

    def add_sums(self, batch: int, replica: int, sums: DeviceCopy) -> None:
        """Add arrived sums of another replica, [its groups, own slice]."""
        assert self.expects_sums(replica, batch), f"sums of batch {batch} from replica {replica} out of order"
        self._take_sums(batch, replica, sums)

    def add_reduced(self, batch: int, replica: int, mean: DeviceCopy) -> None:
        """Add another owner's slice."""
        assert self.expects_reduced(replica, batch), f"slice {replica} of batch {batch} out of order"
        self._slices.setdefault(batch, {})[replica] = mean
        self._next_reduced[replica] = batch + 1

    @torch.no_grad()
    def reduce_own(self, batch: int) -> Tensor | None:
        """Return the own slice of the mean gradient, once all groups' sums of it are there; the others need it."""
        copies = self._sums.get(batch, {})
        # A copy to the device may be seen to be done before its own event, and so that of a later batch first.
        is_next = batch == self._next_reduced[self._index]
        if not is_next or len(copies) < len(self._groups) or not _are_done(copies):
            return None
        del self._sums[batch]
        of_replicas = {replica: copy.take()[0] for replica, copy in copies.items()}
        rows: Mapping[int, Tensor] = {
            group: row
            for replica, groups in enumerate(self._groups)
            for group, row in zip(groups, of_replicas[replica], strict=True)
        }
        first, *others = (rows[group] for group in sorted(rows))
        mean = first.clone()
        for row in others:
            mean.add_(row)
        mean.mul_(1 / self._num_microbatches)
        self._place(batch, self._index, mean)
        self._next_reduced[self._index] = batch + 1
        return mean

    def finish(self, batch: int) -> list[Tensor] | None:
        """Return the mean gradient over the microbatches, fp32, in the parameters' order, once all slices are there."""
        if (
            batch not in self._reduced
            or batch > min(self._reduced)
            or any(batch >= next_batch for next_batch in self._next_reduced.values())
        ):
            return None
        if not _are_done(self._slices.get(batch, {})):
            return None
        for owner, copy in self._slices.pop(batch, {}).items():
            self._place(batch, owner, copy.take()[0])
        whole = self._reduced.pop(batch)
        parts = zip(pairwise(self._offsets), self._shapes, strict=True)
        return [whole[start:stop].view(shape) for (start, stop), shape in parts]

    def _cut(self, sums: Sequence[Sequence[Tensor]], start: int, stop: int) -> Tensor:
        """Return one slice of all held groups: [groups, stop - start], copied."""
        part = torch.empty(len(sums), stop - start, dtype=torch.float32, device=self._device)
        for row, of_group in zip(part, sums, strict=True):
            for tensor, offset in zip(of_group, self._offsets, strict=False):
                first, last = max(start, offset), min(stop, offset + tensor.numel())
                if first < last:
                    row[first - start : last - start] = tensor.view(-1)[first - offset : last - offset]
        return part

    def _take_sums(self, batch: int, replica: int, sums: DeviceCopy) -> None:
        self._next_sums[replica] = batch + 1
        self._sums.setdefault(batch, {})[replica] = sums

    def _place(self, batch: int, owner: int, mean: Tensor) -> None:
        start, stop = self._bounds[owner]
        self._reduced[batch][start:stop] = mean


def _are_done(copies: Mapping[int, DeviceCopy]) -> bool:
    """Return whether the computation would wait for none of them."""
    return all(copy.is_done for copy in copies.values())
