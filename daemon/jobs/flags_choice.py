"""Decides what a job makes of its data's flags: which targets count, and where attention ends. Pure."""

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.daemon.errors import ConfigError
from headway.stages.spec import TrainSpec

if TYPE_CHECKING:
    from headway.stages.data.shard_index import ShardIndex


def with_flags_of(train: TrainSpec, index: "ShardIndex", source: str) -> TrainSpec:
    """Return the settings with each `auto` replaced by what fits the data. Raises ConfigError for what does not fit."""
    if index.row_tokens and index.row_tokens != train.sequence_length + 1:
        what = f"the data has rows for sequences of {index.row_tokens - 1} tokens, not {train.sequence_length}"
        raise ConfigError(f"{what}; set it to {index.row_tokens - 1}", f"{source}:train.sequence_length")
    if index.holds_pairs != train.learns_preferences:
        what = (
            'the data has pairs of answers; set it to "dpo"'
            if index.holds_pairs
            else '"dpo" learns from pairs of answers; prepare the data with --pairs'
        )
        raise ConfigError(what, f"{source}:train.objective")
    if train.loss_mask == "data" and not index.has_flags:
        raise ConfigError('"data" needs flags, which the data does not have; leave it out', f"{source}:train.loss_mask")
    if train.loss_mask == "none" and index.has_flags and index.row_tokens:
        what = '"none" would train on the padding of packed rows; leave it out'
        raise ConfigError(what, f"{source}:train.loss_mask")
    mask = ("data" if index.has_flags else "none") if train.loss_mask == "auto" else train.loss_mask
    if train.documents == "separate" and mask != "data":
        what = '"separate" needs data with flags, and loss_mask = "data"; set it to "joined"'
        raise ConfigError(what, f"{source}:train.documents")
    documents = train.documents
    if documents == "auto":
        documents = "separate" if mask == "data" and index.row_tokens else "joined"
    return replace(train, loss_mask=mask, documents=documents)
