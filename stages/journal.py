"""What every batch gave: the losses as they were computed, and what they cost."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from headway.stages.clipping import fold
from headway.stages.ids import Batch, Boundary, Generation, LayerName

JOURNAL = LayerName("journal")
"""The name under which a journal is stored and moved, as if it were a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRow:
    """One batch."""

    batch: Batch
    microbatch_losses: tuple[float, ...]
    """m float32 values, nats per token, in order."""
    tokens: int
    seconds: float
    """Wall clock since the batch before, on the last stage."""
    generation: Generation

    @property
    def loss(self) -> float:
        """(Σ float64(ℓ_i)) / m, in order of i."""
        return fold(list(self.microbatch_losses)) / len(self.microbatch_losses)


class Journal:
    """Rows of consecutive batches; the last stage appends to it, and it moves with the head."""

    def __init__(self, rows: Iterable[JournalRow] = ()) -> None:
        self._rows: list[JournalRow] = []
        for row in rows:
            self.append(row)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> Sequence[JournalRow]:
        """All rows, oldest first."""
        return tuple(self._rows)

    @property
    def next_batch(self) -> Batch | None:
        """The batch that must be appended next; None: any."""
        return Batch(self._rows[-1].batch + 1) if self._rows else None

    def append(self, row: JournalRow) -> None:
        """Add the next batch. Raises ValueError when it is another one."""
        if self._rows and row.batch != self.next_batch:
            raise ValueError(f"the journal goes on with batch {self.next_batch}, not {row.batch}")
        self._rows.append(row)

    def truncate(self, boundary: Boundary) -> None:
        """Cut to the batches below a boundary."""
        while self._rows and self._rows[-1].batch >= boundary:
            self._rows.pop()

    def tensors(self) -> dict[str, Tensor]:
        """The rows as columns: `losses` float32 [n, m], `seconds` float64 [n], the others int64 [n]."""
        width = len(self._rows[0].microbatch_losses) if self._rows else 0
        return {
            "batch": torch.tensor([row.batch for row in self._rows], dtype=torch.int64),
            "generation": torch.tensor([row.generation for row in self._rows], dtype=torch.int64),
            "losses": torch.tensor([row.microbatch_losses for row in self._rows]).reshape(len(self._rows), width),
            "seconds": torch.tensor([row.seconds for row in self._rows], dtype=torch.float64),
            "tokens": torch.tensor([row.tokens for row in self._rows], dtype=torch.int64),
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """The inverse of `tensors()`. Raises ValueError when columns are missing or differ in length."""
        try:
            columns = [tensors[name].tolist() for name in ("batch", "generation", "losses", "seconds", "tokens")]
        except KeyError as error:
            raise ValueError(f"the journal has no column {error}") from error
        return cls(
            JournalRow(
                batch=Batch(batch),
                microbatch_losses=tuple(losses),
                tokens=tokens,
                seconds=seconds,
                generation=Generation(generation),
            )
            for batch, generation, losses, seconds, tokens in zip(*columns, strict=True)
        )
