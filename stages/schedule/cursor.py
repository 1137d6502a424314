"""The progress of one worker's forwards, or of its backwards: which microbatch is next, in which order. Pure."""

from collections.abc import Collection


class Cursor:
    """The progress of forwards, or backwards: all of the batches before `batch`, and some microbatches of it.

    Batches come one after the other; inside a batch each reduction group has its own order.
    """

    __slots__ = (
        "_group_by_group",
        "_groups",
        "_num_groups",
        "_num_held",
        "_num_microbatches",
        "batch",
        "next_of_group",
        "num_done",
    )

    def __init__(
        self,
        groups: tuple[int, ...],
        *,
        num_groups: int,
        num_microbatches: int,
        first_batch: int,
        group_by_group: bool,
    ) -> None:
        """groups: those that this worker holds, rising. group_by_group: as in StageSchedule."""
        self._groups = groups
        self._num_groups = num_groups
        self._num_microbatches = num_microbatches
        self._num_held = sum(len(range(group, num_microbatches, num_groups)) for group in groups)
        self._group_by_group = group_by_group
        self.batch = first_batch
        self.num_done = 0
        """Number of finished microbatches of `batch`."""
        self.next_of_group = list(groups)
        """Next microbatch of each held group; past m when the group is done."""

    @property
    def lowest_next(self) -> int:
        """Return the first microbatch of `batch`, in the order of the schedule, that is not done."""
        left = (i for i in self.next_of_group if i < self._num_microbatches)
        return next(left) if self._group_by_group else min(left)

    def first_of(self, arrived: Collection[tuple[int, int]]) -> int:
        """Return the first microbatch, in the order of the schedule, that is next in its group and arrived; or -1."""
        if len(self.next_of_group) == 1:
            only = self.next_of_group[0]
            return only if (self.batch, only) in arrived else -1
        ready = (i for i in self.next_of_group if (self.batch, i) in arrived)
        return next(ready, -1) if self._group_by_group else min(ready, default=-1)

    def has_passed(self, batch: int, microbatch: int) -> bool:
        """Return whether a held microbatch is done."""
        if batch != self.batch:
            return batch < self.batch
        return microbatch < self.next_of_group[self._groups.index(microbatch % self._num_groups)]

    def pass_over(self, batch: int, microbatch: int) -> None:
        """Note that one microbatch is done; after the last of its batch, the next batch begins."""
        position = self._groups.index(microbatch % self._num_groups)
        assert batch == self.batch, f"batch {batch} out of order: {self.batch} is current"
        assert microbatch == self.next_of_group[position], f"microbatch {batch}.{microbatch} out of order"
        self.num_done += 1
        if self.num_done == self._num_held:
            self.batch += 1
            self.num_done = 0
            self.next_of_group[:] = self._groups
        else:
            self.next_of_group[position] += self._num_groups
