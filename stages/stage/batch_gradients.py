"""From the gradients of a batch's microbatches to the one gradient that its update takes.

First the ends of the pipeline add up the gradient of a tied embedding. The sums of the groups are added up here, or by
all replicas of the stage together; then the norm of the whole model's gradient scales the result.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from headway.stages.device.device import DeviceCopy
from headway.stages.links.link import Frame, FrameKind
from headway.stages.model.decoder import trained_shapes
from headway.stages.spec import TIED, ModelSpec
from headway.stages.stage.relays import NormRelay, StageRun
from headway.stages.stage.replicas import Arrivals

# Adds up the gradient of a tied embedding, which the first and the last stage both use.
#
# Each end has sums of its own for every reduction group. An end holds the groups of its worker, and the other end's
# worker that holds a group sends its sum of it. docs/numerics.md, section 9.
#
# Only tensors and accounts are here: no link, no clock.


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
        self._arrived = Arrivals(() if self.has_both_ends else self._groups, first_batch=first_batch)
        """The other end's sum of each group."""
        self._next_own = first_batch
        self._own: dict[int, list[list[Tensor]]] = {}
        """By batch, for each group: the own sums, of the embedding first."""

    @property
    def is_empty(self) -> bool:
        """Return whether no batch is half added up."""
        return not self._own and self._arrived.is_empty

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
        return self._arrived.expects(group, batch)

    def missing(self, batch: int) -> int | None:
        """Return the first group of which the other end's sum is not here; None when all are."""
        return self._arrived.missing(batch)

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
        self._arrived.add(group, batch, arrived)

    def is_whole(self, batch: int) -> bool:
        """Return whether a batch waits here, with all sums of both ends on the device."""
        return batch in self._own and self._arrived.is_whole(batch)

    @torch.no_grad()
    def take(self, batch: int) -> list[Tensor]:
        """Return the matrix's sum of each group. Sums of two numbers have no order, so both ends have equal bits."""
        own, arrived = self._own.pop(batch), self._arrived.take(batch)
        if self.has_both_ends:
            return [of_embedding + of_head for of_embedding, of_head in own]
        return [sums + arrived[group] for group, (sums,) in zip(self._groups, own, strict=True)]

    @torch.no_grad()
    def mean(self, of_groups: Sequence[Tensor]) -> Tensor:
        """Return the mean gradient over the microbatches from the sums of all groups, in order of the group."""
        total, *others = of_groups
        for of_group in others:
            total.add_(of_group)
        return total.mul_(1 / self._num_microbatches)


# Sums a batch's gradients, in the one order that gives equal bits everywhere.
#
# Inside a reduction group gradients are added in order of the microbatch, starting from the first, not from zero. The
# groups' sums are added in order of the group. The total is multiplied once by 1/m, in fp32.


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


class BatchGradients:
    """Tells the schedule's state when a batch's groups are added up."""

    def __init__(self, run: StageRun, norm: NormRelay) -> None:
        context, siblings, schedule = run.context, run.siblings, run.state.schedule
        m, num_groups = schedule.num_microbatches, schedule.num_groups
        self._sums = GradientSums(num_microbatches=m, num_groups=num_groups, is_reduced_here=siblings is None)
        self._tied: TiedSums | None = None
        positions = tied_positions(context.layers, context.model)
        if positions:
            first = schedule.first_batch
            self._tied = TiedSums(positions, schedule.held_groups, num_microbatches=m, first_batch=first)
            self._tied_sums = GradientSums(num_microbatches=m, num_groups=num_groups, is_reduced_here=False)
        self._others: dict[int, list[list[Tensor]]] = {}
        """By batch that waits for the other end: the sums of all other parameters, by group or already reduced."""
        self._context = context
        self._links = run.links
        self._state = run.state
        self._siblings = siblings
        self._norm = norm
        self._reduced: dict[int, list[Tensor]] = {}
        self._clipped_below = schedule.first_batch
        """Batches below this have a clipped gradient."""

    @property
    def is_empty(self) -> bool:
        """Return whether no batch is half added up, or waits for its update."""
        has_halves = self._siblings is not None and not self._siblings.is_empty
        has_ties = self._tied is not None and not (self._tied.is_empty and self._tied_sums.is_empty)
        return self._sums.is_empty and not (has_halves or has_ties or self._reduced or self._others)

    def add(self, microbatch: int, gradients: list[Tensor], *, others: Iterable[Tensor] = ()) -> None:
        """Add a microbatch's gradients, see `GradientSums.add`."""
        if self._tied is None:
            self._sums.add(microbatch, gradients, others=others)
            return
        untied, tied = self._tied.split(gradients)
        self._sums.add(microbatch, untied, others=(*others, *tied))
        self._tied_sums.add(microbatch, tied, others=(*others, *untied))

    def end_batch(self, batch: int) -> None:
        """This worker's last backward of a batch is done."""
        sums = [self._sums.reduce()] if self._siblings is None else self._sums.take()
        if self._tied is None:
            self._add_up(batch, sums)
            return
        self._others[batch] = sums
        for group, tensor in self._tied.contribute(batch, self._tied_sums.take()).items():
            self._links.tied[group].send(self._context.frame(FrameKind.TIED_SUMS, batch, group, tensor))
        self.join_ties()

    def expects_tied(self, frame: Frame) -> bool:
        """Return whether a TIED_SUMS is the next of its group, of a batch that the other end can have done."""
        is_next = self._tied is not None and self._tied.expects(frame.microbatch, frame.batch)
        return is_next and frame.batch <= self._state.newest_elsewhere

    def tied_arrived(self, frame: Frame, tensor: DeviceCopy) -> None:
        """Take an expected TIED_SUMS; call `join_ties` once it is on the device."""
        assert self._tied is not None
        self._tied.add(frame.batch, frame.microbatch, tensor)

    def awaited_tie(self, batch: int) -> str | None:
        """Return the worker at the other end that has not sent its part of a tied embedding; None when all have."""
        group = None if self._tied is None else self._tied.missing(batch)
        return None if group is None else self._links.tied[group].peer

    def join_ties(self) -> None:
        """Go on with each batch, in order, for which both ends' sums of a tied embedding are on the device."""
        assert self._tied is not None
        while self._others and self._tied.is_whole(batch := min(self._others)):
            sums, tied = self._others.pop(batch), self._tied.take(batch)
            if self._siblings is None:
                tied = [self._tied.mean(tied)]
            self._add_up(batch, [self._tied.joined(of_group, own) for of_group, own in zip(sums, tied, strict=True)])

    def _add_up(self, batch: int, sums: Sequence[list[Tensor]]) -> None:
        """sums: of each group that this worker holds; without siblings all of them, reduced."""
        if self._siblings is None:
            self._reduced_if_whole(batch, sums[0])
        else:
            self._reduced_if_whole(batch, self._siblings.end_batch(batch, sums))

    def arrived(self, frame: Frame, tensor: DeviceCopy) -> None:
        """An expected SUMS or REDUCED of a sibling has arrived in host memory."""
        assert self._siblings is not None
        self._siblings.received(frame, tensor)

    def go_on(self, batch: int) -> None:
        """What a sibling has sent is on the device. Batches are reduced in order, so a later one may have waited."""
        assert self._siblings is not None
        while self._siblings.has_contributed(batch):
            self._reduced_if_whole(batch, self._siblings.go_on(batch))
            batch += 1

    def clipped(self, batch: int) -> list[Tensor]:
        """The gradient of a batch, clipped; it stays for the update."""
        gradients = self._reduced[batch]
        if batch >= self._clipped_below:
            self._norm.clip(batch, gradients)
            self._clipped_below = batch + 1
        return gradients

    def take(self, batch: int) -> list[Tensor]:
        """The gradient of a batch, clipped, for its update."""
        gradients = self.clipped(batch)
        del self._reduced[batch]
        return gradients

    def _reduced_if_whole(self, batch: int, gradients: list[Tensor] | None) -> None:
        if gradients is None:
            return
        self._reduced[batch] = gradients
        assert len(self._reduced) <= 1 + self._state.schedule.delay, "too many gradient sets are waiting"
        self._state.groups_reduced(batch)
        self._norm.reduced(batch, gradients)
