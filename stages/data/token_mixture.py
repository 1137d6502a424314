"""Draws a job's microbatches from several data folders: each row chooses a source by weight, then its place in it.

All sources in order are one stream here, whose windows never cross from one source into the next. So targets,
positions and divisors are made as those of one folder are.
"""

from collections.abc import Sequence
from itertools import accumulate, islice
from pathlib import Path

from headway.stages.data.shard_index import INDEX_NAME
from headway.stages.data.source_choice import held_out_rows, source_of
from headway.stages.data.tokens import TokenShards
from headway.stages.errors import DataError
from headway.stages.spec import TrainSpec


class TokenMixture(TokenShards):
    """Several open data folders. Threads may share it."""

    def __init__(self, sources: Sequence[TokenShards], weights: Sequence[float]) -> None:
        """Raises DataError: some sources have rows of one length, and others have not."""
        if len({source.index.row_tokens for source in sources}) > 1:
            raise DataError(INDEX_NAME, "the sources have rows of several lengths, or only some have rows")
        without_flags = (source for source in sources if not source.index.has_flags)
        super().__init__(
            next(without_flags, sources[0]).index,  # of which only what all agree on is read
            [each for source in sources for each in source.maps],
            [each for source in sources for each in source.flag_maps],
        )
        self._sources = tuple(sources)
        self._weights = tuple(weights)
        self._offsets = (0, *accumulate(source.num_tokens for source in sources))
        self._turns: dict[tuple[int, int], list[int]] = {}
        """Places of all rows of an evaluation, by their number and length."""
        held_out = [source.validation for source in sources if source.validation is not None]
        if len(held_out) == len(sources):
            self.validation = TokenMixture(held_out, weights)

    def _places(self, train: TrainSpec, seed: int, batch: int, microbatch: int) -> list[int]:
        if train.data_order == "epochs":
            raise DataError(INDEX_NAME, "several sources are drawn by weight, which makes no epochs")
        keys = [f"{seed}/{batch}/{microbatch}/{row}" for row in range(train.microbatch_size)]
        return [self._drawn(train, key) for key in keys]

    def _drawn(self, train: TrainSpec, key: str) -> int:
        source = source_of(key, self._weights)
        return self._offsets[source] + self._sources[source].drawn_place(train, key)

    def _places_in_turn(self, train: TrainSpec, microbatch: int) -> list[int]:
        size = train.microbatch_size
        kind = (train.num_evaluated * size, train.sequence_length)
        if kind not in self._turns:
            self._turns = {kind: self._all_in_turn(train)}
        return self._turns[kind][microbatch * size : (microbatch + 1) * size]

    def _all_in_turn(self, train: TrainSpec) -> list[int]:
        """Return where the rows of a whole evaluation begin."""
        number, step = train.num_evaluated * train.microbatch_size, self.index.row_tokens or train.sequence_length
        rows = held_out_rows(self._weights, [source.num_rows(train) for source in self._sources])
        places = [self._offsets[source] + row * step for source, row in islice(rows, number)]
        if not places or len(places) < number > train.microbatch_size:
            raise DataError(
                INDEX_NAME, f"the validation splits have {len(places)} rows in turn, and an evaluation takes {number}"
            )
        return [places[row % len(places)] for row in range(number)]


def open_tokens(
    folders: Sequence[str | Path], names: Sequence[str], weights: Sequence[float], *, verified: Sequence[str] = ()
) -> TokenShards:
    """Map the shards of a job's sources, one or several.

    names: SHA-256 of each source's data; "" accepts any. verified: as for `TokenShards.open`, for each source; empty:
    the files are verified here. Raises DataError as that does.
    """
    states = verified or [""] * len(folders)
    opened = [
        TokenShards.open(Path(folder), expected_sha256=name, verified=state)
        for folder, name, state in zip(folders, names, states, strict=True)
    ]
    return opened[0] if len(opened) == 1 else TokenMixture(opened, weights)
