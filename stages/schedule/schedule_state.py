"""What a stage has done and what has arrived: what there is to know for its next operation. Pure."""

from math import inf

from headway.stages.early_stop import stop_lag
from headway.stages.schedule.stage_schedule import StageSchedule


class ScheduleState:
    """The finished work and arrived frames of a stage. `next_op` reads it; the methods below report events."""

    __slots__ = (
        "_held",
        "_held_out",
        "awaits_losses",
        "backwards",
        "end",
        "first_unjudged",
        "forwards",
        "gradients",
        "held_out",
        "in_flight",
        "inputs",
        "is_forwards_turn",
        "lag",
        "losses_below",
        "num_held_out",
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
        self._held_out = tuple(i for i in schedule.held_microbatches if i < schedule.num_held_out)
        self.num_held_out = 0
        """Held-out microbatches that are done on the job's last weights, in order."""
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
        self.held_out: set[tuple[int, int]] = set()
        """(batch, microbatch) of held-out text that has arrived and waits; batch `end` is for the last weights."""
        self.gradients: set[tuple[int, int]] = set()
        """(batch, microbatch) whose gradients have arrived and wait; on the last stage, finished forwards."""
        self.reduced_below = schedule.first_batch
        """Batches below this have the sums of all groups."""
        self.totals_below = schedule.first_batch
        """Batches below this have known totals of squares. Updates wait for them only if the job clips."""
        self.own_shares_below = schedule.first_batch
        """Batches below this have the own share of their update."""
        self.shares_below = schedule.first_batch
        """Batches below this have the shares of all replicas."""
        self.losses_below = schedule.first_batch
        """Batches below this have a row in the journal; beyond `end`: also the last weights have their loss."""
        self.awaits_losses = False
        """Whether an update waits for the losses of its batch: where the journal is written."""
        self.updates_held = False
        """True while a reader needs the boundary's content: no update may run, all else may."""

    # --- Queries ---

    @property
    def is_done(self) -> bool:
        """Return whether the stop boundary is reached: its last update applied, nothing in flight, all evaluations
        before it judged, all norms known, and the job's last weights evaluated.
        """
        is_reached = self.version >= self.stop <= min(self.first_unjudged, self.totals_below) and self.in_flight == 0
        return is_reached and self.next_held_out < 0 and not self.awaits_end_loss

    @property
    def next_held_out(self) -> int:
        """Return the held-out microbatch that is next on the job's last weights; -1: there is none, or not yet."""
        is_end = self.version == self.end == self.stop <= self.first_unjudged
        return self._held_out[self.num_held_out] if is_end and self.num_held_out < len(self._held_out) else -1

    @property
    def awaits_end_loss(self) -> bool:
        """Return whether the journal, if it is written here, lacks the loss of the job's last weights."""
        has_one = self.awaits_losses and self.schedule.num_held_out > 0
        return has_one and self.stop == self.end >= self.losses_below

    @property
    def is_empty(self) -> bool:
        """Return whether nothing waits: no activation, no gradient, no half batch."""
        return not (
            self.inputs
            or self.held_out
            or self.gradients
            or self.in_flight
            or self.forwards.num_done
            or self.backwards.num_done
        )

    @property
    def num_versions_live(self) -> int:
        """Return the number of weight versions that coming operations will read."""
        return 1 + max(0, self.version - self.schedule.weight_version(self.backwards.batch))

    @property
    def newest_elsewhere(self) -> int:
        """Return the newest batch b that another worker can have begun: for W_v(b) it needs this one's backwards of all
        batches below v(b).
        """
        done = self.backwards.batch
        return done + 1 if self.schedule.weight_version(done + 1) == done else done

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
        """Return whether an activation is new and belongs to this stage."""
        return (
            not self.schedule.is_first
            and microbatch in self._held
            and batch < self.stop
            and batch <= self.newest_elsewhere
            and not self.forwards.has_passed(batch, microbatch)
            and (batch, microbatch) not in self.inputs
        )

    def expects_held_out(self, batch: int, microbatch: int, *, is_beside: bool) -> bool:
        """Return whether held-out text is new, and is computed here: beside a microbatch, or on the job's last weights.

        is_beside: whether the batch has an evaluation. A stage upstream may know before this worker that an evaluation
        ends the job, but not before this worker has done all backwards of its last batch.
        """
        if self.schedule.is_first or (batch, microbatch) in self.held_out:
            return False
        may_be_end = batch == self.end or batch - self.lag >= self.first_unjudged
        is_last = may_be_end and batch == self.backwards.batch <= self.stop
        is_left = is_last and microbatch in self._held_out[self.num_held_out :]
        return is_left or (is_beside and self.expects_input(batch, microbatch))

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

    def held_out_arrived(self, batch: int, microbatch: int) -> None:
        """Note arrived held-out text."""
        assert self.expects_held_out(batch, microbatch, is_beside=True), f"unexpected held-out {batch}.{microbatch}"
        self.held_out.add((batch, microbatch))

    def gradient_arrived(self, batch: int, microbatch: int) -> None:
        """Note the arrived gradient of an output."""
        assert self.expects_gradient(batch, microbatch), f"unexpected gradient {batch}.{microbatch}"
        self.gradients.add((batch, microbatch))

    def forwarded(self, batch: int, microbatch: int) -> None:
        """Note a finished forward. On the last stage its gradient is there at once. Nothing comes after one on the
        job's last weights.
        """
        self.held_out.discard((batch, microbatch))
        if batch == self.end:
            assert microbatch == self.next_held_out, f"held-out microbatch {batch}.{microbatch} out of order"
            self.num_held_out += 1
            return
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
        """Note that all losses of a batch, or of the job's last weights, are in the journal."""
        assert batch == self.losses_below, f"losses of batch {batch} out of order"
        assert batch < self.backwards.batch or batch == self.end == self.version, f"losses of batch {batch} too early"
        self.losses_below = batch + 1

    def expects_clip_total(self, batch: int) -> bool:
        """Return whether a total is the next one, and this stage has contributed to it.

        A replica that does not lead may receive it before its own last slice of the gradient.
        """
        contributed_below = self.reduced_below if self.schedule.is_lead else self.backwards.batch
        return batch == self.totals_below < contributed_below

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
        begun = self._begun
        if self.schedule.groups is not None:
            begun = max(begun, self.newest_elsewhere + 1)
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
