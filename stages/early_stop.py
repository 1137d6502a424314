"""Decides from held-out losses at which boundary a job ends: docs/numerics.md, section 11. Pure."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from headway.stages.spec import TrainSpec

NOT_KNOWN: Final = -sys.float_info.max
"""Stands in columns of numbers where a value is missing: no mean of float32 values is so far below 0."""


def stop_lag(delay: int) -> int:
    """Return k: an evaluation of batch b ends a job at boundary b + k.

    The judgement goes upstream right behind the last gradient of batch b. With that gradient a stage may apply
    update(b), and begin batch b + 1 + delay before it hears of the judgement.
    """
    return 2 + delay


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationTally:
    """What the evaluations of the batches below a batch say about the job's end."""

    below: int = 0
    best_loss: float = inf
    best_batch: int = -1
    """Batch of the last evaluation that lowered the best loss; of the first one if none did; -1: there was none."""
    num_failures: int = 0
    """Evaluations in a row that have not lowered it."""
    end: int = 0
    """The job's last boundary, if it ends early; 0: it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """`eval_patience` and `eval_min_delta` of a job."""

    patience: int
    min_delta: float
    lag: int
    num_batches: int

    @classmethod
    def of(cls, train: TrainSpec) -> "StopRule | None":
        """Return a job's rule; None: no evaluation ends it."""
        if not train.stops_early:
            return None
        return cls(
            patience=train.eval_patience,
            min_delta=train.eval_min_delta,
            lag=stop_lag(train.delay),
            num_batches=train.batches,
        )

    def judge(self, before: EvaluationTally, batch: int, loss: float) -> EvaluationTally:
        """Return the tally with the evaluation of the next evaluated batch."""
        if before.end:
            return replace(before, below=batch + 1)
        if loss < before.best_loss - self.min_delta:
            return EvaluationTally(below=batch + 1, best_loss=loss, best_batch=batch)
        num_failures = before.num_failures + 1
        return EvaluationTally(
            below=batch + 1,
            best_loss=before.best_loss,
            best_batch=batch if before.best_batch < 0 else before.best_batch,
            num_failures=num_failures,
            end=min(batch + self.lag, self.num_batches) if num_failures >= self.patience else 0,
        )

    def judge_all(self, before: EvaluationTally, evaluations: Iterable[tuple[int, float]]) -> EvaluationTally:
        """Return the tally with (batch, loss) of further evaluations, oldest first. Those that it has are left out."""
        tally = before
        for batch, loss in evaluations:
            if batch >= before.below:
                tally = self.judge(tally, batch, loss)
        return tally
