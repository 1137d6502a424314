"""Decides what a stage does next: one pure function of what it has done and what has arrived.

A schedule is three numbers. `delay` is how many versions old the weights of a gradient are. `depth` limits the
microbatches in flight. `warmup` is how many forwards of a batch come before its first backward. Work runs when it is
ready, not when a table says so; because backwards are added in order, readiness never changes a result.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Literal

from headway.stages.early_stop import stop_lag
from headway.stages.schedule.cursor import Cursor
from headway.stages.spec import TrainSpec, weight_version

ScheduleName = Literal["gpipe", "1f1b", "2bw"]


@dataclass(frozen=True, slots=True)
class Forward:
    """Compute a microbatch's output on W_v(b)."""

    batch: int
    microbatch: int

    def __str__(self) -> str:
        return f"F{self.batch}.{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Backward:
    """Differentiate a microbatch's forward, and add to the gradient sums."""

    batch: int
    microbatch: int

    def __str__(self) -> str:
        return f"B{self.batch}.{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Update:
    """Make W_{b+1} from W_b."""

    batch: int

    def __str__(self) -> str:
        return f"U{self.batch}"


@dataclass(frozen=True, slots=True)
class Orthogonalize:
    """Compute this replica's share of the coming update, and send it to the others. W_b and its state stay."""

    batch: int

    def __str__(self) -> str:
        return f"O{self.batch}"


class Wait(Enum):
    """Wait until something arrives: nothing is runnable."""

    WAIT = "wait"


WAIT = Wait.WAIT

BatchOp = Update | Orthogonalize
"""Operations of a whole batch: they have no microbatch."""

Op = Forward | Backward | BatchOp


class Awaited(Enum):
    """The event for which an idle stage waits; it names the neighbour."""

    NOTHING = "nothing"  # runnable, or done
    INPUT = "input"  # an activation, from upstream
    GRADIENT = "gradient"  # from downstream
    REDUCTION = "reduction"  # of the groups that other replicas hold
    SHARES = "share of the update"  # of the other replicas
    SNAPSHOT = "snapshot"  # the writer that still reads what the next update would change
    LOSSES = "losses"  # of the own last stage, from its device
    CLIP_TOTAL = "clip_total"  # squares from downstream on the first stage, the total from upstream on the others
    JUDGEMENT = "judgement of an evaluation"  # from downstream


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSchedule:
    """One stage's part of a schedule: everything that does not change while a plan is in force."""

    delay: int
    """d: 0 or 1."""
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
        )

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


class ScheduleState:
    """The finished work and arrived frames of a stage. `next_op` reads it; the methods below report events."""

    __slots__ = (
        "_held",
        "awaits_losses",
        "backwards",
        "end",
        "first_unjudged",
        "forwards",
        "gradients",
        "in_flight",
        "inputs",
        "is_forwards_turn",
        "lag",
        "losses_below",
        "own_shares_below",
        "reduced_below",
        "schedule",
        "shares_below",
        "stop",
        "totals_below",
        "updates_held",
        "version",
        "warmup",
    )

    def __init__(self, schedule: StageSchedule) -> None:
        self.schedule = schedule
        self._held = frozenset(schedule.held_microbatches)
        self.warmup = min(schedule.warmup, len(self._held))
        self.forwards = schedule.cursor()
        self.backwards = schedule.cursor()
        self.in_flight = 0
        """Forwards done minus backwards done."""
        self.is_forwards_turn = False
        """True if the last of the two was a backward."""
        self.version = schedule.first_batch
        """k of the newest W_k that is applied."""
        self.stop = schedule.num_batches
        """Boundary at which the stage stops."""
        self.end = schedule.num_batches
        """The job's last boundary, as far as the judged evaluations say."""
        self.lag = stop_lag(schedule.delay)
        """The first forward of a batch waits for the judgement of an evaluation so many batches before."""
        self.first_unjudged: float = inf
        """Oldest evaluated batch whose judgement is not known. Those that a run begins beyond have ended nothing."""
        self._judged_below(max(0, schedule.first_batch - self.lag))
        self.inputs: set[tuple[int, int]] = set()
        """(batch, microbatch) whose activations have arrived and wait."""
        self.gradients: set[tuple[int, int]] = set()
        """(batch, microbatch) whose gradients have arrived and wait; on the last stage, finished forwards."""
        self.reduced_below = schedule.first_batch
        """Batches below this have the sums of all groups."""
        self.totals_below = schedule.first_batch
        """Batches below this have known clip totals."""
        self.own_shares_below = schedule.first_batch
        """Batches below this have the own share of their update."""
        self.shares_below = schedule.first_batch
        """Batches below this have the shares of all replicas."""
        self.losses_below = schedule.first_batch
        """Batches below this have a row in the journal."""
        self.awaits_losses = False
        """Whether an update waits for the losses of its batch: where the journal is written."""
        self.updates_held = False
        """True while a reader needs the boundary's content: no update may run, all else may."""

    # --- Queries ---

    @property
    def is_done(self) -> bool:
        """Return whether the stop boundary is reached: its last update applied, nothing in flight, and all evaluations
        before it judged.
        """
        return self.version >= self.stop <= self.first_unjudged and self.in_flight == 0

    @property
    def is_empty(self) -> bool:
        """Return whether nothing waits: no activation, no gradient, no half batch."""
        return not (
            self.inputs or self.gradients or self.in_flight or self.forwards.num_done or self.backwards.num_done
        )

    @property
    def num_versions_live(self) -> int:
        """Return the number of weight versions that coming operations will read."""
        return 1 + max(0, self.version - weight_version(self.backwards.batch, self.schedule.delay))

    @property
    def is_update_ready(self) -> bool:
        """Return whether update(version) has all its inputs."""
        batch = self.version
        return (
            self._is_gradient_known
            and (batch < self.losses_below or not self.awaits_losses)
            and (batch < self.shares_below or not self.schedule.shares_update)
        )

    @property
    def is_share_ready(self) -> bool:
        """Return whether the own share of update(version) is not computed yet, and has all its inputs."""
        return self.schedule.shares_update and self.own_shares_below == self.version and self._is_gradient_known

    @property
    def _is_gradient_known(self) -> bool:
        """Return whether the gradient that update(version) applies is all there, and its norm."""
        batch = self.version
        return (
            batch < self.stop
            and batch < self.backwards.batch
            and batch < self.reduced_below
            and (batch < self.totals_below or not self.schedule.has_clip)
        )

    def expects_input(self, batch: int, microbatch: int) -> bool:
        """Return whether an activation is new and belongs to this stage.

        A stage begins a batch when it has applied the update of the one before the last (with delay), or of the last.
        So it has all gradients of that batch, and this stage has done all its backwards.
        """
        return (
            not self.schedule.is_first
            and microbatch in self._held
            and batch < self.stop
            and batch <= self.backwards.batch + self.schedule.delay
            and not self.forwards.has_passed(batch, microbatch)
            and (batch, microbatch) not in self.inputs
        )

    def expects_gradient(self, batch: int, microbatch: int) -> bool:
        """Return whether a gradient belongs to a finished forward that has none yet."""
        return (
            not self.schedule.is_last
            and microbatch in self._held
            and self.forwards.has_passed(batch, microbatch)
            and not self.backwards.has_passed(batch, microbatch)
            and (batch, microbatch) not in self.gradients
        )

    # --- Events ---

    def input_arrived(self, batch: int, microbatch: int) -> None:
        """Note an arrived activation."""
        assert self.expects_input(batch, microbatch), f"unexpected input {batch}.{microbatch}"
        self.inputs.add((batch, microbatch))

    def gradient_arrived(self, batch: int, microbatch: int) -> None:
        """Note the arrived gradient of an output."""
        assert self.expects_gradient(batch, microbatch), f"unexpected gradient {batch}.{microbatch}"
        self.gradients.add((batch, microbatch))

    def forwarded(self, batch: int, microbatch: int) -> None:
        """Note a finished forward. On the last stage its gradient is there at once."""
        if not self.schedule.is_first:
            self.inputs.remove((batch, microbatch))
        self.forwards.pass_over(batch, microbatch)
        self.in_flight += 1
        self.is_forwards_turn = False
        if self.schedule.is_last:
            self.gradients.add((batch, microbatch))

    def backwarded(self, batch: int, microbatch: int) -> bool:
        """Note a finished backward. Returns whether it was this stage's last of the batch."""
        self.gradients.remove((batch, microbatch))
        self.backwards.pass_over(batch, microbatch)
        self.in_flight -= 1
        self.is_forwards_turn = True
        return self.backwards.batch > batch

    def groups_reduced(self, batch: int) -> None:
        """Note that the sums of all G groups of a batch are added up."""
        assert batch == self.reduced_below < self.backwards.batch, f"groups of batch {batch} reduced out of order"
        self.reduced_below = batch + 1

    def clip_total_known(self, batch: int) -> None:
        """Note that the squares of the whole model's gradient are added up."""
        assert self.expects_clip_total(batch), f"clip total of batch {batch} out of order"
        self.totals_below = batch + 1

    def orthogonalized(self, batch: int) -> None:
        """Note that the own share of an update is on its way to the other replicas."""
        assert self.is_share_ready, f"share of update {batch} was not ready"
        assert batch == self.own_shares_below, f"share of update {batch} out of order"
        self.own_shares_below = batch + 1

    def shares_known(self, batch: int) -> None:
        """Note that the shares of all replicas are here."""
        assert batch == self.shares_below < self.own_shares_below, f"shares of update {batch} out of order"
        self.shares_below = batch + 1

    def losses_known(self, batch: int) -> None:
        """Note that all losses of a batch are in the journal."""
        assert batch == self.losses_below < self.backwards.batch, f"losses of batch {batch} out of order"
        self.losses_below = batch + 1

    def expects_clip_total(self, batch: int) -> bool:
        """Return whether a total is the next one, and this stage has contributed to it.

        A replica that does not lead may receive it before its own last slice of the gradient.
        """
        contributed_below = self.reduced_below if self.schedule.is_lead else self.backwards.batch
        return self.schedule.has_clip and batch == self.totals_below < contributed_below

    def expects_judgement(self, batch: int) -> bool:
        """Return whether a judgement is new, and of an evaluation in which this stage has done its part."""
        every = self.schedule.judged_every
        return every > 0 and batch % every == 0 and self.first_unjudged <= batch < self.forwards.batch

    def judged(self, batch: int, end: int) -> None:
        """Note what an evaluation and all before it say about the job's last boundary.

        Raises ValueError when the stage is past that boundary, or the job is.
        """
        assert self.expects_judgement(batch), f"unexpected judgement of batch {batch}"
        if not self._begun <= end <= self.schedule.num_batches:
            raise ValueError(f"the job cannot end at {end}: batches below {self._begun} have begun")
        self._judged_below(batch + 1)
        self.end = min(self.end, end)
        self.stop = min(self.stop, end)

    def _judged_below(self, batch: int) -> None:
        every = self.schedule.judged_every
        self.first_unjudged = -(-batch // every) * every if every else inf

    def updated(self, batch: int) -> None:
        """Note that W_{b+1} is applied."""
        assert batch == self.version, f"update {batch} on version {self.version}"
        assert self.is_update_ready, f"update {batch} was not ready"
        assert not self.updates_held, f"update {batch} would change what is being read"
        self.version = batch + 1

    def choose_stop(self) -> int:
        """Stop as soon as possible, with the batch that has begun; first stage only. Returns the boundary.

        With replicas the lead chooses for all, and reports it before it sends any more sums: until then no replica can
        have begun a batch that needs more of them.
        """
        assert self.schedule.is_first, "only the first stage chooses where to stop"
        assert self.schedule.is_lead, "only the leading replica chooses where to stop"
        begun = self.forwards.batch + (1 if self.forwards.num_done else 0)
        if self.schedule.groups is not None:
            begun = max(begun, self.backwards.batch + self.schedule.delay + 1)
            if begun > self.first_unjudged + self.lag:  # no replica begins that batch before the judgement is known
                begun = int(self.first_unjudged) + self.lag
        self.stop = min(self.stop, begun)
        return self.stop

    def stop_at(self, boundary: int) -> None:
        """Stop where the first stage has chosen. Raises ValueError when the stage is past that."""
        if not self._begun <= boundary <= self.end:
            raise ValueError(f"cannot stop at {boundary}: batches below {self._begun} have begun")
        self.stop = boundary

    @property
    def _begun(self) -> int:
        """Return the first batch of which this stage has nothing."""
        begun = self.forwards.batch + (1 if self.forwards.num_done else 0)
        return max((begun, *(batch + 1 for batch, _ in self.inputs)))


def next_op(state: ScheduleState) -> Op | Wait:
    """Return the operation to run now.

    This is a backward if its gradient has arrived; a forward if its input has arrived, its weight version is applied
    and depth allows; an update when it is ready and nothing else is. If both a forward and a backward could run, they
    alternate, so that the stages below and above both have work. An update comes last because the other stages wait for
    forwards and backwards, not for it. They do not run out, because the forwards that need the update wait too.

    A share of an update comes first: it has to reach the other replicas, which takes time beside the next batch's work.
    """
    if state.is_share_ready:
        return Orthogonalize(state.version)
    if state.is_forwards_turn:
        op = _forward(state) or _backward(state)
    else:
        op = _backward(state) or _forward(state)
    if op is not None:
        return op
    return Update(state.version) if state.is_update_ready and not state.updates_held else WAIT


def _backward(state: ScheduleState) -> Backward | None:
    """Return the backward that could run now."""
    cursor, forwards = state.backwards, state.forwards
    batch = cursor.batch
    if state.gradients and (cursor.num_done or forwards.batch > batch or forwards.num_done >= state.warmup):
        microbatch = cursor.first_of(state.gradients)
        if microbatch >= 0:
            return Backward(batch, microbatch)
    return None


def _forward(state: ScheduleState) -> Forward | None:
    """Return the forward that could run now."""
    schedule, cursor = state.schedule, state.forwards
    batch = cursor.batch
    if state.in_flight < schedule.depth and batch < state.stop and _may_begin(state, batch):
        microbatch = cursor.lowest_next if schedule.is_first else cursor.first_of(state.inputs)
        if microbatch >= 0:
            return Forward(batch, microbatch)
    return None


def _may_begin(state: ScheduleState, batch: int) -> bool:
    """Return whether a batch's weights are there, and no evaluation can end the job before that batch any more."""
    return batch - state.schedule.delay <= state.version and batch - state.lag < state.first_unjudged


def awaited(state: ScheduleState) -> Awaited:
    """Return the event for which a waiting stage waits."""
    if state.is_done or next_op(state) is not WAIT:
        return Awaited.NOTHING
    if state.is_update_ready:
        return Awaited.SNAPSHOT
    schedule = state.schedule
    batch = state.forwards.batch
    if batch < state.stop and _may_begin(state, batch) and state.in_flight < schedule.depth:
        return Awaited.INPUT
    if state.in_flight:
        return Awaited.GRADIENT
    if state.version < state.backwards.batch:
        if state.reduced_below <= state.version:
            return Awaited.REDUCTION
        if state.schedule.has_clip and state.totals_below <= state.version:
            return Awaited.CLIP_TOTAL
        is_short = state.schedule.shares_update and state.shares_below <= state.version
        return Awaited.SHARES if is_short else Awaited.LOSSES
    return Awaited.JUDGEMENT if min(batch - state.lag + 1, state.stop) > state.first_unjudged else Awaited.INPUT
