"""From the gradients of a batch's microbatches to the one gradient that its update takes.

The sums of the groups are added up here, or by all replicas of the stage together; then the norm of the whole model's
gradient scales the result.
"""

from torch import Tensor

from headway.stages.device.device import DeviceCopy
from headway.stages.links.link import Frame
from headway.stages.schedule.schedule import ScheduleState
from headway.stages.stage.gradient_sums import GradientSums
from headway.stages.stage.norm_relay import NormRelay
from headway.stages.stage.replicas import Siblings


class BatchGradients:
    """Tells the schedule's state when a batch's groups are added up. Microbatches are added to `sums`."""

    def __init__(self, state: ScheduleState, siblings: Siblings | None, norm: NormRelay) -> None:
        schedule = state.schedule
        self.sums = GradientSums(
            num_microbatches=schedule.num_microbatches,
            num_groups=schedule.num_groups,
            is_reduced_here=siblings is None,
        )
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
        return self.sums.is_empty and not has_halves and not self._reduced

    def end_batch(self, batch: int) -> None:
        """This worker's last backward of a batch is done."""
        if self._siblings is None:
            self._reduced_if_whole(batch, self.sums.reduce())
        else:
            self._reduced_if_whole(batch, self._siblings.end_batch(batch, self.sums.take()))

    def arrived(self, frame: Frame, tensor: DeviceCopy) -> None:
        """An expected SUMS or REDUCED of a sibling has arrived in host memory."""
        assert self._siblings is not None
        self._siblings.received(frame, tensor)

    def go_on(self, batch: int) -> None:
        """What a sibling has sent is on the device."""
        assert self._siblings is not None
        self._reduced_if_whole(batch, self._siblings.go_on(batch))

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
