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


def places_in_row(train: TrainSpec, batch: int, microbatches: Sequence[int]) -> tuple[int, ...]:
    """Return the places of a worker's losses of a batch: i of microbatch i, m + i of held-out microbatch i."""
    held_out = (train.microbatches + i for i in microbatches if train.evaluates(batch, i))
    return (*microbatches, *held_out)


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
    """Appends a row as soon as all losses of the next batch are known, from any replica. It is whole with the norm."""

    def __init__(
        self,
        journal: Journal,
        context: StageContext,
        *,
        on_judged: Callable[[int], None],
        on_batch: Callable[[JournalRow], None],
    ) -> None:
        """on_judged: is told of each batch whose losses are known; on_batch: of each row that is whole, in order.

        Rows from the context's boundary on are cut off by `begin`.
        """
        self._journal = journal
        self._context = context
        self._on_judged = on_judged
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
        self._batch_ended = perf_counter()

    def add(self, batch: int, places: Sequence[int], losses: Sequence[float]) -> None:
        """Add losses of a batch, in order of these places: see `places_in_row`.

        Raises NonFiniteLossError for the first loss of the batch that is not finite, if the job requires it. A loss on
        held-out text may be anything.
        """
        known = self._known.setdefault(batch, {})
        known.update(zip(places, losses, strict=True))
        of_next, train = self._known.get(self._next_batch, {}), self._context.train
        if len(of_next) < len(places_in_row(train, self._next_batch, range(train.microbatches))):
            return
        del self._known[self._next_batch]
        self._append(self._next_batch, [of_next[i] for i in range(len(of_next))])
        self._next_batch += 1

    def add_norm(self, batch: int, norm: float) -> None:
        """Add the norm of a batch's gradient, before or after its losses."""
        self._norms[batch] = norm
        self._tell_whole(batch)

    def _tell_whole(self, batch: int) -> None:
        """Complete a batch's row once its losses and its norm are known."""
        if batch in self._rows and batch in self._norms:
            row = replace(self._rows.pop(batch), gradient_norm=self._norms.pop(batch))
            self._journal.complete(row)
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
            eval_loss=fold(list(held_out)) / len(held_out) if held_out else None,
        )
        self._batch_ended = now
        self._journal.append(row)
        if self._rule is not None and row.eval_loss is not None:
            self.tally = self._rule.judge(self.tally, row.batch, row.eval_loss)
        self._on_judged(batch)
        self._rows[batch] = row
        self._tell_whole(batch)
