"""Decides what a job makes of its data and its length. Pure.

Of its data: targets, attention, epochs, held-out text, and whether sources agree. Of its length: the schedule of its
rates, and what follows when a checkpoint lies at the schedule's end.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Final

from headway.daemon.base.errors import ConfigError
from headway.daemon.base.terminal import counted
from headway.daemon.jobs.job import JobSpec
from headway.stages.data.source_choice import held_out_rows
from headway.stages.spec import AUTO, TrainSpec

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
        what = f"{counted(train.epochs, 'epoch')} of {counted(num_rows, 'row')} take {counted(batches, 'batch')}"
        raise ConfigError(f"{what}, not {train.batches}; leave one of the two out", f"{source}:train.batches")
    return replace(train, batches=batches, data_order="epochs")


def epoch_of(train: TrainSpec, batch: int) -> int | None:
    """Return the epoch of a batch, from 1; None: the job does not count epochs. Exact to one batch: rows are not known.

    Epochs are equally long, so their share of the batches tells which one it is.
    """
    return min(train.epochs, 1 + batch * train.epochs // train.batches) if train.epochs else None


def with_held_out_of(
    train: TrainSpec, indices: Sequence["ShardIndex"], source: str, *, weights: Sequence[float] = (1.0,)
) -> TrainSpec:
    """Return the settings with the number of held-out microbatches: as many as there are, and m at most. A single one
    may repeat its rows.

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
    most = min(max(num_rows // size, min(num_rows, 1)), train.microbatches)
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


_WARMUP: Final = "optim.warmup_batches"
_SYNC: Final = "train.sync_batches"
_BETAS: Final = "optim.rest.betas"
OF_THE_DELAY: Final = (_SYNC, _BETAS)
"""Keys whose defaults take most of a delay's price away."""
LEFT_OUT: Final = (_WARMUP, *OF_THE_DELAY)
"""Keys whose values are computed where a file leaves them out."""
BESIDE_MUON: Final = (0.98, 0.98)
"""Betas of AdamW beside matrices that are orthogonalised: docs/delay.md compares them with others."""


def with_schedule(spec: JobSpec, source: str, *, named: Collection[str] | None = None) -> JobSpec:
    """Return the job with what its file leaves out: the warm-up and the batches without delay, which are shares of its
    length, and the betas of AdamW beside Muon.

    named: the keys of its file; None: all. Raises ConfigError for a warm-up without an end, for more batches without
    delay than there are, and for a schedule whose end is unknown, beyond the job or followed by nothing.
    """
    optim, batches = spec.optim, spec.train.batches
    if named is not None and _WARMUP in named and optim.warmup_batches >= batches:
        what = f"{optim.warmup_batches} batches of warm-up are all {batches} of the job: the rate would only rise"
        raise ConfigError(f"{what}; leave it out, or set train.batches higher", _at(source))
    if named is not None and _WARMUP not in named:
        length = min(optim.schedule_batches or batches, batches)
        optim = replace(optim, warmup_batches=round(optim.warmup_share * length))
    train = spec.train
    if named is not None and _SYNC not in named and train.schedule in ("2bw", AUTO):
        train = replace(train, sync_batches=round(train.sync_share * batches))
    if named is not None and _BETAS not in named and optim.rest.name == "adamw" and optim.matrices.kind.newton_schulz:
        optim = replace(optim, rest=replace(optim.rest, betas=BESIDE_MUON))
    if train.sync_batches > batches:
        what = f"{train.sync_batches} batches without delay are more than the {batches} of the job"
        fix = f"set it to {batches} or less, or train.batches to {train.sync_batches} or more"
        raise ConfigError(f"{what}; {fix}", f"{source}:train.sync_batches")
    if why := _why_no_end(spec):
        raise ConfigError(why, _at(source, "after_end" if optim.after_end else "schedule_batches"))
    return replace(spec, train=train, optim=optim)


def _why_no_end(spec: JobSpec) -> str:
    """Return what is wrong with the end of a job's schedule; empty: nothing."""
    optim, batches = spec.optim, spec.train.batches
    if not (optim.after_end or optim.schedule_batches):
        return ""
    if optim.lr_schedule == "constant":
        return "a constant rate has no end; leave schedule_batches and after_end out"
    if not optim.schedule_batches:
        return "needs schedule_batches: where the schedule ends; `submit --from` has it from the checkpoint"
    if optim.schedule_batches > batches:
        return f"the schedule of {optim.schedule_batches} batches ends after the job of {batches}; make one of them fit"
    if not optim.after_end:
        return f'what follows batch {optim.schedule_batches}? Set after_end to "floor" or "warm_up_again"'
    left = batches - optim.schedule_batches
    if optim.after_end == "floor" and left and not optim.lr_floor:
        return "the rate would be 0 from then on, as lr_floor is; set optim.lr_floor to 0.1, for example"
    if optim.after_end == "warm_up_again" and left and optim.warmup_batches >= left:
        return f"{optim.warmup_batches} batches of warm-up are all {left} that are left; lower optim.warmup_batches"
    return ""


def schedule_end(spec: JobSpec) -> int:
    """Return the batch at which the last schedule of a job has ended."""
    follows = spec.optim.after_end == "warm_up_again" or not spec.optim.schedule_batches
    return spec.train.batches if follows else spec.optim.schedule_batches


def continued_schedule(spec: JobSpec, origin: JobSpec, boundary: int, source: str) -> JobSpec:
    """Return the job that begins at a boundary of another, with the batch at which that one's schedule ends.

    Raises ConfigError when it has ended, and the job does not say what follows.
    """
    optim, end = spec.optim, schedule_end(origin)
    if optim.after_end and not optim.schedule_batches:
        return replace(spec, optim=replace(optim, schedule_batches=end))
    kinds = {optim.lr_schedule, origin.optim.lr_schedule}
    if "constant" not in kinds and boundary >= end and not optim.after_end:
        what = f"the {origin.optim.lr_schedule} schedule of {origin.job.name} has ended at batch {end}; what follows?"
        ways = '"floor" keeps the rate at lr_floor, "warm_up_again" begins another schedule'
        raise ConfigError(f"{what} Set it: {ways}", _at(source, "after_end"))
    return spec


def _at(source: str, key: str = "warmup_batches") -> str:
    return f"{source}:optim.{key}"
