"""How much held-out text an evaluation takes. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from headway.daemon.errors import ConfigError
from headway.stages.data.source_choice import held_out_rows
from headway.stages.spec import TrainSpec

if TYPE_CHECKING:
    from headway.stages.data.shard_index import ShardIndex


def with_held_out_of(
    train: TrainSpec, indices: Sequence["ShardIndex"], source: str, *, weights: Sequence[float] = (1.0,)
) -> TrainSpec:
    """Return the settings with the number of held-out microbatches: as many as there are, and m at most.

    Raises ConfigError: there is no such text, or fewer microbatches of it than the job names.
    """
    if not train.eval_every:
        return train
    if (without := next((number for number, index in enumerate(indices) if not index.validation), None)) is not None:
        what = "the data" if len(indices) == 1 else f"data source {without}"
        what += " has no validation split; `headway data prepare --validation 0.01` holds out a part"
        raise ConfigError(what, f"{source}:train.eval_every")
    of_each = [index.num_rows(train.sequence_length, of=index.validation) for index in indices]
    size = train.microbatch_size
    num_rows = of_each[0] if len(indices) == 1 else _rows_in_turn(of_each, weights, train.microbatches * size)
    most = min(num_rows // size, train.microbatches)
    number = train.eval_microbatches or max(most, 1)
    if number > most:
        fix = f"set it to {most} or less" if most else "hold out more, or take fewer or shorter sequences"
        raise ConfigError(
            f"an evaluation of {number} microbatches takes {number * size} rows of {train.sequence_length} tokens, and "
            f"the validation split has {num_rows}; {fix}",
            f"{source}:train.eval_microbatches",
        )
    return replace(train, eval_microbatches=number)


def _rows_in_turn(of_each: Sequence[int], weights: Sequence[float], most: int) -> int:
    """Return how many rows several sources give, drawn by weight, until one of them has no more; `most` at most."""
    return sum(1 for _ in islice(held_out_rows(weights, of_each), most))
