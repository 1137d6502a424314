"""What the replicas of a stage add up and exchange: sums of gradients, and shares of the coming updates.

GroupReduction and UpdateExchange have only tensors and accounts: no link, no clock. What arrives is still being copied
to the device when it is added; it is used when all of it is there. Siblings joins them to the links.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from headway.stages.device.cpu import Held
from headway.stages.device.device import DeviceCopy
from headway.stages.ids import Batch, MicrobatchIndex
from headway.stages.links.frame_contract import FrameContract
from headway.stages.links.link import Frame, FrameKind, Link
from headway.stages.stage.context import StageContext
from headway.stages.stage.journal_writer import places_in_row
from headway.stages.sums import slice_bounds
from headway.stages.update_shares import UpdateShares


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


class UpdateExchange:
    """One replica's part, for all batches of a generation."""

    def __init__(self, shares: UpdateShares, *, replica_index: int, first_batch: int) -> None:
        self._index = replica_index
        owners = [replica for replica, length in enumerate(shares.num_elements) if length]
        self._next = dict.fromkeys(owners, first_batch)
        """Each replica that owns matrices, and the batch of its next share."""
        self._num_replicas = len(shares.num_elements)
        self._arrived: dict[int, dict[int, DeviceCopy]] = {}
        """Batch to replica to its share."""

    @property
    def is_empty(self) -> bool:
        """Return whether no share waits for its update."""
        return not self._arrived

    def expects(self, replica: int, batch: int) -> bool:
        """Return whether a share would be another replica's next one. The caller limits how far it may be ahead."""
        return replica != self._index and batch == self._next.get(replica)

    def missing(self, batch: int) -> int | None:
        """Return the first replica whose share of a batch's update is not here; None when all are."""
        return next((replica for replica, next_batch in self._next.items() if next_batch <= batch), None)

    def add_own(self, batch: int, share: Tensor) -> None:
        """Add what this replica has computed; it may own nothing."""
        if self._index in self._next:
            self.add(batch, self._index, Held((share,)))

    def add(self, batch: int, replica: int, share: DeviceCopy) -> None:
        """Add a replica's share."""
        assert batch == self._next[replica], f"share of update {batch} from replica {replica} out of order"
        self._next[replica] = batch + 1
        self._arrived.setdefault(batch, {})[replica] = share

    def is_whole(self, batch: int) -> bool:
        """Return whether all shares of a batch's update are on the device."""
        return self.missing(batch) is None and all(copy.is_done for copy in self._arrived[batch].values())

    def take(self, batch: int) -> dict[int, Tensor]:
        """Return the shares of a batch's update, by replica."""
        return {replica: copy.take()[0] for replica, copy in self._arrived.pop(batch).items()}


LEAD = 0
"""Position of the replica that leads its stage."""


class Siblings:
    """The other replicas. A frame's microbatch identifies its sender: it is the sender's first."""

    def __init__(self, context: StageContext, links: Mapping[int, Link], shapes: Sequence[torch.Size]) -> None:
        """links: by position in the stage. shapes: of the stage's parameters, in backward's order."""
        groups = context.replica_groups
        assert sorted(links) == [k for k in range(len(groups)) if k != context.replica_index]
        self._context = context
        self._links = links
        self._first_microbatch = MicrobatchIndex(groups[context.replica_index][0])
        self._by_first_microbatch = {groups[k][0]: k for k in links}
        self._next_losses = dict.fromkeys(links, int(context.boundary))
        self._contracts = {
            k: FrameContract.between_replicas(
                context.model,
                context.train,
                layers=context.layers,
                replica_groups=groups,
                own=context.replica_index,
                sibling=k,
                update_shares=context.update_shares,
            )
            for k in links
        }
        shares = context.update_shares
        self._exchange: UpdateExchange | None = None
        if shares is not None:
            own = context.replica_index
            self._exchange = UpdateExchange(shares, replica_index=own, first_batch=context.boundary)
        self._reduction = GroupReduction(
            shapes,
            groups,
            replica_index=context.replica_index,
            num_microbatches=context.train.microbatches,
            first_batch=context.boundary,
            device=context.device,
        )

    @property
    def is_empty(self) -> bool:
        """Return whether no batch is half reduced, and no share waits for its update."""
        return self._reduction.is_empty and (self._exchange is None or self._exchange.is_empty)

    @property
    def lead(self) -> str:
        """Return the leading replica, for messages; this one must be another."""
        return self._links[LEAD].peer

    def peer(self, frame: Frame) -> str | None:
        """Return the sender of a frame, for messages."""
        sibling = self._sender(frame)
        return None if sibling is None else self._links[sibling].peer

    def awaited(self, batch: int) -> str | None:
        """Return the first replica that has not sent its part of a batch's reduction; None when all have."""
        sibling = self._reduction.missing(batch)
        return None if sibling is None else self._links[sibling].peer

    def awaited_share(self, batch: int) -> str | None:
        """Return the first replica that has not sent its share of a batch's update; None when all have."""
        sibling = None if self._exchange is None else self._exchange.missing(batch)
        return None if sibling is None else self._links[sibling].peer

    def violation(self, frame: Frame) -> str | None:
        """Return how a frame's tensors violate the protocol, or None."""
        sibling = self._sender(frame)
        if sibling is None:
            return f"{frame.kind.name} of microbatch {frame.microbatch}, with which no other replica begins"
        forms = [(tensor.dtype, tensor.shape) for tensor in frame.tensors]
        return self._contracts[sibling].violation(frame.kind, forms)

    def expects(self, frame: Frame, *, newest_batch: int) -> bool:
        """Return whether a frame is its sender's next of its kind. newest_batch: the last that any replica may have
        done.
        """
        sibling, batch = self._sender(frame), frame.batch
        if frame.kind is FrameKind.STOP:
            return sibling == LEAD
        if sibling is None or batch > newest_batch:
            return False
        if frame.kind is FrameKind.LOSSES:
            return batch == self._next_losses[sibling]
        if frame.kind is FrameKind.UPDATE_SHARE:
            has_contributed = self._reduction.has_contributed(batch)
            return self._exchange is not None and has_contributed and self._exchange.expects(sibling, batch)
        if frame.kind is FrameKind.SUMS:
            return self._reduction.expects_sums(sibling, batch)
        return self._reduction.expects_reduced(sibling, batch)

    def has_contributed(self, batch: int) -> bool:
        """Return whether this replica's own backwards of a batch are in its sums."""
        return self._reduction.has_contributed(batch)

    def end_batch(self, batch: int, sums: Sequence[Sequence[Tensor]]) -> list[Tensor] | None:
        """End the own backwards of a batch; sums: per held group. Returns as `go_on`."""
        for sibling, part in self._reduction.contribute(batch, sums).items():
            self._links[sibling].send(self._frame(FrameKind.SUMS, batch, part))
        return self.go_on(batch)

    def received(self, frame: Frame, tensor: DeviceCopy) -> None:
        """Take an expected SUMS or REDUCED; call `go_on` once it is on the device."""
        sibling = self._sender(frame)
        assert sibling is not None
        if frame.kind is FrameKind.SUMS:
            self._reduction.add_sums(frame.batch, sibling, tensor)
        else:
            self._reduction.add_reduced(frame.batch, sibling, tensor)

    def received_losses(self, frame: Frame) -> tuple[int, ...]:
        """Take expected LOSSES. Returns their places in a row of the journal."""
        sibling, train = self._sender(frame), self._context.train
        assert sibling is not None
        self._next_losses[sibling] += 1
        groups = self._context.replica_groups[sibling]
        held = [i for i in range(train.microbatches) if i % train.reduction_groups in groups]
        return places_in_row(train, frame.batch, held)

    def received_share(self, frame: Frame, share: DeviceCopy) -> None:
        """Take an expected UPDATE_SHARE; call `has_shares` once it is on the device."""
        sibling = self._sender(frame)
        assert sibling is not None
        assert self._exchange is not None
        self._exchange.add(frame.batch, sibling, share)

    def share(self, batch: int, own: Tensor) -> None:
        """Send the own share of a batch's update to all others; without matrices of its own there is none."""
        assert self._exchange is not None
        self._exchange.add_own(batch, own)
        for link in self._links.values() if own.numel() else ():
            link.send(self._frame(FrameKind.UPDATE_SHARE, batch, own))

    def has_shares(self, batch: int) -> bool:
        """Return whether all shares of a batch's update are on the device."""
        assert self._exchange is not None
        return self._exchange.is_whole(batch)

    def take_shares(self, batch: int) -> dict[int, Tensor]:
        """Return the shares of a batch's update, by replica."""
        assert self._exchange is not None
        return self._exchange.take(batch)

    def send_losses(self, batch: int, losses: Tensor) -> None:
        """Send the losses of a batch, float32 [microbatches of this replica], to the lead, before its sums."""
        self._links[LEAD].send(self._frame(FrameKind.LOSSES, batch, losses))

    def send_to_all(self, frame: Frame) -> None:
        """Send the lead's clip total or stop to all others."""
        for link in self._links.values():
            link.send(frame)

    def go_on(self, batch: int) -> list[Tensor] | None:
        """Do what is possible now. Returns the batch's mean gradient once all of it is here."""
        mean = self._reduction.reduce_own(batch)
        if mean is not None:
            for link in self._links.values():
                link.send(self._frame(FrameKind.REDUCED, batch, mean))
        return self._reduction.finish(batch)

    def _sender(self, frame: Frame) -> int | None:
        return self._by_first_microbatch.get(frame.microbatch)

    def _frame(self, kind: FrameKind, batch: int, tensor: Tensor) -> Frame:
        return Frame(kind, self._context.generation, Batch(batch), self._first_microbatch, (tensor,))
