"""One worker's part of a schedule, and of each batch's microbatches. Pure.

A schedule is three numbers, and `sync_batches`, up to which there is no delay. `delay` is how many versions old the
weights of a gradient are. `depth` limits the microbatches in flight. `warmup` is how many forwards of a batch come
before its first backward.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from headway.stages.spec import ScheduleName, TrainSpec, weight_version

# The progress of one worker's forwards, or of its backwards: which microbatch is next, in which order. Pure.


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSchedule:
    """One stage's part of a schedule: everything that does not change while a plan is in force."""

    delay: int
    """d: 0 or 1."""
    sync_batches: int = 0
    """k: the first k batches have no delay."""
    depth: int
    """Maximum of forwards done minus backwards done."""
    warmup: int = 1
    """A batch's first backward waits for its warmup-th forward. 1 except on the last stage of gpipe."""
    num_microbatches: int
    """m: microbatches of one batch, on all replicas together."""
    num_groups: int = 1
    """G: microbatch i belongs to reduction group i mod G."""
    groups: tuple[int, ...] | None = None
    """Reduction groups of this worker; None: all."""
    group_by_group: bool = False
    """Order of a batch's microbatches: a group's after another's, so that few sums are open; else rising, as replicas
    need it.
    """
    is_first: bool
    is_last: bool
    first_batch: int = 0
    """Boundary at which the stage starts."""
    num_batches: int
    """Final stop boundary."""
    has_clip: bool = False
    """True if updates wait for the norm of the whole model's gradient."""
    shares_update: bool = False
    """True if each replica of the stage orthogonalises a share of its matrices, and an update waits for all shares."""
    judged_every: int = 0
    """Batches between evaluations that may end the job; 0: none does."""
    num_held_out: int = 0
    """E: held-out microbatches, on all replicas together, that are computed on the job's last weights; 0: none."""

    @classmethod
    def of(
        cls,
        train: TrainSpec,
        *,
        stage_index: int,
        num_stages: int,
        depth: int,
        first_batch: int = 0,
        groups: tuple[int, ...] | None = None,
        group_by_group: bool = False,
        shares_update: bool = False,
    ) -> "StageSchedule":
        """Return the schedule of a worker: the only one of its stage, or the replica that holds these groups.

        In gpipe it has room for all of its microbatches of a batch, at any depth.
        """
        is_last, is_gpipe = stage_index == num_stages - 1, train.schedule == "gpipe"
        return cls(
            delay=train.delay,
            sync_batches=train.sync_batches,
            depth=train.microbatches if is_gpipe else depth,
            warmup=train.microbatches if is_gpipe and is_last else 1,
            num_microbatches=train.microbatches,
            num_groups=train.reduction_groups,
            groups=groups,
            group_by_group=group_by_group,
            is_first=stage_index == 0,
            is_last=is_last,
            first_batch=first_batch,
            num_batches=train.batches,
            has_clip=train.clip_norm > 0,
            shares_update=shares_update,
            judged_every=train.eval_every if train.stops_early else 0,
            num_held_out=train.num_evaluated if train.eval_every else 0,
        )

    def weight_version(self, batch: int) -> int:
        """Return v(b) of a batch."""
        return weight_version(batch, self.delay, self.sync_batches)

    @property
    def is_lead(self) -> bool:
        """Return whether it leads its stage: it is the only worker, or holds group 0."""
        return self.groups is None or self.groups[0] == 0

    @property
    def held_groups(self) -> tuple[int, ...]:
        """Return the reduction groups of this worker, rising."""
        return tuple(range(self.num_groups)) if self.groups is None else self.groups

    @property
    def held_microbatches(self) -> tuple[int, ...]:
        """Return the microbatches of each batch that this worker computes, in its order."""
        if self.group_by_group:
            return tuple(i for k in self.held_groups for i in range(k, self.num_microbatches, self.num_groups))
        held = frozenset(self.held_groups)
        return tuple(i for i in range(self.num_microbatches) if i % self.num_groups in held)

    def cursor(self) -> Cursor:
        """Return the progress of the forwards, or of the backwards, at the start."""
        return Cursor(
            self.held_groups,
            num_groups=self.num_groups,
            num_microbatches=self.num_microbatches,
            first_batch=self.first_batch,
            group_by_group=self.group_by_group,
        )


def replica_depth(stage_depth: int, *, num_held: int, num_microbatches: int) -> int:
    """Return how many microbatches a replica may have in flight that computes num_held of its stage's.

    This is its share of the stage's depth, and one more, because its microbatches do not come evenly.
    """
    return min(stage_depth, math.ceil(stage_depth * num_held / num_microbatches) + 1)


def schedule_depth(schedule: ScheduleName, m: int, p: int, s: int, round_trips_in_microbatches: float = 0.0) -> int:
    """Return how many microbatches stage s of p needs in flight with constant times and m microbatches a batch.

    round_trips_in_microbatches: the sum of the round trips of the links downstream of s, over a microbatch's time.
    """
    if schedule == "gpipe":
        return m
    if schedule == "1f1b":
        return min(m, p - s)
    return min(2 * m, p - s + math.ceil(round_trips_in_microbatches))


def depths_with_slack(
    schedule: ScheduleName, needed: Sequence[int], m: int, num_replicas: Sequence[int] = ()
) -> list[int]:
    """Return how many microbatches each stage may have in flight, from its need with constant times.

    Times do vary. Under 2bw every stage but the last gets one more for itself and one for each stage after it. Then an
    operation that ends late leaves no other stage without work. This holds only as far as a batch has more microbatches
    than the first stage needs, and one. Two batches take at least one batch of work and one way through the pipe. With
    no more microbatches than are under way, unneeded forwards would run ahead of backwards for which the next batch
    waits.

    num_replicas: of each stage, if not one. R replicas have R microbatches at work, and unlike neighbours hand them
    over unevenly: such a stage counts as R.
    """
    if schedule != "2bw":
        return list(needed)
    p, most = len(needed), max(0, 1 + m - needed[0])
    slacks = [sum(num_replicas[s:]) if num_replicas else p - s for s in range(p - 1)]
    return [depth + min(slack, most) for depth, slack in zip(needed, [*slacks, 0], strict=True)]
