"""What a job makes of its data's flags is decided once, when it is submitted."""

from dataclasses import replace

import pytest

from headway.daemon.errors import ConfigError
from headway.daemon.jobs.data_choices import with_flags_of
from headway.stages.data.shard_index import Shard, ShardIndex
from headway.stages.spec import TrainSpec


def index(*, has_flags: bool, row_tokens: int = 0) -> ShardIndex:
    shard = Shard(file="a", num_tokens=0, sha256="", flags="b" if has_flags else "")
    return ShardIndex(dtype="uint8", vocab_size=256, shards=(shard,), sha256="", row_tokens=row_tokens, format=2)


@pytest.mark.parametrize(
    ("has_flags", "row_tokens", "given", "mask"),
    [
        (False, 0, "auto", "none"),
        (False, 129, "auto", "none"),
        (True, 0, "auto", "data"),
        (True, 129, "auto", "data"),
        (True, 0, "none", "none"),
        (True, 129, "data", "data"),
    ],
)
def test_auto_becomes_what_the_data_has(has_flags: bool, row_tokens: int, given: str, mask: str) -> None:
    """Flags → the mask counts, unless the job says otherwise."""
    train = TrainSpec(loss_mask=given)  # type: ignore[arg-type]
    found = with_flags_of(train, index(has_flags=has_flags, row_tokens=row_tokens), "job.toml")
    assert found.loss_mask == mask
    assert found.documents == ("separate" if has_flags and row_tokens else "joined")


def test_pairs_and_what_is_learned_go_together() -> None:
    """Pairs with next_token, or rows of single documents with dpo → the key, and what to do."""
    rows = index(has_flags=True, row_tokens=129)
    with pytest.raises(ConfigError, match=r'job.toml:train.objective: .*; set it to "dpo"'):
        with_flags_of(TrainSpec(), replace(rows, holds_pairs=True), "job.toml")
    with pytest.raises(ConfigError, match=r"job.toml:train.objective: .*prepare the data with --pairs"):
        with_flags_of(TrainSpec(objective="dpo"), rows, "job.toml")
    found = with_flags_of(TrainSpec(objective="dpo"), replace(rows, holds_pairs=True), "job.toml")
    assert (found.loss_mask, found.documents) == ("data", "separate")


@pytest.mark.parametrize(
    ("train", "has_flags", "row_tokens", "reason"),
    [
        (TrainSpec(loss_mask="data"), False, 0, r'job.toml:train.loss_mask: "data" needs flags'),
        (TrainSpec(loss_mask="none"), True, 129, r"job.toml:train.loss_mask: .* padding of packed rows"),
        (TrainSpec(documents="separate"), False, 0, r'job.toml:train.documents: "separate" needs data with flags'),
        (TrainSpec(), True, 65, r"job.toml:train.sequence_length: .* sequences of 64 tokens, not 128; set it to 64"),
    ],
)
def test_what_does_not_fit_the_data_is_refused(train: TrainSpec, has_flags: bool, row_tokens: int, reason: str) -> None:
    """A mask without flags, all targets of padded rows, rows of another length → the key and what to do."""
    with pytest.raises(ConfigError, match=reason):
        with_flags_of(train, index(has_flags=has_flags, row_tokens=row_tokens), "job.toml")
