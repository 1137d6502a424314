"""How much held-out text an evaluation takes. Pure."""

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.daemon.errors import ConfigError
from headway.stages.spec import TrainSpec

if TYPE_CHECKING:
    from headway.stages.data.shard_index import ShardIndex


def with_held_out_of(train: TrainSpec, index: "ShardIndex", source: str) -> TrainSpec:
    """Return the settings with the number of held-out microbatches: as many as there are, and m at most.

    Raises ConfigError: there is no such text, or fewer microbatches of it than the job names.
    """
    if not train.eval_every:
        return train
    if not index.validation:
        what = "the data has no validation split; `headway data prepare --validation 0.01` holds out a part"
        raise ConfigError(what, f"{source}:train.eval_every")
    num_rows, size = index.num_rows(train.sequence_length, of=index.validation), train.microbatch_size
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
