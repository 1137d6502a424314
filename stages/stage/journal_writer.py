"""Makes the journal's rows from the losses of a last stage's microbatches, also if several replicas compute them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor

from headway.stages.early_stop import EvaluationTally, StopRule
from headway.stages.errors import NonFiniteLossError
from headway.stages.ids import Batch
from headway.stages.spec import TrainSpec
from headway.stages.stage.context import StageContext
from headway.stages.state.journal import Journal, JournalRow
from headway.stages.sums import fold


def places_in_row(
    train: TrainSpec, batch: int, microbatches: Sequence[int], *, is_end: bool = False
) -> tuple[int, ...]:
    """Return the places of a worker's losses of a batch: i of microbatch i, m + i of held-out microbatch i.

    is_end: whether they are those of the job's last weights: of held-out text alone.
    """
    m = train.microbatches
    if is_end:
        return tuple(m + i for i in microbatches if train.evaluates(0, i))
    return (*microbatches, *(m + i for i in microbatches if train.evaluates(batch, i)))


class BatchLosses:
    """The own losses of the batches under way, on the device."""

    def __init__(self) -> None:
        self._losses: dict[int, dict[int, Tensor]] = {}
        """Batch to place in its row to loss."""

    @property
    def is_empty(self) -> bool:
        """Return whether no batch is half computed."""
        return not self._losses

    def add(self, batch: int, place: int, loss: Tensor) -> None:
        """Add a forward's loss []. place: as in `places_in_row`."""
        self._losses.setdefault(batch, {})[place] = loss

    def take(self, batch: int) -> tuple[Sequence[int], Tensor]:
        """Return the places of a batch's losses, in order, and these, float32 [own microbatches and held-out ones]."""
        of_batch = self._losses.pop(batch)
        places = sorted(of_batch)
        return places, torch.stack([of_batch[place] for place in places])


class JournalWriter:
    """Appends a row as soon as all losses of the next batch are known, from any replica. It is whole with the norm, and
    that of the job's last batch is told with the loss of the last weights.
    """

    def __init__(
        self,
        journal: Journal,
        context: StageContext,
        *,
        on_judged: Callable[[int], None],
        on_losses: Callable[[int], None],
        on_batch: Callable[[JournalRow], None],
    ) -> None:
        """on_judged: is told of each batch whose losses are known; on_losses: of each whose row is whole, and of the
        job's end when the loss of the last weights is there; on_batch: of each row when nothing of it changes any more.

        Rows from the context's boundary on are cut off by `begin`.
        """
        self._journal = journal
        self._context = context
        self._on_judged = on_judged
        self._on_losses = on_losses
        self._on_batch = on_batch
        self._rows: dict[int, JournalRow] = {}
        """By batch: rows that are in the journal without a norm."""
        self._norms: dict[int, float] = {}
        """By batch: norms whose row is not in the journal yet."""
        self._known: dict[int, dict[int, float]] = {}
        self._next_batch = int(context.boundary)
        self._batch_ended = 0.0
        self._rule = StopRule.of(context.train)
        self.tally = EvaluationTally()
        """What all evaluations of the job say about its end."""

    @property
    def is_empty(self) -> bool:
        """Return whether no batch is half known."""
        return not (self._known or self._rows or self._norms)

    def begin(self) -> None:
        """Begin the run."""
        self._journal.truncate(self._context.boundary)
        if self._rule is not None:
            self.tally = self._rule.judge_all(self._journal.tally, self._journal.evaluations())
        last = self._journal.last
        if last is not None and last.final_eval_loss is not None and last.batch + 1 != self._end:
            self._journal.complete(replace(last, final_eval_loss=None))  # of a shorter job, which this one continues
        self._batch_ended = perf_counter()

    def add(self, batch: int, places: Sequence[int], losses: Sequence[float]) -> None:
        """Add losses of a batch, in order of these places: see `places_in_row`.

        Raises NonFiniteLossError for the first loss of the batch that is not finite, if the job requires it. A loss on
        held-out text may be anything.
        """
        known = self._known.setdefault(batch, {})
        known.update(zip(places, losses, strict=True))
        train, of_next, is_end = (
            self._context.train,
            self._known.get(self._next_batch, {}),
            self._next_batch == self._end,
        )
        wanted = places_in_row(train, self._next_batch, range(train.microbatches), is_end=is_end)
        if len(of_next) < len(wanted):
            return
        del self._known[self._next_batch]
        in_order = [of_next[place] for place in wanted]
        if is_end:
            self._complete(in_order)
        else:
            self._append(self._next_batch, in_order)
        self._next_batch += 1

    def add_norm(self, batch: int, norm: float) -> None:
        """Add the norm of a batch's gradient, before or after its losses."""
        self._norms[batch] = norm
        self._tell_whole(batch)

    @property
    def _end(self) -> int:
        """Return the job's last boundary, as far as its evaluations say."""
        return self.tally.end or self._context.train.batches

    def _complete(self, held_out: Sequence[float]) -> None:
        """Give the job's last row the loss of the last weights."""
        last = self._journal.last
        if last is not None and last.batch + 1 == self._end:  # the newest rows may be lost, and older ones kept
            row = replace(last, final_eval_loss=_mean(held_out))
            self._journal.complete(row)
            self._on_batch(row)
        self._on_losses(self._end)

    def _tell_whole(self, batch: int) -> None:
        """Complete a batch's row once its losses and its norm are known."""
        if batch in self._rows and batch in self._norms:
            row = replace(self._rows.pop(batch), gradient_norm=self._norms.pop(batch))
            self._journal.complete(row)
            self._on_losses(batch)
            if not (self._context.train.eval_every and batch + 1 == self._end):
                self._on_batch(row)

    def _append(self, batch: int, all_losses: Sequence[float]) -> None:
        losses = all_losses[: self._context.train.microbatches]
        held_out = all_losses[len(losses) :]
        for microbatch, loss in enumerate(losses):
            if self._context.stops_at_non_finite and not math.isfinite(loss):
                raise NonFiniteLossError(batch, microbatch, loss)
        now = perf_counter()
        row = JournalRow(
            batch=Batch(batch),
            microbatch_losses=tuple(losses),
            tokens=self._context.train.tokens_per_batch,
            seconds=now - self._batch_ended,
            generation=self._context.generation,
            eval_loss=_mean(held_out) if held_out else None,
        )
        self._batch_ended = now
        self._journal.append(row)
        if self._rule is not None and row.eval_loss is not None:
            self.tally = self._rule.judge(self.tally, row.batch, row.eval_loss)
        self._on_judged(batch)
        self._rows[batch] = row
        self._tell_whole(batch)


def _mean(losses: Sequence[float]) -> float:
    return fold(list(losses)) / len(losses)
