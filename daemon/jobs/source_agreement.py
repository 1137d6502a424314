"""Refuses data sources that cannot be one job's: all have one vocabulary, and rows and flags alike. Pure."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from headway.daemon.errors import ConfigError
from headway.stages.spec import TrainSpec

if TYPE_CHECKING:
    from headway.stages.data.shard_index import ShardIndex


def _vocabulary(index: "ShardIndex") -> str:
    return f"{index.vocab_size} tokens{' of bytes' if index.tokenizer == 'bytes' else ''}"


def _rows(index: "ShardIndex") -> str:
    return f"rows packed with --pack {index.row_tokens - 1}" if index.row_tokens else "no packed rows"


def _flags(index: "ShardIndex") -> str:
    return "flags" if index.has_flags else "no flags"


_FACTS: Final[tuple[tuple[Callable[["ShardIndex"], str], str], ...]] = (
    (_vocabulary, "prepare both with one --tokenizer"),
    (_rows, "prepare both with one --pack, or both without it"),
    (_flags, 'prepare both with --flags, or set loss_mask to "none" for data without packed rows'),
)
"""Each with what to do if two sources differ in it."""


def check_agreement(found: "Sequence[tuple[str, ShardIndex]]", source: str, train: TrainSpec) -> None:
    """Raise ConfigError for the first source that differs from the first one, naming both folders.

    found: folder and index of each source. Flags may differ if the job has no mask.
    """
    first_folder, first = found[0]
    facts = _FACTS[:2] if train.loss_mask == "none" else _FACTS
    for number, (folder, index) in enumerate(found[1:], start=1):
        for fact, fix in facts:
            if fact(index) != fact(first):
                what = f"{folder} has {fact(index)}, and {first_folder} has {fact(first)}; {fix}"
                raise ConfigError(what, f"{source}:data.sources[{number}].source")
