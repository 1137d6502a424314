"""What the replicas of a stage add up and exchange: sums of gradients, and shares of the coming updates.

Arrivals and GroupReduction have only tensors and accounts: no link, no clock. What arrives is still being copied to the
device when it is added; it is used when all of it is there. Siblings joins them to the links.
"""

from collections.abc import Iterable, Mapping, Sequence
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
from headway.stages.state.layer_state import LayerState
from headway.stages.sums import slice_bounds


class Arrivals:
    """What some senders send for each batch: one copy each, batch after batch. The caller limits how far ahead."""

    def __init__(self, senders: Iterable[int], *, first_batch: int) -> None:
        self._next = dict.fromkeys(senders, first_batch)
        """Each sender, and the batch of its next copy."""
        self._copies: dict[int, dict[int, DeviceCopy]] = {}
        """Batch to sender to its copy: of the batches below the senders' next ones that were not taken."""

    @property
    def is_empty(self) -> bool:
        """Return whether nothing waits."""
        return not self._copies

    def expects(self, sender: int, batch: int) -> bool:
        """Return whether a copy would be the sender's next one."""
        return batch == self._next.get(sender)

    def has(self, sender: int, batch: int) -> bool:
        """Return whether a sender has sent its copy of a batch."""
        return batch < self._next[sender]

    def missing(self, batch: int, *, besides: int = -1) -> int | None:
        """Return the first sender whose copy of a batch is not here; None when all are. besides: one not to name."""
        late = (sender for sender in self._next if sender != besides and not self.has(sender, batch))
        return next(late, None)

    def add(self, sender: int, batch: int, copy: DeviceCopy) -> None:
        """Add an expected copy."""
        assert self.expects(sender, batch), f"of batch {batch} from {sender}, out of order"
        self._next[sender] = batch + 1
        self._copies.setdefault(batch, {})[sender] = copy

    def is_whole(self, batch: int) -> bool:
        """Return whether all copies of a batch are on the device."""
        return self.missing(batch) is None and all(copy.is_done for copy in self._copies.get(batch, {}).values())

    def take(self, batch: int) -> dict[int, Tensor]:
        """Return the tensors of a batch by sender, and forget them."""
        return {sender: copy.take()[0] for sender, copy in self._copies.pop(batch, {}).items()}


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
        self._sums = Arrivals(range(len(self._groups)), first_batch=first_batch)
        """Of each replica: [its groups, own slice]."""
        self._slices = Arrivals(range(len(self._groups)), first_batch=first_batch)
        """Of each replica: its slice of the mean gradient."""
        self._finished_below = first_batch
        """Batches below this are reduced."""

    @property
    def is_empty(self) -> bool:
        """Return whether no batch is half reduced."""
        return self._sums.is_empty and self._slices.is_empty

    def expects_sums(self, replica: int, batch: int) -> bool:
        """Return whether sums of a batch would be another replica's next ones."""
        return replica != self._index and self._sums.expects(replica, batch)

    def expects_reduced(self, replica: int, batch: int) -> bool:
        """Return whether a reduced slice would be another replica's next one, of a batch to which this one has
        contributed.
        """
        return replica != self._index and self._slices.expects(replica, batch) and self.has_contributed(batch)

    def has_contributed(self, batch: int) -> bool:
        """Return whether this replica has ended its backwards of a batch. Before, no other has its gradient."""
        return self._sums.has(self._index, batch)

    def missing(self, batch: int) -> int | None:
        """Return the first other replica that has not sent its part of this batch; None when nothing is missing."""
        late = self._sums.missing(batch, besides=self._index)
        return self._slices.missing(batch, besides=self._index) if late is None else late

    @torch.no_grad()
    def contribute(self, batch: int, sums: Sequence[Sequence[Tensor]]) -> dict[int, Tensor]:
        """End this replica's backwards of a batch. sums: per held group, in order, the parameters' sums.

        Returns the part for each other replica: [groups of this replica, its slice].
        """
        parts = dict(enumerate(self._cut(sums, *bounds) for bounds in self._bounds))
        self._sums.add(self._index, batch, Held((parts.pop(self._index),)))
        return parts

    def add_sums(self, batch: int, replica: int, sums: DeviceCopy) -> None:
        """Add arrived sums of another replica, [its groups, own slice]."""
        self._sums.add(replica, batch, sums)

    def add_reduced(self, batch: int, replica: int, mean: DeviceCopy) -> None:
        """Add another owner's slice."""
        self._slices.add(replica, batch, mean)

    @torch.no_grad()
    def reduce_own(self, batch: int) -> Tensor | None:
        """Return the own slice of the mean gradient, once all groups' sums of it are there; the others need it."""
        # A copy to the device may be seen to be done before its own event, and so that of a later batch first.
        if not self._slices.expects(self._index, batch) or not self._sums.is_whole(batch):
            return None
        of_replicas = self._sums.take(batch)
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
        self._slices.add(self._index, batch, Held((mean,)))
        return mean

    @torch.no_grad()
    def finish(self, batch: int) -> list[Tensor] | None:
        """Return the mean gradient over the microbatches, fp32, in the parameters' order, once all slices are there."""
        if batch != self._finished_below or not self._slices.is_whole(batch):
            return None
        self._finished_below = batch + 1
        slices = self._slices.take(batch)
        whole = torch.cat([slices[replica] for replica in range(len(self._groups))])
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


LEAD = 0
"""Position of the replica that leads its stage."""


class Siblings:
    """The other replicas. A frame's microbatch identifies its sender: it is the sender's first."""

    def __init__(self, context: StageContext, layers: Sequence[LayerState], links: Mapping[int, Link]) -> None:
        shapes = [tensor.shape for layer in layers for tensor in layer.versions.sets[0].values()]
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
        owners = [] if shares is None else [replica for replica, length in enumerate(shares.num_elements) if length]
        self._shares = Arrivals(owners, first_batch=context.boundary)
        """Of each replica that owns matrices: its share of an update."""
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
        return self._reduction.is_empty and self._shares.is_empty

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

    def awaited_losses(self, batch: int, *, is_end: bool) -> str | None:
        """Return the first replica that has not sent its losses of a batch; None when all have."""
        late = (each for each, following in self._next_losses.items() if following <= batch)
        return next((self._links[each].peer for each in late if self._places(each, batch, is_end=is_end)), None)

    def awaited_share(self, batch: int) -> str | None:
        """Return the first replica that has not sent its share of a batch's update; None when all have."""
        sibling = self._shares.missing(batch, besides=self._context.replica_index)
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
            return self._reduction.has_contributed(batch) and self._shares.expects(sibling, batch)
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

    def received_losses(self, frame: Frame, *, is_end: bool) -> tuple[int, ...]:
        """Take expected LOSSES. Returns their places in a row of the journal. is_end: as in `places_in_row`."""
        sibling = self._sender(frame)
        assert sibling is not None
        self._next_losses[sibling] += 1
        return self._places(sibling, frame.batch, is_end=is_end)

    def _places(self, sibling: int, batch: int, *, is_end: bool) -> tuple[int, ...]:
        groups, train = self._context.replica_groups[sibling], self._context.train
        held = [i for i in range(train.microbatches) if i % train.reduction_groups in groups]
        return places_in_row(train, batch, held, is_end=is_end)

    def received_share(self, frame: Frame, share: DeviceCopy) -> None:
        """Take an expected UPDATE_SHARE; call `has_shares` once it is on the device."""
        sibling = self._sender(frame)
        assert sibling is not None
        self._shares.add(sibling, frame.batch, share)

    def share(self, batch: int, own: Tensor) -> None:
        """Send the own share of a batch's update to all others; without matrices of its own there is none."""
        if not own.numel():
            return
        self._shares.add(self._context.replica_index, batch, Held((own,)))
        for link in self._links.values():
            link.send(self._frame(FrameKind.UPDATE_SHARE, batch, own))

    def has_shares(self, batch: int) -> bool:
        """Return whether all shares of a batch's update are on the device."""
        return self._shares.is_whole(batch)

    def take_shares(self, batch: int) -> dict[int, Tensor]:
        """Return the shares of a batch's update, by replica."""
        return self._shares.take(batch)

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
