"""Says when data makes few batches an epoch, or fewer held-out rows than a microbatch, and what would make enough."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from headway.daemon.base.errors import ConfigError
from headway.daemon.base.places import is_url
from headway.daemon.base.terminal import counted
from headway.daemon.blobs.data_source import index_at
from headway.daemon.jobs.job import JobSpec
from headway.daemon.jobs.resolve import data_folder
from headway.daemon.text.destination import Piece, RowPacker
from headway.daemon.text.shown_row import num_padding
from headway.stages.data.shard_index import BEGINS_DOCUMENT, ShardIndex, read_index
from headway.stages.data.tokens import TokenShards
from headway.stages.errors import DataError
from headway.stages.spec import TrainSpec

ENOUGH_BATCHES: Final = 10
"""Of an epoch: with fewer, a job ends before its rates have done anything."""
SHORTEST: Final = 64
"""Shortest rows that are advised, in tokens."""
MAX_TOKENS: Final = 1 << 22
"""Of data that is packed anew, to count its rows; of more there are batches enough, or it takes too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Yield:
    """What data gives at a length of rows, and a size of microbatches."""

    length: int
    size: int
    num_rows: int
    held_out: int
    batches: int
    """Of an epoch."""

    def fits(self, train: TrainSpec) -> bool:
        """Return whether that is enough for a job. Data without a row for an evaluation is refused elsewhere."""
        is_evaluated = not train.eval_every or not 0 < self.held_out < self.size
        return is_evaluated and (not train.epochs or self.batches >= ENOUGH_BATCHES)


def few_rows_of(spec: JobSpec, cache_dir: Path) -> str:
    """Return `few_rows` of a resolved job. Of several sources nothing is said: they make no epochs."""
    source = spec.data.source
    if spec.data.sources or not (spec.train.epochs or spec.train.eval_every):
        return ""
    try:
        if is_url(source):
            return few_rows(spec.train, None, index_at(source))
        folder = data_folder(source, cache_dir)
        return few_rows(spec.train, folder, read_index(folder))
    except (ConfigError, DataError, OSError):
        return ""


def few_rows(train: TrainSpec, folder: Path | None, index: ShardIndex) -> str:
    """Return what is too few, with the longest rows that make enough without cutting a document; empty: nothing is.

    folder: of the data; None: its files are elsewhere, so it cannot be packed anew. Raises DataError, OSError.
    """
    found = _yield(train, train.sequence_length, train.microbatch_size, _Rows.of(index, train.sequence_length))
    if found.fits(train):
        return ""
    facts = []
    if train.epochs and found.batches < ENOUGH_BATCHES:
        rows = f"{counted(found.num_rows, 'row')} of {found.length:,} tokens"
        shape = f"{train.microbatches} × {found.size} rows"
        facts = [f"the data has {rows}: {counted(found.batches, 'batch')} of {shape} an epoch"]
    if train.eval_every and 0 < found.held_out < found.size:
        split = f"the validation split has {counted(found.held_out, 'row')}"
        facts.append(f"{split}, and a microbatch {found.size}: each evaluation repeats rows")
    best = _best(train, folder, index, found)
    return "; ".join([*facts, *([_advice(train, index, best)] if best != found else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    trained: int
    held_out: int

    @classmethod
    def of(cls, index: ShardIndex, length: int) -> "_Rows":
        return cls(trained=index.num_rows(length), held_out=index.num_rows(length, of=index.validation))


def _yield(train: TrainSpec, length: int, size: int, rows: _Rows) -> _Yield:
    batches = -(-rows.trained // (train.microbatches * size))
    return _Yield(length=length, size=size, num_rows=rows.trained, held_out=rows.held_out, batches=batches)


def _best(train: TrainSpec, folder: Path | None, index: ShardIndex, found: _Yield) -> _Yield:
    """Return the first that is enough, of shorter rows before smaller microbatches; else the one with most batches."""
    lengths = {found.length: _Rows.of(index, found.length)}
    tokens = index.num_tokens + sum(shard.num_tokens for shard in index.validation)
    if folder is not None and tokens <= MAX_TOKENS:
        lengths |= _shorter(folder, index, found.length)
    sizes = [found.size >> shift for shift in range(found.size.bit_length())]
    tried = [_yield(train, length, size, rows) for size in sizes for length, rows in lengths.items()]
    enough = next((each for each in tried if each.fits(train)), None)
    return enough or max(tried, key=lambda each: (each.batches, each.size, each.length))


def _shorter(folder: Path, index: ShardIndex, length: int) -> dict[int, _Rows]:
    """Return the rows of each half, quarter … of a length that cuts no document; a stream has none to cut."""
    shards = TokenShards.open(folder, verify=False)
    splits = [shards, shards.validation] if shards.validation is not None else [shards]
    pieces = [list(_documents(each)) if index.row_tokens else [] for each in splits]
    longest = max((len(tokens) for split in pieces for tokens, _ in split), default=0)
    found = {}
    while (length := length // 2) >= SHORTEST and length + 1 >= longest:
        if not index.row_tokens:
            found[length] = _Rows.of(index, length)
            continue
        rows = [_repacked(split, length, index) for split in pieces]
        found[length] = _Rows(trained=rows[0], held_out=sum(rows[1:]))
    return found


def _documents(shards: TokenShards) -> Iterator[Piece]:
    """Yield what is packed together: documents, or pairs of them."""
    row_tokens, step = shards.index.row_tokens, 2 if shards.index.holds_pairs else 1
    rows = [np.concatenate(maps).reshape(-1, row_tokens) for maps in (shards.maps, shards.flag_maps)]
    for tokens, flags in zip(*rows, strict=True):
        end = row_tokens - num_padding(tokens, flags)
        starts = [*np.flatnonzero(flags[:end] & BEGINS_DOCUMENT)[::step], end]
        for start, after in pairwise(starts):
            yield tokens[start:after], flags[start:after]


def _repacked(pieces: list[Piece], length: int, index: ShardIndex) -> int:
    packer = RowPacker(length + 1, padding=0, are_whole=index.holds_pairs)
    closed = sum(1 for tokens, flags in pieces for _ in packer.add(tokens, flags, begins=True))
    return closed + sum(1 for _ in packer.finish())


def _advice(train: TrainSpec, index: ShardIndex, best: _Yield) -> str:
    ways = []
    if best.length != train.sequence_length:
        pack = f"`headway data prepare --pack {best.length}`"
        ways.append(pack if index.row_tokens else f"sequence_length = {best.length}")
    if best.size != train.microbatch_size:
        ways.append(f"microbatch_size = {best.size}")
    gives = [counted(best.batches, "batch")] if train.epochs else []
    gives += [counted(best.held_out, "held-out row")] if train.eval_every else []
    return f"{' and '.join(ways)} give{'s' * (len(ways) == 1)} {' and '.join(gives)}"
