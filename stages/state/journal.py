"""The result of every batch: the losses as they were computed, and their cost."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from headway.stages.early_stop import NOT_KNOWN, EvaluationTally, StopRule
from headway.stages.ids import Batch, Boundary, Generation, LayerName
from headway.stages.sums import fold

JOURNAL = LayerName("journal")
"""The name under which a journal is stored and moved, as if it were a layer."""

_DTYPES: dict[str, type[Any]] = {
    "batch": np.int64,
    "generation": np.int64,
    "losses": np.float32,
    "seconds": np.float64,
    "tokens": np.int64,
}
_EVAL_LOSS = "eval_loss"
_GRADIENT_NORM = "gradient_norm"
_FINAL_EVAL_LOSS = "final_eval_loss"
_OPTIONAL = (_EVAL_LOSS, _GRADIENT_NORM, _FINAL_EVAL_LOSS)
"""Columns beside them, float64 [n], NOT_KNOWN where there is no value. One is left out where no row has a value."""
_ALL_DTYPES = _DTYPES | dict.fromkeys(_OPTIONAL, np.float64)
_HELD_OUT = "held_out_loss"
"""Name of the evaluations in a file. Under their own name there, -1 says that there is none."""
_TALLY = "evaluation_tally"
"""What is left of evaluations whose rows were dropped, float64 [5]: the fields of EvaluationTally in their order."""
_MIN_CAPACITY = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRow:
    """The result of one batch."""

    batch: Batch
    microbatch_losses: tuple[float, ...]
    """m float32 values, nats per token, in order."""
    tokens: int
    seconds: float
    """Wall clock seconds since the last batch, on the last stage."""
    generation: Generation
    eval_loss: float | None = None
    """Mean loss of the weights that the batch was computed on, over the evaluation's held-out microbatches, in nats per
    token; None: no evaluation.
    """
    gradient_norm: float | None = None
    """Of the batch's gradient before clipping, as docs/numerics.md defines it; None: not measured."""
    final_eval_loss: float | None = None
    """As `eval_loss`, of the weights after the batch's update. The job's last batch alone has it."""

    @property
    def loss(self) -> float:
        """Return (Σ float64(ℓ_i)) / m, in order of i."""
        return fold(list(self.microbatch_losses)) / len(self.microbatch_losses)


class Journal:
    """Rows of consecutive batches; the last stage appends to it, and it moves with the head.

    Rows that a checkpoint has in its journal parts may be missing at the beginning (`drop_below`).

    The rows are columns that grow by doubling: a long job's journal is handed to a writer without touching a row.
    """

    def __init__(self, rows: Iterable[JournalRow] = ()) -> None:
        self._length = 0
        self._columns = _empty(_MIN_CAPACITY, 0)
        self.tally = EvaluationTally()
        """What evaluations say that count and have no rows here. Those of rows below its batch do not count."""
        for row in rows:
            self.append(row)

    def __len__(self) -> int:
        return self._length

    @property
    def rows(self) -> Sequence[JournalRow]:
        """Return all rows, oldest first."""
        return self._rows_from(0)

    @property
    def last(self) -> JournalRow | None:
        """Return the newest row; None: there are no rows."""
        return self._rows_from(self._length - 1)[0] if self._length else None

    def _rows_from(self, place: int) -> Sequence[JournalRow]:
        columns = [self._columns[name][place : self._length].tolist() for name in _ALL_DTYPES]
        return tuple(
            JournalRow(
                batch=Batch(batch),
                microbatch_losses=tuple(losses),
                tokens=tokens,
                seconds=seconds,
                generation=Generation(generation),
                eval_loss=None if eval_loss == NOT_KNOWN else eval_loss,
                gradient_norm=None if norm < 0 else norm,
                final_eval_loss=None if final == NOT_KNOWN else final,
            )
            for batch, generation, losses, seconds, tokens, eval_loss, norm, final in zip(*columns, strict=True)
        )

    def chosen(
        self, first: int, below: int | None = None, *, every: int = 1, num_rows: int
    ) -> Iterator[dict[str, "np.ndarray[Any, Any]"]]:
        """Yield the rows from one batch to before another, at most `num_rows` at a time, as columns: those of
        `tensors`, NOT_KNOWN where a value is missing, and `loss` in place of `losses`.

        every: only the batches that it divides, and those that were evaluated.
        """
        batches = self._columns["batch"][: self._length]
        start, end = np.searchsorted(batches, [first, np.iinfo(np.int64).max if below is None else below])
        is_chosen = batches[start:end] % every == 0
        for name in (_EVAL_LOSS, _FINAL_EVAL_LOSS):
            is_chosen |= self._columns[name][start:end] != NOT_KNOWN
        places = start + np.flatnonzero(is_chosen)
        for begin in range(0, len(places), num_rows):
            columns = {name: column[places[begin : begin + num_rows]] for name, column in self._columns.items()}
            losses = columns.pop("losses").astype(np.float64)
            columns["loss"] = np.zeros(len(losses))
            for number, of_microbatch in enumerate(losses.T):  # in order of i, as `JournalRow.loss`
                columns["loss"] = columns["loss"] + of_microbatch if number else of_microbatch
            columns["loss"] = columns["loss"] / max(1, losses.shape[1])
            yield columns

    def evaluations(self) -> Sequence[tuple[int, float]]:
        """Return batch and held-out loss of each evaluation, oldest first."""
        batches, losses = (self._columns[name][: self._length] for name in ("batch", _EVAL_LOSS))
        evaluated = losses != NOT_KNOWN
        return tuple(zip(batches[evaluated].tolist(), losses[evaluated].tolist(), strict=True))

    @property
    def first_batch(self) -> Batch | None:
        """Return the batch of the oldest row; None: there are no rows."""
        return Batch(int(self._columns["batch"][0])) if self._length else None

    @property
    def next_batch(self) -> Batch | None:
        """Return the batch that must be appended next; None: any."""
        return Batch(int(self._columns["batch"][self._length - 1]) + 1) if self._length else None

    def append(self, row: JournalRow) -> None:
        """Append the next batch. Raises ValueError for another batch, or another number of microbatches."""
        if self._length and row.batch != self.next_batch:
            raise ValueError(f"the journal goes on with batch {self.next_batch}, not {row.batch}")
        width, capacity = len(row.microbatch_losses), len(self._columns["batch"])
        if width != self._columns["losses"].shape[1]:
            if self._length:
                raise ValueError(f"batch {row.batch} has {width} microbatches, not those of the batches before")
            self._columns = _empty(capacity, width)
        if self._length == capacity:
            self._move_rows(0, capacity=2 * capacity)
        values = (row.batch, row.generation, row.microbatch_losses, row.seconds, row.tokens)
        for name, value in zip(_DTYPES, values, strict=True):
            self._columns[name][self._length] = value
        self._set_optional(self._length, row)
        self._length += 1

    def complete(self, row: JournalRow) -> None:
        """Set what a row was appended without: the gradient's norm, the loss of the job's last weights."""
        place = row.batch - int(self._columns["batch"][0])
        assert 0 <= place < self._length, f"batch {row.batch} is not in the journal"
        self._set_optional(place, row)

    def _set_optional(self, place: int, row: JournalRow) -> None:
        for name in _OPTIONAL:
            number = getattr(row, name)
            self._columns[name][place] = NOT_KNOWN if number is None else number

    def truncate(self, boundary: Boundary) -> None:
        """Cut to the batches below a boundary."""
        self._length = self._length_below(boundary)

    def drop_below(self, batch: Batch, rule: StopRule | None = None) -> None:
        """Drop the rows of older batches, and free their memory. The newest row stays: it says which batch is next.

        What `tensors` has returned keeps its rows. rule: the tally keeps what it needs of dropped evaluations.
        """
        first = self.first_batch
        num_dropped = 0 if first is None else min(batch - first, self._length - 1)
        if num_dropped > 0:
            if rule is not None:
                dropped = [each for each in self.evaluations() if each[0] < self._columns["batch"][num_dropped]]
                self.tally = rule.judge_all(self.tally, dropped)
            self._move_rows(num_dropped, capacity=max(2 * (self._length - num_dropped), _MIN_CAPACITY))

    def tensors(self, *, below: Boundary | None = None) -> dict[str, Tensor]:
        """Return the rows, or those below a boundary, as columns.

        These are: `losses` float32 [n, m], `seconds`, `held_out_loss`, `gradient_norm` and `final_eval_loss` float64
        [n], the others int64 [n]. What a row may lack is left out if no row has it. They are no copies, but rows that
        are appended later do not change them. A tally goes with them.
        """
        length = self._length if below is None else self._length_below(below)
        tensors = {name: torch.from_numpy(column[:length]) for name, column in self._columns.items()}
        for name in _OPTIONAL:
            if (self._columns[name][:length] == NOT_KNOWN).all():
                del tensors[name]
        if _EVAL_LOSS in tensors:
            tensors[_HELD_OUT] = tensors.pop(_EVAL_LOSS)
        if self.tally != EvaluationTally():
            tensors[_TALLY] = torch.tensor(astuple(self.tally), dtype=torch.float64)
        return tensors if length else tensors | {"losses": torch.empty(0, 0)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Return the inverse of `tensors()`; copies. Raises ValueError when columns are missing, differ in length or
        skip.
        """
        journal = cls()
        try:
            given = {name: tensors[name].numpy() for name in _DTYPES}
        except (KeyError, TypeError) as error:
            raise ValueError(f"the journal has no column {error}") from error
        if any(not column.ndim for column in given.values()):
            raise ValueError("the journal's columns are no columns")
        length = len(given["batch"])
        for name in _OPTIONAL:
            given[name] = tensors[name].numpy() if name in tensors else np.full(length, NOT_KNOWN)
        if _HELD_OUT in tensors:
            given[_EVAL_LOSS] = tensors[_HELD_OUT].numpy()
        else:
            given[_EVAL_LOSS] = np.where(given[_EVAL_LOSS] == -1, NOT_KNOWN, given[_EVAL_LOSS])
        for name, dtype in _ALL_DTYPES.items():
            column = given[name]
            if column.shape[0] != length or column.dtype != dtype or column.ndim != (2 if name == "losses" else 1):
                raise ValueError(f"the journal's column {name} does not fit the others")
        if length and (np.diff(given["batch"]) != 1).any():
            raise ValueError("the journal's batches are not consecutive")
        journal._columns = _empty(max(length, _MIN_CAPACITY), given["losses"].shape[1])
        for name, column in given.items():
            journal._columns[name][:length] = column
        journal._length = length
        if _TALLY in tensors:
            journal.tally = _tally_of(tensors[_TALLY])
        return journal

    def _move_rows(self, num_dropped: int, *, capacity: int) -> None:
        """Move the rows, without the oldest, to new columns."""
        columns, length = self._columns, self._length - num_dropped
        self._columns = _empty(capacity, columns["losses"].shape[1])
        for name, column in columns.items():
            self._columns[name][:length] = column[num_dropped : self._length]
        self._length = length

    def _length_below(self, boundary: Boundary) -> int:
        if not self._length:
            return 0
        return min(self._length, max(0, boundary - int(self._columns["batch"][0])))


def _tally_of(tensor: Tensor) -> EvaluationTally:
    if tensor.dtype != torch.float64 or tensor.shape != (len(fields(EvaluationTally)),):
        raise ValueError("the journal's tally of evaluations has another form")
    below, best_loss, best_batch, num_failures, end = tensor.tolist()
    return EvaluationTally(
        below=int(below), best_loss=best_loss, best_batch=int(best_batch), num_failures=int(num_failures), end=int(end)
    )


def _empty(capacity: int, width: int) -> dict[str, "np.ndarray[Any, Any]"]:
    """Return columns with room for these rows and microbatches."""
    return {
        name: np.empty((capacity, width) if name == "losses" else capacity, dtype=dtype)
        for name, dtype in _ALL_DTYPES.items()
    }
