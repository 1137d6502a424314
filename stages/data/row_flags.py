"""What the flags of rows mean to a job: targets, positions in documents, the divisor of a batch's losses. Pure.

Flags are [size, length + 1]: those of the inputs, and of the token after the last one.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from headway.stages.data.shard_index import BEGINS_DOCUMENT, IS_TARGET
from headway.stages.spec import TrainSpec

NOT_TRAINED: Final = -100
"""A target that is not trained on: torch's `ignore_index`."""

Flags = npt.NDArray[Any]


def trained_targets(targets: npt.NDArray[np.int64], flags: Flags, train: TrainSpec) -> npt.NDArray[np.int64]:
    """Return the targets int64 [size, length], with NOT_TRAINED for those that are masked."""
    return np.where(_is_trained(flags, train), targets, NOT_TRAINED)


def num_targets(flags: Flags, train: TrainSpec) -> int:
    """Return the number of what a loss is the mean over: unmasked targets, or pairs of documents that have some."""
    is_trained = _is_trained(flags, train)
    if not train.learns_preferences:
        return int(is_trained.sum())
    number = np.cumsum(positions(flags) == 0, axis=1) - 1
    of_rows = [set(row[mask].tolist()) for row, mask in zip(number, is_trained, strict=True)]
    return sum(document ^ 1 in trained for trained in of_rows for document in trained) // 2


def mean_tokens(num_of_all: int, num_microbatches: int) -> float:
    """Return the number by which each microbatch divides its sum of losses: the targets of all of them, over their
    number.
    """
    return max(num_of_all, 1) / num_microbatches


def positions(flags: Flags) -> npt.NDArray[np.int32]:
    """Return each input's position in its document, int32 [size, length]. A row's first token has position 0."""
    begins = (flags[:, :-1] & BEGINS_DOCUMENT) != 0
    places = np.arange(begins.shape[1], dtype=np.int32)
    first_of_document = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    return (places - first_of_document).astype(np.int32)


def _is_trained(flags: Flags, train: TrainSpec) -> npt.NDArray[np.bool_]:
    """Return which targets are trained on. No document predicts the first token of the next one."""
    of_targets = flags[:, 1:]
    is_trained: npt.NDArray[np.bool_] = (of_targets & IS_TARGET) != 0
    return is_trained & ((of_targets & BEGINS_DOCUMENT) == 0) if train.separates_documents else is_trained
