"""Token shards are opened only when they are what the job names, and windows are a function of their place alone."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from headway.stages.data.shard_index import IS_TARGET, ShardIndex, combined_sha256, read_index
from headway.stages.data.shard_writer import DataForm, writing_shards
from headway.stages.data.tokens import TokenShards
from headway.stages.errors import DataError
from headway.stages.spec import TrainSpec

MakeShards = Callable[..., Path]


@pytest.fixture
def make_shards(tmp_path: Path) -> MakeShards:
    """Write tokens 0, 1, 2 … into a folder, so that a window tells where it lies."""

    def make(num_tokens: int, *, vocab_size: int = 65536, shard_tokens: int = 1 << 20, name: str = "data") -> Path:
        with writing_shards(tmp_path / name, DataForm(vocab_size=vocab_size, most_tokens=shard_tokens)) as writer:
            writer.append(np.arange(num_tokens))
        return tmp_path / name

    return make


def draw(shards: TokenShards, batch: int = 0, microbatch: int = 0, *, seed: int = 1, size: int = 3) -> torch.Tensor:
    return shards.microbatch(
        TrainSpec(microbatch_size=size, sequence_length=16), seed=seed, batch=batch, microbatch=microbatch
    ).inputs


def test_targets_are_the_inputs_one_token_on(make_shards: MakeShards) -> None:
    """Both are int64 [size, length], contiguous; each row counts upwards through the stream."""
    shards = TokenShards.open(make_shards(1000))
    rows = shards.microbatch(TrainSpec(microbatch_size=5, sequence_length=16), seed=1, batch=2, microbatch=3)
    inputs, targets = rows.inputs, rows.targets
    assert inputs.shape == targets.shape == (5, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(16))


def test_a_window_depends_on_its_place_and_nothing_else(make_shards: MakeShards) -> None:
    """Drawn again, in another order, by another opening, in a larger microbatch: the same rows."""
    folder = make_shards(5000)
    shards = TokenShards.open(folder)
    expected = draw(shards, 4, 2)
    other = TokenShards.open(folder)
    draw(other, 9, 9)
    assert torch.equal(draw(other, 4, 2), expected)
    assert torch.equal(draw(other, 4, 2, size=8)[:3], expected)


def test_the_windows_are_these(make_shards: MakeShards) -> None:
    """Golden values: whoever changes them changes every run that was ever made."""
    assert draw(TokenShards.open(make_shards(60000)), 5, 1, seed=7)[:, 0].tolist() == [19348, 31824, 55078]


def test_seams_between_shards_do_not_show(make_shards: MakeShards) -> None:
    """The same stream as one file and as files of 7 tokens, shorter than a window: the same microbatches."""
    one = TokenShards.open(make_shards(200, name="one"))
    many = TokenShards.open(make_shards(200, shard_tokens=7, name="many"))
    assert len(many.index.shards) == 29
    for batch in range(20):
        assert torch.equal(draw(one, batch), draw(many, batch))


def test_every_start_occurs_up_to_the_last(make_shards: MakeShards) -> None:
    """20 tokens hold windows of 16 + 1 at 0, 1, 2 and 3; all come up, the last target is the last token."""
    shards = TokenShards.open(make_shards(20))
    starts = {int(start) for batch in range(40) for start in draw(shards, batch)[:, 0]}
    assert starts == {0, 1, 2, 3}


def test_a_stream_of_one_window_gives_that_window(make_shards: MakeShards) -> None:
    """17 tokens, length 16: the one window there is."""
    assert draw(TokenShards.open(make_shards(17)))[:, 0].tolist() == [0, 0, 0]


def test_a_stream_shorter_than_a_window_is_refused(make_shards: MakeShards) -> None:
    """16 tokens, length 16: the last input would have no target."""
    with pytest.raises(DataError, match="too few"):
        draw(TokenShards.open(make_shards(16)))


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_tokens_take_the_narrowest_type(make_shards: MakeShards, vocab_size: int, dtype: str) -> None:
    """The largest token of a vocabulary survives in its file."""
    folder = make_shards(200, vocab_size=vocab_size, name="filler")
    with writing_shards(folder.parent / "top", DataForm(vocab_size=vocab_size)) as writer:
        writer.append(np.full(40, vocab_size - 1))
    shards = TokenShards.open(folder.parent / "top")
    assert shards.index.dtype == dtype
    assert draw(shards).tolist() == [[vocab_size - 1] * 16] * 3


def test_other_data_than_the_job_names_is_refused(make_shards: MakeShards) -> None:
    """The right name opens; any other does not, even without reading the bytes."""
    folder = make_shards(100)
    name = read_index(folder).sha256
    assert TokenShards.open(folder, expected_sha256=name).num_tokens == 100
    with pytest.raises(DataError, match="was asked for"):
        TokenShards.open(folder, expected_sha256="0" * 64, verify=False)


def test_a_changed_byte_is_refused(make_shards: MakeShards) -> None:
    """One bit flipped in the second of three shards: verification names that file; skipping it is a choice."""
    folder = make_shards(90, shard_tokens=30)
    victim = folder / "shard-00001.bin"
    raw = bytearray(victim.read_bytes())
    raw[5] ^= 1
    victim.write_bytes(raw)
    with pytest.raises(DataError, match=r"shard-00001\.bin: was changed or damaged"):
        TokenShards.open(folder)
    assert TokenShards.open(folder, verify=False).num_tokens == 90


def test_a_truncated_shard_is_refused_even_unverified(make_shards: MakeShards) -> None:
    """A shard one byte short: the sizes are named."""
    folder = make_shards(90)
    victim = folder / "shard-00000.bin"
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"has 179 bytes where shards\.json says 180"):
        TokenShards.open(folder, verify=False)


def test_a_missing_shard_is_refused(make_shards: MakeShards) -> None:
    """The file is gone: it is named."""
    folder = make_shards(90)
    (folder / "shard-00000.bin").unlink()
    with pytest.raises(DataError, match=r"shard-00000\.bin: this shard is missing"):
        TokenShards.open(folder)


def test_a_folder_without_an_index_is_refused(tmp_path: Path) -> None:
    """An empty folder and none at all: no token shards here."""
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(DataError, match="no token shards here"):
            TokenShards.open(folder)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("dtype", "uint32", "does not fit"),
        ("dtype", "float32", "is not one of"),
        ("format", 4, "format 4 is not known"),
        ("shards", [], "does not fit"),
        ("shards", 3, "cannot be read"),
        ("shards", [{"file": "../x.bin", "num_tokens": 1, "sha256": ""}], "not a plain file name"),
    ],
)
def test_an_edited_index_is_refused(make_shards: MakeShards, field: str, value: object, reason: str) -> None:
    """Another dtype or list of shards under the same hash would be other tokens under the same name."""
    folder = make_shards(100)
    file = folder / "shards.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(DataError, match=reason):
        TokenShards.open(folder)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("sha256", "../../../outside", "is no SHA-256"),
        ("sha256", "A" * 64, "is no SHA-256"),
        ("num_tokens", -1, "has -1 tokens"),
        ("file", "..", "not a plain file name"),
        ("file", "", "not a plain file name"),
        ("file", "a\0b", "not a plain file name"),
    ],
)
def test_an_index_that_fits_its_hash_is_still_foreign(
    make_shards: MakeShards, field: str, value: object, reason: str
) -> None:
    """Whoever names a job's data makes its index too: names and hashes in it become paths on each node."""
    folder = make_shards(100)
    file = folder / "shards.json"
    index = json.loads(file.read_text())
    index["shards"][0][field] = value
    index["sha256"] = combined_sha256(msgspec.convert(index | {"sha256": ""}, ShardIndex))
    file.write_text(json.dumps(index))
    with pytest.raises(DataError, match=reason):
        read_index(folder)


# --- Evaluation -------------------------------------------------------------------------------------------------------


def with_validation(folder: Path, num_tokens: int, *, row_tokens: int = 0) -> TokenShards:
    """Tokens from 1000 on are held out; with rows, each also has flags."""
    with writing_shards(folder, DataForm(vocab_size=65536, row_tokens=row_tokens, has_flags=row_tokens > 0)) as writer:
        given = [(np.arange(10 * (row_tokens or 100)), writer), (np.arange(1000, 1000 + num_tokens), writer.validation)]
        for tokens, split in given:
            split.append(tokens, *([np.full(len(tokens), IS_TARGET)] if row_tokens else []))
    return TokenShards.open(folder)


def test_held_out_rows_follow_each_other(tmp_path: Path) -> None:
    """Windows of a stream that do not overlap: 3 microbatches of 2 rows of 16 tokens from 97 tokens, and no more."""
    train = TrainSpec(microbatches=4, microbatch_size=2, sequence_length=16, eval_every=1, eval_microbatches=3)
    shards = with_validation(tmp_path / "data", 97)
    rows = [shards.held_out(train, i) for i in range(3)]
    assert [row.inputs[:, 0].tolist() for row in rows] == [[1000, 1016], [1032, 1048], [1064, 1080]]
    assert all(torch.equal(row.targets, row.inputs + 1) for row in rows)
    too_short = with_validation(tmp_path / "short", 96)
    with pytest.raises(DataError, match="has 5 rows of 16 tokens, and an evaluation takes 6: 3 microbatches of 2"):
        too_short.held_out(train, 0)


def test_a_microbatch_of_too_few_held_out_rows_repeats_them(tmp_path: Path) -> None:
    """Three windows for a microbatch of five: the first two count twice. An empty split gives nothing to repeat."""
    train = TrainSpec(microbatch_size=5, sequence_length=16, eval_every=1, eval_microbatches=1)
    rows = with_validation(tmp_path / "data", 49).held_out(train, 0)
    assert rows.inputs[:, 0].tolist() == [1000, 1016, 1032, 1000, 1016]
    with pytest.raises(DataError, match="has 0 rows of 16 tokens"):
        with_validation(tmp_path / "short", 16).held_out(train, 0)


def test_held_out_rows_of_packed_data_have_a_divisor_of_their_own(tmp_path: Path) -> None:
    """17 tokens a row: every target of 4 rows counts, over 2 microbatches."""
    train = TrainSpec(microbatch_size=2, sequence_length=16, eval_every=1, eval_microbatches=2, loss_mask="data")
    rows = with_validation(tmp_path / "data", 17 * 4, row_tokens=17).held_out(train, 1)
    assert rows.inputs[:, 0].tolist() == [1034, 1051]
    assert rows.mean_tokens is not None
    assert rows.mean_tokens.item() == 4 * 16 / 2


def test_an_evaluation_of_data_without_a_split_says_how_to_make_one(make_shards: MakeShards) -> None:
    with pytest.raises(DataError, match="headway data prepare --validation"):
        TokenShards.open(make_shards(1000)).held_out(TrainSpec(eval_every=1), 0)


# --- Epochs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row_tokens", [0, 17])
def test_an_epoch_sees_each_row_once(tmp_path: Path, row_tokens: int) -> None:
    """Rows, or windows of a stream that do not overlap, over microbatches of two; the next epoch has another order."""
    train = TrainSpec(microbatches=3, microbatch_size=2, sequence_length=16, data_order="epochs")
    with writing_shards(tmp_path / "data", DataForm(vocab_size=65536, row_tokens=row_tokens)) as writer:
        writer.append(np.arange(17 * 12 if row_tokens else 16 * 12 + 1))
    shards = TokenShards.open(tmp_path / "data")
    epochs = [
        [
            place
            for batch in (2 * epoch, 2 * epoch + 1)
            for i in range(3)
            for place in shards.microbatch(train, seed=5, batch=batch, microbatch=i).inputs[:, 0].tolist()
        ]
        for epoch in (0, 1)
    ]
    every = list(range(0, (row_tokens or 16) * 12, row_tokens or 16))
    assert sorted(epochs[0]) == sorted(epochs[1]) == every
    assert epochs[0] != epochs[1] != every
