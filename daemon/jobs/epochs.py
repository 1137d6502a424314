"""How many batches so many epochs of a job's data take, and which epoch a batch belongs to. Pure."""

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from headway.daemon.errors import ConfigError
from headway.stages.spec import TrainSpec

if TYPE_CHECKING:
    from headway.stages.data.shard_index import ShardIndex


def with_epochs_of(
    train: TrainSpec, index: "ShardIndex", source: str, *, named: Collection[str] | None = None
) -> TrainSpec:
    """Return the settings with as many batches as see each row so many times; the last batch begins a further epoch.

    named: the keys of the job's file. Raises ConfigError: it names what contradicts that, or the data has no row.
    """
    if not train.epochs:
        return train
    named = named or ()
    if "train.data_order" in named and train.data_order != "epochs":
        what = 'rows drawn anew each time make no epochs; leave it out, or set it to "epochs"'
        raise ConfigError(what, f"{source}:train.data_order")
    num_rows = index.num_rows(train.sequence_length)
    if not num_rows:
        what = f"{index.num_tokens} tokens of data are too few for a row of {train.sequence_length}"
        raise ConfigError(what, f"{source}:train.sequence_length")
    rows_per_batch = train.microbatches * train.microbatch_size
    batches = -(-train.epochs * num_rows // rows_per_batch)
    if "train.batches" in named and train.batches != batches:
        what = f"{train.epochs} epochs of {num_rows} rows take {batches} batches, not {train.batches}"
        raise ConfigError(f"{what}; leave one of the two out", f"{source}:train.batches")
    return replace(train, batches=batches, data_order="epochs")


def epochs_text(epochs: int) -> str:
    """Return `1 epoch` or `3 epochs`."""
    return f"{epochs} epoch{'s' * (epochs != 1)}"


def epoch_of(train: TrainSpec, batch: int) -> int | None:
    """Return the epoch of a batch, from 1; None: the job does not count epochs. Exact to one batch: rows are not known.

    Epochs are equally long, so their share of the batches tells which one it is.
    """
    return min(train.epochs, 1 + batch * train.epochs // train.batches) if train.epochs else None
