"""Flags beside tokens, packed rows, a validation split: format 2 of the data, from its writer to a microbatch."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from headway.stages.data.shard_index import BEGINS_DOCUMENT, INDEX_NAME, IS_TARGET, read_index
from headway.stages.data.shard_writer import DataForm, writing_shards
from headway.stages.data.tokens import TokenShards
from headway.stages.errors import DataError
from headway.stages.spec import TrainSpec

LENGTH = 7
NUM_ROWS = 11
TRAIN = TrainSpec(microbatches=3, microbatch_size=4, sequence_length=LENGTH, loss_mask="data")
NUM_TOKENS = NUM_ROWS * (LENGTH + 1)
IS_TRAINED = np.random.default_rng(1).random(NUM_TOKENS) < 0.4
BEGINS = np.random.default_rng(2).random(NUM_TOKENS) < 0.3
FLAGS = IS_TRAINED * IS_TARGET + BEGINS * BEGINS_DOCUMENT


def written(out: Path, *, row_tokens: int = LENGTH + 1, shard_tokens: int = 30, has_validation: bool = False) -> Path:
    """Token k is the number k."""
    with writing_shards(
        out, DataForm(vocab_size=256, has_flags=True, row_tokens=row_tokens, most_tokens=shard_tokens)
    ) as writer:
        for begin in range(0, NUM_TOKENS, 13):
            part = slice(begin, begin + 13)
            writer.append(np.arange(NUM_TOKENS)[part], FLAGS[part])
        if has_validation:
            writer.validation.append(np.arange(100, 100 + LENGTH + 1), FLAGS[: LENGTH + 1])
    return out


@pytest.mark.parametrize("row_tokens", [LENGTH + 1, 0])
def test_a_microbatch_has_the_flags_of_its_tokens(tmp_path: Path, row_tokens: int) -> None:
    """Rows or windows, over seams of files → a target is trained on exactly if its own flag says so."""
    shards = TokenShards.open(written(tmp_path / "data", row_tokens=row_tokens))
    assert len(shards.index.shards) == 4 if row_tokens else 3
    number, seen = 0, set()
    for i in range(TRAIN.microbatches):
        rows = shards.microbatch(TRAIN, seed=3, batch=5, microbatch=i)
        places = rows.inputs + 1
        assert torch.equal(rows.targets, torch.where(torch.from_numpy(IS_TRAINED)[places], places, -100))
        assert rows.positions is None
        number += int((rows.targets != -100).sum())
        seen |= set(rows.inputs[:, 0].tolist())
    assert rows.mean_tokens is not None
    assert torch.equal(rows.mean_tokens, torch.tensor(number / 3, dtype=torch.float32))
    assert all(start % (LENGTH + 1) == 0 for start in seen) == bool(row_tokens)


def test_positions_restart_where_a_document_begins(tmp_path: Path) -> None:
    """Separate documents → each token's distance to its document's first in the row; no first token is a target."""
    shards, num_first = TokenShards.open(written(tmp_path / "data")), 0
    for batch in range(4):
        rows = shards.microbatch(replace(TRAIN, documents="separate"), seed=3, batch=batch, microbatch=0)
        assert rows.positions is not None
        assert rows.positions.dtype == torch.int32
        for tokens, targets, positions in zip(rows.inputs, rows.targets, rows.positions, strict=True):
            first = 0
            for k, (token, target) in enumerate(zip(tokens.tolist(), targets.tolist(), strict=True)):
                first = k if BEGINS[token] else first
                assert positions[k] == k - first
                assert target == (token + 1 if IS_TRAINED[token + 1] and not BEGINS[token + 1] else -100)
                num_first += bool(IS_TRAINED[token + 1] and BEGINS[token + 1])
    assert num_first, "no first token of a document is flagged as a target"


def test_every_row_occurs(tmp_path: Path) -> None:
    """11 packed rows → each is drawn some time, and nothing else is."""
    shards = TokenShards.open(written(tmp_path / "data"))
    drawn = [shards.microbatch(TRAIN, seed=1, batch=b, microbatch=0).inputs[:, 0].tolist() for b in range(40)]
    assert {start for starts in drawn for start in starts} == {row * (LENGTH + 1) for row in range(NUM_ROWS)}


def test_a_batch_without_a_target_divides_by_one_over_m(tmp_path: Path) -> None:
    """Nothing is trained on → the divisor is that of a single target."""
    with writing_shards(tmp_path / "data", DataForm(vocab_size=4, has_flags=True, row_tokens=LENGTH + 1)) as writer:
        writer.append(np.zeros(LENGTH + 1, np.uint8), np.zeros(LENGTH + 1, np.uint8))
    rows = TokenShards.open(tmp_path / "data").microbatch(TRAIN, seed=1, batch=0, microbatch=0)
    assert rows.mean_tokens == torch.tensor(1 / 3)


def test_the_validation_split_is_another_stream(tmp_path: Path) -> None:
    """Its row alone is drawn from it; data without one says so."""
    folder = written(tmp_path / "data", has_validation=True)
    held_out = TokenShards.open(folder, is_validation=True)
    assert held_out.num_tokens == LENGTH + 1
    assert set(held_out.microbatch(TRAIN, seed=1, batch=0, microbatch=0).inputs[:, 0].tolist()) == {100}
    assert TokenShards.open(folder).num_tokens == NUM_TOKENS
    with pytest.raises(DataError, match="no validation split"):
        TokenShards.open(written(tmp_path / "other"), is_validation=True)


def test_rows_of_another_length_are_refused(tmp_path: Path) -> None:
    """A sequence of 9 tokens from rows for 7."""
    shards = TokenShards.open(written(tmp_path / "data"))
    with pytest.raises(DataError, match="rows for sequences of 7 tokens, not of 9"):
        shards.microbatch(replace(TRAIN, sequence_length=9), seed=1, batch=0, microbatch=0)


def test_half_a_row_is_refused(tmp_path: Path) -> None:
    """The writer ends inside a row → no folder."""
    with (
        pytest.raises(DataError, match="no whole rows"),
        writing_shards(tmp_path / "data", DataForm(vocab_size=4, row_tokens=8)) as writer,
    ):
        writer.append(np.zeros(12, np.uint8))
    assert not (tmp_path / "data").exists()


def test_changed_flags_are_refused(tmp_path: Path) -> None:
    """A byte of flags changed → verification names the file. Its checksum is part of the data's name."""
    folder = written(tmp_path / "data")
    file = folder / read_index(folder).shards[1].flags
    raw = bytearray(file.read_bytes())
    raw[3] ^= IS_TARGET
    file.write_bytes(raw)
    with pytest.raises(DataError, match=r"shard-00001\.flags.*damaged"):
        TokenShards.open(folder)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 4}, "format 4 is not known; this version reads 1 to 3"),
        ({"format": 1}, "format 1, which has no flags"),
        ({"row_tokens": 1}, "no length of rows"),
        ({"row_tokens": 5}, "no whole rows of 5"),
        ({"row_tokens": 0}, "sha256 does not fit"),
        ({"validation": []}, "sha256 does not fit"),
        ({"flags": "../x"}, "not a plain file name"),
        ({"flags": ""}, "or the other way round"),
        ({"flags": "shard-00000.bin"}, "two of its files have one name"),
        ({"flags_sha256": "0" * 64}, "sha256 does not fit"),
        ({"flags_sha256": "x"}, "no SHA-256"),
    ],
)
def test_an_index_that_cannot_be_so_is_refused(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    """One field of the index or of its last shard changed → one line that names it."""
    folder = written(tmp_path / "data", has_validation=True)
    fields = json.loads((folder / INDEX_NAME).read_text())
    for key, value in change.items():
        (fields if key in fields else fields["shards"][-1])[key] = value
    (folder / INDEX_NAME).write_text(json.dumps(fields))
    with pytest.raises(DataError, match=reason):
        read_index(folder)


def test_data_without_flags_is_written_as_format_1(tmp_path: Path) -> None:
    """A plain stream → the keys that older versions know, and no others."""
    with writing_shards(tmp_path / "data", DataForm(vocab_size=4)) as writer:
        writer.append(np.zeros(12, np.uint8))
    fields = json.loads((tmp_path / "data" / INDEX_NAME).read_text())
    assert fields["format"] == 1
    assert set(fields) == {"dtype", "vocab_size", "shards", "sha256", "tokenizer", "provenance", "format"}
    assert set(fields["shards"][0]) == {"file", "num_tokens", "sha256"}
