"""From the gradients of a batch's microbatches to the one gradient that its update takes.

First the ends of the pipeline add up the gradient of a tied embedding. The sums of the groups are added up here, or by
all replicas of the stage together; then the norm of the whole model's gradient scales the result.
"""

from collections.abc import Iterable, Sequence

from torch import Tensor

from headway.stages.device.device import DeviceCopy
from headway.stages.links.link import Frame, FrameKind
from headway.stages.replicas.tied_sums import TiedSums, tied_positions
from headway.stages.schedule.schedule_state import ScheduleState
from headway.stages.stage.context import StageContext
from headway.stages.stage.gradient_sums import GradientSums
from headway.stages.stage.norm_relay import NormRelay
from headway.stages.stage.replicas import Siblings
from headway.stages.stage.stage_links import StageLinks


class BatchGradients:
    """Tells the schedule's state when a batch's groups are added up."""

    def __init__(
        self,
        context: StageContext,
        *,
        state: ScheduleState,
        links: StageLinks,
        siblings: Siblings | None,
        norm: NormRelay,
    ) -> None:
        schedule = state.schedule
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
        self._links = links
        self._state = state
        self._siblings = siblings
        self._norm = norm
        self._reduced: dict[int, list[Tensor]] = {}
        self._clipped_below = state.schedule.first_batch
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
        newest_batch = self._state.backwards.batch + self._state.schedule.delay
        is_next = self._tied is not None and self._tied.expects(frame.microbatch, frame.batch)
        return is_next and frame.batch <= newest_batch

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
